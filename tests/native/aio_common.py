"""What the tests of file I/O share: the engines that run here, awkward memory, and plain file I/O to compare with."""

import ctypes
import os
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from ds_lightning.errors import NativeOpError
from ds_lightning.ops.aio import AsyncIO

ENGINES = ("io_uring", "libaio", "threads", "python")
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 3 * 4096, (1 << 20) + 4)


@cache
def why_not(engine: str) -> str:
    try:
        AsyncIO(engine=engine).close()
    except NativeOpError as error:
        return str(error)
    return ""


def need(engine: str) -> str:
    """The engine, if it runs here; a test that needs it is skipped otherwise, in its own words."""
    if why_not(engine):
        pytest.skip(why_not(engine))
    return engine


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(values: torch.Tensor, skew: int) -> torch.Tensor:
    """The same values, `skew` bytes past the start of a page."""
    room = AsyncIO.empty(values.nbytes + skew)[skew:]
    room.copy_(values.reshape(-1).view(torch.uint8))
    return room.view(values.dtype).view(values.shape) if skew % values.element_size() == 0 else room


def bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def in_file(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(nbytes)


def held() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def soon_held(expected: tuple[int, int]) -> bool:
    """Whether it comes to hold so many; the kernel shows a thread a little longer than it lives."""
    end = time.monotonic() + 5
    while held() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return held() == expected
