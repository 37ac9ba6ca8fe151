"""Selective recomputation: results of expensive operations are kept, the cheap ones between them are computed again.

Matrix products and attention take nearly all of the time, but what lies between them (norms, activations, dropout,
masks) much of the memory. After Korthikanti et al. 2022, arXiv:2205.05198, who choose by hand what to compute again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ds_lightning.activation.random_states import RandomStates
from ds_lightning.activation.tree import put_back, take_out, tensors_in

_EXPENSIVE = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("convolution", "_convolution", "_int_mm"),
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@cache
def expensive_operations() -> frozenset[Any]:
    """Matrix products, convolutions and fused attention, as many of them as this torch has."""
    packets = [getattr(torch.ops.aten, name) for name in _EXPENSIVE if hasattr(torch.ops.aten, name)]
    return frozenset(packet.default for packet in packets if "default" in packet.overloads())


def compiled_contexts() -> tuple[Any, Any]:
    """The same choice in the terms of torch's compiler."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(list(expensive_operations()))
    return contexts


class _Result:
    """What one operation gave."""

    __slots__ = ("after", "aliases", "output", "random", "versions")

    def __init__(self, output: Any, random: RandomStates | None, after: int) -> None:
        found: list[torch.Tensor] = []
        self.output = take_out(output, found)
        self.aliases = [_alias(tensor) for tensor in found]
        self.versions = [alias._version for alias in self.aliases]
        self.random = random
        self.after = after

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into it since (an activation in place, `y += x`)."""
        return all(alias._version == version for alias, version in zip(self.aliases, self.versions, strict=True))

    def value(self) -> Any:
        if self.random is not None:
            self.random.put_back()
        return put_back(self.output, [_alias(alias) for alias in self.aliases])


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, without a graph."""
    # A dispatch mode runs below the layer that keeps version counters of views, so it is switched on again.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class KeptResults:
    """Results of expensive operations of one checkpointed call, by operation and in order.

    A result that was changed in place is not used: its operation runs again.

    Args:
        saved: how many tensors autograd has saved in this call by now.
        expensive: the operations.
    """

    def __init__(self, saved: Callable[[], int], expensive: frozenset[Any] | None = None) -> None:
        self._saved = saved
        self._expensive = expensive_operations() if expensive is None else expensive
        self._results: dict[Any, list[_Result | None]] = defaultdict(list)

    def recording(self) -> TorchDispatchMode:
        """To be entered around the forward."""
        return _Recording(self)

    def replaying(self) -> TorchDispatchMode:
        """To be entered around a recomputation."""
        return _Replaying(self)

    def forward_is_over(self) -> None:
        """Drop what no recomputation reaches, because autograd saves nothing behind it."""
        total = self._saved()
        for results in self._results.values():
            for place, result in enumerate(results):
                if result is not None and result.after >= total:
                    results[place] = None

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [
            alias
            for results in self._results.values()
            for result in results
            if result is not None
            for alias in result.aliases
        ]

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and keep its result if it is expensive."""
        output = func(*args, **kwargs)
        if func in self._expensive:
            random = None
            if torch.Tag.nondeterministic_seeded in func.tags:  # a recomputation must draw on from where this ended
                random = RandomStates(tensor.device for tensor in tensors_in(output))
            self._results[func].append(_Result(output, random, self._saved()))
        return output

    def replay(self, func: Any, place: int, args: Any, kwargs: Any) -> Any:
        """The kept result, or the operation's."""
        results = self._results.get(func, [])
        result = results[place] if place < len(results) else None
        return func(*args, **kwargs) if result is None or not result.is_intact else result.value()

    def is_expensive(self, func: Any) -> bool:
        """Whether results of the operation are kept."""
        return func in self._expensive


class _Recording(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.record(func, args, kwargs or {})


class _Replaying(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept
        self._seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._kept.is_expensive(func):
            return func(*args, **(kwargs or {}))
        place = self._seen[func]
        self._seen[func] += 1
        return self._kept.replay(func, place, args, kwargs or {})
