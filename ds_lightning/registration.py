"""Makes the strategies known to Lightning by name.

Lightning has no entry point for strategies. While it is not imported yet, an import hook waits for `lightning.pytorch`
and registers right after it, so that importing this package costs nothing, and Hydra apps with our plugin need not.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AWAITED = "lightning.pytorch"


class _AfterImport(MetaPathFinder):
    """Adds one step behind the execution of `_AWAITED`. Fires once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """A loader that registers after the module it loads."""

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
        _register_quietly()


VARIANTS: dict[str, dict[str, Any]] = {
    "dszero0": {"stage": 0},
    "dszero1": {"stage": 1},
    "dszero2": {"stage": 2},
    "dszero3": {"stage": 3},
    "dszero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "dszero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "dszero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "dszero3_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_param": "nvme"},
}


def make_strategy(**arguments: Any) -> Any:
    """Construct a `ZeroStrategy`; the registry holds this instead of the class, so that imports stay cheap."""
    from ds_lightning.strategy import ZeroStrategy

    return ZeroStrategy(**arguments)


def register() -> None:
    """Register all variants with Lightning's Trainer, now or when Lightning comes; harmless when it was done before."""
    if _AWAITED in sys.modules:
        _register_now()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_now() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, arguments in VARIANTS.items():
        if name not in StrategyRegistry:
            described = ", ".join(f"{key}={value}" for key, value in arguments.items())
            StrategyRegistry.register(
                name, make_strategy, description=f"ZeRO ({described}) by ds_lightning", **arguments
            )


def _register_quietly() -> None:
    try:
        _register_now()
    except Exception as error:
        # An app that uses Lightning without us must start all the same.
        warnings.warn(f"ds_lightning could not register its strategies: {error}", stacklevel=2)
