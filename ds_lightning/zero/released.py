"""What a parameter is while its values are not here.

[Note: a released parameter is safe] The tensor keeps its shape and dtype but its storage is empty: reading it would
crash the process. While released, the parameter object's class is a subclass made for its unit, whose
`__torch_function__` answers questions about shape, dtype and identity, and hands everything else to the unit's owner,
who gathers where all ranks are known to run the same code (inside a step), and raises otherwise. Reads from C++ that
bypass it (the backward of an operation whose unit was released too early) find a raised version counter and fail with
autograd's error instead of reading freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_lightning.zero.watch import GRAD_GETTER

Touch = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]

_METADATA_NAMES = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "_version",
    "retains_grad",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_mkldnn",
    "is_nested",
    "is_xla",
    "itemsize",
    "nbytes",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_base",
    "output_nr",
    "name",
    "names",
    "grad_dtype",
)

_METADATA_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "stride",
    "storage_offset",
    "type",
    "get_device",
    "__len__",
    "__hash__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "is_inference",
    "is_conj",
    "is_neg",
)


def _metadata_functions() -> frozenset[Any]:
    functions: set[Any] = set()
    for name in _METADATA_NAMES:
        descriptor = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if name in ("shape", "dtype", "device") and accessor != "__get__":
                continue
            if hasattr(descriptor, accessor):
                functions.add(getattr(descriptor, accessor))
    functions.discard(GRAD_GETTER)  # see [Note: reduced gradients are not in p.grad]
    functions.update(getattr(torch.Tensor, name) for name in _METADATA_METHODS if hasattr(torch.Tensor, name))
    functions.update({torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type})
    functions.update({torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like})
    functions.update({torch.randn_like, torch.result_type, torch.is_same_size})
    return frozenset(functions)


METADATA = _metadata_functions()
"""Functions that never look at values."""


def released_class(touch: Touch) -> type[nn.Parameter]:
    """A parameter class for one unit, whose values are absent.

    Args:
        touch: called as `touch(function, args, kwargs)` when a function wants values; it makes them available and
            returns the function's result, or raises.
    """

    class ReleasedParameter(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            return touch(func, args, kwargs or {})

    return ReleasedParameter
