"""The demo text: the sources of Python's own standard library, which every machine has."""

import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ds_lightning.errors import ConfigError

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
)


def stdlib_files() -> list[Path]:
    """Return the standard library's source files, in the same order on every run and every rank."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        files.extend(Path(folder) / name for name in sorted(names) if name.endswith(".py"))
    if not files:
        raise ConfigError(
            f"No Python sources found under {root}: this Python comes without the text of its "
            "standard library. "
            "Use your own data: data._target_=my_package.MyData."
        )
    return files


def read_stdlib(held_out_every: int = 20, max_megabytes: float = 16.0) -> tuple[Tensor, Tensor]:
    """Return (training bytes, held-out bytes) as two one-dimensional uint8 tensors.

    Whole files are held out, so the held-out loss measures text whose neighbourhood was never
    trained on.

    Args:
        held_out_every: Every so-manyth file is held out.
        max_megabytes: Stop reading after this much text.
    """
    training, held_out = bytearray(), bytearray()
    for index, file in enumerate(stdlib_files()):
        if len(training) + len(held_out) >= max_megabytes * 1e6:
            break
        (held_out if index % held_out_every == held_out_every - 1 else training).extend(file.read_bytes())
    if not held_out:
        raise ConfigError(
            f"max_megabytes={max_megabytes} leaves fewer than held_out_every={held_out_every} "
            "files, so none is held out. Raise max_megabytes or lower held_out_every."
        )
    # frombuffer shares the bytearray's memory: the text exists once per process.
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def unigram_entropy(text: Tensor | bytes) -> float:
    """Return the entropy of single bytes in nats: the best loss of a model without context."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if isinstance(text, bytes) else text
    counts = torch.bincount(tokens, minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum((shares * shares.log()).tolist())
