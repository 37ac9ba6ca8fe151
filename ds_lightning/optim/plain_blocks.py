"""Blocks for a 1-bit optimizer in a process of its own, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.compressed import CompressedMean
from ds_lightning.comm.ledger import Ledger
from ds_lightning.layout.flat import build_layout
from ds_lightning.layout.units import ParamSpec
from ds_lightning.optim.blocks import Average, Block, Extent, Work
from ds_lightning.topology import Topology


class BlockOptimizer(Protocol):
    """What is asked of the optimizer; see `OneBitOptimizer`."""

    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def extents(self) -> Mapping[str, Extent]:
        """Its states with one value per element."""

    @property
    def per_parameter(self) -> Mapping[str, float]:
        """Its states with one value per parameter."""

    def settle(self, blocks: Sequence[Block], average: Average, everything: bool) -> bool:
        """Bring states into the form that checkpoints have."""


class PlainBlocks:
    """The blocks of an optimizer in a process of its own: parameters are copied in and out, states are shared.

    Args:
        optimizer: its parameters and states, which stay where every optimizer has them.
    """

    def __init__(self, optimizer: BlockOptimizer) -> None:
        self._optimizer = optimizer
        self._mean = CompressedMean(Collectives.create(Topology.single(), Ledger()))
        self._blocks: list[tuple[Block, Sequence[torch.Tensor]]] = []
        self._signature: list[list[int]] = []

    def step(self) -> _Step:
        """A step: a context that gives its work and writes parameters back."""
        return _Step(self._optimizer, self._current(), self._mean)

    @torch.no_grad()
    def settle(self) -> None:
        """Bring states into the form that checkpoints have."""
        with _Step(self._optimizer, self._current(), self._mean, steps=False) as work:
            self._optimizer.settle(work.blocks, lambda tensors: None, True)

    def _current(self) -> Sequence[tuple[Block, Sequence[torch.Tensor]]]:
        groups = self._optimizer.param_groups
        signature = [[id(p) for p in group["params"]] for group in groups]
        if signature != self._signature:
            self._signature = signature
            self._blocks = list(self._build())
        return self._blocks

    def _build(self) -> Iterator[tuple[Block, Sequence[torch.Tensor]]]:
        by_name = {}
        specs: dict[torch.device, list[ParamSpec]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for place, p in enumerate(group["params"]):
                name = f"{number}.{place}"
                by_name[name] = p
                spec = ParamSpec(name, (), p.shape, p.dtype, p.dtype, number, "", True)
                specs.setdefault(p.device, []).append(spec)
        for device, members in specs.items():
            for unit in build_layout(members, 1).units:
                whole = (0, unit.numel)
                optimizer = self._optimizer
                block = Block(unit, 0, whole, whole, optimizer.extents, optimizer.per_parameter, device)
                block.parameters = [by_name[slot.name] for slot in unit.slots]
                yield block, block.parameters


class _Step:
    """One step of `PlainBlocks`, or a look at its states without one."""

    def __init__(
        self,
        optimizer: BlockOptimizer,
        blocks: Sequence[tuple[Block, Sequence[torch.Tensor]]],
        mean: CompressedMean,
        steps: bool = True,
    ) -> None:
        self._steps = steps
        self._optimizer = optimizer
        self._blocks = blocks
        self._mean = mean
        self._masters: list[torch.Tensor] = []

    def __enter__(self) -> Work:
        working = []
        for block, params in self._blocks:
            self._take_states(block, params)
            master = torch.zeros(block.unit.numel, dtype=block.unit.master_dtype, device=block.device)
            gradient = torch.zeros_like(master)
            present = [k for k, p in enumerate(params) if self._steps and p.grad is not None]
            for slot, p in zip(block.unit.slots, params, strict=True):
                master[slot.start : slot.stop].copy_(p.reshape(-1))
            for k in present:
                slot = block.unit.slots[k]
                gradient[slot.start : slot.stop].copy_(params[k].grad.reshape(-1))  # type: ignore[union-attr]
            block.begin(master, gradient, 0, present)
            self._masters.append(master)
            working.append(block)
        return Work(working, self._mean, lambda block, state: None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for (block, params), master in zip(self._blocks, self._masters, strict=True):
            for place, (slot, p) in enumerate(zip(block.unit.slots, params, strict=True)):
                if kind is None and block.known[place]:
                    p.copy_(master[slot.start : slot.stop].view(slot.shape))
            self._show_states(block, params)

    def _take_states(self, block: Block, params: Sequence[torch.Tensor]) -> None:
        """States that someone loaded are copied in; those that are views of the block's are there already."""
        state = self._optimizer.state
        for slot, p in zip(block.unit.slots, params, strict=True):
            for key, value in state[p].items() if p in state else ():
                if key in block.extents:
                    target = block.state(key)[slot.start : slot.stop].view(slot.shape)
                    if value.data_ptr() != target.data_ptr():
                        target.copy_(value)
                elif key in block.per_parameter:
                    block.number(key)[block.unit.slots.index(slot)] = float(value)

    def _show_states(self, block: Block, params: Sequence[torch.Tensor]) -> None:
        numbers = {key: values.tolist() for key, values in block.numbers.items()}
        for place, (slot, p) in enumerate(zip(block.unit.slots, params, strict=True)):
            if block.known[place]:
                entry = self._optimizer.state[p]
                entry.clear()
                entry.update({k: v[slot.start : slot.stop].view(slot.shape) for k, v in block.elements.items()})
                entry.update({key: values[place] for key, values in numbers.items()})
