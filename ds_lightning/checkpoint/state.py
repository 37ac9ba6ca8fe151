"""Views of an engine's state by parameter name, in logical shapes, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_lightning.errors import CheckpointError
from ds_lightning.optim.sharded import ShardedOptimizer, belongs_to_elements
from ds_lightning.zero.engine import ZeroEngine


def full_parameters(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Master values of every parameter, on CPU, on rank 0; empty on other ranks. Collective.

    One unit is gathered at a time, so beside the result rank 0 holds one unit more, other ranks nothing.
    """
    result: dict[str, torch.Tensor] = {}
    for index in sorted(engine.units):
        full = engine.values.full_values(index, everywhere=False)
        if engine.topology.rank:
            continue
        for slot in engine.units[index].unit.slots:
            result[slot.name] = full[slot.start : slot.stop].view(slot.shape).to("cpu", copy=True)
    return result


def full_optimizer_state(engine: ZeroEngine, sharded: ShardedOptimizer) -> dict[str, Any]:
    """An optimizer's state in torch's own format and logical shapes, on rank 0; empty on others. Collective.

    One unit's states are gathered at a time.
    """
    states: dict[str, dict[str, Any]] = {}
    for gradients in sharded.units:
        found = engine.values.full_unit_state(sharded, gradients.unit.index, everywhere=False)
        for name, entry in found.items():
            states[name] = {
                key: value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
                for key, value in entry.items()
            }
    if engine.topology.rank:
        return {}
    numbered: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    place = 0
    for group, parameters in zip(sharded.optimizer.param_groups, sharded.user_params(), strict=True):
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = list(range(place, place + len(parameters)))
        groups.append(packed)
        for parameter in parameters:
            state = states.get(engine.table.name_of(parameter))
            if state:
                numbered[place] = state
            place += 1
    return {"state": numbered, "param_groups": groups}


def load_optimizer_state(
    engine: ZeroEngine, sharded: ShardedOptimizer, saved: Mapping[str, Any], names: Sequence[str] | None = None
) -> None:
    """Load a state in torch's format: each rank takes what it owns. Not collective; all ranks load the same.

    Args:
        engine: the engine.
        sharded: the optimizer.
        saved: `{"state": {number: {...}}, "param_groups": [...]}`.
        names: of the saved parameters by number, where they are known; torch goes by order alone.

    Raises:
        CheckpointError: when it does not fit, before anything is changed.
    """
    parameters = [parameter for group in sharded.user_params() for parameter in group]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) == len(parameters):
        mine = [engine.table.name_of(parameter) for parameter in parameters]
        if names is None or len(names) != len(numbers) or set(names) != set(mine):
            names = mine
        by_name = {
            name: saved["state"][number]
            for number, name in zip(numbers, names, strict=True)
            if saved["state"].get(number)
        }
        shapes = {engine.table.name_of(parameter): parameter.shape for parameter in parameters}
        _check_shapes(sharded, by_name, shapes)
    else:
        by_name = {}
    sharded.load_groups(saved["param_groups"])
    for gradients in sharded.units:
        unit_states = {slot.name: by_name[slot.name] for slot in gradients.unit.slots if slot.name in by_name}
        sharded.load_unit(gradients, unit_states)


def _check_shapes(
    sharded: ShardedOptimizer, states: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> None:
    problems = [
        f"{name}.{key}: {tuple(value.shape)} in the checkpoint, {tuple(shapes[name])} in the model"
        for name, entry in states.items()
        for key, value in entry.items()
        if torch.is_tensor(value) and value.ndim > 0 and not belongs_to_elements(key, value, shapes[name])
    ]
    if problems and sharded.elementwise:
        raise CheckpointError(
            f"The optimizer state in the checkpoint does not fit {type(sharded.optimizer).__name__}:\n  "
            + "\n  ".join(problems[:20])
        )
