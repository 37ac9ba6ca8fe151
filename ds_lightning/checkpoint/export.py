"""Checkpoints made into what others read: one Lightning file, or weights alone in one file or several.

See [Note: constant memory]: tensors go through one piece at a time.

[Note: tied weights] Names of one tensor are known by their memory. torch's format stores it once for all of them.
safetensors has one name for each tensor: the first is kept, as modules register the tensor that others share before
those (`embed_tokens` before `lm_head`), and the metadata of the file list the others as `safetensors.torch.save_model`
does. A model that ties them itself finds all it needs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ds_lightning.checkpoint import safetensors_file
from ds_lightning.checkpoint.destination import Destination, Form
from ds_lightning.checkpoint.placement import partial_of, place, remove, sync, tidy
from ds_lightning.checkpoint.torch_file import StreamedFile
from ds_lightning.checkpoint.weights import STATE_DICT, Choice, Weights, choose, read, shown
from ds_lightning.errors import CheckpointError

Progress = Callable[[int], None]
_Write = Callable[[IO[bytes], Progress], None]
_STEMS = {Form.TORCH: ("pytorch_model", ".bin"), Form.SAFETENSORS: ("model", ".safetensors")}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        path: the file or folder.
        files: how many hold tensors.
        names: of tensors.
        nbytes: of tensors.
        notes: what was left out or changed.
    """

    path: Path
    files: int
    names: int
    nbytes: int
    notes: tuple[str, ...]


def export(
    checkpoint: Mapping[str, Any],
    destination: Destination,
    choice: Choice,
    begin: Callable[[int], Progress] | None = None,
) -> Exported:
    """Write what is chosen of a checkpoint. What is at the destination is replaced in one step, in the end.

    Args:
        checkpoint: a Lightning checkpoint; its tensors may be logical.
        destination: where to.
        choice: what.
        begin: called with the bytes of all tensors before the first is written; returns what is told of bytes written.

    Raises:
        CheckpointError: when it cannot be written; nothing has changed then.
        ConfigError: when the choice makes no sense for this checkpoint.
    """
    weights = choose(checkpoint, choice, bare=destination.form is not Form.LIGHTNING)
    if destination.form is Form.LIGHTNING:
        content = StreamedFile(_with(checkpoint, weights))
        files: dict[str, _Write] = {"": partial(_torch_file, content)}
        index, nbytes = None, content.nbytes
    else:
        shards = _shards(weights, destination.max_shard_size)
        nbytes = sum(shard.nbytes for shard in shards)
        names = _names(destination, len(shards))
        files = {name: shard.write(destination.form) for name, shard in zip(names, shards, strict=True)}
        index = _index(dict(zip(names, shards, strict=True)), destination.form, nbytes)
    _write(destination, files, index, begin(nbytes) if begin is not None else _silent)
    return Exported(destination.path, len(files), len(weights.tensors), nbytes, tuple(_notes(weights, destination)))


