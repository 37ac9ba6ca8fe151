"""Full checkpoints as one plain Lightning file: written atomically, read as a memory map."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

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
        if _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are not used for local files.")
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            if target.is_dir():
                raise IsADirectoryError(f"{target} is a directory")
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError | RuntimeError):  # torch's writer reports a full disk as RuntimeError
                raise CheckpointError(
                    f"The checkpoint {target} could not be written: {error}. Free some space or choose another "
                    "directory; earlier checkpoints are untouched."
                ) from error
            raise

    def load_checkpoint(
        self, path: _PATH, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into CPU memory, lazily where it is a local file.

        Args:
            path: the file.
            map_location: ignored for local files: each rank copies what it owns to its device.
            weights_only: None means True for local files. Containers of OmegaConf are safe and always allowed.

        Raises:
            CheckpointError: when there is no such file, or it is no complete checkpoint.
        """
        if _is_remote(path):
            return dict(super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only))
        source = Path(path)
        check_is_file(source)
        safe = True if weights_only is None else weights_only
        try:
            with torch.serialization.safe_globals(_safe_classes()):
                loaded: dict[str, Any] = torch.load(source, map_location="cpu", mmap=True, weights_only=safe)
        except Exception as error:
            text = str(error)
            if safe and ("weights_only" in text or "Unsupported" in text or "WeightsUnpickler" in text):
                raise CheckpointError(
                    f"{source} holds objects that are not plain data, so it is not loaded: unpickling them could run "
                    "any code. If you trust the file, pass weights_only=False to fit/validate/test/predict. "
                    f"({text.splitlines()[0]})"
                ) from error
            raise CheckpointError(
                f"{source} ({source.stat().st_size} bytes) is not a complete checkpoint: it may be truncated, or of "
                f"another kind. ({type(error).__name__}: {text.splitlines()[0] if text else ''})"
            ) from error
        return loaded


def check_is_file(source: Path) -> None:
    """Explain what is wrong with a checkpoint path that is no file.

    Raises:
        CheckpointError: always, unless it is a file.
    """
    if source.is_file():
        names = {entry.name for entry in source.parent.iterdir()} if source.parent.is_dir() else set()
        if source.name in (".metadata", "meta.pt") or source.suffix == ".distcp":
            raise CheckpointError(
                f"{source} is a part of a sharded checkpoint. Sharded directories are not supported yet; consolidate "
                f"it with `python -m lightning.pytorch.utilities.consolidate_checkpoint {source.parent}`."
            )
        if source.name.endswith(("_optim_states.pt", "_model_states.pt")) or "zero_to_fp32.py" in names:
            raise CheckpointError(
                f"{source} is a part of a DeepSpeed checkpoint. Convert it with DeepSpeed's own zero_to_fp32.py first."
            )
        return
    if not source.exists():
        raise CheckpointError(f"The checkpoint {source} does not exist (working directory {Path.cwd()}).")
    entries = sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    if "zero_to_fp32.py" in entries or any(e.endswith("_optim_states.pt") for e in entries):
        hint = "It is a DeepSpeed checkpoint: convert it with its zero_to_fp32.py first."
    elif ".metadata" in entries or "meta.pt" in entries:
        hint = (
            "It is a sharded checkpoint, which is not supported yet; consolidate it with `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {source}`."
        )
    else:
        files = [e for e in entries if e.endswith(".ckpt")]
        hint = f"Did you mean {source / files[0]}?" if files else "Give the path of a .ckpt file."
    raise CheckpointError(f"{source} is a directory where a checkpoint file was expected. {hint}")


def _is_remote(path: _PATH) -> bool:
    return "://" in str(path)


def _safe_classes() -> list[Any]:
    """Classes that Lightning checkpoints contain when hyper-parameters came from Hydra; they hold data only."""
    classes: list[Any] = [defaultdict]
    try:
        from omegaconf import DictConfig, ListConfig, nodes
        from omegaconf.base import ContainerMetadata, Metadata
    except ImportError:
        return classes
    classes += [DictConfig, ListConfig, ContainerMetadata, Metadata, Any, dict, list, int, float, str, bool, bytes]
    names = ("AnyNode", "IntegerNode", "FloatNode", "StringNode", "BooleanNode", "BytesNode", "PathNode")
    return classes + [getattr(nodes, name) for name in names if hasattr(nodes, name)]
