"""Which engine runs, and why not a better one."""

import os
import warnings
from functools import cache
from typing import Literal, NamedTuple, get_args

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.aio.python_engine import PythonEngine
from ds_lightning.ops.aio.request import Engine, Options

EngineName = Literal["auto", "io_uring", "libaio", "threads", "python"]
SWITCH = "DS_LIGHTNING_AIO"
_NATIVE = ("io_uring", "libaio", "threads")  # the best first


class Choice(NamedTuple):
    """The name of an engine and why no better one runs, in words; empty for the best."""

    name: str
    why: str


def choose(name: str) -> Choice:
    """The engine of that name, or for "auto" what `DS_LIGHTNING_AIO` names, or else the best that runs here.

    Raises:
        ValueError: There is no engine of that name.
        NativeOpError: It does not run here.
    """
    source = f"engine={name!r}"
    if name == "auto" and os.environ.get(SWITCH):
        name = os.environ[SWITCH]
        source = f"{SWITCH}={name}"
    if name not in get_args(EngineName):
        raise ValueError(f"{source} is not one of {', '.join(get_args(EngineName))}.")
    if name != "auto":
        why_not = why_not_here(name)
        if why_not:
            raise NativeOpError(
                f"{source} does not run here: {why_not}. Use engine='auto' for the best that does. "
                "`ds-lightning doctor` shows what this installation has."
            )
        return Choice(name, f"{source} was asked for")
    reasons: list[str] = []
    for better in _NATIVE:
        why_not = why_not_here(better)
        if not why_not:
            return Choice(better, "; ".join(reasons))
        reasons.append(f"{better}: {why_not}")
    return Choice("python", _missing() or "; ".join(reasons))


def start(choice: Choice, options: Options) -> Engine:
    """A running engine; tells once per process when it is Python's for want of native code."""
    if choice.name == "python":
        if _missing() and choice.why == _missing():
            _warn_once(choice.why)
        return PythonEngine(options)
    raise NativeOpError(f"The engine {choice.name} is not built.")


def why_not_here(name: str) -> str:
    """Why the engine does not run on this system, in words; empty if it does."""
    if name == "python":
        return ""
    return _missing()


def _missing() -> str:
    found = native.find("_aio")
    return "" if found.module is not None else found.why_not


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"Files are read and written by Python threads, since the native engines are missing: {why}. The bytes are "
        "the same, the speed is not; `ds-lightning doctor` tells what to do.",
        stacklevel=4,
    )