def _with(checkpoint: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """A checkpoint with other weights."""
    before = checkpoint.get(STATE_DICT, {})
    every = {**weights.others, **weights.tensors}
    result = {**checkpoint, STATE_DICT: {name: every[name] for name in [*before, *every] if name in every}}
    if weights.excluded:
        own = dict(checkpoint["ds_lightning"])
        own["excluded_parameters"] = [*own.get("excluded_parameters", ()), *weights.excluded]
        result["ds_lightning"] = own
    return result


@dataclass(slots=True)
class _Shard:
    """The tensors of one file.

    Attributes:
        order: names of the whole export, with their places.
        names: of each tensor; several where it is tied.
        tensors: by first name.
        nbytes: of all of them.
    """

    order: Mapping[str, int]
    names: list[list[str]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, names: list[str], tensor: torch.Tensor) -> None:
        """Take a tensor in."""
        self.names.append(names)
        self.tensors[names[0]] = tensor
        self.nbytes += _nbytes(tensor)

    def stored_names(self, form: Form) -> list[str]:
        """Names under which a file has tensors."""
        if form is Form.SAFETENSORS:
            return list(self.tensors)
        return sorted((name for names in self.names for name in names), key=self.order.__getitem__)

    def write(self, form: Form) -> _Write:
        """What writes the file."""
        if form is Form.SAFETENSORS:
            unsuitable = [name for name, tensor in self.tensors.items() if not safetensors_file.can_hold(tensor.dtype)]
            if unsuitable:
                dtype = self.tensors[unsuitable[0]].dtype
                raise CheckpointError(f"safetensors cannot hold {dtype} ({shown(unsuitable)}). Use --format torch.")
            metadata = {"format": "pt", **{other: names[0] for names in self.names for other in names[1:]}}
            return partial(_safetensors_file, self.tensors, metadata)
        every = {name: self.tensors[names[0]] for names in self.names for name in names}
        return partial(_torch_file, StreamedFile({name: every[name] for name in self.stored_names(form)}))


def _shards(weights: Weights, most: int | None) -> list[_Shard]:
    """Tensors in their order, as many in one file as fit; one that is larger gets a file of its own."""
    order = {name: place for place, name in enumerate(weights.tensors)}
    shards = [_Shard(order)]
    for names in weights.ties():
        tensor = weights.tensors[names[0]]
        if most is not None and shards[-1].names and shards[-1].nbytes + _nbytes(tensor) > most:
            shards.append(_Shard(order))
        shards[-1].add(names, tensor)
    return shards


def _names(destination: Destination, count: int) -> list[str]:
    if destination.max_shard_size is None:
        return [""]
    stem, suffix = _STEMS[destination.form]
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def _index(shards: Mapping[str, _Shard], form: Form, nbytes: int) -> dict[str, Any] | None:
    if len(shards) == 1:
        return None
    places = {name: file for file, shard in shards.items() for name in shard.stored_names(form)}
    return {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}


def _torch_file(content: StreamedFile, stream: IO[bytes], progress: Progress) -> None:
    content.open(stream)
    progress(content.nbytes - sum(_nbytes(tensor) for tensor in content.pending))
    for tensor in content.pending:
        content.write(tensor, _counted(read(tensor), progress))
    content.close()


def _safetensors_file(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], stream: IO[bytes], progress: Progress
) -> None:
    safetensors_file.write(stream, tensors, metadata, lambda tensor: _counted(read(tensor), progress))


def _write(
    destination: Destination, files: Mapping[str, _Write], index: Mapping[str, Any] | None, progress: Progress
) -> None:
    path, unfinished = destination.path, partial_of(destination.path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy([path.parent])
        if destination.max_shard_size is not None:
            unfinished.mkdir()
        for name, write in files.items():
            with (unfinished / name if name else unfinished).open("wb") as stream:
                write(stream, progress)
                stream.flush()
                os.fsync(stream.fileno())
        if destination.max_shard_size is not None:
            if index is not None:
                stem, suffix = _STEMS[destination.form]
                (unfinished / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")
            _carry_over(path, unfinished)
            sync(unfinished)
        place(unfinished, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {type(error).__name__}: {error}. Free some space or choose another place."
        ) from error
    finally:
        with suppress(OSError):
            remove(unfinished)


def _carry_over(old: Path, new: Path) -> None:
    """Keep what else is in a folder whose weights are replaced: a configuration, a tokenizer."""
    if not old.is_dir():
        return
    weights = [f"{stem}{part}{suffix}{end}" for stem, suffix in _STEMS.values() for part, end in _PARTS]
    shutil.copytree(old, new, symlinks=True, ignore=shutil.ignore_patterns(*weights), dirs_exist_ok=True)


_PARTS = (("", ""), ("", ".index.json"), ("-*-of-*", ""))


def _notes(weights: Weights, destination: Destination) -> Iterator[str]:
    yield from weights.notes
    tied = [names for names in weights.ties() if len(names) > 1]
    if tied and destination.form is Form.SAFETENSORS:
        yield "tied and stored once: " + shown(f"{name} (as {first})" for first, *others in tied for name in others)
    if weights.overflowed:
        count = sum(weights.overflowed.values())
        yield f"{count} values are too large for float16 and became infinite, in {shown(weights.overflowed)}"


def _counted(parts: Iterable[torch.Tensor], progress: Progress) -> Iterator[torch.Tensor]:
    for part in parts:
        yield part
        progress(_nbytes(part))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _silent(nbytes: int) -> None:
    """Nobody wants to know."""
