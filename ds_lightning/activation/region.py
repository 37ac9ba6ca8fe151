"""One checkpointed call: its forward keeps the inputs, its backward computes the rest again.

[Note: how a call is computed again]
While the forward runs, each tensor that autograd saves is replaced by a numbered holder (`saved_tensors_hooks`), so
nothing of it stays: neither activations nor, at stage 3, gathered weights. When backward asks for one of them, the
function runs a second time on the kept inputs, in the surroundings of the first time. The n-th tensor that autograd
saves now goes into the n-th holder, if that is still alive; behind the last one alive the run ends. Its graph is thrown
away: gradients flow through the first one, to all inputs and parameters, whether or not any input requires them. What
is restored lives until backward has used it. A later backward over the same graph computes it again.

A checkpoint inside another saves its inputs with autograd, that is in holders of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ds_lightning.activation.measure import bytes_besides, clock, synchronize
from ds_lightning.activation.module_buffers import BufferValues, ModuleBuffers
from ds_lightning.activation.options import ActivationOptions
from ds_lightning.activation.selective import KeptResults
from ds_lightning.activation.surroundings import Surroundings
from ds_lightning.activation.tree import put_back, take_out
from ds_lightning.errors import RecomputationError

NO_BACKWARD = -1
"""Number of the backward pass that is under way, outside of one."""

Fact = tuple[torch.Size, torch.dtype, torch.device]


class _Holder:
    """Stands for a saved tensor; knows its values, by the backward that they were computed for."""

    __slots__ = ("__weakref__", "values")

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}


class _Enough(Exception):
    """All that backward may ask for is there."""


class Region:
    """A call of `function`. Lives as long as its graph.

    Args:
        function: what is called.
        how: what is kept, and where.
        name: for messages and measurements.
        module: the module that runs; its buffers are changed once only.
        buffers: those of `module`.
        before_recomputation: called first in backward, for example to gather parameters.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        how: ActivationOptions,
        name: str,
        module: nn.Module | None = None,
        buffers: ModuleBuffers | None = None,
        before_recomputation: Callable[[], None] | None = None,
    ) -> None:
        self._function = function
        self._how = how
        self._name = name
        self._module = module
        self._buffers = buffers
        self._before_recomputation = before_recomputation
        self._holders: list[ReferenceType[_Holder]] = []
        self._facts: list[Fact] = []

    # Forward --------------------------------------------------------------------------------------------------------

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function, and return what it returns."""
        how = self._how
        if how.synchronize:
            synchronize()
        inputs: list[torch.Tensor] = []
        self._arguments = take_out((tuple(args), dict(kwargs)), inputs)
        self._needs_grad = [tensor.requires_grad for tensor in inputs]
        self._surroundings = Surroundings({tensor.device for tensor in inputs}, how.tracker)
        self._values: BufferValues | None = self._buffers.before_forward() if self._buffers is not None else None
        self._kept = how.store.keep(inputs)
        self._results = KeptResults(self._facts.__len__) if how.selective else None
        self._would_keep: list[torch.Tensor] = []
        start = clock() if how.profile is not None else 0.0
        with saved_tensors_hooks(self._pack, self._unpack), ExitStack() as stack:
            if self._results is not None:
                stack.enter_context(self._results.recording())
            output = self._function(*args, **kwargs)
        if self._results is not None:
            self._results.forward_is_over()
        if self._values is not None:
            self._values.forward_is_over()
        if how.profile is not None:
            self._measure(clock() - start)
        if how.synchronize:
            synchronize()
        return output

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        holder = _Holder()
        self._holders.append(ref(holder))
        self._facts.append((tensor.shape, tensor.dtype, tensor.device))
        if self._how.profile is not None:
            self._would_keep.append(tensor.detach())  # until the call is over, or memory would be counted twice
        return holder

    def _measure(self, seconds: float) -> None:
        assert self._how.profile is not None
        without = bytes_besides(self._would_keep, list(self._module.parameters()) if self._module is not None else ())
        kept = self._kept.nbytes + (bytes_besides(self._results.tensors(), ()) if self._results is not None else 0)
        self._would_keep.clear()
        self._how.profile.forward_is_over(self._name, seconds, without, kept)

    # Backward -------------------------------------------------------------------------------------------------------

    def _unpack(self, holder: _Holder) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if task not in holder.values:
            self._recompute(task, holder)
        return holder.values.pop(task)

    def _recompute(self, task: int, asked: _Holder) -> None:
        how = self._how
        if how.synchronize:
            synchronize()
        if self._before_recomputation is not None and task != NO_BACKWARD:
            self._before_recomputation()
        start = clock() if how.profile is not None else 0.0
        alive = {place: holder for place, reference in enumerate(self._holders) if (holder := reference()) is not None}
        if task == NO_BACKWARD:
            alive = {place: holder for place, holder in alive.items() if holder is asked}
        collecting = _Collecting(alive, self._facts, task)
        values = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(self._kept.restore(), self._needs_grad, strict=True)
        ]
        args, kwargs = put_back(self._arguments, values)
        with ExitStack() as stack:
            stack.enter_context(self._surroundings.restored())
            if self._values is not None:
                stack.enter_context(self._values.showing())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(collecting.pack, _as_it_is))
            if self._results is not None:
                stack.enter_context(self._results.replaying())
            with suppress(_Enough):
                self._function(*args, **kwargs)
        problem = collecting.problem()
        if problem:
            raise RecomputationError(
                f"The checkpointed call of {self._name} gave something else when it was computed again: {problem}. It "
                "must do the same for the same arguments: nothing may depend on what changes between forward and "
                "backward (counters, training mode, a cache that it appends to: set config.use_cache = False in models "
                "of transformers). Leave it out of activation checkpointing otherwise."
            )
        if how.profile is not None:
            how.profile.recomputation_is_over(self._name, clock() - start)
        if how.synchronize:
            synchronize()


class _Collecting:
    """Puts what autograd saves in a recomputation into the holders of the forward."""

    def __init__(self, holders: Mapping[int, _Holder], facts: Sequence[Fact], task: int) -> None:
        self._holders = {place: ref(holder) for place, holder in holders.items()}
        self._facts = facts
        self._task = task
        self._last = max(holders)
        self._seen = 0
        self._wrong = ""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._seen
        self._seen += 1
        value = tensor.detach()
        if place > self._last:  # someone has caught our exception
            return value
        fact = (value.shape, value.dtype, value.device)
        holder = self._holders[place]() if place in self._holders else None
        if fact != self._facts[place]:
            self._wrong = self._wrong or (
                f"saved tensor {place} was {_told(self._facts[place])} and is {_told(fact)} now"
            )
        if holder is not None:
            holder.values.clear()
            holder.values[self._task] = value
        if place == self._last or self._wrong:
            raise _Enough
        return value

    def problem(self) -> str:
        if not self._wrong and self._seen <= self._last:
            return f"{self._seen} tensors were saved, but more than {self._last} at first"
        return self._wrong


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _told(fact: Fact) -> str:
    shape, dtype, device = fact
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
