"""Where a step stands: which forward, backward or evaluation is under way, and what is gathered for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_lightning.comm.agreement import Agreement
from ds_lightning.layout.units import ROOT
from ds_lightning.optim.clip import GradientNorms
from ds_lightning.zero.broadcast import BufferSync
from ds_lightning.zero.buffers import UnitBuffers
from ds_lightning.zero.gradients import UnitGradients
from ds_lightning.zero.hooks import tensors_in, tensors_kept
from ds_lightning.zero.options import EngineOptions
from ds_lightning.zero.prefetch import GatherOrder
from ds_lightning.zero.reduce import GradientReducer
from ds_lightning.zero.residency import Residency, ResidencyManager
from ds_lightning.zero.uneven import UnevenEvaluation


class Passes:
    """Owns the progress of forward and backward passes through one model; hooks and strategies report to it.

    Args:
        units: buffers by unit index, shared with the engine.
        residency: gathers and releases.
        reducer: reduces gradients.
        norms: forgotten when gradients change.
        agreement: for forwards outside of steps.
        options: limits on what is gathered.
        buffers: module buffers.
        before_step: called when a step begins.

    Attributes:
        depth: nested step scopes; more than 0 means that all ranks run the same code.
        evaluating: the whole model stays gathered for an evaluation loop.
        backwards: backward passes that are over.
        failed: a rank has failed; nothing communicates any more.
    """

    def __init__(
        self,
        units: Mapping[int, UnitBuffers],
        residency: ResidencyManager,
        reducer: GradientReducer,
        norms: GradientNorms,
        agreement: Agreement,
        options: EngineOptions,
        buffers: BufferSync,
        before_step: Callable[[], None],
    ) -> None:
        self._units = units
        self._residency = residency
        self._reducer = reducer
        self._norms = norms
        self._agreement = agreement
        self._options = options
        self._buffers = buffers
        self._before_step = before_step
        self.depth = 0
        self.evaluating = False
        self.backwards = 0
        self.failed = False
        self._autocast: torch.autocast | None = None
        self._opened: list[str] = []  # forwards outside a step that opened a scope of their own
        self._touched: set[int] = set()
        self._in_backward = False
        self._entered: tuple[int, ...] = ()  # the units that backward entered last
        self._open_units: set[int] = set()  # that it has left, and is expected to enter again
        self._bracketed = False
        self._tasks: set[int] = set()
        self._uneven: UnevenEvaluation | None = None
        self._scope_units: dict[str, list[int]] = {}
        self._scope_modules: dict[str, list[nn.Module]] = {}
        self._orders: dict[bool, GatherOrder] = {}

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """The units are new.

        Args:
            modules: the gathered modules, by name.
        """
        self._scope_units = {}
        for index, buffers in self._units.items():
            if buffers.sharded:
                self._scope_units.setdefault(buffers.unit.scope, []).append(index)
        self._scope_modules = {scope: list(module.modules()) for scope, module in modules.items()}
        numels = {index: buffers.unit.numel for index, buffers in self._units.items()}
        self._orders = {True: GatherOrder(numels), False: GatherOrder(numels)}
        self._reducer.guided = any(scope != ROOT for scope in self._scope_units)

    @property
    def together(self) -> bool:
        """Whether all ranks are known to run the same code now, so that values may be gathered on demand."""
        return (self.depth > 0 or in_backward_pass()) and not self.failed

    def fetch(self, index: int) -> None:
        """Gather a unit on demand; it stays until the step, or its backward, is over."""
        self._residency.gather(index)
        self._residency.units[index].sticky = True
        self._touched.add(index)

    def abort(self) -> None:
        """A rank has failed: communicate no more."""
        self.failed = True
        if self._uneven is not None:
            self._uneven.close()
            self._uneven = None

    # Steps ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """All ranks run the same code inside: values of sharded parameters may be gathered on demand."""
        self._enter()
        try:
            yield
        except BaseException:
            if self.depth == 1 and not self.evaluating:
                self._residency.release_present()  # no backward comes
            raise
        finally:
            self._leave()

    def _enter(self) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self._residency.unwatch()
        self._before_step()
        if not self.evaluating:
            self._residency.release_all()
        self._touched.clear()
        if self._options.read_ahead:
            self._residency.forget_expected()
        self._order.restart()
        self._buffers.before_forward(torch.is_grad_enabled() and self._reducer.sync)

    def _leave(self) -> None:
        self.depth -= 1
        # With gradients, what was gathered on demand is needed by a backward that comes later.
        if not self.depth and not torch.is_grad_enabled() and not self.evaluating and not self.failed:
            self._residency.release_all()

    @property
    def _order(self) -> GatherOrder:
        return self._orders[torch.is_grad_enabled() or self._in_backward]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not communicate where the stage lets gradients accumulate locally (0 and 1)."""
        before, self._reducer.sync = self._reducer.sync, False
        try:
            yield
        finally:
            self._reducer.sync = before

    # Evaluation -----------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """An evaluation loop, see `begin_evaluation`."""
        self.begin_evaluation()
        try:
            yield
        finally:
            self.end_evaluation()

    def begin_evaluation(self) -> None:
        """An evaluation loop begins: ranks may have different numbers of batches, or generate different lengths.

        The whole model is gathered once, if it fits into `stage3_max_live_parameters`; then no forward communicates.
        Otherwise ranks announce what they gather, see `UnevenEvaluation`. Collective.
        """
        if self.evaluating or self._uneven is not None:
            return
        self._buffers.before_forward(False)  # now, because a rank may have no batch at all
        total = sum(buffers.unit.numel for buffers in self._units.values() if buffers.sharded)
        if total and total <= self._options.max_live:
            self.evaluating = True
            for index, buffers in self._units.items():
                if buffers.sharded:
                    self._residency.gather(index)
        elif total and self._agreement.topology.world_size > 1:
            self._residency.release_all()
            self._uneven = UnevenEvaluation(self._residency, self._agreement)

    def meet(self) -> None:
        """All ranks are about to communicate for a reason of their own: let those catch up that still evaluate."""
        if self._uneven is not None and not self.failed:
            self._uneven.serve()

    def end_evaluation(self) -> None:
        """The evaluation loop is over. Collective."""
        if self._uneven is not None:
            self.meet()
            self._uneven.close()
            self._uneven = None
        if self.evaluating:
            self.evaluating = False
            if not self.failed:
                self._residency.release_all()

    # Forward --------------------------------------------------------------------------------------------------------

    def before_root(self) -> None:
        """The model's own forward begins; outside a step it is one of its own."""
        if self.depth or in_backward_pass():
            return
        device = self._agreement.topology.device.type
        compute = self._options.dtypes.compute
        if compute is not None and not torch.is_autocast_enabled(device):
            # Parameters are 16-bit; a step runs under autocast, so a call outside of one does too.
            self._autocast = torch.autocast(device, dtype=compute, cache_enabled=False)
            self._autocast.__enter__()
        if self._scope_units and not self.evaluating:
            self._open("the model's forward")

    def after_root(self) -> None:
        """Close what `before_root` opened."""
        if self._autocast is not None and self.depth <= 1:
            self._autocast.__exit__(None, None, None)
            self._autocast = None
        if self._opened and self.depth == 1 and self._opened[-1] == "the model's forward":
            self._opened.pop()
            self._leave()

    def _open(self, what: str) -> None:
        self._agreement.rendezvous(
            f"{what} outside a training, validation, test or predict step",
            "Parameters are sharded, so all ranks must call it together, or inside ds_lightning.gathered(module).",
        )
        self._enter()
        self._opened.append(what)

    def before_scope(self, scope: str) -> None:
        """Gather what the scope's forward needs, and start on what comes after."""
        units = self._scope_units.get(scope, ())
        if not units or self.evaluating:
            return
        backward = in_backward_pass()
        if not self.depth and not backward:
            if all(self._residency.state(index) is Residency.FULL for index in units):
                return  # inside `gathered`
            self._open(scope)
        self._need(units)

    def _need(self, units: Sequence[int]) -> None:
        order = self._order
        if self._in_backward:
            self._leave_for(units)
        closed = self._reducer.closings.left
        for index in units:
            order.note(index)
            if index not in closed:
                self._residency.prefetch(index)
        for index in units:
            if index in closed:  # some ranks have it still
                self._reducer.closings.reopen(index)
                self._residency.join(index, keep=True)
            else:
                self._residency.gather(index)
        budget = self._options.prefetch
        if budget is None:
            budget = max(self._units[index].unit.numel for index in self._sharded())
        budget = min(budget, self._options.max_live - self._residency.live_numel(closed))
        for index in order.upcoming(budget, closed):
            self._residency.prefetch(index)
        if self._options.read_ahead:
            self._residency.expect(order.upcoming(self._options.read_ahead * self._agreement.topology.shard_count))

    def _leave_for(self, units: Sequence[int]) -> None:
        """Backward enters a scope, so it has left the one before: all ranks do, at the same place."""
        left, self._entered = self._entered, tuple(units)
        if left == self._entered:
            return
        self._open_units.difference_update(units)
        candidates = sorted(self._open_units.union(left))
        self._open_units = set(candidates) & self._order.expected()
        self._reducer.close([index for index in candidates if index not in self._open_units])

    def _sharded(self) -> list[int]:
        return [index for units in self._scope_units.values() for index in units]

    def after_scope(self, scope: str, args: Any, output: Any) -> None:
        """Release the scope, and see to it that it is gathered again before its backward."""
        units = self._scope_units.get(scope, ())
        if not units or self.evaluating:
            return
        opened = bool(self._opened) and self._opened[-1] == scope and self.depth == 1
        if not in_backward_pass():
            self._release_after_forward(scope, units, output)
        if opened:
            self._opened.pop()
            self._leave()

    def _release_after_forward(self, scope: str, units: Sequence[int], output: Any) -> None:
        if torch.is_grad_enabled():
            tensors = tensors_in(output) + tensors_kept(self._scope_modules[scope])
            with_graph = [tensor for tensor in tensors if tensor.requires_grad]
            failed = output is None and sys.exc_info()[1] is not None
            hidden = not with_graph and not failed and self._requires_grad(units)
            if hidden or any(tensor.is_leaf for tensor in with_graph):
                # Nothing tells when backward enters this scope: keep it.
                for index in units:
                    self._residency.units[index].sticky = True
                    self._touched.add(index)
                return
            for tensor in with_graph:
                tensor.register_hook(lambda _, units=tuple(units): self._before_backward(units))
        limit = self._options.max_reuse_distance or 0
        for index in units:
            distance = self._order.reuse_distance(index)
            if distance is None or distance > limit or not torch.is_grad_enabled():
                self._residency.release(index)

    def _requires_grad(self, units: Sequence[int]) -> bool:
        return any(parameter.requires_grad for index in units for parameter in self._units[index].parameters)

    # Backward -------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """The whole of one backward, so that its end is known. Without it, autograd's callback tells."""
        for index in sorted(self._touched):
            if index in self._units:
                self._residency.gather(index)
                self._residency.units[index].sticky = True
        before, self._bracketed = self._bracketed, True
        try:
            yield
        except BaseException:
            self._in_backward = False
            self._entered = ()
            self._open_units = set()
            self._reducer.fail()
            raise
        finally:
            self._bracketed = before
        self._finish_backward(release_sticky=True)

    def _begin_backward(self) -> None:
        self._in_backward = True
        if self._bracketed:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._task_is_over(task))

    def _task_is_over(self, task: int) -> None:
        """A nested backward (reentrant checkpointing) ends before the one around it, if that is known."""
        self._tasks.discard(task)
        if not self._tasks and not self._bracketed:
            self._finish_backward(release_sticky=not self.depth)

    def _before_backward(self, units: Sequence[int]) -> None:
        """Autograd is about to enter a scope."""
        self._begin_backward()
        if not self.evaluating:
            self._need([index for index in units if index in self._units])

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """The first, or the last expected, parameter of a unit has its gradient."""
        if not self._in_backward or not self._bracketed:
            self._begin_backward()
        self._reducer.arrived(gradients)

    def _finish_backward(self, release_sticky: bool) -> None:
        self._in_backward = False
        self._entered = ()
        self._open_units = set()
        self._orders[True].backward_is_over()
        self.backwards += 1
        self._norms.forget()
        self._residency.unwatch()
        self._reducer.finish()
        self._residency.watch(self._reducer.hidden())
        if self.evaluating:
            return
        if release_sticky:
            self._residency.release_all()
        else:
            for index in self._sharded():
                self._residency.release(index)


def in_backward_pass() -> bool:
    """Whether autograd runs this code."""
    return bool(torch._C._current_graph_task_id() != -1)
