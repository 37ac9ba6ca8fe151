"""Operations with native kernels: a schema, a Python reference and a dispatcher for each.

Importing this package loads nothing; its modules are imported when first named, so that
`ds_lightning` stays cheap to import and works without any native code.
"""

import importlib
from types import ModuleType

_MODULES = ("aio", "memory", "native", "optim", "quantize", "reduce", "signs", "status")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
