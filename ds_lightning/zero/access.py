"""Full values of sharded parameters, gradients and optimizer states, for users.

Everything here is collective: call it on every rank, in the same order. It works from set-up until the process ends; a
parameter that no engine has taken over is simply itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_lightning.errors import ConfigError
from ds_lightning.zero.engine import ZeroEngine
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.residency import TAGS
from ds_lightning.zero.values import VALUES_TAG

_ENGINES = cast("dict[nn.Parameter, ReferenceType[ZeroEngine]]", WeakIdKeyDictionary())
"""Which engine holds a parameter. Public functions get bare parameters, so some table must know; it is weak on both
sides and nothing but this file touches it."""


def remember(engine: ZeroEngine) -> None:
    """Make an engine known for its parameters."""
    for _, parameter in engine.table.parameters():
        _ENGINES[parameter] = ref(engine)


def forget(engine: ZeroEngine) -> None:
    """Undo `remember`."""
    for _, parameter in engine.table.parameters():
        if engine_of(parameter) is engine:
            del _ENGINES[parameter]


def engine_of(parameter: nn.Parameter) -> ZeroEngine | None:
    """The engine that holds a parameter, None if it is an ordinary one."""
    found = _ENGINES.get(parameter)
    engine = found() if found is not None else None
    return None if engine is None or engine.dissolved else engine


@contextmanager
def gathered(
    module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None
) -> Iterator[None]:
    """Inside, the parameters have their full values on every rank. Collective on entry and exit; may be nested.

    Args:
        module_or_params: a module (all its parameters), a parameter, or several.
        modifier_rank: rank whose changes are kept: on exit its values are sent to all ranks and become the values that
            the optimizer goes on from. Without it nothing may be changed inside.

    Raises:
        ReleasedParameterError: on exit, when a parameter was changed without `modifier_rank`.

    Under `16-mixed` and `bf16-mixed` matrices show their 16-bit values, which compute; `full_param` gives fp32 masters.
    Inside a step, with `zero_quantized_weights`, they show what was sent of them.
    """
    if isinstance(module_or_params, nn.Module):
        parameters = list(module_or_params.parameters())
    elif isinstance(module_or_params, torch.Tensor):
        parameters = [cast("nn.Parameter", module_or_params)]
    else:
        parameters = list(module_or_params)
    by_engine: dict[int, tuple[ZeroEngine, list[nn.Parameter]]] = {}
    for parameter in parameters:
        engine = engine_of(parameter)
        if engine is not None:
            by_engine.setdefault(id(engine), (engine, []))[1].append(parameter)
    with ExitStack() as stack:
        for engine, members in by_engine.values():
            engine.settle()
            stack.enter_context(engine.values.gathered(members, modifier_rank))
        yield


def full_param(parameter: nn.Parameter) -> torch.Tensor:
    """The full value of a parameter, in its logical shape, fp32 for floating 16-bit ones. Collective.

    Returns:
        A new tensor on every rank: the master value, where the optimizer keeps one.
    """
    engine = engine_of(parameter)
    if engine is None:
        value = parameter.detach().clone()
    else:
        unit, place = engine.table.slot_of(engine.table.name_of(parameter))
        slot = unit.slots[place]
        engine.settle()
        value = engine.values.full_values(unit.index)[slot.start : slot.stop].view(slot.shape).clone()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def full_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The averaged gradient of a parameter, in its logical shape, fp32. Collective.

    Between backward and the next `zero_grad`. Unscaled from `on_before_optimizer_step` on.

    Returns:
        A new tensor on every rank; None when no rank had a gradient for it.
    """
    engine = engine_of(parameter)
    if engine is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    unit, place = engine.table.slot_of(engine.table.name_of(parameter))
    gradients = engine.reducer.units.get(unit.index)
    if gradients is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    if not gradients.valid or not gradients.present[place]:
        return None
    engine.reducer.settle()
    slot = unit.slots[place]
    if gradients.keeps_local:
        full = _average(engine, gradients)
    elif gradients.whole:
        full = gradients.read(0, unit.numel)
    else:
        full = engine.values.spread(unit.index, gradients.read(*gradients.buffers.owned), gradients.kept)
    value = full[slot.start : slot.stop].view(slot.shape).clone()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def full_optimizer_state(parameter: nn.Parameter, key: str) -> Any:
    """One entry of a parameter's optimizer state, such as `"exp_avg"`, in logical shape. Collective.

    Returns:
        A new tensor (or the plain value) on every rank; None when there is no such state.
    """
    engine = engine_of(parameter)
    if engine is None:
        return None
    engine.settle(everything=True)
    name = engine.table.name_of(parameter)
    unit, place = engine.table.slot_of(name)
    group = unit.slots[place].group
    for sharded in engine.optimizers:
        if group in sharded.groups:
            value = engine.values.full_unit_state(sharded, unit.index).get(name, {}).get(key)
            return value.clone() if torch.is_tensor(value) else value
    return None


