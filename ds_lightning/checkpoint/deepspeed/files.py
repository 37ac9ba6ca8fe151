"""Finds the files of a DeepSpeed checkpoint and says what is wrong with their number, before any of them is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ds_lightning.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)(?:_\d+)?_model_states\.pt$")
_OPTIMIZER = re.compile(
    r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt$"
)
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*\.pt$|expp_rank_\d+_.*\.pt$")
_PIPELINE = re.compile(r"layer_\d+-model_.*\.pt$")


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint.

    Attributes:
        folder: the folder of the tag.
        model: the files of the model by rank: one, or at stage 3 one of each rank.
        optimizer: the files of the optimizer by rank; none at stage 0 and in universal checkpoints.
        universal: whether there is a folder `zero` with a folder for each parameter.
    """

    folder: Path
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]
    universal: bool


def is_deepspeed_checkpoint(path: str | Path) -> bool:
    """Whether a path is a folder that DeepSpeed wrote: the one with `latest`, that of a tag, or a universal one."""
    folder = Path(path)
    if not folder.is_dir():
        return False
    if _is_tag_folder(folder):
        return True
    pointers = [folder / name for name in ("latest", "latest_universal")]
    return any(pointer.is_file() for pointer in pointers) or bool(_tags_in(folder))


def find_files(path: str | Path, tag: str | None = None) -> Files:
    """The files of a checkpoint.

    Args:
        path: the folder that `save_checkpoint` was given, the folder of a tag in it, or a universal folder.
        tag: which of the checkpoints in the folder; by default the one that `latest`, or `latest_universal`, names.

    Raises:
        CheckpointError: when there is none, or its files are too few, too many, or of model-parallel or expert-parallel
            training.
    """
    folder = _tag_folder(Path(path), tag)
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_parallel(folder, names)
    model = _by_rank(folder, names, _MODEL)
    optimizer = _by_rank(folder, names, _OPTIMIZER)
    universal = (folder / "zero").is_dir()
    if not model:
        raise CheckpointError(
            f"{folder} has no mp_rank_00_model_states.pt and no zero_pp_rank_0_mp_rank_00_model_states.pt. Copy the "
            "file back, or load another checkpoint."
        )
    sharded = [name for name in names if name.startswith("zero_pp_rank_") and name.endswith("_model_states.pt")]
    if sharded and not universal and "mp_rank_00_model_states.pt" in names:
        raise CheckpointError(
            f"{folder} holds both mp_rank_00_model_states.pt and {sharded[0]}: checkpoints of different stages were "
            "saved with the same tag. Remove the files of the older one."
        )
    prefixes = {match["prefix"] for name in names if (match := _OPTIMIZER.match(name))}
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder} holds optimizer files with the prefixes {sorted(prefixes)}: checkpoints of different precisions "
            "were saved with the same tag. Remove the files of the older one."
        )
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"{folder / 'offloaded_tensors'} holds swap files of an optimizer that was offloaded to NVMe; they cannot "
            "be read. Load the checkpoint in DeepSpeed once, with offload_optimizer on the CPU, and save it again."
        )
    return Files(folder, model, () if universal else optimizer, universal)


def _tag_folder(path: Path, tag: str | None) -> Path:
    if not path.exists():
        raise CheckpointError(f"The checkpoint {path} does not exist (working directory {Path.cwd()}).")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file of a DeepSpeed checkpoint. Give the folder that it is in.")
    if tag is not None:
        if not (path / tag).is_dir():
            raise CheckpointError(f"{path / tag} is not there. {_offer(path)}")
        return path / tag
    if _is_tag_folder(path):
        return path
    for pointer in (path / "latest", path / "latest_universal"):
        if pointer.is_file():
            named = pointer.read_text().strip()
            if not named or not (path / named).is_dir():
                raise CheckpointError(f"{pointer} names {named!r}, and there is no such folder. {_offer(path)}")
            return path / named
    raise CheckpointError(f"{path / 'latest'} is missing, so it is not known which checkpoint is meant. {_offer(path)}")


def _offer(path: Path) -> str:
    found = _tags_in(path)
    return f"Pass one of these as the tag: {', '.join(found)}." if found else "There is no other checkpoint beside it."


def _tags_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and _is_tag_folder(entry))


def _is_tag_folder(folder: Path) -> bool:
    return (folder / "zero" / "optimizer_state.pt").is_file() or any(
        entry.name.endswith(("model_states.pt", "optim_states.pt")) for entry in folder.iterdir()
    )


def _refuse_parallel(folder: Path, names: list[str]) -> None:
    for name in names:
        match = _MODEL.match(name) or _OPTIMIZER.match(name)
        if _EXPERTS.match(name):
            what, fix = "expert-parallel (MoE)", "save its weights with DeepSpeed in one file and load those"
        elif _PIPELINE.match(name):
            what, fix = "pipeline-parallel", "convert it with DeepSpeed's ds_to_universal, and load that"
        elif match and int(match["mp"]):
            what, fix = "tensor- or pipeline-parallel", "convert it with DeepSpeed's ds_to_universal, and load that"
        else:
            continue
        if match and (folder / "zero").is_dir():
            continue  # a universal checkpoint has whole parameters; the file is a copy of what was converted
        raise CheckpointError(f"{folder / name} is a part of a {what} checkpoint, which is not supported: {fix}.")


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> tuple[Path, ...]:
    """The files of a kind by rank, without gaps."""
    found = {int(match["rank"] or 0): name for name in names if (match := pattern.match(name)) and not int(match["mp"])}
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            last = found[max(found)]
            missing = re.sub(r"(zero_pp_rank_)\d+", rf"\g<1>{rank}", last)
            raise CheckpointError(
                f"{folder / missing} is missing, while {last} is there. Each rank wrote a file: copy all of them."
            )
    return tuple(folder / found[rank] for rank in sorted(found))
