"""The flops profiler in a training run: one report, of one step, whatever the stage and the window."""

import json

import pytest
import torch

import ds_lightning as dsl
from ds_lightning.callbacks import FlopsProfile
from ds_lightning.profile import FlopsProfiler
from tests.lightning.runs import LENGTH, Model, loader, trainer, zero
from tests.pool import run_ranks


def one_step(batches, rows=2):
    """What one step of the model is, without a Trainer."""
    model = Model()
    profiler = FlopsProfiler(model)
    profiler.start_profile(time=False)
    for _ in range(batches):
        model.training_step(torch.zeros(rows, LENGTH, dtype=torch.long), 0).backward()
    profiler.stop_profile()
    return profiler.tree.total()


def profile(path, stage, window, steps, validate=False):
    config = {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(path), "detailed": False}}
    model = Model()
    run = trainer(zero(stage, config), steps=steps, accumulate_grad_batches=window)
    if validate:
        run.validate(model, loader(), verbose=False)
    run.fit(model, loader())
    assert sum(isinstance(callback, FlopsProfile) for callback in run.callbacks) == 1
    assert not any("scopes" in str(hook) for m in model.modules() for hook in m._forward_pre_hooks.values())
    return run.global_step


@pytest.mark.parametrize(("stage", "window"), [(0, 1), (2, 3), (3, 1), (3, 3)])
def test_a_run_reports_one_step(tmp_path, stage, window):
    path = tmp_path / "made" / "profile.json"
    assert run_ranks(profile, 2, path, stage, window, 4, validate=window == 3) == [4, 4]
    found = json.loads(path.read_text())
    expected = one_step(window)
    model = found["model"]
    assert found["step"] == 2
    assert found["facts"]["micro-batches in the step"] == str(window)
    assert model["forward_macs"] == expected.forward_macs
    assert model["forward_flops"] == expected.forward_flops
    if stage == 0 or window == 1:  # gradients meet those of the micro-batch before
        assert model["backward_flops"] == pytest.approx(expected.backward_flops, rel=0.02)
    assert model["parameters"] == sum(parameter.numel() for parameter in Model().parameters())
    assert model["forward_seconds"] > 0
    assert model["backward_seconds"] > 0
    assert "iter latency" in found["facts"]


def test_without_a_second_step_there_are_no_times(tmp_path):
    path = tmp_path / "profile.json"
    run_ranks(profile, 1, path, 3, 1, 3)
    found = json.loads(path.read_text())
    assert found["model"]["forward_flops"] == one_step(1).forward_flops
    assert found["model"]["forward_seconds"] == 0
    assert "iter latency" not in found["facts"]


def too_short():
    run = trainer(zero(2, {"flops_profiler": {"enabled": True, "profile_step": 50}}), steps=2)
    with pytest.warns(UserWarning, match="profile_step=50"):
        run.fit(Model(), loader())


def test_a_run_that_is_too_short_says_so():
    run_ranks(too_short, 1)


def by_hand(path):
    model = Model()
    profile = FlopsProfile(profile_step=1, output_file=path, peak_flops=1e12, recompute_fwd_factor=1.0)
    trainer(zero(1), steps=3, callbacks=[profile]).fit(model, loader())
    assert profile.profiler is not None
    total = profile.profiler.tree.total()
    assert total.recomputed_flops == total.forward_flops


def test_the_callback_works_by_hand_and_knows_the_peak(tmp_path):
    path = tmp_path / "profile.txt"
    run_ranks(by_hand, 1, path)
    assert "MFU" in path.read_text()
    assert "recomputed in bwd" in path.read_text()


class Failing(Model):
    def training_step(self, tokens, index):
        if index == 1:
            raise ZeroDivisionError
        return super().training_step(tokens, index)


def fails():
    model = Failing()
    with pytest.raises(ZeroDivisionError):
        trainer(zero(3), steps=3, callbacks=[FlopsProfile()]).fit(model, loader())
    assert dsl.profile.FlopsProfiler is FlopsProfiler
    assert not any("_enter" in repr(hook) for m in model.modules() for hook in m._forward_pre_hooks.values())


def test_a_failing_step_leaves_no_hook_behind():
    run_ranks(fails, 1)


def unwritable(where):
    config = {"flops_profiler": {"enabled": True, "output_file": where}}
    with pytest.raises(dsl.errors.ConfigError, match=r"flops_profiler\.output_file"):
        trainer(zero(2, config), steps=2).fit(Model(), loader())


def test_a_report_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    run_ranks(unwritable, 1, str(tmp_path / "file" / "made" / "profile.json"))
