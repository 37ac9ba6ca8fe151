"""An open file that transfers go to and come from."""

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ds_lightning.errors import FileIOError
from ds_lightning.ops.aio.direct import open_direct

if TYPE_CHECKING:
    from ds_lightning.ops.aio.transfer import Transfer

Mode = Literal["r", "r+", "w+"]
_FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC}
_ONLY_FOR_ITS_OWNER = 0o600


class File:
    """Owns the descriptors of one file: one that takes any bytes and, where possible, one past the page cache.

    `AsyncIO.open` makes it. It may be used by several threads and by several `AsyncIO`s. Closing it waits for the
    transfers that use it. Use it as a context manager, or close it.

    Args:
        path: The file. Its folder must exist.
        mode: "r" reads, "r+" reads and writes what exists, "w+" creates or empties, then reads and writes.
        nbytes: The size: reserved on the disk for "w+", the least that must be there for "r" and "r+".
        direct: Whether to go past the page cache (O_DIRECT) where file system and alignment allow.

    Attributes:
        path: The file.
        fd: Its descriptor, which takes any offset, length and address.
        direct: Whether whole pages go past the page cache.
        why_not_direct: Why they do not, in words; empty if they do.
        alignment: Bytes. What lies at multiples of it in memory and in the file needs no copy.

    Raises:
        FileIOError: It cannot be opened, is too short, or does not fit on the disk.
    """

    def __init__(
        self, path: str | os.PathLike[str], mode: Mode = "r", nbytes: int | None = None, direct: bool = True
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}.")
        self.path = Path(path)
        self.mode = mode
        self._lock = threading.RLock()
        self._in_use: set[Transfer] = set()
        try:
            self.fd = os.open(self.path, _FLAGS[mode] | os.O_CLOEXEC, _ONLY_FOR_ITS_OWNER)
        except OSError as error:
            raise _cannot_open(self.path, mode, error) from error
        self._direct_fd = -1
        try:
            if nbytes is not None and mode == "w+":
                self.allocate(nbytes)
            elif nbytes is not None and self.nbytes < nbytes:
                raise FileIOError(
                    f"{self.path} was opened as a file of {nbytes} bytes, but it has {self.nbytes}: it was cut short, "
                    "or it belongs to something else. Write it again.",
                    path=self.path,
                    wanted=nbytes,
                    found=self.nbytes,
                )
            self.why_not_direct = "it was not asked for"
            self.alignment = self.memory_alignment = os.sysconf("SC_PAGE_SIZE")
            if direct:
                found = open_direct(self.path, self.fd, os.O_CLOEXEC | (_FLAGS[mode] & ~(os.O_CREAT | os.O_TRUNC)))
                self._direct_fd, self.why_not_direct, self.alignment, self.memory_alignment = found
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether whole pages go past the page cache."""
        return self._direct_fd >= 0

    @property
    def direct_fd(self) -> int:
        """The descriptor past the page cache, which takes aligned requests only; -1 where there is none."""
        return self._direct_fd

    @property
    def nbytes(self) -> int:
        """The size of the file now."""
        return os.fstat(self.fd).st_size

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.fd < 0

    def allocate(self, nbytes: int) -> None:
        """Makes the file at least `nbytes` long, with all of it reserved on the disk.

        Raises:
            FileIOError: The disk has too little room, or the file may not grow that far. The file is as before.
        """
        before = self.nbytes
        if nbytes <= 0:
            return
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            os.ftruncate(self.fd, before)
            raise FileIOError(
                f"{self.path} needs {nbytes} bytes ({max(nbytes - before, 0)} more than it has), but they cannot be "
                f"reserved: {os.strerror(error.errno or 0)}. Free on this file system: {free_bytes(self.fd)} bytes. "
                "Make room, or choose a folder on a larger disk.",
                code=error.errno,
                path=self.path,
                wanted=nbytes,
                found=free_bytes(self.fd),
            ) from error

    def close(self) -> None:
        """Waits until no transfer uses the file and closes it; may be called again."""
        while True:
            with self._lock:
                transfers = list(self._in_use)
                if not transfers:
                    descriptors = (self._direct_fd, self.fd)
                    self._direct_fd = self.fd = -1
                    break
            for transfer in transfers:
                transfer.join()
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def hold(self, transfer: "Transfer") -> None:
        """The file stays open until `transfer` is done."""
        with self._lock:
            if self.fd < 0:
                raise ValueError(f"{self.path} was closed; open it again.")
            self._in_use.add(transfer)

    def release(self, transfer: "Transfer") -> None:
        """`transfer` is done."""
        with self._lock:
            self._in_use.discard(transfer)

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Whoever moves bytes holds the file, so nothing uses it any more.
        for descriptor in (getattr(self, "_direct_fd", -1), getattr(self, "fd", -1)):
            if descriptor >= 0:
                os.close(descriptor)

    def __repr__(self) -> str:
        how = "closed" if self.closed else "direct" if self.direct else "cached"
        return f"File({str(self.path)!r}, {self.mode!r}, {how})"


def free_bytes(fd: int) -> int:
    """What an ordinary user may still write to the file system of an open file."""
    told = os.fstatvfs(fd)
    return told.f_bavail * told.f_frsize


def _cannot_open(path: Path, mode: str, error: OSError) -> FileIOError:
    verb = {"r": "reading", "r+": "reading and writing", "w+": "writing"}[mode]
    fix = {
        errno.ENOENT: f"Its folder does not exist: create {path.parent}."
        if mode == "w+"
        else "There is no such file: was it written, and is the path right?",
        errno.EACCES: "Change the permissions, or choose another folder.",
        errno.EPERM: "Change the permissions, or choose another folder.",
        errno.EROFS: "The file system is read-only: choose another folder.",
        errno.EISDIR: "It is a folder: name a file.",
        errno.EMFILE: "Too many files are open: close some, or raise the limit (ulimit -n).",
        errno.ENOSPC: "Make room, or choose a folder on a larger disk.",
    }.get(error.errno or 0, "Check the path.")
    return FileIOError(
        f"{path} cannot be opened for {verb}: {os.strerror(error.errno or 0)}. {fix}", code=error.errno, path=path
    )
