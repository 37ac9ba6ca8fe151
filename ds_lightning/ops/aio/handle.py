"""DeepSpeed's handle for asynchronous I/O, by the names and results of its methods."""

import contextlib
import errno
import logging
import os
import threading
from functools import cache

import torch

from ds_lightning.errors import FileIOError
from ds_lightning.ops.aio.async_io import AsyncIO
from ds_lightning.ops.aio.choice import EngineName
from ds_lightning.ops.aio.file import File
from ds_lightning.ops.aio.locked import locked_memory
from ds_lightning.ops.aio.transfer import Transfer

_SECTOR = 512
_VALIDATED_AT_ONCE = 16 << 20
_log = logging.getLogger(__name__)


class AioHandle:
    """`aio_handle` of DeepSpeed; see `AsyncIO` for what runs beneath.

    Blocking calls return what the table of their method says, or log what is wrong and return -1. An asynchronous one
    that fails later makes `wait` raise: lost bytes do not pass for success. Buffers may be anywhere in memory and of
    any size; page-locked ones are accepted and not needed. Several threads may share a handle.

    Args:
        block_size: Bytes per request to the kernel.
        queue_depth: Requests in flight per thread.
        single_submit: Whether each request is a system call of its own.
        overlap_events: Whether the queue is refilled while requests are under way.
        intra_op_parallelism: Threads that share one transfer.
        thread_count: The old name of `intra_op_parallelism`.
        engine: As for `AsyncIO`.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
        *,
        thread_count: int | None = None,
        engine: EngineName = "auto",
    ) -> None:
        if thread_count is not None and intra_op_parallelism not in (1, thread_count):
            raise ValueError(
                f"thread_count={thread_count} is the old name of intra_op_parallelism={intra_op_parallelism}; give one."
            )
        threads = intra_op_parallelism if thread_count is None else thread_count
        self._io = AsyncIO(block_size, queue_depth, single_submit, overlap_events, threads, engine)
        self._lock = threading.Lock()
        self._pending: list[tuple[Transfer, torch.Tensor | None]] = []  # with what is to be validated

    def get_block_size(self) -> int:
        """Bytes per request to the kernel."""
        return self._io.options.block_size

    def get_queue_depth(self) -> int:
        """Requests in flight per thread."""
        return self._io.options.queue_depth

    def get_single_submit(self) -> bool:
        """Whether each request is a system call of its own."""
        return self._io.options.single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled while requests are under way."""
        return self._io.options.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads that share one transfer."""
        return self._io.options.intra_op_parallelism

    def get_alignment(self) -> int:
        """Bytes that DeepSpeed's buffers are padded to: 512 per thread."""
        return _SECTOR * self.get_intra_op_parallelism()

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fills `buffer` from a file of exactly its bytes past `file_offset`, and blocks; 0, or -1."""
        try:
            file = File(filename, "r")
        except FileIOError as error:
            return _failed(error)
        with file:
            found = file.nbytes - file_offset
            if found != buffer.nbytes:
                return _failed(
                    f"{filename} has {file.nbytes} bytes, {found} of them past offset {file_offset}; read() "
                    f"needs exactly the {buffer.nbytes} of the buffer. Use pread() for a part of a file."
                )
            return self._blocking(buffer, file, file_offset, validate, is_write=False, success=0)

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Writes `buffer` to a file, which is created if need be, and blocks; 0, or -1."""
        try:
            file = _open_to_write(filename)
        except FileIOError as error:
            return _failed(error)
        with file:
            return self._blocking(buffer, file, file_offset, validate, is_write=True, success=0)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool,
        async_op: bool = False,
        file_offset: int = 0,
        **renamed: bool,
    ) -> int:
        """Fills `buffer` from a part of a file, in `intra_op_parallelism` threads, of which its bytes are a multiple.

        Args:
            buffer: Contiguous.
            filename: A path, or an open descriptor, which stays the caller's.
            validate: Whether to read once more by other means and compare.
            async_op: Whether to return at once. DeepSpeed calls it `async`, which Python takes by `**` alone.
            file_offset: Where the bytes begin.
            **renamed: `async`, for `async_op`.

        Returns:
            0 if asynchronous, else the number of completed operations: 1. -1 if it cannot be done.
        """
        return self._parallel(buffer, filename, validate, _async(async_op, renamed), file_offset, is_write=False)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int,
        validate: bool,
        async_op: bool = False,
        file_offset: int = 0,
        **renamed: bool,
    ) -> int:
        """Writes `buffer` to a file, which is created if need be; arguments and result as of `pread`."""
        return self._parallel(buffer, filename, validate, _async(async_op, renamed), file_offset, is_write=True)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """`pread` that blocks: 1, or -1."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """`pwrite` that blocks: 1, or -1."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """`pread` that returns at once: 0, or -1. `wait` completes it."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str | int, file_offset: int = 0) -> int:
        """`pwrite` that returns at once: 0, or -1. `wait` completes it."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Blocks until all asynchronous operations are complete; how many they were since the last `wait`.

        Raises:
            AssertionError: Nothing is pending.
            FileIOError: One of them failed. All are over, and none is pending any more.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            raise AssertionError("wait() was called with nothing pending; count what you start.")
        error: FileIOError | None = None
        for transfer, validated in pending:
            try:
                transfer.wait()
                if validated is not None:
                    _validate(validated, transfer)
            except FileIOError as this:
                error = error or this
            finally:
                transfer.file.close()
        if error is not None:
            raise error
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Zeros of shape (num_elem,), of the dtype of `example_tensor`, in page-locked memory where limits allow."""
        return locked_memory().new(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlocks memory of `new_cpu_locked_tensor`, of any handle; False if it is not such.

        The memory itself goes when the last view of it does, so that no view is left hanging.
        """
        return locked_memory().unlock(locked_tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether memory is page-locked: by `new_cpu_locked_tensor` of any handle, views included, or by torch."""
        return locked_memory().is_locked(buffer) or buffer.is_pinned()

    def _parallel(
        self, buffer: torch.Tensor, filename: str | int, validate: bool, later: bool, offset: int, is_write: bool
    ) -> int:
        threads = self.get_intra_op_parallelism()
        if buffer.nbytes % threads:
            return _failed(
                f"The {buffer.nbytes} bytes of the buffer for {filename} do not divide by intra_op_parallelism="
                f"{threads}; pad the buffer, or use one thread."
            )
        try:
            file = _open_to_write(filename) if is_write else File(_path(filename), "r", offset + buffer.nbytes)
        except FileIOError as error:
            return _failed(error)
        if not later:
            with file:
                return self._blocking(buffer, file, offset, validate, is_write, success=1)
        try:
            transfer = self._begin(buffer, file, offset, is_write)
        except BaseException:
            file.close()
            raise
        with self._lock:
            self._pending.append((transfer, buffer if validate else None))
        return 0

    def _blocking(
        self, buffer: torch.Tensor, file: File, offset: int, validate: bool, is_write: bool, success: int
    ) -> int:
        try:
            transfer = self._begin(buffer, file, offset, is_write)
            transfer.wait()
            if validate:
                _validate(buffer, transfer)
        except FileIOError as error:
            return _failed(error)
        return success

    def _begin(self, buffer: torch.Tensor, file: File, offset: int, is_write: bool) -> Transfer:
        if is_write:
            _speak_of_wear()
            return self._io.write(buffer, file, offset)
        return self._io.read(buffer, file, offset)


aio_handle = AioHandle


def _async(async_op: bool, renamed: dict[str, bool]) -> bool:
    later = renamed.pop("async", async_op)
    if renamed:
        raise TypeError(f"There is no argument {next(iter(renamed))!r}; did you mean 'async'?")
    return later


def _path(file: str | int) -> str:
    """Of an open descriptor: a way to open it once more, whatever became of its name."""
    return f"/proc/self/fd/{file}" if isinstance(file, int) else file


def _open_to_write(file: str | int) -> File:
    """Unlike mode "w+" this keeps what the file has."""
    path = _path(file)
    try:
        return File(path, "r+")
    except FileIOError as error:
        if error.errno != errno.ENOENT:
            raise
    with contextlib.suppress(OSError):  # opening it again says what is wrong
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return File(path, "r+")


def _validate(buffer: torch.Tensor, transfer: Transfer) -> None:
    """Compares with the bytes of the file, read by plain calls."""
    moved = buffer.detach().cpu().reshape(-1).view(torch.uint8)
    path, offset = transfer.file.path, transfer.offset
    with path.open("rb") as stream:
        stream.seek(offset)
        for start in range(0, moved.numel(), _VALIDATED_AT_ONCE):
            part = moved[start : start + _VALIDATED_AT_ONCE]
            found = bytearray(stream.read(part.numel()))
            if len(found) != part.numel() or not torch.equal(part, torch.frombuffer(found, dtype=torch.uint8)):
                raise FileIOError(
                    f"{path} and the buffer differ after the transfer, in the {part.numel()} bytes from offset "
                    f"{offset + start} on. Did somebody else write to one of them? If not, the disk is at fault.",
                    path=path,
                    offset=offset + start,
                )


def _failed(why: str | FileIOError) -> int:
    _log.error("%s", why)
    return -1


@cache
def _speak_of_wear() -> None:
    _log.warning("Swapping writes a lot: consumer SSDs wear out by it. See their endurance (TBW) before long runs.")
