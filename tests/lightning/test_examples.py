"""The files of examples/ run as their first lines say, on two processes, with small settings."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from ds_lightning.cli import main
from tests.warm import run_python

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL_GPT = ["--steps=4", "--width=32", "--layers=2"]


@pytest.fixture
def run(tmp_path):
    """Runs an example as a script, in a folder of its own."""
    path = [str(ROOT), *filter(None, sys.path)]
    try:
        has_plugin = importlib.util.find_spec("hydra_plugins.ds_lightning") is not None
    except ModuleNotFoundError:
        has_plugin = False
    if not has_plugin:
        (tmp_path / "hydra_plugins").symlink_to(ROOT / "ds_lightning" / "hydra_plugins")
        path.insert(0, str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def start(file: str, *words: str) -> str:
        done = run_python([str(EXAMPLES / file), *words], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return start


full = pytest.mark.full


@pytest.mark.parametrize("strategies", [("dszero3", "dszero1"), pytest.param(("ddp", "ddp"), marks=full)])
def test_train_gpt_saves_and_resumes_at_another_stage(run, strategies):
    first, second = strategies
    assert "saved" in run("train_gpt.py", f"--strategy={first}", *SMALL_GPT)
    resumed = run(
        "train_gpt.py",
        f"--strategy={second}",
        *SMALL_GPT[1:],
        "--steps=8",
        "--resume=checkpoints/gpt.ckpt",
    )
    assert "saved" in resumed


def test_checkpoints_are_resumed_on_another_number_of_ranks_and_exported(run, tmp_path):
    assert "after 4 steps" in run("checkpoints.py", *SMALL_GPT)
    words = ["--resume=last", "--devices=1", "--stage=1", "--steps=8"]
    assert "after 8 steps" in run("checkpoints.py", *words, *SMALL_GPT[1:])
    assert (tmp_path / "checkpoints" / "last.ckpt" / ".metadata").is_file()
    out = tmp_path / "gpt.safetensors"
    assert main(["export", str(tmp_path / "checkpoints" / "last.ckpt"), str(out), "--key", "ema.state_dict"]) == 0
    assert out.is_file()


def test_pretrained_goes_back_to_transformers(run, tmp_path):
    assert "tuned has" in run("pretrained.py", "--steps=2")
    assert len(list((tmp_path / "tuned").glob("model-*.safetensors"))) > 1


def test_adapters_are_a_small_part_of_a_checkpoint(run, tmp_path):
    said = run("lora.py", "--base-steps=2", "--steps=2", *SMALL_GPT[1:], "--rank=2")
    assert "2,048 of 43,904 parameters are trained (4.7%)" in said
    sizes = [(tmp_path / file).stat().st_size for file in ("base.ckpt", "adapters.ckpt")]
    assert sizes[0] > 5 * sizes[1]
    assert (tmp_path / "merged.pt").is_file()


@pytest.mark.parametrize("strategy", ["dszero2", pytest.param("ddp_find_unused_parameters_true", marks=full)])
def test_manual_gan(run, strategy):
    assert "mean radius" in run("manual_gan.py", f"--strategy={strategy}", "--epochs=1")


def test_hydra_app(run):
    words = ["trainer.max_steps=3", "model.width=32", "data.max_megabytes=2"]
    assert "stage 3: loss" in run("hydra_app/app.py", "zero=stage3", *words)
    assert "stage 1: loss" in run("hydra_app/app.py", "zero.stage=1", "trainer.devices=1", *words)


OFFLOAD = ["--layers=32", "--width=256", "--steps=2", "--limit=128"]  # 388 MiB of states


def test_offload_trains_with_a_third_of_the_memory_of_its_states(run, tmp_path):
    said = run("offload.py", *OFFLOAD)
    assert "388 MiB of states" in said
    assert "allowed: 128 MiB" in said
    assert (tmp_path / "offload.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "swap").iterdir()) == []


@full
def test_offload_example_fails_without_offload(run):
    with pytest.raises(AssertionError):  # the process is killed, or says that it used more
        run("offload.py", *OFFLOAD, "--offload=none")


def test_every_example_is_run_here():
    tested = Path(__file__).read_text()
    scripts = {file.relative_to(EXAMPLES).as_posix() for file in EXAMPLES.rglob("*.py")}
    assert [name for name in scripts if not name.startswith("bench/") and name not in tested] == []
