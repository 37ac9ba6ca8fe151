"""A job of which one rank fails ends soon, says who waited for what, and leaves no process behind."""

import signal

import pytest
import torch

from tests.lightning.scripts import run_script

full = pytest.mark.full

SCRIPT = """
class Failing(Model):
    def training_step(self, tokens, index):
        print(f"step {{index}} of rank {{RANK}}", flush=True)
        return self.step_of(tokens, index)

    def step_of(self, tokens, index):
{step}
        return super().training_step(tokens, index)

if __name__ == "__main__":
    try:
        trainer(impatient({stage}, {timeout}), max_steps=6).fit(Failing(), data())
    except BaseException as error:
        print(f"[{{time.monotonic() - start:.1f}} s] rank {{RANK}} {{type(error).__name__}}: {{error}}", flush=True)
        raise
"""


def job(folder, step, stage, timeout=30, **options):
    lines = "\n".join(f"        {line}" for line in step.strip().splitlines())
    return run_script(folder, SCRIPT.format(step=lines, stage=stage, timeout=timeout), **options)


@pytest.mark.parametrize(
    ("torchrun", "stage"), [(True, 3), pytest.param(False, 3, marks=full), pytest.param(False, 1, marks=full)]
)
def test_an_exception_on_one_rank_ends_the_job_and_is_shown(tmp_path, torchrun, stage):
    step = """
if index == 2 and RANK == 1:
    raise RuntimeError("the disk of rank one is on fire")
"""
    ended = job(tmp_path, step, stage, torchrun=torchrun)
    assert ended.code not in (0, -1000), ended.output
    assert "the disk of rank one is on fire" in ended.output
    assert "Traceback" in ended.output
    assert ended.seconds < 40
    assert ended.left == []


@pytest.mark.parametrize(("torchrun", "stage"), [(False, 3), pytest.param(True, 3, marks=full)])
def test_a_rank_that_is_killed_ends_the_job(tmp_path, torchrun, stage):
    step = """
if index == 2 and RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = job(tmp_path, step, stage, torchrun=torchrun)
    assert ended.code not in (0, -1000), ended.output
    assert ended.seconds < 40
    assert ended.left == []


def test_ranks_that_run_different_modules_are_told_where_they_diverge(tmp_path):
    step = """
if index == 1 and RANK == 1:
    self.blocks = torch.nn.ModuleList([self.blocks[0], self.blocks[2]])
"""
    ended = job(tmp_path, step, 3, timeout=5)
    assert ended.code not in (0, -1000), ended.output
    assert "TopologyError" in ended.output, ended.output
    assert "rank 0" in ended.output or "rank 1" in ended.output
    assert "of unit" in ended.output or "could not agree on" in ended.output
    assert ended.seconds < 40
    assert ended.left == []


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=full)])
def test_a_rank_that_sleeps_is_waited_for_no_longer_than_the_timeout(tmp_path, stage):
    step = """
if index == 1 and RANK == 1:
    time.sleep(60)
if index == 1:
    global start
    start = time.monotonic()
"""
    ended = job(tmp_path, step, stage, timeout=5)
    assert ended.code not in (0, -1000), ended.output
    (line,) = [line for line in ended.output.splitlines() if "] rank 0 TopologyError" in line]
    assert 4 < float(line.partition("[")[2].partition(" s]")[0]) < 15
    assert "up to 5 s" in line
    assert ended.seconds < 40
    assert ended.left == []


TERMINATED = """
from lightning.pytorch.callbacks import ModelCheckpoint

class Slow(Model):
    def training_step(self, tokens, index):
        if index == 3:
            open(f"ready{RANK}", "w").close()
        time.sleep(0.2)
        return super().training_step(tokens, index)

