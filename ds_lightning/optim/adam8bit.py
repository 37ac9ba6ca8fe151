"""Adam and AdamW with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError
from ds_lightning.offload.stored import Stored, Values, present
from ds_lightning.ops.adam8bit import LARGEST_BLOCK, adam8bit
from ds_lightning.ops.blocks import Blocks, dequantize_blocks, quantize_blocks
from ds_lightning.optim.adam import Decoupled, checked_betas, numbers_of_step
from ds_lightning.optim.native import NativeOptimizer, Preparation, Slices, check_positive

BLOCK_SIZE = 256
_MOMENTS = ("exp_avg", "exp_avg_sq")


class MomentCodec:
    """Moments of 8 bits: "exp_avg" (int8) and "exp_avg_sq" (uint8), with "..._scale" each, and "blocks"."""

    def block_size(self, group: Mapping[str, Any]) -> int:
        """Elements of a block."""
        return int(group["block_size"])

    def decoded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with moments that are dequantized when they are read; see `StateCodec`."""
        blocks: Blocks | None = state.get("blocks")
        if blocks is None:
            return dict(state)
        plain = {key: value for key, value in state.items() if key != "blocks" and not key.endswith("_scale")}
        for name in _MOMENTS:
            read = partial(_read, state[name].view(-1), state[f"{name}_scale"], blocks)
            plain[name] = Stored(torch.float32, blocks.numel, read)
        return plain

    def encoded(self, state: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
        """The state with quantized moments; see `StateCodec`."""
        if not all(name in state for name in _MOMENTS):
            return dict(state)
        kept = {key: value for key, value in state.items() if key not in _MOMENTS}
        for name in _MOMENTS:
            value: Values = state[name]
            with torch.inference_mode(False):
                codes, scales = quantize_blocks(present(value).reshape(-1), blocks, signed=name == "exp_avg")
            kept[name], kept[f"{name}_scale"] = codes, scales
        return {**kept, "blocks": blocks}


class Adam8bit(NativeOptimizer):
    """`ds_lightning.optim.Adam` whose moments take 2.03 bytes per parameter instead of 8 (arXiv:2110.02861).

    Moments are quantized in blocks by the dynamic map of `ds_lightning.ops.blocks`; a step dequantizes a block, does
    what Adam does in fp32, and quantizes it again, in one pass over memory. Every parameter begins with a block of its
    own, also where parameters are stepped on together, so that numbers of different magnitudes do not share a scale.
    That is why small parameters need no exception here; keep one with rare large gradients (an embedding) in fp32 by
    giving it to another optimizer.

    `state_dict()` and checkpoints hold the moments in fp32 and torch's format: they load into `torch.optim.Adam`, and
    its states load here. Loading quantizes; what was saved by this class is quantized to the same bits.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        bias_correction: whether to correct the moments for their start at zero.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        adam_w_mode: whether weight decay is decoupled, as in AdamW, or added to the gradient.
        weight_decay: factor of the weight decay.
        block_size: elements that share a scale: 256, or 2048 as in the paper. States keep the size with which they were
            made.
        set_grad_none: only True, `zero_grad()`'s own default.
        torch_only: switches of `torch.optim.Adam`; on, they are refused.

    Raises:
        ConfigError: for a switch that only `torch.optim.Adam` has, or another block size.
        ValueError: for hyper-parameters out of range.
    """

    moments = _MOMENTS
    codec = MomentCodec()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        block_size: int = BLOCK_SIZE,
        set_grad_none: bool = True,
        **torch_only: Any,
    ) -> None:
        if not set_grad_none:
            raise ConfigError("set_grad_none=False is not supported; call zero_grad(set_to_none=False) instead.")
        check_positive(lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": checked_betas(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": adam_w_mode,
            "block_size": block_size,
        }
        super().__init__(params, defaults, torch_only)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: for a block size that is no power of two from 8 to 4096.
        """
        size = param_group.get("block_size", self.defaults["block_size"])
        if not (isinstance(size, int) and 8 <= size <= LARGEST_BLOCK and size & (size - 1) == 0):
            raise ConfigError(
                f"block_size={size!r} is no power of two from 8 to {LARGEST_BLOCK}; usual are 256 and 2048."
            )
        super().add_param_group(param_group)

    def _step(self, group: dict[str, Any], slices: Slices, grad_scale: float) -> None:
        for count, counted in self._counts(slices).items():
            for part in self._by_size(group, counted):
                states = part.states
                adam8bit(
                    part.params,
                    part.grads,
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [state["exp_avg_scale"] for state in states],
                    [state["exp_avg_sq_scale"] for state in states],
                    [state["blocks"] for state in states],
                    part.copies,
                    **numbers_of_step(group, count),
                    grad_scale=grad_scale,
                )

    def _slices(self, group: Mapping[str, Any], preparation: Preparation) -> Slices:
        slices = super()._slices(group, preparation)
        for param, state in zip(slices.params, slices.states, strict=True):
            if "blocks" not in state:
                blocks = preparation.blocks.get(param) or Blocks.whole(param.numel(), self.codec.block_size(group))
                state.update(_zeros(param, blocks) | self.codec.encoded(state, blocks))
        return slices

    def _by_size(self, group: Mapping[str, Any], slices: Slices) -> list[Slices]:
        """The slices by the size of their blocks; as a rule all have one."""
        sizes = [state["blocks"].size for state in slices.states]
        if len(set(sizes)) == 1:
            return [slices]
        return [slices.take([k for k, size in enumerate(sizes) if size == each]) for each in sorted(set(sizes))]

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of `torch.optim.Adam`: moments are new fp32 tensors."""
        found = super().state_dict()
        shapes = _shapes(self.param_groups, found["param_groups"])
        found["state"] = {number: _plain(self.codec, entry, shapes[number]) for number, entry in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of `torch.optim.Adam` and `AdamW`.

        Raises:
            ConfigError: for groups that ask for what only `torch.optim` has.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if state and "blocks" not in state:
                    blocks = Blocks.whole(param.numel(), self.codec.block_size(group))
                    self.state[param] = self.codec.encoded(state, blocks)


class AdamW8bit(Decoupled, Adam8bit):
    """`Adam8bit` with decoupled weight decay, whatever else is asked for; its default decay is that of torch, 0.01."""


def _read(codes: Tensor, scales: Tensor, blocks: Blocks, start: int, stop: int) -> Tensor:
    return dequantize_blocks(codes[start:stop], scales, blocks, start, stop).cpu()


def _zeros(param: Tensor, blocks: Blocks) -> dict[str, Any]:
    """What a parameter begins with."""

    def zeros(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=param.device)

    with torch.inference_mode(False):
        return {
            "exp_avg": zeros(param.numel(), torch.int8),
            "exp_avg_sq": zeros(param.numel(), torch.uint8),
            "exp_avg_scale": zeros(blocks.count, torch.float32),
            "exp_avg_sq_scale": zeros(blocks.count, torch.float32),
            "blocks": blocks,
        }


def _shapes(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
    """The parameters, by the numbers of a state dict."""
    return {
        number: param
        for group, numbers in zip(groups, saved, strict=True)
        for number, param in zip(numbers["params"], group["params"], strict=True)
    }


def _plain(codec: MomentCodec, entry: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    return {
        key: value.read().to(param.device).view(param.shape) if isinstance(value, Stored) else value
        for key, value in codec.decoded(entry).items()
    }
