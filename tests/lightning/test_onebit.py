"""The 1-bit optimizers in Lightning: DeepSpeed's configurations, precisions, overflow, checkpoints."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from tests.lightning import runs
from tests.pool import run_ranks

CONFIGS = Path(__file__).parents[1] / "data" / "ds_configs"
EARLY = {
    "onebit_adam": {"freeze_step": 3},
    "onebit_lamb": {"freeze_step": 3},
    "zero_one_adam": {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 4},
}


class Model(runs.Model):
    """Its optimizer is that of the configuration."""

    def __init__(self, overflow: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.overflow = overflow

    def configure_optimizers(self):
        return None

    def training_step(self, tokens, index):
        loss = super().training_step(tokens, index)
        if index in self.overflow and dist.get_rank() == 1:
            loss = loss * float("inf")
        return loss


def config_of(name, *, fp16=None, **params):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    config["optimizer"]["params"].update(EARLY[name], **params)
    if fp16 is not None:
        config["fp16"] = {"enabled": fp16, "initial_scale_power": 8}
    config["zero_optimization"] = {"stage": 0, "stage3_param_persistence_threshold": 0}
    return config


def fit(config, steps, precision=None, path=None, model=None, stage=0, **options):
    model = model or Model()
    config = copy.deepcopy(config)
    config["zero_optimization"]["stage"] = stage
    strategy = dsl.ZeroStrategy(config=config)
    kind = {} if config.get("fp16", {}).get("enabled") else {"precision": precision or "32-true"}
    trainer = runs.trainer(strategy, steps=steps, **kind, **options)
    if config.get("fp16", {}).get("enabled"):
        assert trainer.precision_plugin.precision == "16-mixed"
    trainer.fit(model, runs.loader(size=48), runs.loader(size=4), ckpt_path=path)
    return model, trainer


def everything(model, trainer):
    engine = trainer.strategy.engine
    found = dict(runs.full_weights(model))
    for name, p in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "worker_error", "server_error", "last_factor", "lamb_coeff_freeze"):
            value = dsl.full_optimizer_state(p, key) if p.requires_grad else None
            if value is not None:
                found[f"{name}.{key}"] = torch.as_tensor(value)
    groups = engine.optimizers[0].optimizer.param_groups
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return found


def equal_on_all_ranks(model):
    for name, p in model.named_parameters():
        mine = p.detach().double().flatten()
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
        assert all(torch.equal(ranks[0], other) for other in ranks), name
        assert mine.isfinite().all(), name


def check_configuration(name, precision, stage=0):
    config = config_of(name, fp16=precision == "16-mixed")
    model, trainer = fit(
        config, 12, precision, stage=stage, gradient_clip_val=0.5, accumulate_grad_batches=2, val_check_interval=3
    )
    equal_on_all_ranks(model)
    assert trainer.strategy.engine.optimizers[0].onebit.steps == 12
    assert trainer.strategy.last_grad_norm > 0
    return trainer.strategy.last_grad_norm


@pytest.mark.parametrize(
    ("name", "precision", "stage"),
    [
        ("onebit_adam", "16-mixed", 0),
        ("onebit_adam", "bf16-mixed", 1),
        ("onebit_lamb", "32-true", 0),
        ("zero_one_adam", "bf16-mixed", 0),
        ("zero_one_adam", "bf16-true", 0),
    ],
)
def test_deepspeeds_configurations_train(name, precision, stage):
    runs.everywhere(run_ranks(check_configuration, 2, name, precision, stage))


def check_resume(name, stop, folder, stage=0):
    """Eight steps in one go, with a checkpoint at `stop`, and the same from that checkpoint."""
    config = config_of(name, fp16=False)
    path = str(Path(folder) / "middle.ckpt")

    class Save(runs.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == stop:
                trainer.save_checkpoint(path)

    straight = everything(*fit(config, 10, callbacks=[Save()], stage=stage))
    model, trainer = fit(config, 10, path=path, stage=stage)
    again = everything(model, trainer)
    assert not runs.same(straight, again)
    equal_on_all_ranks(model)


@pytest.mark.parametrize(
    ("name", "stop", "stage"),
    [
        ("onebit_adam", 2, 0),  # before the freeze: back to the warm-up
        ("onebit_adam", 6, 0),
        ("onebit_adam", 6, 1),
        ("onebit_lamb", 6, 0),
        ("zero_one_adam", 3, 0),
        ("zero_one_adam", 9, 0),  # between two common steps
    ],
)
def test_a_run_resumes_in_any_phase_as_if_it_had_not_stopped(name, stop, stage, tmp_path):
    run_ranks(check_resume, 2, name, stop, str(tmp_path), stage)


def save_one(name, folder):
    _, trainer = fit(config_of(name, fp16=False), 6)
    trainer.save_checkpoint(Path(folder) / "other.ckpt")


def load_one(name, folder):
    model, trainer = fit(config_of(name, fp16=False), 8, path=str(Path(folder) / "other.ckpt"))
    equal_on_all_ranks(model)
    assert trainer.strategy.engine.optimizers[0].onebit.steps == 8


@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam"])
def test_a_checkpoint_resumes_on_other_numbers_of_ranks(name, tmp_path):
    run_ranks(save_one, 2, name, str(tmp_path))
    for world in (1, 3):
        run_ranks(load_one, world, name, str(tmp_path))


def check_overflow():
    """One rank's gradient overflows in a compressed step."""

    class Watch(runs.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            block = trainer.strategy.engine.optimizers[0]
            states = [b.elements for b in block._blocks.values()]
            self.before = [{k: v.clone() for k, v in e.items()} for e in states]

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 5:
                sharded = trainer.strategy.engine.optimizers[0]
                after = [b.elements for b in sharded._blocks.values()]
                assert all(torch.equal(a[k], b[k]) for a, b in zip(self.before, after, strict=True) for k in a)
                assert sharded.onebit.steps == 5
                self.seen = True

    watch = Watch()
    model, trainer = fit(config_of("onebit_adam", fp16=True), 8, model=Model((5,)), callbacks=[watch])
    assert watch.seen
    assert trainer.strategy.skipped_steps == 1
    equal_on_all_ranks(model)


def test_an_overflow_on_one_rank_leaves_all_states_as_they_were():
    run_ranks(check_overflow, 2)


def check_refused(name, stage):
    class Own(runs.Model):
        def configure_optimizers(self):
            return getattr(dsl.optim, name)(p for p in self.parameters() if p.requires_grad)

    with pytest.raises(ConfigError, match=f"{name} exchanges whole momenta and works at stage"):
        runs.trainer(stage).fit(Own(), runs.loader())


@pytest.mark.parametrize(("name", "stage"), [("OneBitAdam", 2), ("ZeroOneAdam", 1), ("OneBitLamb", 3)])
def test_an_optimizer_object_is_refused_at_other_stages(name, stage):
    run_ranks(check_refused, 1, name, stage)
