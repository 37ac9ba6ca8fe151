"""Which module is running, in forward, in backward and in what backward computes again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from ds_lightning.profile.operations import gates
from ds_lightning.profile.tree import ModuleProfile
from ds_lightning.zero.hooks import tensors_in


class Phase(Enum):
    """What a module is doing."""

    FORWARD = auto()
    BACKWARD = auto()
    RECOMPUTE = auto()


class ModuleScopes:
    """Follows a model through its forwards and backwards by hooks, and takes the time.

    Backward enters a module with the first gradient of its output and leaves it with the last of its input; a module
    whose input needs none is left when another one is entered.

    Args:
        nodes: the profile of each module.
        root: the model itself, which is where everything happens that no hook claims.
        ignored: classes of modules that count nothing, nor what lies in them.
        synchronize: waits for the device, so that times are those of the work.
        timed: whether to take times at all.

    Attributes:
        paused: nothing counts for a while.
    """

    def __init__(
        self,
        nodes: dict[nn.Module, ModuleProfile],
        root: nn.Module,
        ignored: Collection[type[nn.Module]],
        synchronize: Callable[[], None],
        timed: bool,
    ) -> None:
        self._nodes = nodes
        self._root = root
        self._ignored = {inner for module in nodes if isinstance(module, tuple(ignored)) for inner in module.modules()}
        self._synchronize = synchronize
        self._timed = timed
        self.paused = False
        self._modules = {node: module for module, node in nodes.items()}
        self._handles: list[RemovableHandle] = []
        self._tensors: list[Any] = []
        self._calls: list[tuple[nn.Module, float]] = []  # under way, the innermost last
        self._backward: list[tuple[ModuleProfile, float]] = []  # entered, not left

    @property
    def module(self) -> nn.Module:
        """The one that is running."""
        if self._calls:
            return self._calls[-1][0]
        return self._modules[self._backward[-1][0]] if self._backward else self._root

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        if not _in_backward():
            return Phase.FORWARD
        return Phase.RECOMPUTE if self._calls else Phase.BACKWARD

    def counts(self, module: nn.Module) -> bool:
        """Whether a module's operations count."""
        return not self.paused and module not in self._ignored

    def open(self) -> None:
        """Begin to follow."""
        for module in self._nodes:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Leave no hook behind."""
        self._end_backward()
        for handle in (*self._handles, *self._tensors):
            handle.remove()
        self._handles.clear()
        self._tensors.clear()
        self._calls.clear()

    def _now(self) -> float:
        if not self._timed:
            return 0.0
        self._synchronize()
        return time.perf_counter()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        backward = _in_backward()
        if not backward:
            self._end_backward()
        self._calls.append((module, self._now()))
        if not backward and torch.is_grad_enabled():
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            if inputs:
                node = self._nodes[module]
                self._tensors.append(register_multi_grad_hook(inputs, lambda _: self._leave_backward(node)))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._calls:  # called before the profile began
            return
        _, start = self._calls.pop()
        own = self._nodes[module].own
        extra = gates(module, args, kwargs) if self.counts(module) else 0
        if _in_backward():
            own.recomputed_flops += extra
            return
        own.forward_flops += extra
        own.calls += 1
        own.forward_seconds += self._now() - start
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            node = self._nodes[module]
            self._tensors.append(register_multi_grad_hook(outputs, lambda _: self._enter_backward(node), mode="any"))

    # Backward ---------------------------------------------------------------------------------------------------------

    def _enter_backward(self, node: ModuleProfile) -> None:
        now = self._now()
        entered = [open_node for open_node, _ in self._backward]
        if node in entered:  # another call of it
            entered.clear()
        # A module and its last child have the same output, and the child's hook comes first.
        place = next((k for k, open_node in enumerate(entered) if _within(open_node, node)), None)
        if place is not None:
            self._backward.insert(place, (node, now))
            return
        while self._backward and not _within(node, self._backward[-1][0]):
            self._close_backward(now)
        self._backward.append((node, now))

    def _leave_backward(self, node: ModuleProfile) -> None:
        if all(entered is not node for entered, _ in self._backward):
            return
        now = self._now()
        while self._close_backward(now) is not node:  # what was entered within it is over too
            pass

    def _close_backward(self, now: float) -> ModuleProfile:
        node, start = self._backward.pop()
        node.own.backward_seconds += now - start
        return node

    def _end_backward(self) -> None:
        """A backward is over, if there was one."""
        now = self._now() if self._backward else 0.0
        while self._backward:
            self._close_backward(now)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _within(node: ModuleProfile, outer: ModuleProfile) -> bool:
    return not outer.name or node.name == outer.name or node.name.startswith(outer.name + ".")
