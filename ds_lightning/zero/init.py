"""Builds a model already sharded, so that no rank ever holds it whole.

[Note: sharded construction] Inside `building`, a module that becomes the child of another is complete, so its
parameters are cut at once and only this rank's part stays: a block is cut layer by layer while it is built, and a list
of blocks never exists whole. torch tells of registrations through a hook of its own; nothing is patched and nothing is
on the meta device, so constructors and `init` functions run as written. Whoever touches values later inside `building`
(an `apply(init)`, a `load_state_dict`) gets them gathered, and they are cut again. Rank 0's values win, as everywhere.

[Note: what whole layers leave behind] Each layer is whole for a moment, and its memory is free afterwards. Parts that
are allocated meanwhile lie in between, so the C library keeps what is free, up to the size of the model. It is told to
give it back every few layers, while the model is cut and while the engine takes it over.

[Note: loading into parts] What a logical tensor holds is not gathered: each rank reads its own part of the file, and
nothing is communicated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import ReleasedParameterError
from ds_lightning.offload.shelf import MemoryShelf, Part, Shelf
from ds_lightning.ops.memory import release_free_memory
from ds_lightning.topology import Topology
from ds_lightning.zero.logical import LogicalTensor
from ds_lightning.zero.released import released_class

_LOOSE = 4 << 20
"""Bytes that may be free and kept by the C library."""
SMALLEST = 4096
"""Parameters below this many elements are not worth cutting before the engine does it."""


class ShardedConstruction:
    """Owns the parts of parameters between construction and set-up. Construction is collective.

    Args:
        module: the model, for names in messages.
        topology: ranks and groups.
        tell: tells the user something.
        shelf: keeps the parts; None keeps them in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        topology: Topology,
        tell: Callable[[str], None] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self._module = module
        self._topology = topology
        self._tell = tell
        self._shelf = shelf or MemoryShelf()
        self._collectives = Collectives.create(topology, Ledger(), topology.teams.everyone)
        self._parts: dict[int, tuple[nn.Parameter, Part, torch.Size]] = {}
        self._whole: OrderedDict[int, nn.Parameter] = OrderedDict()  # gathered because someone touched them
        self._largest = 0
        self._loose = 0  # bytes
        self._building = False
        self._class = released_class(self._touch)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Modules are constructed, initialised or loaded inside, alike on all ranks."""
        if self._building:
            yield
            return
        self._building = True
        handle = register_module_module_registration_hook(self._registered)
        try:
            yield
        finally:
            handle.remove()
            self._building = False
        self._cut_whole(0)

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        new = [p for p in child.parameters() if id(p) not in self._parts and _worth_cutting(p)]
        self._tell_of_whole(child, new)
        for parameter in new:
            self._cut(parameter)
        self._largest = max(self._largest, sum(parameter.numel() for parameter in new))

    def _tell_of_whole(self, child: nn.Module, new: Sequence[nn.Parameter]) -> None:
        """What is built layer by layer brings parameters of its own alone; the others have been cut already."""
        own = {id(parameter) for parameter in child._parameters.values()}
        inner = [parameter for parameter in new if id(parameter) not in own]
        if self._tell is None or 2 * len(inner) <= sum(1 for _ in child.parameters()):
            return
        mebibytes = sum(parameter.nbytes for parameter in inner) / 2**20
        self._tell(
            f"{type(child).__name__} came whole into configure_model: each rank held {mebibytes:.1f} MiB of it before "
            "they were cut. from_pretrained makes such models. Make the model from its configuration (from_config), "
            "fill it with ds_lightning.load_pretrained, and no rank ever holds it whole."
        )

    def _cut(self, parameter: nn.Parameter) -> None:
        """Keep this rank's part of rank 0's values."""
        size, rank = self._topology.world_size, self._topology.rank
        with torch.no_grad():
            shape = parameter.shape
            values = parameter.detach().to(self._topology.device).contiguous().view(-1)
            if size > 1:
                dist.broadcast(values, group_src=0, group=self._topology.data_group)
            chunk = -(-values.numel() // size)
            own = values[rank * chunk : (rank + 1) * chunk]
            if id(parameter) in self._parts:  # its place is kept
                part = self._parts[id(parameter)][1]
                part.write(own)
            else:
                padded = torch.zeros(chunk, dtype=values.dtype, device=values.device)
                padded[: own.numel()].copy_(own)
                part = self._shelf.put(padded)
            # The parameter keeps its shape over an empty storage.
            hollow = torch.empty(0, dtype=values.dtype, device=values.device)
            hollow.untyped_storage().resize_(values.numel() * values.element_size())
            view = torch.empty(0, dtype=values.dtype, device=values.device)
            view.set_(hollow.untyped_storage(), 0, shape, torch.empty(shape, device="meta").stride())
            parameter.data = view
            hollow.untyped_storage().resize_(0)
        self._parts[id(parameter)] = (parameter, part, shape)
        self._whole.pop(id(parameter), None)
        parameter.__class__ = self._class
        self._let_go(2 * parameter.nbytes)

    def _let_go(self, nbytes: int) -> None:
        """So much was whole for a moment. See [Note: what whole layers leave behind]."""
        self._loose += nbytes
        if self._loose > _LOOSE:
            release_free_memory()
            self._loose = 0

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The full value of a parameter, cut or not. Collective."""
        entry = self._parts.get(id(parameter))
        if entry is None or id(parameter) in self._whole:
            return parameter.detach()
        _, part, shape = entry
        size, rank = self._topology.world_size, self._topology.rank
        with torch.no_grad():
            full = torch.empty(part.numel * size, dtype=part.dtype, device=self._topology.device)
            part.copy_to(full[rank * part.numel : (rank + 1) * part.numel])
            self._collectives.all_gather(full, "under construction", 0, full.numel()).wait()
        parameter.__class__ = nn.Parameter
        return full[: shape.numel()].view(shape)

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """As `read`, for the engine, which keeps the value: this rank's part is given up. Collective."""
        value = self.read(parameter)
        if self._parts.pop(id(parameter), None) is not None:
            self._let_go(2 * value.nbytes)
        return value

    def finish(self) -> None:
        """The engine has taken all parameters over."""
        self._parts.clear()
        self._whole.clear()
        self._shelf.close()
        release_free_memory()

    def _touch(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        wanted = [a for a in _leaves((*args, *kwargs.values())) if id(a) in self._parts]
        if not self._building:
            names = {id(p): n for n, p in self._module.named_parameters(remove_duplicate=False)}
            raise ReleasedParameterError(
                f"{getattr(func, '__name__', func)} touches {', '.join(names.get(id(a), '?') for a in wanted)}, which "
                "was built sharded in configure_model and is not set up yet. Do it inside configure_model, or later "
                "inside ds_lightning.gathered(...)."
            )
        if func is torch.Tensor.copy_ and _fills(args):
            return self._fill(args[0], args[1])
        for parameter in wanted:
            if id(parameter) not in self._whole:
                parameter.data = self.read(parameter)
                self._whole[id(parameter)] = parameter
        result = func(*args, **kwargs)
        self._cut_whole(2 * self._largest)
        return result

    def _fill(self, parameter: nn.Parameter, values: LogicalTensor) -> nn.Parameter:
        """See [Note: loading into parts]."""
        _, part, shape = self._parts[id(parameter)]
        start = min(self._topology.rank * part.numel, shape.numel())
        stop = min(start + part.numel, shape.numel())
        with torch.no_grad():
            part.write(values.flat(start, stop))
        return parameter

    def cut(self) -> None:
        """Nothing that has been cut before is whole any more. Collective."""
        self._cut_whole(0)

    def _cut_whole(self, budget: int) -> None:
        """Cut gathered parameters again, oldest first, until at most `budget` elements are whole."""
        total = sum(parameter.numel() for parameter in self._whole.values())
        while self._whole and total > budget:
            parameter = next(iter(self._whole.values()))
            total -= parameter.numel()
            self._cut(parameter)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A model that is being built.

    Attributes:
        topology: the ranks that build it together.
        construction: what cuts it; None when each rank builds it whole.
    """

    topology: Topology
    construction: ShardedConstruction | None


_UNDER_WAY: ContextVar[UnderWay | None] = ContextVar("ds_lightning_under_way", default=None)
"""Public functions get bare modules that belong to nothing yet, so something must know; nothing but this file touches
it."""


@contextmanager
def constructing(topology: Topology, construction: ShardedConstruction | None) -> Iterator[None]:
    """A model is built inside, alike on all ranks."""
    token = _UNDER_WAY.set(UnderWay(topology, construction))
    try:
        with nullcontext() if construction is None else construction.building():
            yield
    finally:
        _UNDER_WAY.reset(token)


def under_way() -> UnderWay | None:
    """What is being built around this call."""
    return _UNDER_WAY.get()


def _worth_cutting(parameter: nn.Parameter) -> bool:
    return (
        parameter.numel() >= SMALLEST
        and parameter.is_floating_point()
        and not parameter.is_meta
        and parameter.layout is torch.strided
    )


def _fills(args: Sequence[Any]) -> bool:
    return len(args) > 1 and isinstance(args[1], LogicalTensor) and args[0].shape == args[1].shape


def _leaves(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, list | tuple) else [value]
    return found
