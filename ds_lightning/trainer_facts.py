"""What a Trainer and a LightningModule say about a run, as the facts a configuration is reconciled with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from ds_lightning.config import Facts


def collect_facts(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    stage: int | None,
    precision: str,
    optimizers: list[torch.optim.Optimizer],
    *,
    has_optimizer: bool | None = None,
    has_schedule: bool = False,
    total_steps: int | None = None,
) -> Facts:
    """Gather facts without creating dataloaders or anything else.

    Args:
        trainer: the Trainer of the run.
        module: its module.
        stage: what `ZeroStrategy(stage=...)` says.
        precision: name of the precision in use.
        optimizers: those of the run.
        has_optimizer: whether the module made them; None means that it did, if there are any.
        has_schedule: whether the module made a schedule.
        total_steps: what `total_steps` said; None takes the Trainer's `max_steps`.
    """
    return Facts(
        world_size=trainer.world_size,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=_algorithm(trainer),
        clip_is_default=trainer.gradient_clip_val is None,
        precision=precision,
        micro_batch_size=micro_batch_size(trainer, module),
        max_steps=_known_steps(trainer) if total_steps is None else total_steps,
        warmup_steps=_warmup_steps(module),
        hidden_size=_hidden_size(module),
        optimizer_defaults=_optimizer_defaults(module, optimizers),
        group_rates=_group_rates(optimizers),
        has_optimizer=bool(optimizers) if has_optimizer is None else has_optimizer,
        has_schedule=has_schedule,
        trains=trainer.state.fn == TrainerFn.FITTING,
        stage=stage,
    )


def _algorithm(trainer: pl.Trainer) -> str | None:
    value = trainer.gradient_clip_algorithm
    return None if value is None else str(getattr(value, "value", value))


def micro_batch_size(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    """Batch size of the training data on one rank, as far as it is known without building a dataloader."""
    source = trainer.fit_loop._data_source.instance
    candidates: list[Any] = [
        getattr(trainer, "train_dataloader", None),
        source,
        getattr(trainer, "datamodule", None),
        module,
    ]
    for candidate in candidates:
        size = _batch_size_of(candidate)
        if size is not None:
            return size
    return None


def _batch_size_of(source: Any) -> int | None:
    sampler = getattr(source, "batch_sampler", None)
    hparams: Any = getattr(source, "hparams", None)
    for value in (
        getattr(sampler, "batch_size", None),
        getattr(source, "batch_size", None),
        hparams.get("batch_size") if hasattr(hparams, "get") else None,
    ):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def total_steps(trainer: pl.Trainer) -> int | None:
    """Optimizer steps of the whole run by Lightning's estimate; None if there is no end.

    Makes the training dataloader, unless there is one or the Trainer counts steps alone.
    """
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None


def _known_steps(trainer: pl.Trainer) -> int | None:
    """Only what needs no dataloader: `estimated_stepping_batches` would build one."""
    return trainer.max_steps if trainer.max_steps is not None and trainer.max_steps > 0 else None


def _hidden_size(module: pl.LightningModule) -> int | None:
    for owner in module.modules():
        config: Any = getattr(owner, "config", None)
        size = getattr(config, "hidden_size", None)
        if size is None and getattr(config, "hidden_sizes", None):
            size = max(config.hidden_sizes)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _warmup_steps(module: pl.LightningModule) -> int | None:
    hparams: Any = module.hparams
    for name in ("warmup_num_steps", "num_warmup_steps", "warmup_steps"):
        value = hparams.get(name) if hasattr(hparams, "get") else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _group_rates(optimizers: list[torch.optim.Optimizer]) -> list[float] | None:
    """As they were before any schedule changed them."""
    groups = optimizers[0].param_groups if optimizers else []
    rates = [float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups]
    return rates if len(set(rates)) > 1 else None


def _optimizer_defaults(module: pl.LightningModule, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hparams: Any = module.hparams
    for key, names in {
        "lr": ("lr", "learning_rate"),
        "betas": ("betas",),
        "eps": ("eps", "adam_epsilon"),
        "weight_decay": ("weight_decay",),
    }.items():
        for name in names:
            value = hparams.get(name) if hasattr(hparams, "get") else None
            value = getattr(module, name, None) if value is None else value
            if value is not None and not callable(value):
                found.setdefault(key, value)
    if optimizers:
        found.update({k: v for k, v in optimizers[0].defaults.items() if k in ("lr", "betas", "eps", "weight_decay")})
    return found
