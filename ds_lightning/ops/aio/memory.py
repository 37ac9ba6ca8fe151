"""Memory that direct I/O takes as it is."""

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
    if nbytes < 0:
        raise ValueError(f"nbytes={nbytes} is negative.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8, count=nbytes)
    # Room to begin at a huge page; what is not touched costs addresses only.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(memoryview(memory)[skipped : skipped + nbytes], dtype=torch.uint8)
