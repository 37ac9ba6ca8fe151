"""Plain Lightning files for those who have ordinary tensors: written atomically, read as a memory map."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from ds_lightning.checkpoint.file_tensors import stand_ins
from ds_lightning.checkpoint.full import unwritten
from ds_lightning.checkpoint.placement import make_folder, partial_of, place, remove
from ds_lightning.checkpoint.plain_data import trusted
from ds_lightning.errors import CheckpointError


class ZeroCheckpointIO(TorchCheckpointIO):
    """Lightning's file format, written atomically and read as a memory map.

    Local files are written beside their place and renamed, so that none is ever half there, and read as a map of the
    file, so that ranks of a node share its pages. Remote paths go through Lightning's own IO.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`. Called on rank 0.

        Raises:
            CheckpointError: when it cannot be written; what was there before stays.
        """
        if is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are not used for local files.")
        target = Path(path)
        partial = partial_of(target)
        try:
            if target.is_dir():
                raise IsADirectoryError(f"{target} is a directory")
            make_folder(target.parent)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            place(partial, target)
        except BaseException as error:
            remove(partial)
            if isinstance(error, OSError | RuntimeError):  # torch's writer reports a full disk as RuntimeError
                raise CheckpointError(unwritten(target, error)) from error
            raise

    def load_checkpoint(
        self, path: _PATH, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into CPU memory, lazily where it is a local file.

        Args:
            path: the file.
            map_location: ignored for local files: each rank copies what it owns to its device.
            weights_only: None means True for local files: plain data only, see `checkpoint/plain_data.py`.

        Raises:
            CheckpointError: when there is no such file, or it is no complete checkpoint.
        """
        if is_remote(path):
            return dict(super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only))
        return _loaded(Path(path), "cpu", weights_only)

    def load_lazily(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a local file and leave its tensors there: they are logical ones. See [Note: reading without mapping].

        Args:
            path: the file.
            weights_only: as for `load_checkpoint`. Tensors inside of objects that are no plain data have no values.

        Raises:
            CheckpointError: as `load_checkpoint`.
        """
        try:
            content: dict[str, Any] = stand_ins(_loaded(path, "meta", weights_only), path)
        except (CheckpointError, ValueError):  # something odd in it, or nothing that can be read at all
            return _loaded(path, "cpu", weights_only)
        return content


def _loaded(source: Path, device: str, weights_only: bool | None) -> dict[str, Any]:
    if not source.is_file():
        kind = "is a directory where a checkpoint file was expected" if source.is_dir() else "does not exist"
        raise CheckpointError(f"The checkpoint {source} {kind} (working directory {Path.cwd()}).")
    safe = True if weights_only is None else weights_only
    try:
        classes, others = trusted(source) if safe else ([], [])
        if others:
            raise CheckpointError(
                f"{source} holds objects that are not plain data, so it is not loaded: unpickling them could run any "
                "code. If you trust the file, pass weights_only=False to fit/validate/test/predict (ds-lightning "
                f"export: --trust), or torch.serialization.add_safe_globals these: {', '.join(others)}."
            )
        with torch.serialization.safe_globals(classes):
            loaded: dict[str, Any] = torch.load(source, map_location=device, mmap=True, weights_only=safe)
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error)
        if "WeightsUnpickler" in text or "weights_only" in text:
            text = text.splitlines()[-1]
        raise CheckpointError(
            f"{source} ({source.stat().st_size} bytes) is not a complete checkpoint: it may be truncated, or of "
            f"another kind. ({type(error).__name__}: {text.splitlines()[0] if text else ''})"
        ) from error
    return loaded


def is_remote(path: _PATH) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)