def grad_norms(module: nn.Module, norm_type: float = 2, group_separator: str = "/") -> dict[str, float]:
    """Norms of all gradients, with the keys of `lightning.pytorch.utilities.grad_norm`. One collective.

    Args:
        module: the model, or a part of it.
        norm_type: p; `inf` is allowed.
        group_separator: between prefix and name in the keys.

    Returns:
        The norm of each parameter's full averaged gradient, and the total.
    """
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ConfigError(f"norm_type must be a positive number or inf, not {norm_type}.")
    pieces: dict[str, torch.Tensor | None] = {}
    parameters = dict(module.named_parameters())
    engine = next((found for found in map(engine_of, parameters.values()) if found is not None), None)
    if engine is not None:
        engine.reducer.settle()
    averages: dict[int, torch.Tensor] = {}
    for name, parameter in parameters.items():
        pieces[name] = _owned_gradient(parameter, averages)
    present = {name: piece for name, piece in pieces.items() if piece is not None}
    if not present:
        return {}
    counts = engine is None or engine.topology.first_replica  # each element once
    local = [float(piece.double().norm(norm_type)) if piece.numel() and counts else 0.0 for piece in present.values()]
    votes = torch.tensor(local, dtype=torch.float64)
    infinite = norm_type == float("inf")
    if not infinite:
        votes = votes.pow(norm_type)
    if engine is not None:
        (engine.agreement.maximum if infinite else engine.agreement.total)(votes, "gradient norms").wait()
    total = float(votes.max()) if infinite else float(votes.sum() ** (1.0 / norm_type))
    values = votes if infinite else votes.pow(1.0 / norm_type)
    prefix = f"grad_{norm_type}_norm"
    result = {f"{prefix}{group_separator}{name}": float(v) for name, v in zip(present, values, strict=True)}
    result[f"{prefix}_total"] = total
    return result


def _average(engine: ZeroEngine, gradients: UnitGradients) -> torch.Tensor:
    """The averaged gradient of a unit of which every rank keeps its own. Collective."""
    full = gradients.read(0, gradients.unit.numel).clone()
    engine.collectives.average(full, gradients.unit.name, gradients.unit.index * TAGS + VALUES_TAG)
    return full


def _owned_gradient(parameter: nn.Parameter, averages: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """This rank's part of a parameter's gradient, possibly empty; None when no rank has one.

    Args:
        parameter: of any module.
        averages: by unit, of those of which every rank keeps its own; completed here, which is collective.
    """
    engine = engine_of(parameter)
    if engine is None:
        return None if parameter.grad is None else parameter.grad.detach().reshape(-1)
    unit, place = engine.table.slot_of(engine.table.name_of(parameter))
    gradients = engine.reducer.units.get(unit.index)
    if gradients is None or not gradients.valid or not gradients.present[place]:
        return None
    slot, chunk = unit.slots[place], gradients.buffers.owned
    start, stop = max(slot.start, chunk[0]), min(slot.stop, chunk[1])
    if gradients.keeps_local:
        if unit.index not in averages:
            averages[unit.index] = _average(engine, gradients)
        return averages[unit.index][start:stop] if stop > start else torch.empty(0)
    return gradients.read(start, stop) if stop > start else torch.empty(0)


__all__ = ["full_grad", "full_optimizer_state", "full_param", "gathered", "grad_norms"]
