"""Real ranks, cheaply: worker processes that live for the whole test run and take functions.

    results = run_ranks(check_sum, 3, scale=2.0)     # check_sum(scale=2.0) in each of three ranks

`run_ranks` calls a module-level function in every rank of a gloo process group of the given size,
a new group for each call, and returns one result per rank. When ranks fail, it raises `RankError`
with the first failure's traceback on top and ends that size's processes; the next call starts new
ones. `fresh_ranks` is for functions that end their process: it reports instead of raising.

[Note: how the workers start and end]
The workers are forked by a `forkserver` that has imported torch and Lightning and nothing else: the
imports are paid once per test run, and starting a pool again after a failure takes milliseconds. A
thread in each worker reads the pipe from the test process; when that process is gone, by whatever
signal, the pipe ends and the worker exits at once, even in the middle of a collective.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import random
import reprlib
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_LIMIT = 90.0  # seconds from fork to ready; covers the imports on a busy machine
GRACE = 1.0  # how long the other ranks may take to report once one has failed
PRELOAD = ["torch", "torch.distributed", "lightning.pytorch"]
LOG_TAIL = 6000  # characters of a worker's output shown in a report


class RankError(AssertionError):
    """A function failed in at least one rank, or did not return in time."""


@dataclass(frozen=True)
class Outcome:
    """How one rank of `fresh_ranks` ended."""

    rank: int
    exitcode: int
    """Negative: the signal that ended the process."""
    output: str
    """What it wrote to stdout and stderr."""
    result: Any = None
    """What the function returned, if it did."""
    error: str = ""
    """The traceback, if the function raised."""
    timed_out: bool = False
    """Whether it still ran at the end of the timeout and was killed."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
    """Calls `fn(*args, **kwargs)` in each rank and returns the results in the order of ranks.

    Each rank has a default gloo group, one thread, and the same seeds before every call. Working
    directory, environment and default dtype are put back afterwards.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.call(fn, args, kwargs, timeout)
    except BaseException:  # pytest-timeout and Ctrl-C as well: the ranks may be anywhere
        _pools.pop(world_size, None)
        pool.kill()
        raise


def fresh_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Outcome]:
    """Calls `fn` once in each of `world_size` new processes and tells how each of them ended.

    Raises nothing of its own: a rank that is killed, raises or hangs is an outcome.
    """
    pool = _Pool(world_size, init_process_group=init_process_group)
    try:
        return pool.call_once(fn, args, kwargs, timeout)
    finally:
        pool.kill()


def shutdown() -> None:
    """Ends all workers; the next call starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