if __name__ == "__main__":
    keep = ModelCheckpoint("kept", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(impatient(3, 15), max_steps=500, callbacks=[keep], enable_checkpointing=True)
    run.fit(Slow(), data())
"""


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=full)])
def test_a_job_that_is_terminated_stops_and_its_checkpoints_load(tmp_path, torchrun):
    ended = run_script(tmp_path, TERMINATED, torchrun=torchrun, send=("ready0", signal.SIGTERM))
    # Lightning leaves by SystemExit, which is 0; a child that its launcher ends first makes it something else.
    assert ended.code not in (-1000, -signal.SIGABRT, -signal.SIGSEGV), ended.output
    assert "Received SIGTERM" in ended.output
    assert ended.seconds < 45
    assert ended.left == []
    kept = sorted((tmp_path / "kept").glob("*.ckpt"))
    assert kept
    for path in kept:
        assert torch.load(path, weights_only=True)["global_step"] > 0
    assert not list((tmp_path / "kept").glob(".*"))


ON_EXCEPTION = """
from lightning.pytorch.callbacks import OnExceptionCheckpoint

class Failing(Model):
    def training_step(self, tokens, index):
        if index == 2 and (RANK == 1 or {everywhere}):
            raise RuntimeError("out of ideas")
        return super().training_step(tokens, index)

if __name__ == "__main__":
    keep = OnExceptionCheckpoint(".", filename="emergency")
    trainer(impatient(3, 20), callbacks=[keep], enable_checkpointing=True).fit(Failing(), data())
"""


@pytest.mark.full
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_checkpoint_on_exception_is_saved_when_all_ranks_fail_and_hangs_nothing_when_one_does(tmp_path, everywhere):
    ended = run_script(tmp_path, ON_EXCEPTION.format(everywhere=everywhere))
    assert ended.code not in (0, -1000), ended.output
    assert ended.seconds < 45
    assert ended.left == []
    assert "out of ideas" in ended.output or not everywhere
    if everywhere:
        assert torch.load(tmp_path / "emergency.ckpt", weights_only=True)["global_step"] == 2


BESIDE = """
from lightning.pytorch.callbacks import ModelCheckpoint
from ds_lightning.checkpoint.background import BackgroundWriter

complete = BackgroundWriter._complete

def slowly(self, write):
    time.sleep(3)
    complete(self, write)

BackgroundWriter._complete = slowly

class Slow(Model):
    def training_step(self, tokens, index):
        if index == 2:  # after the first save; Lightning's own handler must not meet a collective
            open(f"ready{{RANK}}", "w").close()
            time.sleep(1)
        return super().training_step(tokens, index)

if __name__ == "__main__":
    keep = ModelCheckpoint("kept", filename="{{step}}", every_n_train_steps=2, save_top_k=1, save_last=True)
    config = {{"zero_optimization": {{"stage3_param_persistence_threshold": 0}}}}
    method = Patient(stage=3, config=config, checkpoint="sharded", async_save=True, start_method="{start}")
    run = trainer(method, max_steps={steps}, callbacks=[keep], enable_checkpointing=True)
    run.fit(Slow(), data())
"""


@pytest.mark.full
def test_a_job_that_is_terminated_completes_what_it_is_writing(tmp_path):
    ended = run_script(tmp_path, BESIDE.format(start="popen", steps=500), send=("ready0", signal.SIGTERM), timeout=90)
    assert ended.code not in (-1000, -signal.SIGABRT, -signal.SIGSEGV), ended.output
    assert "Received SIGTERM" in ended.output
    assert ended.left == []
    assert not [path for path in (tmp_path / "kept").iterdir() if path.name.startswith(".")], ended.output
    for name in ("step=2.ckpt", "last.ckpt"):
        assert (tmp_path / "kept" / name / "meta.pt").is_file(), ended.output


@pytest.mark.full
def test_processes_that_are_spawned_write_beside_training(tmp_path):
    ended = run_script(tmp_path, BESIDE.format(start="spawn", steps=2), timeout=110)
    assert ended.code == 0, ended.output
    assert ended.left == []
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["last.ckpt", "latest", "step=2.ckpt"]
