"""Reads and writes that go on by themselves."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.ops.aio import memory
from ds_lightning.ops.aio.choice import EngineName, start
from ds_lightning.ops.aio.file import File, Mode
from ds_lightning.ops.aio.request import Engine, Options
from ds_lightning.ops.aio.transfer import Transfer


class AioOptions(Protocol):
    """The `aio` block of a configuration."""

    block_size: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool
    use_gds: bool


class AsyncIO:
    """Owns an engine with its threads, and what is under way in it.

    Any number of transfers may be under way at the same time, each with its own completion, in no promised order: two
    that touch the same bytes, one of them writing, must be waited for in turn. Methods may be called by several
    threads. The interpreter's lock is not held while bytes move.

    Memory and file of a transfer are kept until it is done, also when nobody keeps the transfer. Threads do not
    survive `fork`: the child of a process that holds an `AsyncIO` must make its own, and using the parent's is an
    error there, in words.

    The defaults are those that `examples/bench/aio.py` found fastest; a configuration's own are DeepSpeed's.

    Args:
        block_size: Bytes per request to the kernel.
        queue_depth: Requests in flight per thread.
        single_submit: Whether each request is a system call of its own, rather than as many at once as there are.
        overlap_events: Whether the queue is refilled while requests are under way; otherwise it is emptied first.
        intra_op_parallelism: Threads that share one transfer, each with a queue of its own.
        engine: "io_uring", "libaio", "threads" (these three are native), "python" (the reference), or "auto" for the
            first of them that runs here. The environment variable `DS_LIGHTNING_AIO` stands in for "auto".

    Attributes:
        engine: The name of the engine that runs.
        why: Why no better one does, in words; empty for the best.
        options: The other arguments.

    Raises:
        ValueError: An argument is out of range.
        NativeOpError: The engine asked for does not run here.
    """

    def __init__(
        self,
        block_size: int = 8 << 20,
        queue_depth: int = 4,
        single_submit: bool = False,
        overlap_events: bool = True,
        intra_op_parallelism: int = 1,
        engine: EngineName = "auto",
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.options = Options(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._engine, self.engine, self.why = start(engine, self.options)
        self._pid = os.getpid()
        self._under_way = _UnderWay()
        self._end = weakref.finalize(self, _end, self._engine, self._under_way, self._pid)

    @classmethod
    def from_config(cls, config: AioOptions, engine: EngineName = "auto") -> "AsyncIO":
        """From the `aio` block of a configuration.

        Raises:
            ConfigError: It asks for GPUDirect Storage, which is not supported yet.
        """
        if config.use_gds:
            raise ConfigError("aio.use_gds=true is not supported yet; set it to false.")
        return cls(
            config.block_size,
            config.queue_depth,
            config.single_submit,
            config.overlap_events,
            config.intra_op_parallelism,
            engine,
        )

    def open(
        self, path: str | os.PathLike[str], mode: Mode = "r", nbytes: int | None = None, direct: bool = True
    ) -> File:
        """Opens a file for transfers; see `File`."""
        return File(path, mode, nbytes, direct)

    def read(self, tensor: torch.Tensor, file: File, offset: int = 0) -> Transfer:
        """Starts to fill `tensor` from `file`; its values are not defined before the transfer was waited for.

        Args:
            tensor: Contiguous, of any dtype. One on a GPU is filled when the transfer is waited for.
            file: Open.
            offset: Where the bytes begin in the file.

        Returns:
            The transfer under way. It fails if the file has too few bytes.
        """
        return self._begin(tensor, file, offset, is_write=False)

    def write(self, tensor: torch.Tensor, file: File, offset: int = 0) -> Transfer:
        """Starts to write `tensor` to `file`; it must not change before the transfer was waited for.

        Args:
            tensor: Contiguous, of any dtype. One on a GPU is copied before this returns.
            file: Open for writing; it grows as needed.
            offset: Where the bytes begin in the file.

        Returns:
            The transfer under way. Done means handed to the disk or, for cached bytes, to the system; not synced.
        """
        return self._begin(tensor, file, offset, is_write=True)

    @staticmethod
    def empty(nbytes: int) -> torch.Tensor:
        """Zeroed bytes at the start of a page, which move without a copy; freed with the tensor. See `memory.empty`."""
        return memory.empty(nbytes)

    def close(self) -> None:
        """Waits for what is under way and ends the threads; may be called again.

        Raises:
            FileIOError: A transfer that nobody waited for has failed.
        """
        self._check_process()
        if self._end.detach() is not None:
            _end(self._engine, self._under_way, self._pid)
        for transfer in self._under_way.take_all():
            if not transfer.was_waited_for:
                transfer.wait()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._end.alive

    def __enter__(self) -> "AsyncIO":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, tensor: torch.Tensor, file: File, offset: int, is_write: bool) -> Transfer:
        self._check_process()
        self._check(tensor, file, offset, is_write)
        host, finish = (tensor, None) if tensor.device.type == "cpu" else _staged(tensor, is_write)
        if not is_write and not tensor.is_inference():
            # Autograd must learn of a write behind its back, as of any in-place operation.
            torch.autograd.graph.increment_version(tensor)
        transfer = Transfer(host, file, offset, is_write)
        self._under_way.add(transfer)
        try:
            transfer.start(self._engine, finish)
        except BaseException:
            self._under_way.discard(transfer)
            raise
        return transfer

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"This AsyncIO belongs to process {self._pid}, which forked this one: its threads are not here. Make "
                "a new AsyncIO in this process, or start processes with 'spawn'."
            )

    def _check(self, tensor: torch.Tensor, file: File, offset: int, is_write: bool) -> None:
        if self.closed:
            raise ValueError("This AsyncIO was closed; make a new one.")
        if file.closed:
            raise ValueError(f"{file.path} was closed; open it again.")
        if is_write and file.mode == "r":
            raise ValueError(f"{file.path} was opened for reading; open it with mode='r+' or 'w+' to write.")
        if offset < 0:
            raise ValueError(f"offset={offset} is negative.")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(
                f"A contiguous tensor is needed, not one of shape {tuple(tensor.shape)} and layout {tensor.layout} "
                "whose elements lie apart; use .contiguous() to write, and a buffer to read into."
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"A tensor on the CPU or a CUDA device is needed, not on {tensor.device}.")


class _UnderWay:
    """The transfers that nobody has seen the end of: what keeps their memory alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()

    def add(self, transfer: Transfer) -> None:
        """One more; those that are over are let go, except failures that nobody heard of."""
        with self._lock:
            over = [other for other in self._transfers if other.done]
            self._transfers.add(transfer)
        for other in over:
            other.join()
            if other.error is None or other.was_waited_for:
                self.discard(other)

    def discard(self, transfer: Transfer) -> None:
        with self._lock:
            self._transfers.discard(transfer)

    def take_all(self) -> list[Transfer]:
        with self._lock:
            transfers = list(self._transfers)
            self._transfers.clear()
        return transfers

    def join(self) -> None:
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.join()


def _end(engine: Engine, under_way: _UnderWay, pid: int) -> None:
    """Not a method: it must not keep the `AsyncIO` alive."""
    if os.getpid() != pid:
        return
    if engine.is_own_thread():
        # The last reference died in a collection of garbage there; a thread cannot wait for itself.
        threading.Thread(target=_end, args=(engine, under_way, pid)).start()
        return
    engine.close()
    under_way.join()


def _staged(tensor: torch.Tensor, is_write: bool) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Host memory in place of a tensor on a GPU, and what to do once it is filled."""
    host = memory.empty(tensor.nbytes)
    there = tensor.detach().reshape(-1).view(torch.uint8)
    if is_write:
        host.copy_(there)
        return host, None
    return host, lambda: _fill(there, host)


def _fill(there: torch.Tensor, host: torch.Tensor) -> None:
    there.copy_(host)
