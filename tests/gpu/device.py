"""Tensors on the GPU that begin where a test wants them to, and the module under test."""

from contextlib import contextmanager
from types import ModuleType

import torch

from ds_lightning.ops import native

DEVICE = "cuda"


def module() -> ModuleType:
    """Without it there is nothing to test: an error on a machine with a GPU."""
    return native.load("_cuda", "any")


def moved(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The same values on the GPU, `offset` elements after an aligned address and with guards around."""
    raw = torch.full((tensor.numel() + offset + 16,), 7, dtype=tensor.dtype, device=DEVICE)
    inside = raw[offset : offset + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def assert_guards_are_untouched(tensor: torch.Tensor) -> None:
    raw = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    begin = tensor.storage_offset()
    assert raw[:begin].eq(7).all()
    assert raw[begin + tensor.numel() :].eq(7).all()


@contextmanager
def busy_stream():
    """A stream whose work so far takes longer than it takes to launch what follows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def has_free(gibibytes: float) -> bool:
    return torch.cuda.mem_get_info()[0] > gibibytes * 2**30
