"""Checkpoints the blocks of a model, which knows nothing of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_lightning.activation.module_buffers import ModuleBuffers
from ds_lightning.activation.options import ActivationOptions
from ds_lightning.activation.region import Region
from ds_lightning.activation.selective import compiled_contexts


class _Forward:
    """Stands for a module's `forward` on the instance, so that hooks on the module run once and stay outside.

    [Note: why not hooks]
    A recomputation from hooks would call the module again, with all its other hooks: one that changes inputs would
    change them twice. In this way the units' own hooks stay around the checkpoint: parameters are gathered before the
    forward and before the block's backward, and released behind them.
    """

    def __init__(
        self, module: nn.Module, name: str, how: ActivationOptions, before_recomputation: Callable[[], None] | None
    ) -> None:
        self._module = ref(module)
        self._name = name
        self._how = how
        self._buffers = ModuleBuffers(module)
        self._before_recomputation = before_recomputation
        self._own = module.__dict__.get("forward")  # someone else may stand there already

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        module, original = self._original()
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        region = Region(original, self._how, self._name, module, self._buffers, self._before_recomputation)
        return region.forward(args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In terms that torch's compiler understands; it plans the recomputation itself."""
        module, own = self._module(), self._own
        assert module is not None
        forward = type(module).forward

        def original(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if own is not None else forward(module, *args, **kwargs)

        if self._how.selective:
            return torch_checkpoint(original, *args, use_reentrant=False, context_fn=compiled_contexts, **kwargs)
        return torch_checkpoint(original, *args, use_reentrant=False, **kwargs)

    def _original(self) -> tuple[nn.Module, Callable[..., Any]]:
        module = self._module()
        assert module is not None
        return module, self._own or type(module).forward.__get__(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._original()[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module is an ordinary one."""
        twin = memo[id(self._module())]
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return type(twin).forward.__get__(twin)

    def __reduce__(self) -> Any:
        """So is one that is pickled."""
        if self._own is not None:
            return _itself, (self._own,)
        return getattr, (self._module(), "forward")

    def remove(self) -> None:
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._own is not None:
            module.__dict__["forward"] = self._own
        else:
            del module.__dict__["forward"]


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class CheckpointedBlocks:
    """Modules whose calls are checkpointed, until `remove`.

    Names, parameters, classes and hooks of the model stay as they are.

    Args:
        modules: by name; see `worth_checkpointing`.
        how: what is kept, and where.
        before_recomputation: called with the name of a module before its forward is computed again.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        how: ActivationOptions,
        before_recomputation: Callable[[str], None] | None = None,
    ) -> None:
        self.how = how
        self.names = tuple(modules)
        self._forwards: list[_Forward] = []
        for name, module in modules.items():
            before = None if before_recomputation is None else partial(before_recomputation, name)
            forward = _Forward(module, name, how, before)
            module.__dict__["forward"] = forward
            self._forwards.append(forward)

    def remove(self) -> None:
        """Leave the modules as they were. Graphs that exist keep their checkpoints."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def is_checkpointed(function: Any) -> bool:
    """Whether this is a module, or a method of one, that checkpoints itself."""
    if isinstance(function, _Forward):
        return True
    module = getattr(function, "__self__", function)
    return isinstance(module, nn.Module) and isinstance(module.__dict__.get("forward"), _Forward)


def worth_checkpointing(modules: Mapping[str, nn.Module], every: int = 1) -> dict[str, nn.Module]:
    """The blocks among the modules that are gathered as one, every `every`-th of them.

    Single layers of torch (an embedding, a head) save little more than their input, so nothing would be gained.
    """
    blocks = {name: module for name, module in modules.items() if not _is_single_layer(module)}
    return {name: module for place, (name, module) in enumerate(blocks.items()) if place % every == 0}


def _is_single_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase) or next(module.children(), None) is not None:
        return False
    return type(module).__module__.startswith("torch.nn.")
