"""The reference engine: Python threads and plain positional reads and writes."""

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EINVAL

from ds_lightning.ops.aio.request import Failure, Options, Request

_MOST_THREADS = 16


class PythonEngine:
    """Owns a pool of threads, each of which moves one block at a time.

    The number of requests in flight is that of the threads: `intra_op_parallelism` times `queue_depth`, at most 16.
    Each request is a system call of its own and begins when a thread is free, so `single_submit` and
    `overlap_events` are always true here.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        threads = min(options.intra_op_parallelism * options.queue_depth, _MOST_THREADS)
        self._threads: set[int] = set()
        known = self._threads
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="ds_lightning.aio", initializer=lambda: known.add(threading.get_ident())
        )

    def submit(self, request: Request) -> "PythonTicket":
        """Starts a request; memory and descriptors must live until its ticket is done."""
        pieces = list(cut(request, self._options.block_size))
        ticket = PythonTicket(len(pieces))
        for at, nbytes, is_direct in pieces:
            self._pool.submit(_carry_out, ticket, request, at, nbytes, is_direct)
        return ticket

    def is_own_thread(self) -> bool:
        """Whether the caller is one of its threads."""
        return threading.get_ident() in self._threads

    def close(self) -> None:
        """Finishes what is under way and ends all threads; may be called again."""
        self._pool.shutdown(wait=True)


class PythonTicket:
    """Counts the pieces of one request."""

    def __init__(self, pieces: int) -> None:
        self._lock = threading.RLock()
        self._left = pieces
        self._failure: Failure | None = None
        self._over = threading.Event()
        if not pieces:
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self._over.is_set()

    def wait(self) -> Failure | None:
        """Blocks until it is done; the failure at the lowest offset, or None."""
        self._over.wait()
        return self._failure

    def count(self, failure: Failure | None) -> None:
        """One more piece is over."""
        with self._lock:
            if failure is not None and (self._failure is None or failure.offset < self._failure.offset):
                self._failure = failure
            self._left -= 1
            if not self._left:
                self._over.set()


def cut(request: Request, block_size: int) -> Iterator[tuple[int, int, bool]]:
    """The pieces of a request: bytes from its start, length, and whether it may go past the page cache.

    A page that a request covers in part is always touched through the page cache, by every request, and whole pages
    never are: the two ways meet in no page, so that neither sees the other's stale bytes.
    """
    end = request.offset + request.nbytes
    begin_direct = end_direct = end
    if request.direct_fd >= 0:
        alignment = request.offset_alignment
        begin_direct = min(-(-request.offset // alignment) * alignment, end)
        end_direct = max(end // alignment * alignment, begin_direct)
        block_size = -(-block_size // alignment) * alignment
    for start, stop, is_direct in (
        (request.offset, begin_direct, False),
        (begin_direct, end_direct, True),
        (end_direct, end, False),
    ):
        for at in range(start, stop, block_size):
            yield at - request.offset, min(block_size, stop - at), is_direct


def _carry_out(ticket: PythonTicket, request: Request, at: int, nbytes: int, is_direct: bool) -> None:
    failure: Failure | None = Failure(EINVAL, request.offset + at)
    try:
        address = request.address + at
        if is_direct and address % request.memory_alignment == 0:
            failure = _move(request.is_write, request.direct_fd, address, nbytes, request.offset + at)
            if failure is None or failure.errno != EINVAL:
                return
        # The kernel knows alignments that it does not tell: the page cache takes anything.
        failure = _move(request.is_write, request.fd, address, nbytes, request.offset + at)
    finally:
        ticket.count(failure)


def _move(is_write: bool, fd: int, address: int, nbytes: int, offset: int) -> Failure | None:
    """Until all bytes are moved; Python repeats calls that a signal interrupted."""
    moved = 0
    call = os.pwritev if is_write else os.preadv
    while moved < nbytes:
        view = (ctypes.c_char * (nbytes - moved)).from_address(address + moved)
        try:
            count = call(fd, [view], offset + moved)
        except OSError as error:
            return Failure(error.errno or EINVAL, offset + moved)
        if count == 0:
            return Failure(0, offset + moved)
        moved += count
    return None
