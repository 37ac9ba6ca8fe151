"""`ds-lightning` as a user types it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ds_lightning.cli import main
from tests.warm import run_python

ROOT = Path(__file__).parents[2]
TINY = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.block_size=32",
    "data.batch_size=2",
    "data.held_out_windows=8",
    "data.max_megabytes=2",
    "sample.length=8",
]
SCRIPT = "import sys\nfrom ds_lightning.cli import main\nsys.exit(main())\n"


@pytest.fixture
def shell(tmp_path):
    """Runs a command line in a folder of its own, with the console script that pip would write."""
    script = tmp_path / "bin" / "ds-lightning"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }

    def run(*words: str, module: bool = False, code: int = 0) -> subprocess.CompletedProcess[str]:
        start = ["-m", "ds_lightning"] if module else [str(script)]
        done = run_python([*start, *words], cwd=tmp_path, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def _table(text: str) -> dict[str, str]:
    rows = re.findall(r"^[^\w]*((?:\w[\w-]*\s)+?)\s*\u2502\s*(.*?)\s*\u2502?$", text, re.MULTILINE)
    return {name.strip(): value for name, value in rows}


def _loss(row: str) -> float:
    return float(row.split()[0])


@pytest.mark.parametrize(
    ("choice", "resumes"),
    [("zero=stage3", True), ("strategy=ddp", False), pytest.param("strategy=ddp", True, marks=pytest.mark.full)],
)
def test_training_reports_and_goes_on_from_its_checkpoint(shell, tmp_path, choice, resumes):
    done = shell("train", choice, "trainer.max_steps=6", *TINY)
    table = _table(done.stdout)
    assert table["processes"] == "2 x cpu"
    assert table["optimizer steps"] == "6"
    assert table["held-out loss after"] < table["held-out loss before"]
    assert _loss(table["unigram entropy"]) == pytest.approx(3.2, abs=0.3)
    measured, formula = re.findall(r"[\d.]+\d", table["bytes per parameter"])
    assert float(measured) == pytest.approx(float(formula), rel=0.05)
    assert len(table["model states per rank"].split(", ")) == 2
    assert done.stdout.count("Training finished") == 1
    assert "Sample:\ndef " in done.stdout
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1
    assert not list(tmp_path.glob("*.log"))

    command = shlex.split(re.search(r"^Go on with: ds-lightning (.*)$", done.stdout, re.M)[1])
    assert "trainer.max_steps=12" in command
    if not resumes:
        return
    resumed = _table(shell(*command).stdout)
    assert resumed["optimizer steps"] == "12"
    assert resumed["held-out loss before"] == table["held-out loss after"]


def test_own_classes_replace_the_demo_and_its_arguments(shell, tmp_path):
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "from lightning.pytorch import LightningDataModule\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset\n"
        "class MyModule(BoringModel):\n"
        "    def __init__(self, scale=1.0):\n"
        "        super().__init__()\n"
        "        print('scale', scale)\n"
        "class MyData(LightningDataModule):\n"
        "    def train_dataloader(self):\n"
        "        return torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)\n"
    )
    done = shell(
        "train",
        "model._target_=my_pkg.MyModule",
        "data._target_=my_pkg.MyData",
        "zero=stage2",
        "trainer.max_steps=3",
        "+model.scale=0.5",
        module=True,
    )
    assert done.stdout.count("scale 0.5") == 2
    table = _table(done.stdout)
    assert table["parameters"] == "66"
    assert "unigram entropy" not in table


def test_multirun_starts_the_ranks_of_each_job_anew(shell, tmp_path):
    done = shell("train", "-m", "zero=stage1,stage2", "trainer.max_steps=2", *TINY, module=True)
    assert re.findall(r"stage (\d) ", done.stdout) == ["1", "2"]
    assert done.stdout.count("2 x cpu") == 2
    assert len(list((tmp_path / "multirun").rglob("*.ckpt"))) == 2


def test_a_failing_class_shows_its_own_traceback(shell, tmp_path):
    (tmp_path / "broken.py").write_text("class Model:\n    def __init__(self): 1 / 0\n")
    done = shell("train", "model._target_=broken.Model", "trainer.devices=1", code=1)
    assert "ZeroDivisionError" in done.stderr
    assert "broken.py" in done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("zero.stgae=2", "did you mean 'zero.stage'?"),
        ("zero=stagge3", "did you mean 'zero=stage3'?"),
        ("zro=stage2", "did you mean 'zero'?"),
        ("precision=bf61", "did you mean 'precision=bf16'?"),
        ("trainer.max_stpes=3", "did you mean 'trainer.max_steps'?"),
        ("zero.stage={", "no viable alternative"),
        ("zero.stage=7", "zero_optimization.stage"),
        ("zero.zenflow={}", "not supported yet"),
        ("ckpt_path=nothing.ckpt", "there is no such file or folder"),
        ("model=custom", "model._target_=my_package.MyClass"),
        ("model._target_=nowhere.Model", "No module named 'nowhere'"),
        ("+model.depth=3", "unexpected keyword argument 'depth'"),
    ],
)
def test_a_mistake_ends_in_words(override, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = _environment(), list(sys.argv)
    assert main(["train", override]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert "Traceback" not in message
    assert (_environment(), list(sys.argv)) == before


def _environment():
    """What torch sets when parts of it are first imported is left out."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "TORCHINDUCTOR_"))}


def test_an_unknown_command_is_refused_with_a_guess(capsys):
    assert main(["doktor"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err


def test_help_does_not_wait_for_torch(shell):
    code = "import sys; from ds_lightning.cli import main; main(['--help']);assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ds-lightning COMMAND" in done.stdout


def test_check_prints_a_row_per_key_and_fails_on_mistakes(tmp_path, capsys):
    good = tmp_path / "good.json"
    good.write_text('{"zero_optimization": {"stage": 3}}')
    assert main(["check", str(good)]) == 0
    assert "zero_optimization.stage" in capsys.readouterr().out
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimization": {"stgae": 3}}')
    assert main(["check", str(bad)]) == 1
    assert "stage" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "none.json")]) == 2
    assert main(["check"]) == 2
    assert "usage" in capsys.readouterr().err


def test_doctor_tells_versions_devices_and_native_code(capsys):
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for word in ("torch", "lightning", "gloo", "_native", "_aio", "_cuda"):
        assert word in report