class _Pool:
    """The processes of one world size, and the pipes to them."""

    def __init__(self, world_size: int, *, init_process_group: bool = True) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ds_lightning_ranks_")
        self._calls = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = 0
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                settings = _Settings(rank, world_size, str(self._log(rank)), init_process_group)
                process = context.Process(target=_worker, args=(theirs, settings, port), name=f"rank{rank}")
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
                if rank == 0:
                    # Rank 0 serves the store; the system chooses its port, so none is raced for.
                    port = self._receive_ready(0)
            for rank in range(1, world_size):
                self._receive_ready(rank)
        except BaseException:
            self.kill()
            raise

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        replies, timed_out = self._exchange(fn, args, kwargs, timeout, stop_at_failure=True)
        if timed_out or any(reply.error for reply in replies.values()):
            raise RankError(self._report(fn, replies, timeout if timed_out else None))
        return [pickle.loads(replies[rank].result) for rank in range(self.world_size)]

    def call_once(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> list[Outcome]:
        replies, timed_out = self._exchange(fn, args, kwargs, timeout, stop_at_failure=False)
        for pipe in self._pipes:
            pipe.close()  # the workers that have replied exit
        outcomes = []
        for rank, process in enumerate(self._processes):
            hung = timed_out and rank not in replies
            process.join(0 if hung else 5)
            if process.exitcode is None:
                process.kill()
                process.join()
            reply = replies.get(rank, _Reply(0.0))
            result = pickle.loads(reply.result) if reply.result else None
            error = "" if reply.died else reply.error
            outcomes.append(Outcome(rank, process.exitcode, self._output(rank), result, error, hung))
        return outcomes

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
        self._folder.cleanup()

    def _exchange(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        *,
        stop_at_failure: bool,
    ) -> tuple[dict[int, _Reply], bool]:
        """Sends one call to all ranks; their replies, and whether the time ran out."""
        self._calls += 1
        message = pickle.dumps(_Call(_address(fn), args, kwargs, self._calls, timeout))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        replies: dict[int, _Reply] = {}
        end = time.monotonic() + timeout
        while len(replies) < self.world_size:
            missing = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in replies}
            ready = wait(list(missing), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                failed = stop_at_failure and any(reply.error for reply in replies.values())
                if not failed:
                    self._dump_stacks(missing.values())
                return replies, not failed
            for pipe in ready:
                reply = self._receive(missing[pipe])
                replies[missing[pipe]] = reply
                if reply.error and stop_at_failure:
                    end = min(end, time.monotonic() + GRACE)
        return replies, False

    def _receive(self, rank: int) -> _Reply:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(5)
            how = f"ended with exit code {process.exitcode}"
            if process.exitcode is not None and process.exitcode < 0:
                how = f"was killed by {signal.Signals(-process.exitcode).name}"
            said = f"The process {how}."
            return _Reply(time.monotonic(), error=said, brief=said, died=True)

    def _receive_ready(self, rank: int) -> int:
        if self._pipes[rank].poll(START_LIMIT):
            try:
                return self._pipes[rank].recv()
            except EOFError:
                pass
        raise RankError(f"Rank {rank} did not start.\n{self._output(rank)}")

    def _dump_stacks(self, ranks: Any) -> None:
        """Lets hanging workers write where they are to their logs."""
        for rank in ranks:
            process = self._processes[rank]
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)

    def _report(self, fn: Callable[..., Any], replies: dict[int, _Reply], timeout: float | None) -> str:
        """The first failure in full, what else is known in short."""
        name = f"{fn.__module__}.{fn.__qualname__}"
        failed = sorted((rank for rank in replies if replies[rank].error), key=lambda rank: replies[rank].at)
        silent = [rank for rank in range(self.world_size) if rank not in replies]
        lines = []
        if failed:
            first, *later = failed
            lines.append(f"{name} failed first in rank {first} of {self.world_size}:\n")
            lines.append(replies[first].error)
            lines += [f"Rank {rank} failed later: {replies[rank].brief}" for rank in later]
            if silent:
                lines.append(f"Had not returned by then: {_ranks(silent)}.")
            shown = [first]
        else:
            who = f"{_ranks(silent)} of {self.world_size}"
            lines.append(f"{name}: {who} did not return within {timeout:g} s.")
            shown = silent
        for rank in shown:
            output = self._output(rank)
            if output:
                lines.append(f"--- output of rank {rank} ---\n{output}")
        return "\n".join(lines)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _output(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace") if log.exists() else ""
        return text if len(text) <= LOG_TAIL else f"...{text[-LOG_TAIL:]}"


@dataclass(frozen=True)
class _Settings:
    rank: int
    world_size: int
    log: str
    init_process_group: bool


@dataclass(frozen=True)
class _Call:
    address: tuple[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    timeout: float


@dataclass(frozen=True)
class _Reply:
    at: float
    """`time.monotonic`, one clock for all processes of a machine."""
    result: bytes = b""
    error: str = ""
    """The whole story of a failure."""
    brief: str = ""
    """Its one line."""
    died: bool = False


_pools: dict[int, _Pool] = {}
atexit.register(shutdown)


def _address(fn: Callable[..., Any]) -> tuple[str, str]:
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(
            f"{fn.__module__}.{fn.__qualname__} cannot be sent to the ranks: they import functions "
            "by name. Move it to the top level of a module that can be imported."
        )
    return fn.__module__, fn.__qualname__


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# What follows runs in the workers.


def _worker(pipe: Connection, settings: _Settings, port: int) -> None:
    log = os.open(settings.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    calls = _read_in_background(pipe)

    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        settings.world_size,
        is_master=settings.rank == 0,
        wait_for_workers=False,
        multi_tenant=True,  # `init_method="env://"` in a test finds the same server
    )
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        NODE_RANK="0",
        WORLD_SIZE=str(settings.world_size),
        LOCAL_WORLD_SIZE=str(settings.world_size),
    )
    gc.collect()
    gc.freeze()  # collections between calls skip what the imports made
    pipe.send(store.port)
    home = os.getcwd(), dict(os.environ), torch.get_default_dtype()
    while True:
        reply = _answer(calls.get(), store, settings)
        pipe.send_bytes(pickle.dumps(reply))
        os.chdir(home[0])
        os.environ.clear()
        os.environ.update(home[1])
        torch.set_default_dtype(home[2])


def _read_in_background(pipe: Connection) -> queue.SimpleQueue[bytes]:
    """See [Note: how the workers start and end]."""
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                calls.put(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=read, daemon=True, name="pipe").start()
    return calls


def _answer(request: bytes, store: Any, settings: _Settings) -> _Reply:
    """Runs one call in a process group of its own."""
    from torch import distributed as dist

    try:
        call: _Call = pickle.loads(request)
        module, qualname = call.address
        fn: Any = import_module(module)
        for part in qualname.split("."):
            fn = getattr(fn, part)
        if settings.init_process_group:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"call{call.number}", store),
                rank=settings.rank,
                world_size=settings.world_size,
                timeout=timedelta(seconds=call.timeout),
            )
        _seed()
        result = pickle.dumps(fn(*call.args, **call.kwargs))
        return _Reply(time.monotonic(), result=result)
    except Exception as error:
        at = time.monotonic()
        story = "".join(traceback.format_exception(error)) + _locals_of(error)
        message = str(error).partition("\n")[0]
        return _Reply(at, error=story, brief=f"{type(error).__name__}: {message}")
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _locals_of(error: BaseException) -> str:
    """The innermost frame's variables, of a failed assertion only: pytest does not explain it."""
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    brief = reprlib.Repr()
    brief.maxother = brief.maxstring = 300
    shown = (f"    {name} = {brief.repr(value)}" for name, value in frame.f_locals.items())
    return "  where\n" + "\n".join(shown) + "\n"
