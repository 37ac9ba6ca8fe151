"""Gathers and releases units: a state machine per unit, stage 3 only moves through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch._C import _autograd

from ds_lightning.comm.collectives import Pending
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.released import released_class
from ds_lightning.zero.transport import Transport
from ds_lightning.zero.watch import ReducedParameter

_RELEASED_VERSION = 1 << 30
"""Added to the version counters of released parameters: autograd refuses to read them. See [Note: a released parameter
is safe]."""

GATHER_TAG = 0
"""Message tags of gathers are multiples of `TAGS` plus this."""
TAGS = 4

_unsafe_set_version_counter: Any = _autograd._unsafe_set_version_counter
try:
    _unsafe_set_version_counter((), ())
except TypeError:
    # torch 2.6 sets one at a time.
    def _set_versions(parameters: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
        for parameter, version in zip(parameters, versions, strict=True):
            _unsafe_set_version_counter(parameter, version)
else:
    _set_versions = _unsafe_set_version_counter


class Residency(Enum):
    """Where the values of a unit are."""

    SHARDED = auto()  # only this rank's elements exist
    GATHERING = auto()  # all-gather in flight, do not touch
    FULL = auto()  # modules may run


class UnitResidency:
    """The state of one unit. Owns who needs it; only `ResidencyManager` changes it.

    Attributes:
        exact: whether what is there, or on its way, are the values of its owners: quantized weights are not.
    """

    __slots__ = ("buffers", "exact", "pending", "pins", "released", "state", "sticky", "versions")

    def __init__(self, buffers: UnitBuffers, released: type[nn.Parameter]) -> None:
        self.buffers = buffers
        self.state = Residency.FULL
        self.exact = True
        self.pending: Pending | None = None
        self.pins = 0  # `gathered` contexts around it
        self.sticky = False  # touched outside its module: stays until the step or its backward is over
        self.released = released
        self.versions: tuple[int, ...] = ()


class ResidencyManager:
    """Gathers and releases the units of one engine. `gather` and `prefetch` are collective, in the same order.

    Args:
        units: buffers by unit index.
        transport: how to gather.
        piece: `allgather_bucket_size`, elements per message.
        touch: what to do when released values are wanted outside a gather: called with the unit's index, the function
            and its arguments.

    Attributes:
        on_demand: while set, gathers go through it one at a time, and nothing is fetched ahead; see `zero/uneven.py`.
    """

    def __init__(
        self,
        units: Iterable[UnitBuffers],
        transport: Transport,
        piece: int,
        touch: Callable[[int, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any],
    ) -> None:
        self._transport = transport
        self._piece = piece
        self._touch = touch
        self.on_demand: Callable[[int], None] | None = None
        self._watched: list[UnitResidency] = []
        self.units: dict[int, UnitResidency] = {}
        for buffers in units:
            self.add(buffers)

    def add(self, buffers: UnitBuffers) -> None:
        """Take charge of a unit; sharded ones are released at once."""
        index = buffers.unit.index
        touch = self._touch

        def touched(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return touch(index, func, args, kwargs)

        entry = UnitResidency(buffers, released_class(touched))
        self.units[index] = entry
        if buffers.sharded:
            self._release(entry)

    def remove(self, index: int) -> None:
        """Forget a unit, which must be full or not sharded."""
        self.units.pop(index)
        self._transport.drop(index)

    def state(self, index: int) -> Residency:
        """Where the unit's values are."""
        return self.units[index].state

    def gather(self, index: int, exact: bool = False) -> None:
        """Make the unit's values available, waiting for them.

        Args:
            index: the unit.
            exact: those of their owners, where no others are there already: the ones that compute, in a step.
        """
        entry = self.units[index]
        if entry.state is Residency.FULL:
            return
        if self.on_demand is not None:
            self.on_demand(index)
            return
        self._start(entry, exact)
        self._finish(entry)

    def join(self, index: int, keep: bool) -> None:
        """Take part in a gather that some rank needs, whatever the state of the unit here. Collective.

        Args:
            index: the unit.
            keep: this rank needs it too.
        """
        entry = self.units[index]
        if entry.state is Residency.FULL:
            entry.exact = self._transport.exact(entry.buffers)
            with torch.no_grad():
                self._transport.gather(entry.buffers, index * TAGS + GATHER_TAG, self._piece, again=True).wait()
            return
        self._start(entry)
        self._finish(entry)
        if not keep:
            self._release(entry)

    def _finish(self, entry: UnitResidency) -> None:
        """Wait for a gather."""
        assert entry.pending is not None
        pending, entry.pending = entry.pending, None
        try:
            with torch.no_grad():
                pending.wait()
        except BaseException:
            # What arrived is unknown: leave no parameter that looks whole.
            entry.buffers.free()
            entry.state = Residency.SHARDED
            raise
        parameters = entry.buffers.parameters
        for parameter in parameters:
            parameter.__class__ = nn.Parameter
        _set_versions(tuple(parameters), entry.versions)
        entry.state = Residency.FULL

    def prefetch(self, index: int, exact: bool = False) -> None:
        """Start gathering the unit without waiting; see `gather`."""
        if self.on_demand is None:
            self._start(self.units[index], exact)

    def _start(self, entry: UnitResidency, exact: bool = False) -> None:
        if entry.state is not Residency.SHARDED:
            return
        buffers = entry.buffers
        entry.exact = exact or self._transport.exact(buffers)
        tag = buffers.unit.index * TAGS + GATHER_TAG
        with torch.no_grad():
            buffers.allocate()
            entry.pending = self._transport.gather(buffers, tag, self._piece, exact)
        entry.state = Residency.GATHERING

    def release(self, index: int) -> None:
        """Free the unit's values unless something still needs them."""
        entry = self.units[index]
        if entry.pins or entry.sticky or not entry.buffers.sharded:
            return
        if entry.state is Residency.GATHERING:  # fetched ahead and never used
            self.gather(index)
        if entry.state is Residency.FULL:
            self._release(entry)

    def release_all(self) -> None:
        """Free every unit that is not pinned, used or not."""
        for index, entry in self.units.items():
            entry.sticky = False
            self.release(index)

    def release_present(self) -> None:
        """As `release_all`, without waiting for what is under way: other ranks may be gone."""
        for index, entry in self.units.items():
            entry.sticky = False
            if entry.state is Residency.FULL:
                self.release(index)

    def abandon(self) -> None:
        """Forget gathers in flight after a failure, without waiting for ranks that may be gone."""
        for entry in self.units.values():
            entry.pending = None

    def watch(self, indices: Iterable[int]) -> None:
        """The gradients of these units were reduced. See [Note: reduced gradients are not in p.grad]."""
        for index in indices:
            entry = self.units[index]
            if entry.state is Residency.FULL:
                self._watched.append(entry)
                for parameter in entry.buffers.parameters:
                    parameter.__class__ = ReducedParameter

    def unwatch(self) -> None:
        """Those gradients are gone, or a new step begins."""
        for entry in self._watched:
            for parameter in entry.buffers.parameters:
                if parameter.__class__ is ReducedParameter:
                    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        self._watched.clear()

    def live_numel(self, besides: Set[int] = frozenset()) -> int:
        """Elements of sharded units that are gathered or being gathered, without some."""
        return sum(
            entry.buffers.unit.numel
            for index, entry in self.units.items()
            if entry.buffers.sharded and entry.state is not Residency.SHARDED and index not in besides
        )

    def republish(self, indices: Iterable[int]) -> None:
        """Spread updated master values to every rank, in all units whose values are present. Collective."""
        pending: list[Pending] = []
        for index in indices:
            pending += self.publish(index)
        for work in pending:
            work.wait()

    def publish(self, index: int, copied: bool = False) -> list[Pending]:
        """Begin to spread one unit's updated master values, if its values are present. Collective.

        Args:
            index: the unit.
            copied: this rank's part of a unit that is not sharded has them already.

        Returns:
            What is to be waited for.
        """
        self._transport.outdate((index,))
        entry = self.units[index]
        buffers = entry.buffers
        if entry.state is not Residency.FULL:
            return []
        tag = index * TAGS + GATHER_TAG
        with torch.no_grad():
            torch.autograd.graph.increment_version(buffers.parameters)
            if buffers.sharded:
                return [self._transport.gather(buffers, tag, self._piece, entry.exact)]
            if not copied:
                buffers.refresh()
            if buffers.keeps_all:
                return []  # every rank updated all of it
            return [self._transport.publish(buffers, tag, self._piece)]

    def outdate(self, indices: Iterable[int]) -> None:
        """The values of these units change, on all ranks alike."""
        self._transport.outdate(indices)

    def expect(self, indices: Iterable[int]) -> None:
        """These units will be gathered soon: begin to read what is on disk."""
        for index in indices:
            entry = self.units[index]
            near = self._transport.near(index)
            if entry.state is Residency.SHARDED and entry.buffers.home is not None and not near:
                entry.buffers.home.expect()

    def forget_expected(self) -> None:
        """What was read ahead is out of date, or nobody comes for it."""
        for entry in self.units.values():
            if entry.buffers.home is not None:
                entry.buffers.home.forget_ahead()

    def _release(self, entry: UnitResidency) -> None:
        parameters = entry.buffers.parameters
        entry.versions = tuple(parameter._version for parameter in parameters)
        _set_versions(tuple(parameters), tuple(v + _RELEASED_VERSION for v in entry.versions))
        entry.buffers.free()
        for parameter in parameters:
            parameter.__class__ = entry.released
        entry.state = Residency.SHARDED
