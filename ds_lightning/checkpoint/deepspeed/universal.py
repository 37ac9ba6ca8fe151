"""Writes universal checkpoints of DeepSpeed, which it loads at any stage and number of ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ds_lightning.checkpoint.placement import partial_of, place, remove, sync
from ds_lightning.errors import CheckpointError

# The versions of DeepSpeed and of its universal format whose layout this is.
_VERSION = "0.19.8"
_FORMAT = 0.4
_OURS = frozenset({"state_dict", "optimizer_states", "lr_schedulers"})


def write_universal(
    checkpoint: Mapping[str, Any], folder: str | Path, parameter_names: Sequence[str] | None = None
) -> None:
    """Write a checkpoint of Lightning's form as a universal one, a tensor at a time.

    In DeepSpeed, load it with `"checkpoint": {"load_universal": true}` and
    `engine.load_checkpoint(folder.parent, tag=folder.name)`. It restores what its optimizer has: weights, moments,
    step counts and hyper-parameters; DeepSpeed takes frozen parameters and buffers from the model as it was built, and
    begins with a new loss scale. They are in the folder nevertheless, for those who read it otherwise.

    A parameter that the optimizer has and that never had a gradient gets moments of zeros, as DeepSpeed would have
    given it. At stage 3, DeepSpeed takes the hyper-parameters of the first group for all groups.

    Args:
        checkpoint: with `state_dict` and one entry of `optimizer_states` in torch's format. In the place of tensors
            there may be objects with `shape` and `flat(start, stop)`, row-major elements as a 1-D tensor.
        folder: where to write; it must not exist, or be empty. `latest_universal` beside it will name it, at the end.
        parameter_names: names of the optimizer's parameters by number; by default, those that the checkpoint has under
            `ds_lightning`.

    Raises:
        CheckpointError: when there is not one optimizer, its parameters are not known by name, or the folder is not
            empty.
    """
    target = Path(folder)
    groups, states = _optimizer_of(checkpoint)
    weights = checkpoint["state_dict"]
    names = _names_of(checkpoint, parameter_names, groups, weights)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty. Give a new folder, so that no two checkpoints are mixed.")
    unfinished = partial_of(target)
    try:
        remove(unfinished)
        _write_into(unfinished, checkpoint, groups, states, names)
        sync(unfinished)
        place(unfinished, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {type(error).__name__}: {error}. Free some space or choose another place."
        ) from error
    finally:
        with suppress(OSError):
            remove(unfinished)
    (target.parent / "latest_universal").write_text(target.name)


def _write_into(
    target: Path,
    checkpoint: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    names: Mapping[int, str],
) -> None:
    weights = checkpoint["state_dict"]
    zero = target / "zero"
    zero.mkdir(parents=True)

    kinds = _kinds(states, weights, names)
    steps = [float(state["step"]) for state in states.values() if "step" in state]
    step = torch.tensor(max(steps, default=0.0))
    for name in weights:
        if _is_tensor(weights[name]):
            _write(zero / name / "fp32.pt", _whole(weights[name]))
    for number, name in names.items():
        for kind in kinds:
            value = states.get(number, {}).get(kind)
            shape = weights[name].shape
            _write(zero / name / f"{kind}.pt", torch.zeros(shape) if value is None else _whole(value))
        if kinds:
            torch.save(states.get(number, {}).get("step", step), zero / name / "step.pt")

    packed = [{**group, "params": [place]} for place, group in enumerate(groups)]
    # Stages 1 and 2 read the first of the two, stage 3 the second.
    inner = {"state": {0: {"step": step}} if kinds else {}, "param_groups": packed}
    torch.save(
        {"zero_stage": 1, "ds_version": _VERSION, "param_groups": packed, "optimizer_state_dict": inner},
        zero / "optimizer_state.pt",
    )
    model = _model_states(checkpoint, groups, names)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # of stages 1, 2 and of 3
        torch.save(model, target / file)


def _optimizer_of(checkpoint: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    optimizers = list(checkpoint.get("optimizer_states") or [])
    if len(optimizers) != 1:
        raise CheckpointError(
            f"The checkpoint has states of {len(optimizers)} optimizers; a universal checkpoint has those of one. "
            "Export the weights alone, or remove the others from 'optimizer_states'."
        )
    return list(optimizers[0]["param_groups"]), dict(optimizers[0]["state"])


def _names_of(
    checkpoint: Mapping[str, Any],
    given: Sequence[str] | None,
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Any],
) -> dict[int, str]:
    """Names by number, of parameters that have elements."""
    numbers = [number for group in groups for number in group["params"]]
    saved = checkpoint.get("ds_lightning", {}).get("optimizer_parameter_names") or [[]]
    names = list(saved[0] if given is None else given)
    if len(names) != len(numbers):
        raise CheckpointError(
            f"The optimizer has {len(numbers)} parameters, and {len(names)} names of them are known. Pass "
            "parameter_names: the names of its parameters, in the order of its groups."
        )
    unknown = sorted(set(names) - set(weights))
    if unknown:
        raise CheckpointError(f"The optimizer has parameters that 'state_dict' has not: {', '.join(unknown[:5])}.")
    return {number: name for number, name in zip(numbers, names, strict=True) if math.prod(weights[name].shape)}


def _kinds(states: Mapping[int, Mapping[str, Any]], weights: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Keys of states with a value for each element."""
    return sorted(
        {
            key
            for number, state in states.items()
            for key, value in state.items()
            if number in names and key != "step" and _is_tensor(value) and value.shape == weights[names[number]].shape
        }
    )


def _model_states(
    checkpoint: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> dict[str, Any]:
    weights = checkpoint["state_dict"]
    trained = set(names.values())
    ours = checkpoint.get("ds_lightning", {})
    steps, skipped = int(checkpoint.get("global_step", 0)), int(ours.get("skipped_steps", 0))
    schedulers = checkpoint.get("lr_schedulers") or [{"last_epoch": steps - skipped}]
    scheduler = dict(schedulers[0])
    scheduler.setdefault("last_batch_iteration", int(scheduler.get("last_epoch", steps - skipped)) - 1)
    shapes = [
        OrderedDict((names[n], torch.Size(weights[names[n]].shape)) for n in group["params"] if n in names)
        for group in groups
    ]
    engine = {
        "module": OrderedDict(_others(weights, trained)),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": scheduler,
        "skipped_steps": skipped,
        "global_steps": steps,
        "dp_world_size": int(ours.get("world_size", 1)),
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _FORMAT},
    }
    return {**{key: value for key, value in checkpoint.items() if key not in _OURS}, **engine}


def _others(weights: Mapping[str, Any], trained: set[str]) -> Iterator[tuple[str, Any]]:
    """What no optimizer has: frozen parameters, buffers, and further names of tied parameters."""
    for name, value in weights.items():
        if name not in trained:
            yield name, _whole(value, wide=False) if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and (torch.is_tensor(value) or hasattr(value, "flat"))


def _whole(value: Any, wide: bool = True) -> torch.Tensor:
    """A tensor of its own on the CPU, in fp32 unless it is to stay as it is."""
    shape = torch.Size(value.shape)
    values = value.flat(0, math.prod(shape)).view(shape) if hasattr(value, "flat") else value.detach()
    made: torch.Tensor = values.to("cpu", torch.float32 if wide else values.dtype, copy=True)
    return made.contiguous()


def _write(path: Path, values: torch.Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save({"param": values, "cat_dim": 0}, path)
