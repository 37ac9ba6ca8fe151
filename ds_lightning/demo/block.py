"""The repeated part of the demo model: one pre-norm transformer block."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lightning.demo.rotary import rotate


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and added on.

    Args:
        width: Size of the residual stream.
        heads: Number of attention heads; divides `width`.
        dropout: Probability of dropping an element, in attention and on both branches.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; `rotation` comes from `rotary.rotation`."""
        x = x + self._drop(self.attention_out(self._attend(self.norm_attention(x), rotation)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)), approximate="tanh")))

    def _attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, rotation), rotate(key, rotation)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    @torch.no_grad()
    def reset_parameters(self, std: float, residual_std: float) -> None:
        """Initialise as GPT-2 does: layers that write into the residual stream start smaller."""
        for linear in (self.qkv, self.mlp_in):
            nn.init.normal_(linear.weight, std=std)
        for linear in (self.attention_out, self.mlp_out):
            nn.init.normal_(linear.weight, std=residual_std)
        for linear in (self.qkv, self.mlp_in, self.attention_out, self.mlp_out):
            nn.init.zeros_(linear.bias)
