"""Checkpoints that DeepSpeed wrote, read without DeepSpeed: by name, in fp32, a tensor at a time.

`DeepSpeedCheckpoint` opens one; `to_lightning` gives it the form of Lightning's files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_lightning.checkpoint.deepspeed.checkpoint import DeepSpeedCheckpoint
from ds_lightning.checkpoint.deepspeed.files import is_deepspeed_checkpoint
from ds_lightning.checkpoint.deepspeed.layout import StoredTensor, read_value, whole

__all__ = ["DeepSpeedCheckpoint", "StoredTensor", "is_deepspeed_checkpoint", "to_lightning", "whole"]

# The state of a run has had this form since then; Lightning upgrades what later versions have changed.
_LIGHTNING_VERSION = "2.4.0"


def to_lightning(checkpoint: DeepSpeedCheckpoint, tensor: Callable[[StoredTensor], Any] = whole) -> dict[str, Any]:
    """A checkpoint in the form of Lightning's own files.

    `optimizer_states` holds one state in torch's format, numbered through the groups in the order of DeepSpeed's
    `param_shapes`: frozen parameters, and empty ones, are in no group, and `round_robin_gradients` has another order
    than the user's optimizer. `ds_lightning.optimizer_parameter_names` says whose each number is; it is empty where
    DeepSpeed does not save names (stage 0 in fp32 with several groups), where the order is the user's own.

    What Lightning's DeepSpeedStrategy has saved of the run (loops, callbacks, schedulers, hyper-parameters) is passed
    on. Otherwise the loops are such that Lightning goes on at `global_step`, from the beginning of an epoch 0, and the
    client state is under `deepspeed_client_state`.

    Args:
        checkpoint: an opened one.
        tensor: makes what is put in the place of each tensor, from a `StoredTensor`: `.shape`, `.dtype`, and
            `.flat(start, stop)`, its row-major elements as a 1-D CPU tensor of that dtype (float32 for all that was
            saved in 16 bits). The default reads it. Names of one tied parameter get one object.

    Returns:
        `state_dict`, `optimizer_states`, `lr_schedulers`, `loops`, `global_step`, `epoch`,
        `pytorch-lightning_version`, `ds_lightning` as `ZeroStrategy` writes it, for fp16 the loss scale under
        `ZeroPrecision` and `MixedPrecision`, and what the client state has beside them.
    """
    made = {id(checkpoint.stored(name)): tensor(checkpoint.stored(name)) for name in checkpoint.names()}
    known = None not in checkpoint.group_names
    groups: list[dict[str, Any]] = []
    first = 0
    for hyper, size in zip(checkpoint.param_groups, checkpoint.group_sizes(), strict=True):
        groups.append({**hyper, "params": list(range(first, first + size))})
        first += size
    states = {
        number: {key: read_value(value, tensor) for key, value in state.items()}
        for number, state in checkpoint.numbered_states()
        if state
    }
    names = [[name for group in checkpoint.group_names for name in group or ()]] if known and groups else []
    result: dict[str, Any] = {
        "epoch": 0,
        "global_step": checkpoint.global_steps,
        "pytorch-lightning_version": _LIGHTNING_VERSION,
        "loops": _loops(checkpoint.global_steps),
        "lr_schedulers": [] if checkpoint.lr_scheduler is None else [checkpoint.lr_scheduler],
        **(
            checkpoint.client_state
            if checkpoint.from_lightning
            else {"deepspeed_client_state": checkpoint.client_state}
        ),
        "state_dict": {name: made[id(checkpoint.stored(name))] for name in checkpoint.names()},
        "optimizer_states": [{"state": states, "param_groups": groups}] if groups else [],
        "ds_lightning": {
            "version": 1,
            "stage": checkpoint.stage,
            "world_size": checkpoint.world_size,
            "precision": checkpoint.precision,
            "skipped_steps": checkpoint.skipped_steps,
            "excluded_parameters": [],
            "optimizer_parameter_names": names,
            "imported_from": f"deepspeed {checkpoint.version}",
        },
    }
    result.update(_scale_states(checkpoint))
    return result


def _scale_states(checkpoint: DeepSpeedCheckpoint) -> dict[str, Any]:
    """The loss scale as our precision plugin and Lightning's save it."""
    found = checkpoint.loss_scale
    if not found or not found["dynamic"] or "scale" not in found:
        return {}
    iteration, last = int(found.get("iteration", 0)), int(found.get("last_overflow", -1))
    window = int(found.get("window", 1000))
    ours = {
        "scale": float(found["scale"]),
        "iteration": iteration,
        "last_overflow": last,
        "tolerance": int(found.get("tolerance", 1)),
        "skipped": checkpoint.skipped_steps,
    }
    theirs = {
        "scale": float(found["scale"]),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": window,
        "_growth_tracker": max(iteration - last - 1, 0) % window,
    }
    return {"ZeroPrecision": ours, "MixedPrecision": theirs}


def _loops(steps: int) -> dict[str, Any]:
    """Lightning's loops after so many optimizer steps, at the beginning of an epoch."""
    total = {"ready": steps, "completed": steps}
    none = {"ready": 0, "completed": 0}
    optimizer = {
        "step": {"total": dict(total), "current": dict(none)},
        "zero_grad": {"total": {**total, "started": steps}, "current": {**none, "started": 0}},
    }
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(total), "current": dict(none)},
    }
    return {"fit_loop": fit, **{f"{name}_loop": {"state_dict": {}} for name in ("validate", "test", "predict")}}
