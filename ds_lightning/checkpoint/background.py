"""Writes one checkpoint at a time beside training.

[Note: writing beside training] Training stalls until this rank's values are copied; then a thread of every rank writes
them, talking to the other ranks in a process group of its own. One write is under way at a time: who wants the next one
waits. Whatever depends on the new checkpoint being complete, such as the removal of an older one, waits too. A write
that fails raises where the next one begins, or at the end of the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ds_lightning.errors import CheckpointError


class Write(Protocol):
    """A checkpoint on its way."""

    target: Path

    def stage(self) -> None:
        """Copy what may change from now on."""

    def run(self) -> None:
        """Write it; collective over threads of all ranks."""


class BackgroundWriter:
    """Owns the write under way. Every rank has one, and they do the same things in the same order."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._after: list[Callable[[], None]] = []
        self.target: Path | None = None

    def __reduce__(self) -> Any:
        """A thread belongs to its process: a copy in another one begins idle."""
        return BackgroundWriter, ()

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Write, after: Callable[[], None]) -> None:
        """Begin a write that is staged; nothing may be under way.

        Args:
            write: what to do.
            after: what to do when it is complete; not called when it fails.
        """
        assert not self.busy, "one write at a time"
        self.target = write.target
        self._after = [after]

        def run() -> None:
            try:
                write.run()
                while (action := self._next_action()) is not None:
                    action()
            except Exception as error:
                self._error = error
            with self._lock:
                self._after = []
                self.target = None

        # A daemon: when training fails, nobody can wait for ranks that are gone.
        self._thread = threading.Thread(target=run, name="ds_lightning checkpoint", daemon=True)
        self._thread.start()

    def _next_action(self) -> Callable[[], None] | None:
        with self._lock:
            if self._after:
                return self._after.pop(0)
            self.target = None  # whoever comes later finds nothing under way
            return None

    def then(self, action: Callable[[], None]) -> None:
        """Do something when the write under way is complete, or now if there is none; never after a failed one."""
        with self._lock:
            if self.target is not None:
                self._after.append(action)
                return
            if self._error is not None:
                return
        action()

    def wait(self, tell: Callable[[float], None] | None = None) -> None:
        """Wait for the write under way, if there is one.

        Args:
            tell: called with the seconds that were waited, if it took noticeably long.

        Raises:
            CheckpointError: when it failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        began = time.monotonic()
        thread.join()
        waited = time.monotonic() - began
        if tell is not None and waited > 0.1:
            tell(waited)
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"A checkpoint written in the background failed. {error}") from error

    def abandon(self) -> None:
        """Forget the write under way without waiting: other ranks may be gone."""
        self._thread = None
