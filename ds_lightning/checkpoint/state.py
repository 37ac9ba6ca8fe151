"""An engine's state as logical tensors by parameter name, in torch's own formats, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_lightning.checkpoint.snapshot import Snapshot, Vector
from ds_lightning.errors import CheckpointError
from ds_lightning.offload.stored import Values
from ds_lightning.ops.memory import release_free_memory
from ds_lightning.optim.sharded import ShardedOptimizer, belongs_to_elements
from ds_lightning.optim.unit_states import element_keys, merged, outline, pieces_of
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.engine import ZeroEngine


def parameters(engine: ZeroEngine, snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Master values of every parameter, by canonical name, as logical tensors. Nothing is copied or sent."""
    result: dict[str, torch.Tensor] = {}
    for index in sorted(engine.units):
        buffers = engine.units[index]
        own = buffers.owned_values()
        result.update(_elements("parameters", buffers, own, buffers.unit.saved_dtype, snapshot))
    return result


def companions(
    engine: ZeroEngine, snapshot: Snapshot, what: str, vectors: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Values that accompany parameters, by canonical name, as logical tensors. Nothing is copied or sent.

    Args:
        engine: the engine.
        snapshot: of the checkpoint that is being put together.
        what: they are, for messages.
        vectors: by unit index, this rank's elements, `[chunk]`; the same units on every rank.
    """
    result: dict[str, torch.Tensor] = {}
    for index in sorted(vectors):
        own = vectors[index]
        result.update(_elements(what, engine.units[index], own, own.dtype, snapshot))
    return result


def _elements(
    what: str, buffers: UnitBuffers, own: Values, dtype: torch.dtype, snapshot: Snapshot
) -> dict[str, torch.Tensor]:
    vector = snapshot.add(_vector(what, buffers, dtype, [(buffers.owned[0], own)]))
    return {slot.name: snapshot.tensor(vector, slot.start, slot.shape) for slot in buffers.unit.slots}


def optimizer_state(engine: ZeroEngine, sharded: ShardedOptimizer, snapshot: Snapshot) -> dict[str, Any]:
    """An optimizer's state in torch's own format, with logical tensors for what belongs to elements. Collective.

    The ranks tell each other which states there are, and those that do not belong to elements; no more is sent.
    """
    names, entries = _named_states(engine, sharded, snapshot)
    numbered: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    place = 0
    for group, members in zip(sharded.optimizer.param_groups, names, strict=True):
        packed = {key: value for key, value in group.items() if key not in {"params", *sharded.kept_keys}}
        packed["params"] = list(range(place, place + len(members)))
        groups.append(packed)
        for name in members:
            if entries.get(name):
                numbered[place] = entries[name]
            place += 1
    return {"state": numbered, "param_groups": groups}


def _named_states(
    engine: ZeroEngine, sharded: ShardedOptimizer, snapshot: Snapshot
) -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Names of the parameters of each group, and states by name."""
    mine = {gradients.unit.index: sharded.unit_state(gradients) for gradients in sharded.units}
    outlines = engine.agreement.everyone({index: outline(state) for index, state in mine.items()})
    entries: dict[str, dict[str, Any]] = {}
    for gradients in sharded.units:
        unit = gradients.unit
        known = merged([other[unit.index] for other in outlines])
        numbers = {}
        for key, dtype in element_keys(known):
            pieces = pieces_of(mine[unit.index], key, dtype)
            numbers[key] = snapshot.add(_vector(key, gradients.buffers, dtype, pieces))
        template = next(iter(known.values()), {})
        for slot in unit.slots:
            entry = known.get(slot.name)
            if entry is None and not slot.numel and slot.group in sharded.groups:
                entry = template  # a parameter without elements lies on no rank
            if entry:
                entries[slot.name] = {
                    key: snapshot.tensor(numbers[key], slot.start, slot.shape) if kind == "elements" else value
                    for key, (kind, value) in entry.items()
                }
    names = [[engine.table.name_of(parameter) for parameter in group] for group in sharded.user_params()]
    return names, entries


def _vector(what: str, buffers: UnitBuffers, dtype: torch.dtype, pieces: Sequence[tuple[int, Values]]) -> Vector:
    """What this rank writes of a unit: its own chunk, also where it holds more (stage 0, parameters at 1 and 2)."""
    start, stop = buffers.owned
    own = []
    for first, values in pieces:
        lo, hi = max(first, start), min(first + values.numel(), stop)
        if hi > lo:
            own.append((lo, (values.detach() if isinstance(values, torch.Tensor) else values)[lo - first : hi - first]))
    return Vector(f"{what} of {buffers.unit.name}", buffers.unit.numel, (start, stop), dtype, tuple(own))


def load_optimizer_state(
    engine: ZeroEngine,
    sharded: ShardedOptimizer,
    saved: Mapping[str, Any],
    names: Sequence[str] | None = None,
    partial: bool = False,
) -> list[str]:
    """Load a state in torch's format: each rank takes what it owns. Not collective; all ranks load the same.

    Args:
        engine: the engine.
        sharded: the optimizer.
        saved: `{"state": {number: {...}}, "param_groups": [...]}`.
        names: of the saved parameters by number, where they are known; torch goes by order alone.
        partial: where names are known, parameters may be new or gone; the number of groups must fit.

    Returns:
        Parameters that begin without the state that others of the optimizer have, in a partial load.

    Raises:
        CheckpointError: when it does not fit, before anything is changed.
    """
    parameters = {engine.table.name_of(p): p for group in sharded.user_params() for p in group}
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    known = names is not None and len(names) == len(numbers)
    partial = partial and known
    if not partial:
        sharded.check_groups(saved["param_groups"])
        if names is None or not known or set(names) != set(parameters):  # renamed, perhaps by on_load_checkpoint
            names = list(parameters)
    assert names is not None
    by_name = {
        name: saved["state"][number]
        for number, name in zip(numbers, names, strict=True)
        if name in parameters and saved["state"].get(number)
    }
    _check_shapes(sharded, by_name, {name: parameter.shape for name, parameter in parameters.items()})
    engine.resting.wake(by_name)
    sharded.load_groups(saved["param_groups"])
    for gradients in sharded.units:
        unit_states = {slot.name: by_name[slot.name] for slot in gradients.unit.slots if slot.name in by_name}
        sharded.load_unit(gradients, unit_states)
        release_free_memory()  # what was read lies between states that stay, where the C library would keep it
    return [name for name in parameters if name not in names]


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
