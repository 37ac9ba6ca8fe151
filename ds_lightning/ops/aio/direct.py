"""Whether a file can be read and written past the page cache, and how it must be aligned for that."""

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")

# <linux/stat.h>: of struct statx, 256 bytes, only these three words matter.
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_STATX_BYTES, _MASK, _DIO_MEM_ALIGN, _DIO_OFFSET_ALIGN = 256, 0, 152, 156


class Direct(NamedTuple):
    """A second descriptor of a file that goes past the page cache, or why there is none."""

    fd: int
    """-1 where there is none."""
    why_not: str
    offset_alignment: int = _PAGE
    """Of offsets and lengths; at least a page, so that no page is both cached and not."""
    memory_alignment: int = _PAGE


def open_direct(path: Path, fd: int, flags: int) -> Direct:
    """Opens the file of `fd` once more with O_DIRECT; never raises for want of it."""
    kind = file_system(fd)
    if not hasattr(os, "O_DIRECT"):
        return Direct(-1, "this system has no O_DIRECT")
    if kind in _IN_MEMORY:
        return Direct(-1, f"a {kind} keeps its files in memory anyway")
    told = _told_alignment(fd)
    if told == (0, 0):
        return Direct(-1, f"the file system ({kind}) takes no direct I/O for this file")
    try:
        # By descriptor, so that it is the same file whatever becomes of its name.
        direct_fd = os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
    except OSError:
        try:
            direct_fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            return Direct(-1, f"the file system ({kind}) refuses O_DIRECT: {os.strerror(error.errno or 0)}")
    if told is None:
        return Direct(direct_fd, "")
    memory, offset = told
    return Direct(direct_fd, "", max(offset, _PAGE), max(memory, 1))


def file_system(fd: int) -> str:
    """The type of the file system of an open file, as mount tells it; "unknown" where that is not known."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"


def _told_alignment(fd: int) -> tuple[int, int] | None:
    """Alignment of memory and of offsets as statx tells it, zeros for "never"; None where it is not told."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None

    def word(at: int) -> int:
        return ctypes.c_uint32.from_buffer(answer, at).value

    return (word(_DIO_MEM_ALIGN), word(_DIO_OFFSET_ALIGN)) if word(_MASK) & _STATX_DIOALIGN else None
