"""Rotary positions (arXiv:2104.09864): local patterns are learnt in few steps."""

import torch
from torch import Tensor


def rotation(time: int, size: int, device: torch.device) -> Tensor:
    """Return cosines and sines, (2, time, size // 2), for heads of `size` elements."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(time, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of elements of (..., time, size) by the angle of its position."""
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
