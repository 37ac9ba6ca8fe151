"""Small training scripts, started as users start theirs, and what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

HEAD = """
import os, signal, sys, time
from datetime import timedelta
import torch, lightning.pytorch as pl
import ds_lightning as dsl
from tests.lightning.runs import Model, Words, zero
from torch.utils.data import DataLoader

RANK = int(os.environ.get("LOCAL_RANK", 0))
start = time.monotonic()

def trainer(strategy, **options):
    options = {"max_steps": 3, "max_epochs": -1, "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, **options}
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options)

class Patient(dsl.ZeroStrategy):
    # torch bounds the start of the processes by the same timeout; here they may take their time on a busy machine.
    def setup_distributed(self):
        timeout, self._timeout = self._timeout, timedelta(seconds=60)
        super().setup_distributed()
        self._timeout = timeout

def impatient(stage, seconds):
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return Patient(stage=stage, config=config, timeout=timedelta(seconds=seconds))

def data():
    return DataLoader(Words(24), batch_size=2)
"""


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    code: int
    seconds: float
    output: str
    left: list[int]
    """Processes that it left behind."""


def environment(tag: str) -> dict[str, str]:
    """Of a user's shell: nothing of the test run's own ranks, and a mark to find children by."""
    foreign = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in foreign}
    return {**kept, "PYTHONPATH": str(ROOT), "DSL_TEST_TAG": tag, "PYTHONWARNINGS": "ignore"}


def alive(tag: str) -> list[int]:
    """Processes that carry the mark of a script."""
    mark = f"DSL_TEST_TAG={tag}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def run_script(
    folder: Path, body: str, *, torchrun: bool = False, timeout: float = 60, send: tuple[str, int] | None = None
) -> Ended:
    """Runs a script on two ranks.

    Args:
        folder: where it is written and run.
        body: follows `HEAD`.
        torchrun: started by torchrun rather than as `python script.py`.
        timeout: after it, it is killed.
        send: once a file of this name exists, every process of the script gets this signal.
    """
    script = folder / "script.py"
    script.write_text(HEAD + body)
    tag = f"{folder.name}-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, str(script)]
    if torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(tag), stdout=log, stderr=subprocess.STDOUT)
        try:
            while send is not None and process.poll() is None and time.monotonic() - began < timeout:
                if (folder / send[0]).exists():
                    for pid in alive(tag):
                        os.kill(pid, send[1])
                    break
                time.sleep(0.05)
            code = process.wait(max(1.0, timeout - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            code = -1000
        seconds = time.monotonic() - began
        end = time.monotonic() + 3
        while (left := [pid for pid in alive(tag) if pid != process.pid]) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in alive(tag):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return Ended(code, seconds, (folder / "output.txt").read_text(errors="replace"), left)
