"""Which classes in a checkpoint hold data only, so that the safe unpickler may make them.

[Note: plain data] torch's safe unpickler makes tensors and containers, and what it is told to trust. Hyper-parameters
are often more: containers of OmegaConf, dataclasses, enums, paths, numpy's numbers. Making one of those runs no code
but its own constructor, so they are trusted, under conditions: the class is imported already (reading a file imports
nothing), and no special method of it is somebody's code. The one exception is a dataclass of the user's own program,
which may check itself in `__post_init__`; libraries are full of functions not made for a stranger's arguments.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import sys
import sysconfig
import types
from argparse import Namespace
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import torch

_CONTAINERS = (
    *(Counter, defaultdict, deque, set, frozenset, complex, Namespace, types.SimpleNamespace),
    *(pathlib.PosixPath, pathlib.PurePosixPath, decimal.Decimal),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
)
_BY_NAME = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _CONTAINERS}
_OMEGACONF = ("omegaconf.dictconfig", "omegaconf.listconfig", "omegaconf.nodes", "omegaconf.base")
_NUMPY = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype")
_MAKING = ("__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__getattribute__", "__setattr__", "__del__")
"""Methods that unpickling would run."""


def trusted(source: Path) -> tuple[list[Any], list[str]]:
    """Classes of plain data that a file of `torch.save` names, and names of it that are something else.

    The file is looked at, not run.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    found = {name: _plain(name) for name in names}
    kinds = [kind for kind in found.values() if kind is not None]
    if any(name in _NUMPY for name in names):  # torch asks for the class of the dtype of a number as well
        kinds += [kind for kind in vars(sys.modules["numpy.dtypes"]).values() if isinstance(kind, type)]
    return kinds, [name for name, kind in found.items() if kind is None]


def _plain(name: str) -> Any:
    """What a name stands for, if that is plain data."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    module_name, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module_name), attribute, None)
    if found is None:
        return None
    if module_name in ("builtins", "typing"):
        return found if found in (dict, list, tuple, int, float, str, bool, bytes, Any) else None
    if name in _NUMPY:
        return found
    if not isinstance(found, type) or found.__module__ != module_name:
        return None
    if module_name in _OMEGACONF or _is_enum(found) or _is_dataclass(found):
        return found
    return None


def _is_enum(kind: type) -> bool:
    own = [base for base in kind.__mro__ if base.__module__ != "enum" and base not in (object, int, str)]
    return issubclass(kind, enum.Enum) and not any("_missing_" in vars(base) for base in own)


def _is_dataclass(kind: type) -> bool:
    for base in kind.__mro__[:-1]:
        parameters = base.__dict__.get("__dataclass_params__")
        if parameters is None:
            return False
        # Frozen ones refuse to be set, those with slots set themselves: `dataclass` has written these methods.
        generated = {"__setattr__"} if parameters.frozen else set()
        generated |= {"__setstate__"} if getattr(parameters, "slots", False) else set()
        if any(method in vars(base) and method not in generated for method in _MAKING):
            return False
    if not kind.__dataclass_params__.init:  # type: ignore[attr-defined]
        return False
    return not hasattr(kind, "__post_init__") or _is_users(kind)


def _is_users(kind: type) -> bool:
    """Whether a class belongs to the program, not to a library."""
    file = getattr(sys.modules[kind.__module__], "__file__", None)
    if file is None:  # a notebook
        return kind.__module__ == "__main__"
    path = Path(file).resolve()
    libraries = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    return not any(folder in path.parents for folder in libraries)
