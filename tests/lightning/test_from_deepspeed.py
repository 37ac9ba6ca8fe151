"""`ckpt_path=` pointed at what DeepSpeed itself wrote: weights, moments, steps and loss scale go on."""

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import ds_lightning as dsl
from ds_lightning.schedules import WarmupLR
from tests.data.deepspeed.make import Tiny, groups_of, loss_of
from tests.lightning.runs import AtTrainStart, full_weights, listening, trainer
from tests.pool import run_ranks

FIXTURES = Path(__file__).parents[1] / "data" / "deepspeed"


class Resumed(pl.LightningModule):
    """The network that DeepSpeed trained, with the same optimizer."""

    def __init__(self):
        super().__init__()
        network = Tiny()
        for name, child in network.named_children():
            setattr(self, name, child)
        self.gain = network.gain
        for name, value in network.named_buffers(recurse=False):
            self.register_buffer(name, value, persistent=name != "scratch")

    forward = Tiny.forward

    def training_step(self, batch, index):
        tokens, targets = batch
        return loss_of(self(tokens), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(groups_of(self))


def batches():
    draw = torch.Generator().manual_seed(3)
    data = list(
        zip(torch.randint(0, 7, (48,), generator=draw), torch.randint(0, 7, (48,), generator=draw), strict=True)
    )
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def resume(name, kind, precision):
    def look(run, model):
        moments = {
            key: {k: dsl.full_optimizer_state(p, k) for k in ("exp_avg", "exp_avg_sq", "step")}
            for key, p in model.named_parameters()
            if p.requires_grad
        }
        rates = [group["lr"] for group in model.optimizers().param_groups]
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        return full_weights(model), moments, rates, buffers, run.global_step, run.strategy.loss_scale

    start = AtTrainStart(look)
    run = trainer(kind, precision, steps=100, max_epochs=1, limit_train_batches=3, callbacks=[start])
    run.fit(Resumed(), batches(), ckpt_path=str(FIXTURES / name))
    return start.result, run.global_step, full_weights(run.lightning_module)


def check(name, stage, world, precision="32-true"):
    reference = torch.load(FIXTURES / name / "reference.pt", weights_only=True)
    for start, last, after in run_ranks(resume, world, name, stage, precision):
        weights, moments, rates, buffers, step, scale = start
        for key, value in reference["weights"].items():
            assert torch.equal(weights[key], value), key
        for key, values in reference["moments"].items():
            assert torch.equal(moments[key]["exp_avg"], values["exp_avg"]), key
            assert torch.equal(moments[key]["exp_avg_sq"], values["exp_avg_sq"]), key
        assert torch.equal(buffers["mean"], torch.linspace(-0.3, 0.7, 5))
        assert last == step + 3
        assert rates == reference["lr"]
        assert step == reference["global_steps"]
        assert scale == (reference["loss_scale"] or 1.0)
        assert not torch.equal(after["embed.weight"], weights["embed.weight"])


CASES = [
    ("stage0_bf16", 1, 2, "bf16-mixed"),
    ("stage1_fp32", 3, 3, "32-true"),
    ("stage2_fp16", 2, 2, "16-mixed"),
    ("stage2_fp32_world3", 0, 1, "32-true"),
    ("stage3_fp32", 3, 2, "32-true"),
    ("stage3_bf16_world3_subgroups", 1, 3, "bf16-mixed"),
    ("universal_stage1", 3, 2, "bf16-mixed"),
    ("universal_stage3", 2, 3, "32-true"),
]


@pytest.mark.parametrize(("name", "stage", "world", "precision"), CASES, ids=str)
def test_a_run_of_deepspeed_goes_on(name, stage, world, precision):
    check(name, stage, world, precision)


class Scheduled(Resumed):
    """With the schedule of the configuration that DeepSpeed ran with, or one of torch."""

    def __init__(self, of_deepspeed):
        super().__init__()
        self.of_deepspeed = of_deepspeed

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.of_deepspeed:
            schedule = WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=10)
        else:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def resume_schedule(name, of_deepspeed):
    def look(run, model):
        schedule = run.lr_scheduler_configs[0].scheduler
        return schedule.last_epoch, [group["lr"] for group in run.optimizers[0].param_groups], list(vars(schedule))

    start = AtTrainStart(look)
    run = trainer(2, steps=100, max_epochs=1, limit_train_batches=1, callbacks=[start])
    with listening() as said:
        run.fit(Scheduled(of_deepspeed), batches(), ckpt_path=str(FIXTURES / name))
    schedule = run.lr_scheduler_configs[0].scheduler
    return start.result, any("begin anew" in line for line in said), schedule.last_epoch, schedule.get_last_lr()


