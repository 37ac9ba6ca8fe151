"""What one operation of torch costs, from the shapes it is called with.

[Note: what is counted] A multiplication with its addition is one MAC and two FLOPs. Matrix products, convolutions and
attention count 2 FLOPs per MAC, by the formulas of `torch.utils.flop_counter`; the bias of a linear layer is not
counted, that of a convolution is. Activations, softmax and pooling count one FLOP per element of their input,
normalization 5 (4 without affine parameters; batch normalization 2 and 1 in evaluation), upsampling, additions and
multiplications one per element of their result. Everything else (copies, indexing, dropout, embeddings, comparisons)
counts nothing. The backward of an element-wise operation counts what its forward does, that of a normalization twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Cost(NamedTuple):
    """What an operation costs."""

    flops: int
    macs: int = 0


Formula = Callable[..., Cost]
"""Called with the module that runs, the result, and the arguments of the operation."""

_ELEMENTWISE = (
    *("relu", "relu_", "_prelu_kernel", "elu", "elu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_"),
    *("silu", "silu_", "gelu", "gelu_", "_softmax", "_log_softmax"),
    *("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d"),
)
_ELEMENTWISE_BACKWARD = (
    *("threshold_backward", "_prelu_kernel_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward"),
    *("silu_backward", "gelu_backward", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("avg_pool2d_backward", "avg_pool3d_backward"),
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
)
_PER_RESULT = (
    *("add", "add_", "mul", "mul_"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_BATCH_NORMS = (
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
)
_NORMS = ("native_layer_norm", "native_group_norm", "_fused_rms_norm")
_NORMS_BACKWARD = (
    *("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward", "native_layer_norm_backward"),
    *("native_group_norm_backward", "_fused_rms_norm_backward"),
)
_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def _present(names: tuple[str, ...]) -> Iterator[Any]:
    """Those of the operations that this torch has."""
    for name in names:
        found = getattr(aten, name, None)
        if found is not None:
            yield found


def _per_input(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    return Cost(args[0].numel())


def _per_input_backward(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    return Cost(max(tensor.numel() for tensor in args[:2] if isinstance(tensor, torch.Tensor)))


def _per_result(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    return Cost(0 if isinstance(module, _RECURRENT) else out.numel())


def _mean(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    """Adaptive pooling to a single element is a mean."""
    return Cost(args[0].numel() if isinstance(module, _POOLS) else 0)


def _batch_norm(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    training = next((value for value in args[3:] if isinstance(value, bool)), False)
    return Cost(args[0].numel() * _batch_norm_flops(training, affine=args[1] is not None))


def _batch_norm_training(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    return Cost(args[0].numel() * _batch_norm_flops(training=True, affine=args[1] is not None))


def _batch_norm_flops(training: bool, affine: bool) -> int:
    """Per element."""
    return (4 if training else 1) + int(affine)


def _norm(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    affine = any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))
    return Cost(args[0].numel() * (5 if affine else 4))


def _norm_backward(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    return Cost(args[0].numel() * 10)


def _convolution(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    products = int(flop_registry[aten.convolution](*args, out_val=out, **kwargs))
    return Cost(products + (out.numel() if args[2] is not None else 0), products // 2)


def _cpu_attention(module: nn.Module, out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Cost:
    """`[batch, heads, tokens, width]` each: two products."""
    macs = query.shape[:-2].numel() * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return Cost(2 * macs, macs)


def _cpu_attention_backward(
    module: nn.Module, out: Any, gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Cost:
    """Five products: the scores once more, and the gradients of values, probabilities, queries and keys."""
    width, depth = query.shape[-1], value.shape[-1]
    macs = query.shape[:-2].numel() * query.shape[-2] * key.shape[-2] * (3 * width + 2 * depth)
    return Cost(2 * macs, macs)


def _recurrent_products(weights: list[torch.Tensor], steps: int) -> int:
    return steps * sum(weight.numel() for weight in weights if weight.ndim == 2)


def _mkldnn_rnn(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    macs = _recurrent_products(list(args[1:3]), args[0].shape[0] * args[0].shape[1])
    return Cost(2 * macs, macs)


def _mkldnn_rnn_backward(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    macs = 2 * _recurrent_products(list(args[1:3]), args[0].shape[0] * args[0].shape[1])
    return Cost(2 * macs, macs)


def _cudnn_rnn(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    given = args[0]  # `[steps, batch, width]`, or packed `[rows, width]`
    macs = _recurrent_products(list(args[1]), prod(given.shape[:-1]))
    return Cost(2 * macs, macs)


def _cudnn_rnn_backward(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
    macs = 2 * _recurrent_products(list(args[1]), prod(args[0].shape[:-1]))
    return Cost(2 * macs, macs)


def _of_torch(known: Callable[..., Any]) -> Formula:
    """One of torch's own formulas: all of them are products."""

    def formula(module: nn.Module, out: Any, *args: Any, **kwargs: Any) -> Cost:
        flops = int(known(*args, out_val=out, **kwargs))
        return Cost(flops, flops // 2)

    return formula


@cache
def formulas() -> dict[Any, Formula]:
    """The formula of every operation that counts."""
    found: dict[Any, Formula] = {operation: _of_torch(known) for operation, known in flop_registry.items()}
    for names, formula in (
        (_ELEMENTWISE, _per_input),
        (_ELEMENTWISE_BACKWARD, _per_input_backward),
        (_PER_RESULT, _per_result),
        (_BATCH_NORMS, _batch_norm),
        (("_batch_norm_with_update",), _batch_norm_training),
        (_NORMS, _norm),
        (_NORMS_BACKWARD, _norm_backward),
        (("mean",), _mean),
        (("convolution", "_convolution", "convolution_overrideable"), _convolution),
        (("_scaled_dot_product_flash_attention_for_cpu",), _cpu_attention),
        (("_scaled_dot_product_flash_attention_for_cpu_backward",), _cpu_attention_backward),
        (("mkldnn_rnn_layer",), _mkldnn_rnn),
        (("mkldnn_rnn_layer_backward",), _mkldnn_rnn_backward),
        (("_cudnn_rnn",), _cudnn_rnn),
        (("_cudnn_rnn_backward",), _cudnn_rnn_backward),
    ):
        for operation in _present(names):
            found[operation] = formula
            # Named by themselves too, so that torch's counter does not take them apart (upsampling into index sums).
            found.update({getattr(operation, overload): formula for overload in operation.overloads()})
    return found


def gates(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """FLOPs of the element-wise work in a recurrent layer: 10 per hidden element of an LSTM, 7 of a GRU, 1 else.

    Libraries fuse it, each in another way; so it is counted here, once, and the same everywhere. 0 for other modules.
    """
    if not isinstance(module, _RECURRENT):
        return 0
    given = args[0] if args else kwargs["input"]
    rows = prod((given.data if isinstance(given, nn.utils.rnn.PackedSequence) else given).shape[:-1])
    if isinstance(module, nn.RNNBase):
        per_element = {"LSTM": 10, "GRU": 7}.get(module.mode, 1)
        layers = module.num_layers * (2 if module.bidirectional else 1)
    else:
        per_element = 10 if isinstance(module, nn.LSTMCell) else 7 if isinstance(module, nn.GRUCell) else 1
        layers = 1
    assert isinstance(module.hidden_size, int)
    return rows * layers * per_element * module.hidden_size
