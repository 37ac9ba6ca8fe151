"""What a DeepSpeed checkpoint of stage 0 holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_lightning.checkpoint.deepspeed.files import Files
from ds_lightning.checkpoint.deepspeed.layout import (
    Contents,
    cut,
    head_to_tail,
    numbers,
    running,
    stored,
    with_step,
    without_parameters,
)
from ds_lightning.errors import CheckpointError


def unsharded(files: Files, model: Mapping[str, Any]) -> Contents:
    """Stage 0: parameters as they are. See [Note: layouts of DeepSpeed] for names.

    Raises:
        CheckpointError: when it is the model file of another stage, whose optimizer files are missing.
    """
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if model.get("param_shapes") is not None or "optimizer" not in model or stage not in (0, "auto"):
        raise CheckpointError(
            f"{files.folder} has no zero_pp_rank_*_optim_states.pt, though it was written at stage "
            f"{stage or '1 to 3'}. Each rank wrote a file: copy all of them."
        )
    header = model["optimizer"] or {}
    result = Contents(0, int(model.get("dp_world_size", 1)), header=header)
    inner = header.get("optimizer_state_dict", header)
    if not inner:
        return result
    groups, states = inner["param_groups"], inner["state"]
    result.numbers = [len(group["params"]) for group in groups]
    flat, masters = header.get("fp32_groups_flat"), header.get("fp32_groups")
    if flat is not None:
        masters = [[values] for values in flat]
    names = _only_names(model, groups) if masters is None else _match_by_value(files, model, masters, flat is not None)
    result.groups = [(without_parameters(group), names[n] if names else None) for n, group in enumerate(groups)]
    if flat is not None:
        result.numbers = [len(group) for group in names or ()]
    shapes = {name: values.shape for name, values in model["module"].items() if torch.is_tensor(values)}
    for number, group in enumerate(names or ()):
        places = head_to_tail({name: shapes[name] for name in group}, None)
        if masters is not None:
            where = running(masters[number])
            result.weights.update({name: cut(where, *place, files.model) for name, place in places.items()})
        if flat is not None:
            state = states.get(groups[number]["params"][0], {})
            moments = {key: running([v]) for key, v in state.items() if torch.is_tensor(v) and v.ndim == 1}
            for name, place in places.items():
                entry = {**numbers(state), **{key: cut(where, *place, files.model) for key, where in moments.items()}}
                result.states[name] = with_step(entry, groups[number])
    if flat is None:
        flat_names = [name for group in names or () for name in group]
        members = [(index, hyper) for hyper in groups for index in hyper["params"]]
        for number, (index, hyper) in enumerate(members):
            found = states.get(index, {})
            entry = {key: stored(v) if torch.is_tensor(v) and v.ndim else v for key, v in found.items()}
            result.by_number[number] = with_step(entry, hyper)
            if names:
                result.states[flat_names[number]] = result.by_number[number]
    return result


def _only_names(model: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Names of an optimizer's parameters, where there is but one way to give them: one group of everything."""
    names = parameters_in(model)
    if len(groups) != 1 or len(groups[0]["params"]) != len(names):
        return None
    return [names]


def parameters_in(model: Mapping[str, Any]) -> list[str]:
    """Names of the parameters that a module's state has, in its order; tied ones once, by their first name."""
    buffers = set(model.get("buffer_names") or ())
    seen: set[Any] = set()
    result: list[str] = []
    for name, values in model["module"].items():
        if name in buffers or not torch.is_tensor(values):
            continue
        identity = (values.data_ptr(), values.shape) if values.numel() else name
        if identity not in seen:
            seen.add(identity)
            result.append(name)
    return result


def _match_by_value(
    files: Files, model: Mapping[str, Any], masters: Sequence[Sequence[torch.Tensor]], flat: bool
) -> list[list[str]]:
    """Names of the masters of 16-bit training: each is the one that rounds to the module's values.

    Where several have the same shape and values, they are taken in the order of the module.

    Raises:
        CheckpointError: when values of a master are not those of any parameter.
    """
    left = {name: model["module"][name] for name in parameters_in(model)}
    result: list[list[str]] = []
    for group in masters:
        names: list[str] = []
        for master in group:
            found = _names_in(master.detach(), left, flat)
            if found is None:
                raise CheckpointError(
                    f"{files.model[0]}: the optimizer's fp32 weights are not those of the module beside them, so they "
                    "cannot be named. Load the weights alone."
                )
            names += found
        result.append(names)
    return result


def _names_in(master: torch.Tensor, left: dict[str, torch.Tensor], flat: bool) -> list[str] | None:
    """Names of the parameters in a master, which are taken from those that are left; None if one has no name."""
    values = master.reshape(-1)
    names: list[str] = []
    while not names or values.numel():
        fitting = (
            name
            for name, half in left.items()
            if (0 < half.numel() <= values.numel() if flat else half.shape == master.shape)
            and torch.equal(values[: half.numel()].to(half.dtype), half.reshape(-1))
        )
        name = next(fitting, None)
        if name is None:
            return names if flat and not values.any() else None  # zeros are padding
        names.append(name)
        values = values[left.pop(name).numel() :]
    return names
