"""Writes checkpoints beside training, one at a time.

[Note: writing beside training] Training stalls until this rank's values are copied; then a thread of every rank writes
them, talking to the other ranks in a process group of its own. One write is under way at a time: who wants the next
one waits. Only a second one of the very same values (`save_last=True` asks for it) may stand in line, for it needs no
memory of its own. Whatever depends on a checkpoint being complete, such as the removal of an older one, stands in line
as well. A write that fails takes with it what stands behind it, and raises on every rank where the next one begins, or
at the end of the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ds_lightning.checkpoint.snapshot import Snapshot


class Write(Protocol):
    """A checkpoint on its way."""

    target: Path
    snapshot: Snapshot

    def stage(self) -> None:
        """Copy what may change from now on and is not in the snapshot."""

    def run(self) -> None:
        """Write it; collective over threads of all ranks."""


class BackgroundWriter:
    """Owns the line of what is to be done. Every rank has one, with the same writes in the same order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[Callable[[], None]] = deque()
        self._writes: list[Write] = []
        self._running = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> Any:
        """A thread belongs to its process: a copy in another one begins idle."""
        return BackgroundWriter, ()

    @property
    def writes(self) -> list[Write]:
        """What is under way or in line, in order."""
        with self._lock:
            return list(self._writes)

    def add(self, write: Write) -> None:
        """Do a write that is staged, after those before it; never after a failed one."""
        with self._lock:
            if self._error is not None:
                return
            self._writes.append(write)
            self._line.append(partial(self._complete, write))
            if self._running:
                return
            self._running = True
            # A daemon: when training fails, nobody can wait for ranks that are gone.
            self._thread = threading.Thread(target=self._work, name="ds_lightning checkpoint", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Do something after all writes until now, or at once if there are none under way; never after a failed one."""
        with self._lock:
            if self._error is not None:
                return
            if self._running:
                self._line.append(action)
                return
        action()

    def wait(self, limit: float | None = None) -> tuple[float, BaseException | None]:
        """Wait for all writes.

        Args:
            limit: seconds after which they are left alone.

        Returns:
            The seconds that were waited, and what went wrong; that is told once.
        """
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join(limit)
            if not self._thread.is_alive():
                self._thread = None
        error = None
        if self._thread is None:
            error, self._error = self._error, None
        return time.monotonic() - began, error

    def _complete(self, write: Write) -> None:
        write.run()
        with self._lock:
            self._writes.remove(write)

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                step()
            except BaseException as error:  # whatever it is, someone must hear of it
                with self._lock:
                    self._error = error
                    self._line.clear()
                    self._writes.clear()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if self._line:
                return self._line.popleft()
            self._running = False  # whoever comes later finds nothing under way
            return None
