"""A module from a checkpoint of any kind, as `LightningModule.load_from_checkpoint` makes one from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint, pl_legacy_patch
from lightning_utilities.core.rank_zero import rank_zero_info

from ds_lightning.checkpoint import keys
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO, is_remote
from ds_lightning.checkpoint.loading import load

_Module = TypeVar("_Module", bound=pl.LightningModule)
MapLocation = torch.device | str | Mapping[str, str] | Callable[..., Any] | None


def load_from_checkpoint(
    module_class: type[_Module],
    path: str | Path,
    strict: bool | None = None,
    map_location: MapLocation = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> _Module:
    """Make a module with the weights and hyper-parameters of a checkpoint.

    As `module_class.load_from_checkpoint`, for everything that a run of this package resumes from: files, sharded
    folders, folders with `latest`. Parameters that were left out of the checkpoint because they were frozen keep the
    values that the module is made with. Not collective: the module is an ordinary one, whole on each rank that calls.

    Args:
        module_class: the LightningModule's class.
        path: the checkpoint.
        strict: whether names must match; None means what the module's `strict_loading` says.
        map_location: the device of the module, as for `torch.load`; None means the CPU.
        weights_only: False unpickles any object in a file that you trust; None means plain data only.
        **kwargs: arguments of the module, in the place of the saved hyper-parameters.

    Raises:
        CheckpointError: when it cannot be read.
    """
    if is_remote(path):
        return module_class.load_from_checkpoint(
            path, map_location=cast(Any, map_location), strict=strict, weights_only=weights_only, **kwargs
        )
    read = partial(ZeroCheckpointIO().load_checkpoint, weights_only=weights_only)
    with pl_legacy_patch():
        content = load(Path(path), read, lambda message: rank_zero_info(f"ds_lightning: {message}"))
    checkpoint = _pl_migrate_checkpoint({"pytorch-lightning_version": lightning.__version__, **content})
    hyper_parameters = checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hyper_parameters.update(kwargs)
    excluded = set(checkpoint.get("ds_lightning", {}).get("excluded_parameters", ()))
    if excluded and strict is not False:
        module = cast(_Module, _load_state(module_class, checkpoint, strict=False, **kwargs))
        if strict or module.strict_loading:
            keys.check_keys(module, checkpoint["state_dict"], excluded)
    else:
        module = cast(_Module, _load_state(module_class, checkpoint, strict=strict, **kwargs))
    return module.to(_device(map_location))


def _device(map_location: MapLocation) -> torch.device:
    """Where `torch.load` would put a tensor of the CPU."""
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, torch.device | str):
        return torch.device(map_location)
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get("cpu", "cpu"))
    moved = map_location(torch.empty(1).untyped_storage(), "cpu")
    return torch.device("cpu") if moved is None else torch.device(moved.device)