def test_a_schedule_of_deepspeed_goes_on_and_one_of_torch_begins_anew():
    reference = torch.load(FIXTURES / "stage2_fp32" / "reference.pt", weights_only=True)
    ((last, rates, _), told, after, following) = run_ranks(resume_schedule, 2, "stage2_fp32", True)[0]
    assert last == reference["global_steps"]
    assert rates == reference["lr"]
    assert not told
    assert after == last + 1
    assert following == pytest.approx([0.01 * math.log(last + 1) / math.log(10)] * len(rates), rel=1e-15)
    ((last, _, attributes), told, *_) = run_ranks(resume_schedule, 2, "stage2_fp32", False)[0]
    assert (last, told) == (0, True)
    assert "last_batch_iteration" not in attributes


class Wrapped(pl.LightningModule):
    """What Lightning's own DeepSpeedStrategy trained."""

    def __init__(self, width=5):
        super().__init__()
        self.save_hyperparameters()
        self.net = Tiny()

    def training_step(self, batch, index):
        return loss_of(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(groups_of(self))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def resume_of_lightning(name, kind):
    def look(run, model):
        scheduler = run.lr_scheduler_configs[0].scheduler
        return full_weights(model), run.global_step, run.current_epoch, scheduler.last_epoch

    start = AtTrainStart(look)
    run = trainer(kind, steps=8, callbacks=[start])
    run.fit(Wrapped(), batches(), ckpt_path=str(FIXTURES / name))
    assert run.global_step == 8
    return start.result


@pytest.mark.parametrize(("name", "stage", "world"), [("lightning_stage2", 3, 2), ("lightning_stage3", 1, 3)])
def test_a_run_of_lightnings_deepspeed_strategy_goes_on(name, stage, world):
    reference = torch.load(FIXTURES / name / "reference.pt", weights_only=True)
    for weights, step, epoch, scheduled in run_ranks(resume_of_lightning, world, name, stage):
        assert (step, epoch) == (reference["global_step"], reference["epoch"])
        assert scheduled == step
        for key, value in reference["weights"].items():
            assert torch.equal(weights[key], value), key


class Within(pl.LightningModule):
    """The network that DeepSpeed trained by itself, now a part of a module."""

    def __init__(self):
        super().__init__()
        self.net = Tiny()

    training_step = Wrapped.training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(groups_of(self))


def resume_within(name):
    def look(run, model):
        moments = {n: dsl.full_optimizer_state(p, "exp_avg") for n, p in model.named_parameters() if p.requires_grad}
        return full_weights(model), moments

    start = AtTrainStart(look)
    trainer(3, steps=100, max_epochs=1, limit_train_batches=2, callbacks=[start]).fit(
        Within(), batches(), ckpt_path=str(FIXTURES / name)
    )
    return start.result


@pytest.mark.parametrize("name", ["stage2_fp32", "stage2_fp32_exclude_frozen"])
def test_a_network_goes_on_as_a_part_of_a_module_and_without_frozen_weights(name):
    reference = torch.load(FIXTURES / name / "reference.pt", weights_only=True)
    left_out = reference["frozen"] if "exclude" in name else ()
    for weights, moments in run_ranks(resume_within, 2, name):
        for key, value in reference["weights"].items():
            assert key in left_out or torch.equal(weights[f"net.{key}"], value), key
        for key, values in reference["moments"].items():
            assert torch.equal(moments[f"net.{key}"], values["exp_avg"]), key
