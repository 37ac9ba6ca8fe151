"""Every block of the README does what the README says."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ds_lightning.cli.model_states import bytes_per_parameter
from tests.warm import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()


class Block(NamedTuple):
    """A fenced block; `file` is what the line above it names."""

    language: str
    text: str
    file: str | None


def _blocks() -> list[Block]:
    pattern = r"(?:`([\w./]+)`:\n\n)?```(\w+)\n(.*?)```"
    return [Block(m[2], m[3], m[1]) for m in re.finditer(pattern, README, re.DOTALL)]


BLOCKS = _blocks()
FILES = {block.file: block.text for block in BLOCKS if block.file}
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines()]
SET_UP = [line for line in COMMANDS if line.startswith(("python3 -m venv", "pip install"))]
# The commands stay as they are; these words behind them only make the run short. One of each program starts both of
# its processes, which is most of the time that a run takes.
SHORTER = [
    "trainer.max_steps=2",
    "data.max_megabytes=2",
    "data.held_out_windows=4",
    "model.layers=2",
    "model.width=32",
    "model.block_size=32",
    "sample.length=4",
]
SHORTER_APP = ["trainer.max_steps=2", "model.width=32"]
ALONE = "trainer.devices=1"


@pytest.fixture
def run(tmp_path):
    """Runs a command of the README in a folder with the files it names."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    scripts = tmp_path / "bin"
    scripts.mkdir()
    program = scripts / "ds-lightning"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom ds_lightning.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    (scripts / "python").symlink_to(sys.executable)
    path = [str(ROOT), *filter(None, sys.path)]
    try:
        has_plugin = importlib.util.find_spec("hydra_plugins.ds_lightning") is not None
    except ModuleNotFoundError:
        has_plugin = False
    if not has_plugin:
        (tmp_path / "hydra_plugins").symlink_to(ROOT / "ds_lightning" / "hydra_plugins")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *path]),
        "NO_COLOR": "1",
    }

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = words
        if program == "python":
            return run_python(arguments, cwd=tmp_path, env=environment)
        if program == "ds-lightning":
            return run_python([str(scripts / program), *arguments], cwd=tmp_path, env=environment)
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)

    return start


def test_set_up_installs_what_ci_installs():
    assert "python3 -m venv" in SET_UP[0]
    for line in SET_UP[1:]:
        install = line.replace("pip install ", "").replace('"', "")
        extras = re.search(r"\[(.*)\]", install)
        if extras is None:
            assert f"pip install -q {install}\n" in CI
        else:
            assert f"\n{extras[1]} = [\n" in (ROOT / "pyproject.toml").read_text()
            assert re.search(r'pip install -q -e "\.\[[\w,]*test', CI)


def test_pytest_is_what_ci_runs():
    assert "pytest" in COMMANDS
    assert re.search(r"^pytest\b", CI, re.MULTILINE)


def test_both_programs_are_run_with_all_their_processes():
    assert {"ds-lightning train zero=stage3", "python app.py zero=stage3"} < set(COMMANDS)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in SET_UP and line != "pytest"])
def test_command(run, command, tmp_path):
    words = shlex.split(command)
    if words[:2] == ["ds-lightning", "train"]:
        words += SHORTER if command == "ds-lightning train zero=stage3" else [*SHORTER, ALONE]
    elif words[0] == "python":
        words += SHORTER_APP if command == "python app.py zero=stage3" else [*SHORTER_APP, ALONE]
    elif words[:2] == ["ds-lightning", "export"]:
        (tmp_path / "checkpoints").mkdir()
        torch.save({"state_dict": {"model.weight": torch.ones(2, 3)}}, tmp_path / words[2])
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("number", [i for i, b in enumerate(BLOCKS) if b.language == "python" and b.file is None])
def test_python_block(run, tmp_path, number):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number].text)
    done = run("python", str(script))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "text"], ids=lambda b: "shown")
def test_shown_output_is_what_the_command_prints(run, block):
    command, *expected = block.text.splitlines()
    done = run(*shlex.split(command.removeprefix("$ ")))
    printed = (done.stdout + done.stderr).splitlines()
    assert [line for line in expected if line not in printed] == []


def test_the_table_of_stages_is_the_formula():
    rows = re.findall(r"^\| (\d) \| [\w ]+ \| ([^|]+) \| ([^|]+) \| [\d.]+ \|$", README, re.MULTILINE)
    assert [int(stage) for stage, *_ in rows] == [0, 1, 2, 3]
    for stage, single, mixed in rows:
        for ranks in (1, 2, 8):
            for text, precision in ((single, "32-true"), (mixed, "bf16-mixed")):
                value = sum(_term(term, ranks) for term in text.split("+"))
                assert value == bytes_per_parameter(int(stage), ranks, precision)


def _term(text: str, ranks: int) -> float:
    number, _, divided = text.strip().partition("/")
    return int(number) / (ranks if divided else 1)


def test_every_file_and_option_named_exists():
    for name in re.findall(r"`(examples/[\w/.]+)`", README):
        assert (ROOT / name).exists(), name
    for group, option in re.findall(r"`(zero|offload|precision)=(\w+)`", README):
        assert (ROOT / "conf" / group / f"{option}.yaml").exists(), option
    for option in re.findall(r"^\| `[\w-]+` \| `(\w+)` \|", README, re.MULTILINE):
        assert (ROOT / "conf" / "precision" / f"{option}.yaml").exists(), option
