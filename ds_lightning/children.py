"""The processes that Lightning's popen launcher has started."""

from __future__ import annotations

import subprocess
import time
from typing import Any

_GRACE = 3.0  # seconds in which the other ranks may fail and say why


def end_children(launcher: Any) -> None:
    """A rank that is stuck must not outlive the one that started it; Lightning ends children after Ctrl-C only."""
    end = time.monotonic() + _GRACE
    for process in getattr(launcher, "procs", ()):
        if isinstance(process, subprocess.Popen):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
