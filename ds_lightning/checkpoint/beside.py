"""16-bit weights beside a checkpoint: what `stage3_gather_16bit_weights_on_model_save` asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ds_lightning.checkpoint.destination import Destination, Form
from ds_lightning.checkpoint.export import export
from ds_lightning.checkpoint.loading import ReadFile, load
from ds_lightning.checkpoint.weights import Choice
from ds_lightning.errors import CheckpointError

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(precision: str) -> torch.dtype | None:
    """The 16-bit dtype that computes at a precision, or None."""
    return _DTYPES.get(precision.partition("-")[0])


def why_none(precision: str, own_format: bool) -> str | None:
    """Why there will be no weights although they were asked for; None when there will be."""
    if dtype_of(precision) is not None and own_format:
        return None
    reason = f"at precision {precision}" if own_format else "of remote paths or with a checkpoint_io of others"
    return (
        f"stage3_gather_16bit_weights_on_model_save: no 16-bit weights are written beside checkpoints {reason}; "
        "`ds-lightning export CKPT OUT --dtype bf16` makes them"
    )


def weights_path(checkpoint: Path) -> Path:
    """The file of weights that belongs to a checkpoint."""
    return checkpoint.with_name(checkpoint.name.removesuffix(".ckpt") + ".weights.safetensors")


def write_weights(checkpoint: Path, dtype: torch.dtype, read_file: ReadFile, log: Callable[[str], None]) -> None:
    """Write the weights of a complete checkpoint beside it, piece by piece. On rank 0.

    A failure is told and not raised: the checkpoint is there, and other ranks do not take part.
    """
    target = weights_path(checkpoint)
    try:
        done = export(load(checkpoint, read_file, log), Destination(target, Form.SAFETENSORS), Choice(dtype=dtype))
    except CheckpointError as error:
        log(f"WARNING: there are no 16-bit weights beside {checkpoint}, which is complete itself: {error}")
        return
    for note in done.notes:
        if "infinite" in note:
            log(f"WARNING: {target}: {note}")
