"""Windows of a byte text: random ones to train on, fixed ones to measure with."""

import random

from torch import Tensor
from torch.utils.data import Dataset

from ds_lightning.errors import ConfigError


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (tokens, next tokens) of `block_size` bytes.

    An item depends on its index and the seed only, never on the order of reading: any sampler, any
    number of ranks or workers and any restart sees the same window under the same index.

    Args:
        text: One-dimensional uint8 tensor.
        block_size: Bytes per window.
        seed: Draw each window's place from this seed; None lays the windows head to tail.
        count: Number of windows; None means as many as fit without overlap.
    """

    def __init__(self, text: Tensor, block_size: int, seed: int | None = None, count: int | None = None) -> None:
        self._places = len(text) - block_size  # a window needs one byte more, for the last target
        if self._places < 1:
            raise ConfigError(f"block_size={block_size} needs more than {len(text)} bytes of text. Use a smaller one.")
        fitting = (len(text) - 1) // block_size
        self._text = text
        self._block_size = block_size
        self._seed = seed
        self._count = fitting if count is None else count if seed is not None else min(count, fitting)
        # Fixed windows are spread evenly, so that a few of them still stand for the whole text.
        self._stride = max(block_size, (len(text) - 1) // max(1, self._count))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._seed is None:
            start = index * self._stride
        else:
            start = random.Random(self._seed * 1_000_003 + index).randrange(self._places)
        window = self._text[start : start + self._block_size + 1].long()
        return window[:-1], window[1:]
