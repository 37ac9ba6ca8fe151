"""Registers the strategy names once an app imports Lightning, so it need not import us.

Lightning has no entry point for strategies. An import hook waits for `lightning.pytorch` and
imports ds_lightning, which registers, right after it: not at Hydra's start, where that would cost
every app the import of torch.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "lightning.pytorch"


class _AfterImport(MetaPathFinder):
    """Adds one step behind the execution of `AWAITED`. Fires once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """A loader that imports ds_lightning after the module it loads."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps no trace of us: tools that look at the loader see the ordinary one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _import_ours()


def register_with_lightning() -> None:
    """Register now if Lightning is there, else when it comes. Calling it again changes nothing."""
    if AWAITED in sys.modules:
        _import_ours()
    elif not any(type(finder).__name__ == _AfterImport.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _import_ours() -> None:
    try:
        importlib.import_module("ds_lightning.registration").register()
    except Exception as error:
        # An app that uses Lightning without us must start all the same.
        warnings.warn(
            f"ds_lightning could not be imported, so its strategies are unknown: {error}",
            stacklevel=2,
        )
