"""Reading and writing a file by ds_lightning.ops.aio side by side with fio and, where installed, DeepSpeed's handle.

    python examples/bench/aio.py --folder /local_nvme             # 256 MiB, 7 rounds
    python examples/bench/aio.py --mib 64 --rounds 3 --engines io_uring --blocks 1048576 --depths 8

All contestants move the same file past the page cache and take turns, in another order every round: disks are shared
and caches of hosts come and go. Figures are medians over rounds; ratios are medians of the ratios, within each round,
to the setting of fio that is fastest over all rounds. fio's figures are its own, from a few blocks of memory that stay
in the processor's caches; ours and DeepSpeed's are from the call to the end of the wait, from memory as large as the
file. Memory of ours is plain: at the start of a page ("aligned"), as torch allocates it ("torch"), or one
byte off, by way of copies ("misaligned"). DeepSpeed's is page-locked by its own allocator.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ALIGNED, TORCH, MISALIGNED = "aligned", "torch", "misaligned"


class Ours:
    """One setting of AsyncIO and one kind of memory."""

    def __init__(self, file: Path, nbytes: int, engine: Any, block: int, depth: int, threads: int, memory: str) -> None:
        import torch

        from ds_lightning.ops import aio

        self.io = aio.AsyncIO(block, depth, intra_op_parallelism=threads, engine=engine)
        self.file = self.io.open(file, "r+")
        if memory == TORCH:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        else:
            self.tensor = self.io.empty(nbytes + 1)[memory == MISALIGNED :][:nbytes]
        self.tensor.fill_(7)
        self.name = f"ours {engine}, {_size(block)} x {depth}, {threads} thread(s), {memory}"

    def write(self) -> float:
        began = time.perf_counter()
        self.io.write(self.tensor, self.file).wait()
        return time.perf_counter() - began

    def read(self) -> float:
        began = time.perf_counter()
        self.io.read(self.tensor, self.file).wait()
        return time.perf_counter() - began


class Fio:
    """One setting of fio."""

    def __init__(self, file: Path, nbytes: int, engine: str, block: int, depth: int, threads: int) -> None:
        self.nbytes = nbytes
        self.command = ["fio", "--name=bench", f"--filename={file}", f"--size={nbytes // threads}", f"--bs={block}"]
        self.command += [f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--output-format=json"]
        self.command += [f"--numjobs={threads}", f"--offset_increment={nbytes // threads}", "--group_reporting"]
        self.command += ["--thread", "--overwrite=1"]
        self.name = f"fio {engine}, {_size(block)} x {depth}, {threads} job(s)"

    def write(self) -> float:
        return self._run("write")

    def read(self) -> float:
        return self._run("read")

    def _run(self, verb: str) -> float:
        out = subprocess.run([*self.command, f"--rw={verb}"], check=True, capture_output=True, text=True).stdout
        job = json.loads(out[out.index("{") :])["jobs"][0]
        return self.nbytes / float(job[verb]["bw_bytes"])


class DeepSpeed:
    """Its handle, with page-locked memory of its own."""

    def __init__(self, file: Path, nbytes: int, block: int, depth: int, threads: int) -> None:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, threads)
        self.tensor = self.handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self.tensor.fill_(7)
        self.file = str(file)
        self.name = f"deepspeed libaio, {_size(block)} x {depth}, {threads} thread(s), locked"

    def write(self) -> float:
        began = time.perf_counter()
        self.handle.sync_pwrite(self.tensor, self.file)
        return time.perf_counter() - began

    def read(self) -> float:
        began = time.perf_counter()
        self.handle.sync_pread(self.tensor, self.file)
        return time.perf_counter() - began


def contestants(arguments: argparse.Namespace, file: Path) -> Iterator[Any]:
    """Everybody who can take part here."""
    from ds_lightning.errors import NativeOpError

    nbytes = arguments.mib << 20
    settings = list(itertools.product(arguments.blocks, arguments.depths, arguments.threads))
    if shutil.which("fio") is None:
        print("fio is not installed: no figures of it, and no ratios.")
    else:
        for engine in ("io_uring", "libaio"):
            yield from (Fio(file, nbytes, engine, *setting) for setting in settings)
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: no figures of it.")
    else:
        yield from (DeepSpeed(file, nbytes, *setting) for setting in settings)
    for engine in arguments.engines:
        try:
            yield from (Ours(file, nbytes, engine, *setting, ALIGNED) for setting in settings)
        except NativeOpError as error:
            print(error)
    for memory in (TORCH, MISALIGNED):
        yield Ours(file, nbytes, "auto", 8 << 20, 4, 1, memory)


def report(mib: int, seconds: dict[tuple[str, str], list[float]]) -> None:
    """Print medians, and ratios to the best of fio."""
    from rich.console import Console
    from rich.table import Table

    best = {}
    for verb in ("write", "read"):
        settings = [name for name, what in seconds if what == verb and name.startswith("fio")]
        best[verb] = min(settings, key=lambda name: statistics.median(seconds[name, verb]), default=None)
    table = Table(title=f"{mib} MiB, ratios to the best setting of fio")
    for column in ("contestant", "write", "x fio", "read", "x fio"):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for name in dict.fromkeys(name for name, _ in seconds):
        row = [name]
        for verb in ("write", "read"):
            own = seconds[name, verb]
            row.append(f"{mib * 2**20 / statistics.median(own) / 1e9:.2f} GB/s")
            rival = best[verb]
            ratios = [] if rival is None else [b / a for a, b in zip(own, seconds[rival, verb], strict=True)]
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "-")
        table.add_row(*row)
    Console(width=120).print(table)


def main() -> None:
    """Let all contestants take turns and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", nargs="+", default=["io_uring", "libaio", "threads"])
    parser.add_argument("--blocks", nargs="+", type=int, default=[1 << 20, 8 << 20])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    arguments = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        file = Path(folder) / "bench.bin"
        with file.open("wb") as stream:  # its blocks are on the disk before anybody is timed
            for _ in range(arguments.mib):
                stream.write(b"\7" * (1 << 20))
            stream.flush()
        everybody = list(contestants(arguments, file))
        for turn in range(arguments.rounds + 1):  # the first warms up
            order = random.Random(turn).sample(everybody, len(everybody))  # a disk remembers who came before
            for contestant, verb in itertools.product(order, ("write", "read")):
                took = getattr(contestant, verb)()
                if turn:
                    seconds.setdefault((contestant.name, verb), []).append(took)
    names = [contestant.name for contestant in everybody]
    report(arguments.mib, {(name, verb): seconds[name, verb] for name in names for verb in ("write", "read")})


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


if __name__ == "__main__":
    main()
