"""Finds out what a checkpoint path is and reads it into a Lightning checkpoint whose tensors stay where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_lightning.checkpoint.deepspeed.files import is_deepspeed_checkpoint
from ds_lightning.checkpoint.placement import is_partial, pointed_to, set_aside
from ds_lightning.errors import CheckpointError
from ds_lightning.zero.logical import logical

META = "meta.pt"
METADATA = ".metadata"

_KEPT = ("hyper_parameters", "pytorch-lightning_version")
"""What goes with weights alone, of what Lightning's own sharded checkpoints hold beside them."""

ReadFile = Callable[[Path], dict[str, Any]]


def load(path: Path, read_file: ReadFile, log: Callable[[str], None], to_resume: bool = True) -> dict[str, Any]:
    """Read a checkpoint of any known kind.

    Args:
        path: a file, a sharded folder of ours or of Lightning's, one of DeepSpeed's, or a folder with `latest`.
        read_file: reads a file in `torch.save`'s format.
        log: tells the user something.
        to_resume: states are wanted too: it is told when there are none.

    Returns:
        A dict with at least `state_dict`. Tensors of files are maps of the file, those of folders logical tensors.

    Raises:
        CheckpointError: when there is none, or it is not complete, or of an unknown kind; names what was found.
    """
    source = resolved(path, log)
    missed = log if to_resume else _silent
    if source.is_dir():
        return _from_folder(source, read_file, log, missed)
    _check_is_no_part(source)
    content = read_file(source)
    if isinstance(content, dict) and "state_dict" in content:
        return content
    if isinstance(content, Mapping) and content and all(torch.is_tensor(value) for value in content.values()):
        return _weights_alone(dict(content), source, missed)
    raise CheckpointError(
        f"{source} is a file of torch, but no Lightning checkpoint: it has no 'state_dict', and it is no plain dict of "
        "tensors either. Load what you need from it with torch.load, and module.load_state_dict before fit."
    )


def resolved(path: Path, log: Callable[[str], None]) -> Path:
    """Follow links and `latest`."""
    if path.is_symlink() and not path.exists():
        before = pointed_to(path.parent)
        if before is None:
            raise CheckpointError(
                f"{path} points to {os.readlink(path)}, which was never completed, and there is no complete checkpoint "
                f"beside it."
            )
        log(f"{path} points to {os.readlink(path)}, which was never completed; {before} is the newest complete one")
        return before
    if is_partial(path):
        raise CheckpointError(f"{path} is what a run that was killed had not completed. Give another checkpoint.")
    if not path.exists():
        before = set_aside(path)
        if before is not None:
            log(f"{path} was being replaced when a run was killed; {before} is what was there")
            return before
        raise CheckpointError(f"The checkpoint {path} does not exist (working directory {Path.cwd()}).")
    if path.is_dir() and not is_sharded(path):
        newest = pointed_to(path)
        if newest is not None and (newest.is_file() or is_sharded(newest)):
            return newest
    return path


def is_sharded(folder: Path) -> bool:
    """Whether a folder is a checkpoint of `torch.distributed.checkpoint`, complete or not."""
    return (folder / METADATA).is_file() or (folder / META).is_file()


def _from_folder(
    folder: Path, read_file: ReadFile, log: Callable[[str], None], missed: Callable[[str], None]
) -> dict[str, Any]:
    if not is_sharded(folder):
        if is_deepspeed_checkpoint(folder):
            return _of_deepspeed(folder, log)
        raise CheckpointError(_no_checkpoint(folder))
    from ds_lightning.checkpoint import sharded, stored  # torch.distributed.checkpoint is slow to import

    tensors = stored.StoredFolder(folder)
    rest = read_file(folder / META) if (folder / META).is_file() else {}
    if sharded.TENSORS in rest.get("ds_lightning", {}):
        return sharded.put_together(rest, tensors.tensors())
    return _of_others(folder, tensors, rest, missed)


def _of_others(folder: Path, stored: Any, rest: dict[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """A folder that Lightning's FSDP or ModelParallel strategy wrote, or a bare one of `dcp.save`: its weights."""
    tensors = stored.tensors()
    prefixes = [p for p in ("model.", "state_dict.") if any(name.startswith(p) for name in tensors)]
    prefix = prefixes[0] if prefixes else ""
    weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if not weights:
        raise CheckpointError(f"{folder} holds no tensors.")
    kept = {key: value for key, value in rest.items() if key in _KEPT or key.startswith(("hparams_", "datamodule_"))}
    return {**kept, **_weights_alone(weights, folder, log)}


def _of_deepspeed(folder: Path, log: Callable[[str], None]) -> dict[str, Any]:
    from ds_lightning.checkpoint.deepspeed.convert import DeepSpeedCheckpoint, to_lightning

    checkpoint = DeepSpeedCheckpoint(folder)
    found = to_lightning(checkpoint, logical)
    log(f"{folder} was written by DeepSpeed {checkpoint.version} at stage {checkpoint.stage}")
    return found


def _weights_alone(weights: dict[str, Any], source: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """A checkpoint with nothing to resume but weights."""
    log(f"{source} holds weights in a form without states to resume: optimizers and loops begin anew")
    return {
        "state_dict": weights,
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": [],
        "lr_schedulers": [],
        "ds_lightning": {"weights_alone": True},
    }


def _check_is_no_part(source: Path) -> None:
    """A file inside of a folder that is a checkpoint as a whole."""
    if source.name in (METADATA, META) or source.suffix == ".distcp":
        raise CheckpointError(f"{source} is a part of a sharded checkpoint. Give its folder: {source.parent}.")
    if source.name.endswith(("_optim_states.pt", "_model_states.pt")):
        raise CheckpointError(f"{source} is a part of a DeepSpeed checkpoint. Give its folder: {source.parent}.")


def _no_checkpoint(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    files = [name for name in names if name.endswith(".ckpt")]
    hint = f"Did you mean {folder / files[0]}?" if files else "Give the path of a .ckpt file or folder."
    return f"{folder} is a directory without a checkpoint in it. {hint}"


def _silent(message: str) -> None:
    """It does not matter."""
