"""What `p.grad` answers when the gradient has gone to its shard.

[Note: reduced gradients are not in p.grad] Once reduced, a gradient lives in its shard and `p.grad` is None: code that
goes through `p.grad` (`torch.nn.utils.clip_grad_norm_`, a logger) would silently do nothing. From the end of backward
until the gradients are cleared, or the next step begins, the parameters therefore have a class that refuses this one
question and passes everything else on. Code of torch and Lightning that only looks whether there is something to clear
or to compile is answered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_lightning.errors import ReleasedParameterError

GRAD_GETTER: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
"""What `__torch_function__` sees of `p.grad`."""


_FRAMEWORK = ("torch.", "lightning.", "ds_lightning.")
_USES_GRADIENTS = ("torch.nn.utils", "lightning.pytorch.utilities.grads")


def check_gradient(gradient: torch.Tensor | None, depth: int) -> torch.Tensor | None:
    """Answer `p.grad` of a parameter whose gradient was reduced.

    Args:
        gradient: what it holds.
        depth: frames between here and whoever asked.

    Raises:
        ReleasedParameterError: when it holds nothing and a user asked.
    """
    if gradient is not None:
        return gradient
    caller = sys._getframe(depth)
    name = str(caller.f_globals.get("__name__", ""))
    curious = name.startswith(_FRAMEWORK) and not name.startswith(_USES_GRADIENTS)
    if curious or caller.f_code.co_name.endswith("zero_grad"):
        return None
    raise ReleasedParameterError(
        f"{name}.{caller.f_code.co_name} reads the gradient of a parameter, which was reduced and is spread over the "
        "ranks as shards. Use self.clip_gradients(optimizer, gradient_clip_val=...) to clip, "
        "ds_lightning.grad_norms(module) to log norms, and ds_lightning.full_grad(parameter) for the whole averaged "
        "gradient; call them on every rank."
    )


class ReducedParameter(nn.Parameter):
    """A parameter whose gradient was reduced."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Refuse to pretend that there is no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return check_gradient(result, 2) if func == GRAD_GETTER else result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is an ordinary parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied
