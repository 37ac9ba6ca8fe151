"""One tensor on its way to or from a file."""

import errno
import os
import threading
from collections.abc import Callable

import torch

from ds_lightning.errors import FileIOError
from ds_lightning.ops.aio.file import File, free_bytes
from ds_lightning.ops.aio.request import Engine, Failure, Request, Ticket


class Transfer:
    """A read or a write under way; `AsyncIO.read` and `AsyncIO.write` make it.

    It keeps its memory alive and its file open until it is done. It may be waited for by several threads.

    Attributes:
        file: The other end.
        offset: Where in the file, in bytes.
        nbytes: How many bytes move.
        is_write: Whether they go to the file.
    """

    def __init__(self, memory: torch.Tensor, file: File, offset: int, is_write: bool) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = memory.nbytes
        self.is_write = is_write
        self.was_waited_for = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # collecting garbage may come back here
        self._memory: torch.Tensor | None = memory
        self._finish: Callable[[], None] | None = None
        self._ticket: Ticket | None = None
        self._error: FileIOError | None = None

    def start(self, engine: Engine, finish: Callable[[], None] | None = None) -> None:
        """Hands the bytes to an engine; `finish` runs once, when all of them were moved."""
        # Under the lock, so that a file closed by another thread meanwhile waits for the ticket.
        with self._lock:
            assert self._memory is not None, "a transfer starts once"
            try:
                self.file.hold(self)
                self._ticket = engine.submit(
                    Request(
                        self.is_write,
                        self._memory.data_ptr(),
                        self.nbytes,
                        self.offset,
                        self.file.fd,
                        self.file.direct_fd,
                        self.file.alignment,
                        self.file.memory_alignment,
                    )
                )
            except BaseException:
                self._memory = None
                self.file.release(self)
                raise
            self._finish = finish

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, without blocking."""
        return self._is_over() or (self._ticket is not None and self._ticket.done)

    def wait(self) -> None:
        """Blocks until all bytes are moved; may be called again, and then says the same.

        Raises:
            FileIOError: Not all bytes were moved; how many were is not defined.
        """
        self.join()
        self.was_waited_for = True
        if self._error is not None:
            raise self._error.with_traceback(None)

    @property
    def error(self) -> FileIOError | None:
        """What `wait` raises; None before it is done."""
        return self._error

    def join(self) -> None:
        """Blocks until no byte is under way, and lets go of memory and file; never raises for lost bytes."""
        if self._is_over():
            return
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"The transfer of {self.file.path} began in process {self._pid}, which forked this one: only that "
                "process can wait for it."
            )
        with self._lock:
            ticket = self._ticket
        assert ticket is not None, "only what was started is waited for"
        failure = ticket.wait()
        with self._lock:
            if self._is_over():  # another thread was faster
                return
            try:
                if failure is not None:
                    self._error = self._explained(failure)
                elif self._finish is not None:
                    self._finish()
            finally:
                self._memory = self._finish = None
                self.file.release(self)

    def _is_over(self) -> bool:
        return self._memory is None

    def _explained(self, failure: Failure) -> FileIOError:
        verb = "Writing" if self.is_write else "Reading"
        what = f"{verb} {self.nbytes} bytes at offset {self.offset} of {self.file.path}"
        size = self.file.nbytes
        there = min(max(size - self.offset, 0), self.nbytes)
        if failure.errno == 0 and not self.is_write:
            problem = f"met the end of the file: it has {size} bytes, so {there} were found"
            fix = "It was cut short, or it belongs to something else."
        elif failure.errno in (errno.ENOSPC, errno.EDQUOT):
            there = free_bytes(self.file.fd)
            problem = f"found no room at offset {failure.offset}: {there} bytes are free"
            fix = "Make room, or choose a folder on a larger disk."
        elif failure.errno == errno.EFBIG:
            problem = f"failed at offset {failure.offset}: files may not grow that large here"
            fix = "Raise the limit (ulimit -f), or choose another file system."
        else:
            problem = f"failed at offset {failure.offset}: {os.strerror(failure.errno)}"
            fix = "The disk or its file system has a fault: see the system's log."
        return FileIOError(
            f"{what} {problem}. {fix}",
            code=failure.errno or None,
            path=self.file.path,
            offset=failure.offset,
            wanted=self.nbytes,
            found=there,
        )

    def __repr__(self) -> str:
        verb = "write to" if self.is_write else "read from"
        state = "done" if self.done else "under way"
        return f"Transfer({verb} {str(self.file.path)!r}, {self.nbytes} bytes at {self.offset}, {state})"
