"""Runs a user's optimizer on this rank's elements.

[Note: the user's optimizer object] Schedulers, callbacks and users hold the optimizer and its group dicts, so both
stay. `group["params"]` keeps the user's parameters; for the duration of `step` it holds this rank's runs instead: one
flat tensor per unit and group, so a step is a few large operations. `optimizer.state` is keyed by the runs. A run whose
parameters stop having gradients alike (one is unused in this step) is cut into one run per parameter, because an
optimizer must leave a parameter without a gradient alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.layout.flat import ALIGNMENT, Piece
from ds_lightning.offload.stored import Stored, Values
from ds_lightning.ops.blocks import Blocks
from ds_lightning.optim.codec import decoded_values
from ds_lightning.optim.gradients import OnDisk, ReducedGradients
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.unit_states import Elements, UnitState
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.logical import flat_range
from ds_lightning.zero.table import ParameterTable

GROUPS = 1 << 16
"""Groups an optimizer may have: group `g` of optimizer `i` is number `i * GROUPS + g`, also when groups are added."""

_SHARED_STATE = frozenset({"step", "mu_product", "eta", "mu"})
"""0-dim states of torch's optimizers that belong to the parameter, not to its elements."""


@dataclass(slots=True, eq=False)
class Run:
    """A range of one unit on which the optimizer steps as one tensor.

    Attributes:
        gradients: the unit's gradients (and through them its buffers).
        group: index of the parameter group within the optimizer.
        start: first element, in the unit.
        stop: first element behind it.
        slots: the slots of the unit that it overlaps, in order.
        parameter: view of the unit's master values; without elements while these are on disk.
        stored: keys of its states that are on disk.
        blocks: how its states are cut, where the optimizer encodes them in blocks.
    """

    gradients: UnitGradients
    group: int
    start: int
    stop: int
    slots: tuple[int, ...]
    parameter: nn.Parameter
    stored: tuple[str, ...] = ()
    blocks: Blocks | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter, also while that is on disk."""
        return torch.Size((self.stop - self.start,)) if self.gradients.buffers.on_disk else self.parameter.shape

    @property
    def gradient(self) -> torch.Tensor:
        """The reduced gradient of the run, a view where that is in memory, in the parameter's shape."""
        return self.gradients.read(self.start, self.stop).view(self.shape)

    @property
    def foreign(self) -> bool:
        """Whether the gradient has another dtype than the parameter, so that torch does not take it for `p.grad`."""
        return self.gradients.kept != self.gradients.unit.master_dtype

    @property
    def published(self) -> torch.Tensor | None:
        """Where new values must be copied to in memory, 1-D, in the compute dtype; None where they need not."""
        return self.gradients.buffers.published(self.start, self.stop)

    def overlap(self, slot: int) -> tuple[int, int]:
        """The part of a slot in the run, in unit coordinates."""
        place = self.gradients.unit.slots[slot]
        return max(place.start, self.start), min(place.stop, self.stop)


