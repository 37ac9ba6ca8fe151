"""Finds the native modules built from `csrc/`; a missing one is an error only when it is used.

`_native` holds the CPU ops and `_cuda` the CUDA ops. Both are built when the package is installed
and know nothing of torch. Set `DS_LIGHTNING_NATIVE=0` to run on the Python references alone.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ds_lightning.errors import NativeOpError

if TYPE_CHECKING:
    import torch

_PACKAGE = "ds_lightning"
_SWITCH = "DS_LIGHTNING_NATIVE"
_NEEDS = {
    "_native": "a C++17 compiler",
    "_aio": "a C++17 compiler",
    "_cuda": "a C++17 compiler and nvcc (the CUDA toolkit; at build time only)",
}


@dataclass(frozen=True, slots=True)
class Found:
    """What looking for a native module gave: the module, or why there is none."""

    name: str
    module: ModuleType | None
    where: str
    """The module's file, or the folders searched for it."""
    why_not: str = ""
    """Empty when there is a module."""
    fix: str = ""


@cache
def find(name: str) -> Found:
    """Looks for `_native`, `_aio` or `_cuda`, once per process; never raises."""
    full_name = f"{_PACKAGE}.{name}"
    searched = ", ".join(importlib.import_module(_PACKAGE).__path__)
    if os.environ.get(_SWITCH) == "0":
        return Found(name, None, searched, f"{_SWITCH}=0 switches it off", f"Unset {_SWITCH}.")
    if importlib.util.find_spec(full_name) is None:
        why_not = _why_missing(name)
        fix = f"Install {_NEEDS[name]}, then reinstall ds_lightning with pip."
        return Found(name, None, searched, why_not, fix)
    try:
        module = importlib.import_module(full_name)
    except ImportError as error:
        fix = "Reinstall ds_lightning with pip, so that it is built for this Python and system."
        return Found(name, None, searched, f"it does not load: {error}", fix)
    return Found(name, module, module.__file__ or "built in")


def load(name: str, op: str) -> ModuleType:
    """The native module `name`, or a `NativeOpError` that says why `op` cannot run."""
    found = find(name)
    if found.module is None:
        raise NativeOpError(
            f"The native op {op!r} was asked for, but {_PACKAGE}.{name} is not available: "
            f"{found.why_not} (searched {found.where}). {found.fix} "
            "`ds-lightning doctor` shows what this installation has."
        )
    return found.module


def mark_written(*tensors: "torch.Tensor") -> None:
    """Tells autograd of writes behind its back, so that it notices them as of any in-place operation."""
    import torch

    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _why_missing(name: str) -> str:
    """Builds for another Python lie beside the place where this one's would be."""
    package = importlib.import_module(_PACKAGE)
    others = sorted(file.name for folder in package.__path__ for file in Path(folder).glob(f"{name}.*.so"))
    if others:
        return f"it was built for another Python ({', '.join(others)})"
    return "it was not built when the package was installed"
