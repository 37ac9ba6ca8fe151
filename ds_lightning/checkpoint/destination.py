"""Where an export goes to and in which form; settled and checked before anything is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ds_lightning.errors import CheckpointError, ConfigError

MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of one file in a folder, unless told otherwise; Hugging Face's number."""


class Form(Enum):
    """What is written; the values of the last two are those of `--format`."""

    LIGHTNING = "Lightning checkpoint"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


_SUFFIXES = {
    ".ckpt": Form.LIGHTNING,
    ".pt": Form.TORCH,
    ".pth": Form.TORCH,
    ".bin": Form.TORCH,
    ".safetensors": Form.SAFETENSORS,
}


@dataclass(frozen=True, slots=True)
class Destination:
    """A file or a folder that is to be written.

    Attributes:
        path: the file, or the folder in Hugging Face's layout.
        form: what is written.
        max_shard_size: most bytes of tensors in one file of the folder; None for a file.
    """

    path: Path
    form: Form
    max_shard_size: int | None = None

    @classmethod
    def of(cls, path: Path, form: str | None, max_shard_size: int | None, overwrite: bool) -> Destination:
        """What is meant by a path, and perhaps a form and a size.

        Raises:
            ConfigError: when they do not go together.
            CheckpointError: when something is there that may not be overwritten.
        """
        by_suffix = _SUFFIXES.get(path.suffix)
        wanted = None if form is None else Form(form)
        if by_suffix is None:
            if path.suffix and wanted is None:
                raise ConfigError(
                    f"The suffix of {path.name} does not tell what it is to be. Known are .ckpt (everything, to go on "
                    "training), .pt, .pth and .bin (weights in torch's format) and .safetensors (weights). For a "
                    "folder of that name add --format torch or --format safetensors."
                )
            found = cls(path, wanted or Form.SAFETENSORS, max_shard_size or MAX_SHARD_SIZE)
        else:
            if max_shard_size is not None:
                raise ConfigError(
                    f"--max-shard-size is for several files in a folder, but {path.name} is the name of one file. Give "
                    "the name of a folder, without a suffix."
                )
            # A Lightning checkpoint is a file of torch too.
            if wanted not in (None, by_suffix) and not (by_suffix is Form.LIGHTNING and wanted is Form.TORCH):
                raise ConfigError(
                    f"{path.name} is the name of a {by_suffix.value} file, but --format {form} was asked for. Leave "
                    "out --format, or choose another name."
                )
            found = cls(path, by_suffix)
        found._check_free(overwrite)
        return found

    def _check_free(self, overwrite: bool) -> None:
        path, is_folder = self.path, self.max_shard_size is not None
        if not os.path.lexists(path) or (is_folder and path.is_dir() and not any(path.iterdir())):
            return
        if is_folder != path.is_dir():
            there, wanted = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            raise CheckpointError(f"{path} is {there}, but {wanted} is to be written. Choose another name.")
        if not overwrite:
            raise CheckpointError(f"{path} exists already. Choose another name, or add --overwrite.")

    def check_apart(self, source: Path) -> None:
        """Refuse to write over a checkpoint, into it, or around it.

        Raises:
            CheckpointError: when that was asked for.
        """
        here, there = self.path.resolve(), source.resolve()
        if here == there or there in here.parents or here in there.parents:
            raise CheckpointError(f"{self.path} and the checkpoint {source} overlap. Choose another place.")
