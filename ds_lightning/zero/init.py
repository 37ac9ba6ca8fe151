"""Builds a model already sharded, so that no rank ever holds it whole.

[Note: sharded construction] Inside `building`, a module that becomes the child of another is complete, so its
parameters are cut at once and only this rank's part stays: a block is cut layer by layer while it is built, and a list
of blocks never exists whole. torch tells of registrations through a hook of its own; nothing is patched and nothing is
on the meta device, so constructors and `init` functions run as written. Whoever touches values later inside `building`
(an `apply(init)`, a `load_state_dict`) gets them gathered, and they are cut again. Rank 0's values win, as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import ReleasedParameterError
from ds_lightning.topology import Topology
from ds_lightning.zero.released import released_class

SMALLEST = 4096
"""Parameters below this many elements are not worth cutting before the engine does it."""


class ShardedConstruction:
    """Owns the parts of parameters between construction and set-up. Construction is collective.

    Args:
        module: the model, for names in messages.
        topology: ranks and groups.
    """

    def __init__(self, module: nn.Module, topology: Topology) -> None:
        self._module = module
        self._topology = topology
        self._collectives = Collectives.create(topology, Ledger())
        self._parts: dict[int, tuple[nn.Parameter, torch.Tensor, torch.Size]] = {}
        self._whole: OrderedDict[int, nn.Parameter] = OrderedDict()  # gathered because someone touched them
        self._largest = 0
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
        total = 0
        for parameter in child.parameters():
            if id(parameter) not in self._parts and _worth_cutting(parameter):
                total += parameter.numel()
                self._cut(parameter)
        self._largest = max(self._largest, total)

    def _cut(self, parameter: nn.Parameter) -> None:
        """Keep this rank's part of rank 0's values."""
        size, rank = self._topology.world_size, self._topology.rank
        with torch.no_grad():
            shape = parameter.shape
            values = parameter.detach().to(self._topology.device).contiguous().view(-1)
            dist.broadcast(values, group_src=0, group=self._topology.data_group)
            chunk = -(-values.numel() // size)
            part = torch.zeros(chunk, dtype=values.dtype, device=values.device)
            own = values[rank * chunk : (rank + 1) * chunk]
            part[: own.numel()].copy_(own)
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

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """The full value of a parameter, cut or not. Collective."""
        entry = self._parts.get(id(parameter))
        if entry is None or id(parameter) in self._whole:
            return parameter.detach()
        _, part, shape = entry
        size, rank = self._topology.world_size, self._topology.rank
        with torch.no_grad():
            full = torch.empty(part.numel() * size, dtype=part.dtype, device=part.device)
            full[rank * part.numel() : (rank + 1) * part.numel()].copy_(part)
            self._collectives.all_gather(full, "under construction", 0, full.numel()).wait()
        parameter.__class__ = nn.Parameter
        return full[: shape.numel()].view(shape)

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """As `read`, for the engine, which keeps the value: this rank's part is given up. Collective."""
        value = self.read(parameter)
        self._parts.pop(id(parameter), None)
        return value

    def finish(self) -> None:
        """The engine has taken all parameters over."""
        self._parts.clear()
        self._whole.clear()

    def _touch(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        wanted = [a for a in _leaves((*args, *kwargs.values())) if id(a) in self._parts]
        if not self._building:
            names = {id(p): n for n, p in self._module.named_parameters(remove_duplicate=False)}
            raise ReleasedParameterError(
                f"{getattr(func, '__name__', func)} touches {', '.join(names.get(id(a), '?') for a in wanted)}, which "
                "was built sharded in configure_model and is not set up yet. Do it inside configure_model, or later "
                "inside ds_lightning.gathered(...)."
            )
        for parameter in wanted:
            if id(parameter) not in self._whole:
                parameter.data = self.read(parameter)
                self._whole[id(parameter)] = parameter
        result = func(*args, **kwargs)
        self._cut_whole(2 * self._largest)
        return result

    def _cut_whole(self, budget: int) -> None:
        """Cut gathered parameters again, oldest first, until at most `budget` elements are whole."""
        total = sum(parameter.numel() for parameter in self._whole.values())
        while self._whole and total > budget:
            parameter = next(iter(self._whole.values()))
            total -= parameter.numel()
            self._cut(parameter)


def _worth_cutting(parameter: nn.Parameter) -> bool:
    return (
        parameter.numel() >= SMALLEST
        and parameter.is_floating_point()
        and not parameter.is_meta
        and parameter.layout is torch.strided
    )


def _leaves(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, list | tuple) else [value]
    return found
