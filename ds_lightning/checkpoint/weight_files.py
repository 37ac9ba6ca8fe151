"""Weights in files and folders of many kinds, as stand-ins: headers are read and checked, values are not.

Beside checkpoints of any kind these are the folders of Hugging Face: one file of weights, or several and an index that
tells which tensor is in which.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_lightning.checkpoint import safetensors_file
from ds_lightning.checkpoint.deepspeed.files import is_deepspeed_checkpoint
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO, is_remote
from ds_lightning.checkpoint.loading import is_sharded, load, resolved
from ds_lightning.checkpoint.placement import pointed_to
from ds_lightning.checkpoint.weights import STATE_DICT, named_tensors, shown
from ds_lightning.errors import CheckpointError

_SAFETENSORS = ".safetensors"
_INDEX = ".index.json"
_OF_A_FOLDER = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""What a folder of Hugging Face's has one of, in the order in which `from_pretrained` looks."""


def open_weights(source: str | Path, key: str | None, log: Callable[[str], None]) -> dict[str, Any]:
    """What a source holds, by name: logical tensors that are read when they are asked for.

    Args:
        source: a file of safetensors or torch, an index, a folder of Hugging Face's, or a checkpoint of any kind.
        key: where in a checkpoint the weights are; dots lead into nested dicts. None: where they usually are.
        log: tells the user something.

    Raises:
        CheckpointError: when there are none, or a file is missing, broken, or not to be trusted.
    """
    if is_remote(source):
        raise CheckpointError(f"Weights are read from local files, not from {source}. Copy them here first.")
    path = Path(source)
    if not path.exists() and not path.is_symlink() and len(path.parts) == 2 and not path.parent.exists():
        raise CheckpointError(
            f"{path} is no file or folder here (working directory {Path.cwd()}). Nothing is fetched from the hub: give "
            f"the folder that huggingface_hub.snapshot_download({str(path)!r}) returns."
        )
    place = _main_file(path) if path.is_dir() else path
    if not place.name.endswith((_SAFETENSORS, _INDEX)):
        return _of_torch(place, key, log)
    if not place.is_file():
        raise CheckpointError(f"{place} does not exist (working directory {Path.cwd()}).")
    if key is not None:
        raise CheckpointError(f"key={key!r} leads into a nested checkpoint, but {place} holds nothing but weights.")
    return _of_index(place) if place.name.endswith(_INDEX) else _with_ties(*safetensors_file.read(place))


def _main_file(folder: Path) -> Path:
    """The file of a folder that tells where its weights are; the folder itself if that is a checkpoint."""
    for name in _OF_A_FOLDER:  # before `latest`, which Hugging Face's Trainer has beside them
        if (folder / name).is_file():
            return folder / name
    if is_sharded(folder) or is_deepspeed_checkpoint(folder) or pointed_to(folder) is not None:
        return folder
    names = sorted(entry.name for entry in folder.iterdir())
    for suffix in (_INDEX, _SAFETENSORS):  # of other libraries, under other names
        found = [name for name in names if name.endswith(suffix)]
        if len(found) == 1:
            return folder / found[0]
    raise CheckpointError(
        f"{folder} holds no weights that are known here: none of {', '.join(_OF_A_FOLDER)}, and no checkpoint. It has "
        f"{shown(names)}. Give the path of the file with the weights."
    )


def _of_torch(path: Path, key: str | None, log: Callable[[str], None]) -> dict[str, Any]:
    """A file of `torch.save`, or a checkpoint; nothing is unpickled but plain data."""
    source = resolved(path, log)
    read = ZeroCheckpointIO().load_lazily
    content = read(source) if key is not None and source.is_file() else load(source, read, log, to_resume=False)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{source} holds a {type(content).__name__}, not a dict with weights in it.")
    return named_tensors(content, key or STATE_DICT, "key={!r}")


def _with_ties(tensors: dict[str, torch.Tensor], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Names that were left out because another one has the same tensor: `safetensors.torch.save_model` notes them."""
    others = {name: tensors[first] for name, first in metadata.items() if name not in tensors and first in tensors}
    return {**tensors, **others}


def _of_index(index: Path) -> dict[str, Any]:
    """The tensors of several files."""
    places = _weight_map(index)
    names: dict[str, list[str]] = defaultdict(list)
    for name, file in places.items():
        names[file].append(name)
    # The name decides, not what it leads to: in the hub's own cache, files are links to somewhere else.
    outside = [file for file in names if file in ("", ".", "..") or Path(file).name != file or "\\" in file]
    if outside:
        raise CheckpointError(f"{index} names {shown(outside)}: files of an index lie beside it.")
    absent = [file for file in names if not (index.parent / file).is_file()]
    if absent:
        raise CheckpointError(f"{index} names {shown(absent)}, which {index.parent} does not have. Fetch them again.")
    found: dict[str, Any] = {}
    for file, expected in names.items():
        path = index.parent / file
        if file.endswith(_SAFETENSORS):
            tensors = _with_ties(*safetensors_file.read(path))
        else:
            tensors = _of_torch(path, None, _silent)
        lost = [name for name in expected if name not in tensors]
        if lost:
            raise CheckpointError(f"{index} says that {file} holds {shown(lost)}, but it does not.")
        found |= {name: value for name, value in tensors.items() if places.get(name, file) == file}
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: {type(error).__name__}: {error}.") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} is no index of weights: there is no weight_map with names of files.")
    return places


def _silent(message: str) -> None:
    """What is told of a file says nothing of all of them."""