class ShardedOptimizer:
    """Owns the runs of one optimizer and its state on this rank.

    Args:
        optimizer: the user's; its groups and itself stay the same objects.
        first_group: index of its first group among the groups of all optimizers.
        elementwise: whether it may step on slices; otherwise every run is one whole parameter.
        in_parts: whether it steps on slices all at once, and is told which parameters lie in them. Its runs are then
            cut at the borders of ranks also where this rank has all of them, so that it does the same at every stage.
        tile: `sub_group_size`, the most elements in a run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        first_group: int,
        elementwise: bool,
        tile: int = 2**63 - 1,
        in_parts: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.first_group = first_group
        self.elementwise = elementwise
        self.in_parts = in_parts
        self.tile = -(-tile // ALIGNMENT) * ALIGNMENT  # so that every run has elements of some parameter
        self.codec = optimizer.codec if isinstance(optimizer, NativeOptimizer) else None
        self.runs: list[Run] = []
        self.units: tuple[UnitGradients, ...] = ()  # that have parameters of this optimizer; set by the engine
        self._users: list[list[nn.Parameter]] | None = None
        self._near: list[Run] = []  # of the step under way

    @property
    def local(self) -> bool:
        """Whether the gradients of the next step are those of each rank alone."""
        return False

    @property
    def kept_keys(self) -> frozenset[str]:
        """Keys of groups that checkpoints neither hold nor change."""
        return frozenset()

    @property
    def groups(self) -> range:
        """Indices of its groups among the groups of all optimizers."""
        return range(self.first_group, self.first_group + GROUPS)

    def user_params(self) -> list[list[nn.Parameter]]:
        """The user's parameters, by group, also during a step."""
        return self._users or [group["params"] for group in self.optimizer.param_groups]

    # Runs -----------------------------------------------------------------------------------------------------------

    def adopt(self, gradients: UnitGradients) -> None:
        """Make runs for the part of a unit that this rank updates."""
        for piece in self._pieces(gradients):
            if piece.group not in self.groups:
                continue
            if self.elementwise:
                for start, stop in self._cuts(gradients, piece):
                    self.runs.append(self._run(gradients, piece, start, stop))
            else:
                for slot in piece.slots:
                    place = gradients.unit.slots[slot]
                    whole = Piece(piece.group, place.start, place.stop, (slot,))
                    run = self._run(gradients, whole, place.start, place.stop)
                    run.parameter = nn.Parameter(run.parameter.detach().view(place.shape))
                    self.runs.append(run)
        self.take_user_state(gradients)

    def _pieces(self, gradients: UnitGradients) -> Iterator[Piece]:
        """The part of a unit that this rank updates, by group."""
        buffers, unit = gradients.buffers, gradients.unit
        if not (self.in_parts and buffers.keeps_all):
            yield from unit.pieces(buffers.start, buffers.stop)
            return
        for rank in range(unit.world_size):
            yield from unit.pieces(*unit.owned(rank))

    def _cuts(self, gradients: UnitGradients, piece: Piece) -> Iterator[tuple[int, int]]:
        """The ranges of a piece that are stepped on at once; those on disk lie within tiles of their file."""
        swap = gradients.home.swap if gradients.home is not None else None
        start = piece.start
        size = self._block_size(piece.group)
        while start < piece.stop:
            stop = min(start + self.tile, piece.stop)
            if size and stop < piece.stop:  # a cut within a block would make two of it
                stop = gradients.unit.block_cut(start, stop, size)
            if swap is not None:
                first, tile = gradients.buffers.start, swap.layout.tile
                stop = min(first + ((start - first) // tile + 1) * tile, piece.stop)
            yield start, stop
            start = stop

    def _block_size(self, group: int) -> int:
        """Elements of a block of states; 0 where they are not encoded in blocks."""
        if self.codec is None:
            return 0
        return self.codec.block_size(self.optimizer.param_groups[group - self.first_group])

    def drop(self, gradients: UnitGradients) -> None:
        """Forget the runs of a unit and their state."""
        for run in self.runs:
            if run.gradients is gradients:
                self.optimizer.state.pop(run.parameter, None)
        self.runs = [run for run in self.runs if run.gradients is not gradients]

    def _run(self, gradients: UnitGradients, piece: Piece, start: int, stop: int) -> Run:
        slots = tuple(
            index
            for index in piece.slots
            if gradients.unit.slots[index].start < stop and gradients.unit.slots[index].stop > start
        )
        buffers = gradients.buffers
        with torch.inference_mode(False):
            if buffers.on_disk:
                parameter = nn.Parameter(torch.empty(0, dtype=gradients.unit.master_dtype))
            else:
                parameter = nn.Parameter(buffers.master[start - buffers.start : stop - buffers.start])
        run = Run(gradients, piece.group - self.first_group, start, stop, slots, parameter)
        if size := self._block_size(piece.group):
            run.blocks = Blocks(size, torch.tensor(gradients.unit.block_borders(start, stop, size)))
        return run

    def _decoded(self, run: Run) -> Mapping[str, Any]:
        """The state of a run as torch has it."""
        return decoded_values(self.codec, self.optimizer.state.get(run.parameter) or {})

    def _keep(self, run: Run, state: dict[str, Any]) -> dict[str, Any]:
        """Give a run a state that torch would have; returns it as it is kept."""
        if self.codec is not None and run.blocks is not None:
            state = self.codec.encoded(state, run.blocks)
        self.optimizer.state[run.parameter] = state
        return state

    def _split(self, run: Run) -> list[Run]:
        """One run per parameter, with the state that belongs to it."""
        state = {
            key: value.read().to(run.parameter.device) if isinstance(value, Stored) else value
            for key, value in self._decoded(run).items()
        }
        self.optimizer.state.pop(run.parameter, None)
        parts = []
        for slot in run.slots:
            start, stop = run.overlap(slot)
            stop = max(stop, min(run.gradients.unit.slots[slot].end, run.stop))  # see `Unit.pieces`
            piece = Piece(run.group + self.first_group, start, stop, (slot,))
            part = self._run(run.gradients, piece, start, stop)
            part.stored = run.stored
            if state:
                own = {
                    key: value[start - run.start : stop - run.start]
                    if per_element(value, run.shape)
                    else copy.deepcopy(value)
                    for key, value in state.items()
                }
                self._keep(part, own)
            parts.append(part)
        return parts

    def present_runs(self) -> list[Run]:
        """The runs that have a gradient; cuts those of which only some parameters do."""
        present: list[Run] = []
        kept: list[Run] = []
        for run in self.runs:
            if run.gradients.complete_set:
                kept.append(run)
                present.append(run)
                continue
            flags = [run.gradients.valid and run.gradients.present[slot] for slot in run.slots]
            if all(flags):
                kept.append(run)
                present.append(run)
            elif not any(flags):
                kept.append(run)
            else:
                parts = self._split(run)
                kept += parts
                present += [part for part, flag in zip(parts, flags, strict=True) if flag]
        self.runs = kept
        return present

    # Step -----------------------------------------------------------------------------------------------------------

    def swap_in(self) -> list[Run]:
        """Put this rank's runs and gradients into the groups. Returns the runs that must be stepped on apart."""
        assert self._users is None, "step inside a step"
        runs = self.present_runs()
        self._users = [group["params"] for group in self.optimizer.param_groups]
        near: list[Run] = []
        apart: list[Run] = []
        for run in runs:
            home = run.gradients.home
            (apart if home is not None and home.steps_apart and not self.in_parts else near).append(run)
        self.attach(near)
        self.show(near)
        self._near = near
        return apart

    def attach(self, runs: Sequence[Run]) -> None:
        """Let the parameters of these runs have their gradients; `apart.prepare` gives a native step the others."""
        for run in runs:
            if not run.foreign:
                run.parameter.grad = run.gradient
            elif not isinstance(self.optimizer, NativeOptimizer):
                run.parameter.grad = run.gradient.to(run.parameter.dtype)

    def show(self, runs: Sequence[Run]) -> None:
        """Let the groups hold these runs, in a step."""
        chosen: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for run in runs:
            chosen[run.group].append(run.parameter)
        for group, parameters in zip(self.optimizer.param_groups, chosen, strict=True):
            group["params"] = parameters

    @property
    def near(self) -> list[Run]:
        """What is not stepped on apart, in a step."""
        return self._near

    def done(self, runs: Sequence[Run]) -> None:
        """These runs have had their step; the groups hold the others."""
        over = set(map(id, runs))
        self._near = [run for run in self._near if id(run) not in over]
        self.show(self._near)

    def swap_out(self) -> None:
        """Put the user's parameters back. Safe to call twice, or after a failed step."""
        if self._users is None:
            return
        for group, users in zip(self.optimizer.param_groups, self._users, strict=True):
            group["params"] = users
        self._users = None
        self._near = []
        for run in self.runs:
            run.parameter.grad = None

    @property
    def swapped(self) -> bool:
        """Whether a step is under way."""
        return self._users is not None

    def touched_units(self) -> list[int]:
        """Indices of units with parameters of this optimizer that had a gradient on any rank, in order."""
        groups = self.groups
        found = []
        for gradients in self.units:
            slots = gradients.unit.slots
            if gradients.valid and (
                gradients.complete_set
                or any(p and s.group in groups for p, s in zip(gradients.present, slots, strict=True))
            ):
                found.append(gradients.unit.index)
        return sorted(found)

    def reduced_gradients(self, owned: bool = False) -> ReducedGradients:
        """The reduced gradients of this optimizer's parameters on this rank, in as few parts as there can be.

        Parameters without a gradient count as zeros. The cut does not depend on the stage or on how runs are split, so
        sums over them are the same bits at every stage.

        Args:
            owned: only what this rank owns; at stage 0 every rank holds everything.
        """
        groups = self.groups
        found: list[torch.Tensor | OnDisk] = []
        for gradients in self.units:
            if not gradients.valid:
                continue
            whole = gradients.whole and not owned
            for place, piece in enumerate(gradients.all_pieces if whole else gradients.owned_pieces):
                if piece.group not in groups:
                    continue
                if gradients.on_disk is not None:
                    found.append(OnDisk(gradients.on_disk, place))
                else:
                    found.append(gradients.read(piece.start, piece.stop))
        return ReducedGradients(found)

    def has_gradients(self) -> bool:
        """Whether any of its parameters has a gradient; the same on all ranks."""
        return bool(self.touched_units())

    # State ----------------------------------------------------------------------------------------------------------

    def take_user_state(self, gradients: UnitGradients) -> None:
        """Take over state that is keyed by the user's parameters: loaded, or made in a constructor (Adagrad)."""
        state = self.optimizer.state
        taken = {}
        for slot, parameter in zip(gradients.unit.slots, gradients.parameters, strict=True):
            if slot.group in self.groups and state.get(parameter):
                found = decoded_values(self.codec, state.pop(parameter))
                taken[slot.name] = {
                    key: value.read().view(slot.shape) if isinstance(value, Stored) else value
                    for key, value in found.items()
                }
        if taken:
            self.load_unit(gradients, taken)

    def load_unit(self, gradients: UnitGradients, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the state of a unit's runs.

        Args:
            gradients: the unit.
            states: by parameter name, in logical shapes; parameters without an entry have no state.
        """
        runs, self.runs = self.runs, []
        for run in runs:
            if run.gradients is not gradients:
                self.runs.append(run)
                continue
            before = self.optimizer.state.pop(run.parameter, {})
            run.stored = ()
            found = [states.get(gradients.unit.slots[slot].name) for slot in run.slots]
            parts = [run] if len(run.slots) == 1 or _mergeable(found) else self._split(run)
            self.runs += parts
            for part in parts:
                self._load_run(part, states, before if part is run else {})

    def _load_run(self, run: Run, states: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any]) -> None:
        unit = run.gradients.unit
        state: dict[str, Any] = {}
        first = states.get(unit.slots[run.slots[0]].name)
        if not first:
            return
        group = self.optimizer.param_groups[run.group]
        shape = run.shape
        for key, value in first.items():
            if not belongs_to_elements(key, value, unit.slots[run.slots[0]].shape):
                value = copy.deepcopy(value)
                if key == "step" and torch.is_tensor(value) and (group.get("fused") or group.get("capturable")):
                    value = value.to(device=run.parameter.device, dtype=torch.float32)
                state[key] = value
                continue
            dtype = run.parameter.dtype if value.is_floating_point() else value.dtype
            if (self.codec is not None or run.gradients.buffers.narrow) and value.is_floating_point():
                dtype = torch.float32
            target = before.get(key)  # its memory serves again
            if not torch.is_tensor(target) or target.shape != shape or target.dtype != dtype:
                with torch.inference_mode(False):
                    target = torch.zeros(shape, dtype=dtype, device=run.parameter.device)
            for slot in run.slots:
                place = unit.slots[slot]
                start, stop = run.overlap(slot)
                source = flat_range(states[place.name][key], start - place.start, stop - place.start)
                target.view(-1)[start - run.start : stop - run.start].copy_(source)
            state[key] = target
        put_away(run, self._keep(run, state))

    def unit_state(self, gradients: UnitGradients) -> UnitState:
        """State of a unit's runs on this rank, by parameter name and key."""
        found: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            if run.gradients is not gradients or not (self.optimizer.state.get(run.parameter) or run.stored):
                continue
            state = self._decoded(run)
            elements = _elements_of(run, state)
            for slot in run.slots:
                start, stop = run.overlap(slot)
                entry = found.setdefault(gradients.unit.slots[slot].name, {})
                for key, value in elements.items():
                    piece = (start, value[start - run.start : stop - run.start])
                    entry.setdefault(key, Elements(value.dtype)).pieces.append(piece)
                entry.update({key: value for key, value in state.items() if key not in elements})
        return found

    def check_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Compare the sizes of saved groups with those of the user's.

        Raises:
            CheckpointError: when they differ.
        """
        sizes = [len(params) for params in self.user_params()]
        found = [len(group["params"]) for group in saved]
        if sizes != found:
            raise CheckpointError(
                f"The optimizer state in the checkpoint has groups of {found} parameters, but "
                f"{type(self.optimizer).__name__} has groups of {sizes}. It belongs to another model or optimizer; "
                "load the weights alone, or build the same groups."
            )

    def load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyper-parameters of saved groups.

        Raises:
            CheckpointError: when there are more or fewer groups.
        """
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise CheckpointError(
                f"The optimizer state in the checkpoint has {len(saved)} groups, {type(self.optimizer).__name__} has "
                f"{len(groups)}."
            )
        for group, values in zip(groups, saved, strict=True):
            kept = {"params", *self.kept_keys}
            group.update({key: copy.deepcopy(value) for key, value in values.items() if key not in kept})

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return sum(
            value.nbytes
            for run in self.runs
            for value in self.optimizer.state.get(run.parameter, {}).values()
            if torch.is_tensor(value)
        )


def _elements_of(run: Run, state: Mapping[str, Any]) -> dict[str, Values]:
    """The states of a run with one value per element, 1-D, in memory or on disk."""
    found: dict[str, Values] = {k: v for k, v in state.items() if isinstance(v, Stored)}
    found.update({k: v.reshape(-1) for k, v in state.items() if per_element(v, run.shape)})
    if run.stored:
        home = run.gradients.home
        assert home is not None
        first = run.gradients.buffers.start
        found.update({key: home.stored(key)[run.start - first : run.stop - first] for key in run.stored})
    return found


def put_away(run: Run, state: dict[str, Any]) -> None:
    """Move the states of a run that belong on disk there; nothing where they live in memory."""
    home = run.gradients.home
    if home is None or home.swap is None:
        return
    keys = [k for k, v in state.items() if k in home.swap.layout.regions and per_element(v, run.shape)]
    for key in keys:
        home.write(key, run.start - run.gradients.buffers.start, state.pop(key))
    run.stored = tuple(keys)


def per_element(value: Any, shape: torch.Size) -> bool:
    """Whether a state has one value per element of a run of this shape."""
    return torch.is_tensor(value) and value.shape == shape and value.ndim > 0


def belongs_to_elements(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a saved state has one value per element of a parameter of `shape`."""
    return torch.is_tensor(value) and value.shape == shape and (value.ndim > 0 or key not in _SHARED_STATE)


def _mergeable(states: Iterable[Mapping[str, Any] | None]) -> bool:
    """Whether parameters with these states can go on as one run."""
    states = list(states)
    first = states[0]
    for other in states[1:]:
        if (first is None) != (other is None):
            return False
        if first is None or other is None:
            continue
        if first.keys() != other.keys():
            return False
        for key, value in first.items():
            twin = other[key]
            scalar = not torch.is_tensor(value) or value.ndim == 0
            if scalar and key in _SHARED_STATE | {k for k in first if not torch.is_tensor(first[k])} and value != twin:
                return False
    return True


def check_optimizers(optimizers: list[torch.optim.Optimizer], table: ParameterTable) -> None:
    """Refuse what cannot be sharded: empty optimizers, foreign parameters, a parameter in two places.

    Args:
        optimizers: the user's.
        table: every parameter of the module.
    """
    problems = []
    owner: dict[int, str] = {}
    for place, optimizer in enumerate(optimizers):
        title = f"optimizer {place} ({type(optimizer).__name__})"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's stand-in
            problems.append(
                "configure_optimizers returned None, so nothing would be trained; return an optimizer, or name one "
                "in the configuration (optimizer.type)"
            )
        elif not parameters:
            problems.append(f"{title} has no parameters; give it some, or do not return it from configure_optimizers")
        for parameter in parameters:
            if parameter not in table:
                problems.append(
                    f"{title} holds a tensor of shape {tuple(parameter.shape)} that is no parameter of the module; "
                    "register it on the LightningModule"
                )
            elif id(parameter) in owner:
                problems.append(
                    f"parameter {table.name_of(parameter)} is in {owner[id(parameter)]} and in {title}; each may be "
                    "in one optimizer only, once"
                )
            owner.setdefault(id(parameter), title)
    if problems:
        raise ConfigError("The optimizers cannot be sharded:\n  " + "\n  ".join(problems))
