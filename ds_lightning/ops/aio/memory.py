"""Memory that direct I/O takes as it is."""

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20


def empty(nbytes: int) -> torch.Tensor:
    """Zeroed bytes at the start of a page, in huge pages where there are any; freed with the last view of it.

    Args:
        nbytes: At least 0.

    Returns:
        uint8 of shape (nbytes,) on the CPU. Its storage has exactly as many bytes.
    """
    return mapped(nbytes)[0]


def mapped(nbytes: int) -> tuple[torch.Tensor, mmap.mmap]:
    """As `empty`, and the mapping that lives as long as the tensor's storage: at least a page, also for no bytes."""
    if nbytes < 0:
        raise ValueError(f"nbytes={nbytes} is negative.")
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, max(nbytes, 1))
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) if nbytes else _nothing()
        return tensor, memory
    # Room to begin at a huge page; what is not touched costs addresses only.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(memoryview(memory)[skipped : skipped + nbytes], dtype=torch.uint8), memory


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
