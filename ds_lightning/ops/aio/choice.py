"""Which engine runs, and why not a better one."""

import os
import warnings
from functools import cache
from typing import Literal, NamedTuple, get_args

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.aio.native_engine import NativeEngine
from ds_lightning.ops.aio.python_engine import PythonEngine
from ds_lightning.ops.aio.request import Engine, Options

EngineName = Literal["auto", "io_uring", "libaio", "threads", "python"]
SWITCH = "DS_LIGHTNING_AIO"
_NATIVE = ("io_uring", "libaio", "threads")  # the best first


class Running(NamedTuple):
    """An engine, its name, and why no better one runs, in words; empty for the best."""

    engine: Engine
    name: str
    why: str


def start(name: str, options: Options) -> Running:
    """Starts the engine of that name, or for "auto" the one `DS_LIGHTNING_AIO` names, or else the best that runs here.

    Warns once per process when that is Python's for want of native code.

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
    if name == "auto":
        return _best(options)
    why = f"{source} was asked for"
    if name == "python":
        return Running(PythonEngine(options), name, why)
    missing = native.find("_aio").why_not
    try:
        return Running(NativeEngine(name, options), name, why)
    except NativeOpError as error:
        raise NativeOpError(
            f"{source} does not run here: {missing or error}. Use engine='auto' for the best that does. "
            "`ds-lightning doctor` shows what this installation has."
        ) from error


def _best(options: Options) -> Running:
    missing = native.find("_aio").why_not
    if missing:
        _warn_once(missing)
        return Running(PythonEngine(options), "python", f"no native engine: {missing}")
    reasons: list[str] = []
    for name in _NATIVE:
        try:
            return Running(NativeEngine(name, options), name, "; ".join(reasons))
        except NativeOpError as error:
            reasons.append(f"no {name}: {error}")
    return Running(PythonEngine(options), "python", "; ".join(reasons))


@cache
def _warn_once(missing: str) -> None:
    warnings.warn(
        f"Files are read and written by Python threads, since the native engines are not there: {missing}. The bytes "
        "are the same, the speed is not; `ds-lightning doctor` tells what to do.",
        stacklevel=5,
    )
