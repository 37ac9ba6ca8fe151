"""Host memory that the kernel never pages out."""

import ctypes
import mmap
import os
import resource
import threading
import warnings
import weakref
from functools import cache

import torch

from ds_lightning.ops.aio import memory


class LockedMemory:
    """Knows which memory of this process it has locked; `locked_memory()` is the one that all handles share."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sizes: dict[int, int] = {}
        self._warned = False

    def new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in locked memory, unlocked and freed with the last view of it.

        Where the limit of locked memory forbids it (ulimit -l), the memory is ordinary, and one warning says so.

        Args:
            numel: Elements, at least 0.
            dtype: Their type.

        Returns:
            Of shape (numel,) on the CPU, at the start of a page.
        """
        tensor, mapping = memory.mapped(numel * dtype.itemsize)
        if tensor.nbytes:
            self._try_to_lock(tensor, mapping)
        return tensor.view(dtype)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of a CPU tensor, maybe a view, lie in memory that `new` has locked."""
        if tensor.device.type != "cpu":
            return False
        first = tensor.data_ptr()
        with self._lock:
            return any(start <= first and first + tensor.nbytes <= start + size for start, size in self._sizes.items())

    def unlock(self, tensor: torch.Tensor) -> bool:
        """Lets the kernel page the memory of a tensor out again; False if `new` has not locked it, all of it."""
        start = tensor.data_ptr()
        with self._lock:
            size = self._sizes.get(start)
            if size is None or tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() != size:
                return False
            del self._sizes[start]
        ctypes.CDLL(None).munlock(ctypes.c_void_p(start), ctypes.c_size_t(size))
        return True

    def _try_to_lock(self, tensor: torch.Tensor, mapping: mmap.mmap) -> None:
        start, size = tensor.data_ptr(), tensor.nbytes
        try:
            mlock = ctypes.CDLL(None, use_errno=True).mlock
        except AttributeError:
            self._warn(size, "this system has no mlock")
            return
        if mlock(ctypes.c_void_p(start), ctypes.c_size_t(size)) != 0:
            self._warn(size, os.strerror(ctypes.get_errno()))
            return
        with self._lock:
            self._sizes[start] = size
        # The end of the mapping unlocks it; its address may then be somebody else's.
        weakref.finalize(mapping, self._sizes.pop, start, None).atexit = False

    def _warn(self, size: int, why: str) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        most = "has no limit" if limit == resource.RLIM_INFINITY else f"is limited to {limit} bytes per process"
        warnings.warn(
            f"{size} bytes could not be page-locked: {why}. Locked memory {most} here (ulimit -l). The memory is "
            "ordinary instead: results are the same, and direct I/O is as fast from it.",
            stacklevel=5,
        )


@cache
def locked_memory() -> LockedMemory:
    """The one of this process."""
    return LockedMemory()
