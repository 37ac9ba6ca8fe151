"""Folders of `torch.distributed.checkpoint` read range by range, safely.

[Note: safe reading] torch reads `.metadata` with an open unpickler, which runs whatever the file says. Here only the
classes of the table itself are made. A table may name any path for its chunks; only files inside the folder are opened.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ds_lightning.checkpoint.file_tensors import FileSource, Window, row_major, source_of
from ds_lightning.checkpoint.loading import METADATA
from ds_lightning.checkpoint.sharded import PLACES
from ds_lightning.errors import CheckpointError
from ds_lightning.layout.boxes import boxes, overlap
from ds_lightning.zero.logical import logical

_SMALL = 1 << 20
"""Bytes of a chunk that are read at once; of a larger one, only what is asked for."""

_TABLE_CLASSES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
}


class _TableUnpickler(pickle.Unpickler):
    """Makes the classes of a table of chunks and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A known class, or an error."""
        if (module, name) in _TABLE_CLASSES:
            return _TABLE_CLASSES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            return PurePosixPath  # the name under which it was written, not used here
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a table of chunks")


class StoredFolder:
    """The tensors of one folder, read when they are asked for.

    Args:
        folder: the checkpoint.

    Raises:
        CheckpointError: when there is no table, or it is broken, or a file is missing or too short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = _read_table(folder)
        self._infos: Mapping[MetadataIndex, Any] = self.table.storage_data or {}
        self._places: dict[MetadataIndex, FileSource | None] = {}
        self._check_files()
        self._take_places()

    def _take_places(self) -> None:
        """What `__R_0.json` say, where they agree with the table."""
        for path in sorted(self.folder.glob(f"__*{PLACES}")):
            try:
                for name, chunks in json.loads(path.read_text()).items():
                    for offsets, start in chunks:
                        index = MetadataIndex(name, torch.Size(offsets))
                        self._places[index] = self._noted(index, int(start))
            except (AttributeError, KeyError, OSError, StopIteration, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path} does not fit the chunks beside it: {type(error).__name__}: {error}. Without that file the "
                    "checkpoint is read in another way."
                ) from error

    def _noted(self, index: MetadataIndex, start: int) -> FileSource:
        entry, info = self.table.state_dict_metadata[index.fqn], self._infos[index]
        assert isinstance(entry, TensorStorageMetadata)
        shape = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        dtype = entry.properties.dtype
        if not info.offset <= start <= info.offset + info.length - shape.numel() * dtype.itemsize:
            raise ValueError(f"{index.fqn} does not lie at {start}")
        return FileSource(self.folder / info.relative_path, start, shape, row_major(shape), dtype)

    def _check_files(self) -> None:
        """Every chunk lies within a file of the folder."""
        ends: dict[str, int] = {}
        for info in self._infos.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        root = self.folder.resolve()
        for name, end in ends.items():
            path = (root / name).resolve()
            if path.parent != root:
                raise CheckpointError(f"{self.folder / METADATA} names {name}, which is outside of the checkpoint.")
            if not path.is_file():
                raise CheckpointError(f"The checkpoint {self.folder} is not complete: {name} is missing.")
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"The checkpoint {self.folder} is not complete: {name} has {path.stat().st_size} bytes of {end}."
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as logical tensors."""
        return {
            name: logical(_StoredSource(self, name, entry.size, entry.properties.dtype))
            for name, entry in self.table.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)` of a tensor; reads the chunks that hold some of them."""
        entry = self.table.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        wanted = boxes(entry.size, start, stop)
        out = torch.empty(stop - start, dtype=entry.properties.dtype)
        found = 0
        for chunk in entry.chunks:
            shared = [(b, part) for b in wanted if (part := overlap(b, chunk.offsets, chunk.sizes)) is not None]
            if not shared:
                continue
            place = self._place(name, chunk)
            if chunk.sizes.numel() == stop - start and shared == [(wanted[0], (chunk.offsets, chunk.sizes))]:
                # Just what was asked for: the usual case at the same world size.
                return self._chunk(name, chunk).reshape(-1) if place is None else place.flat(0, stop - start)
            values = self._chunk(name, chunk) if place is None else None
            for box, (offsets, sizes) in shared:
                target = out[box.start - start : box.start - start + box.numel].view(box.sizes)
                into = _narrowed(target, box.offsets, offsets, sizes)
                if place is not None:
                    inside = [offset - base for offset, base in zip(offsets, chunk.offsets, strict=True)]
                    into.copy_(place.part(inside, sizes))
                elif values is not None:
                    into.copy_(_narrowed(values, chunk.offsets, offsets, sizes))
                found += into.numel()
        if found != stop - start:
            raise CheckpointError(f"The checkpoint {self.folder} is not complete: elements of {name} are missing.")
        return out

    def _place(self, name: str, chunk: Any) -> FileSource | None:
        """Where the values of a large chunk lie; None for small ones, and where torch does not tell."""
        index = MetadataIndex(name, chunk.offsets)
        info = self._infos[index]
        if index not in self._places:
            if info.length <= _SMALL:
                return None
            path = self.folder / info.relative_path
            try:
                with path.open("rb") as file:
                    window = io.BufferedReader(Window(file, info.offset, info.length))
                    outline = torch.load(window, map_location="meta", weights_only=True)
                place = source_of(outline, path, info.offset) if torch.is_tensor(outline) else None
            except Exception:  # reading all of it tells what is wrong
                place = None
            self._places[index] = place if place is not None and place.shape == chunk.sizes else None
        return self._places[index]

    def _chunk(self, name: str, chunk: Any) -> torch.Tensor:
        data = io.BytesIO(self._bytes(MetadataIndex(name, chunk.offsets)))
        try:
            values = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{name} in {self.folder} cannot be read: {type(error).__name__}: {error}. The file is damaged, or not "
                "in torch.save's format."
            ) from error
        if not torch.is_tensor(values) or values.shape != chunk.sizes:
            raise CheckpointError(f"{name} in {self.folder} is not what the table says: {chunk.sizes} was expected.")
        return values.detach()

    def _bytes(self, index: MetadataIndex) -> bytes:
        info = self._infos[index]
        with (self.folder / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            data: bytes = stream.read(info.length)
            return data


@dataclass(frozen=True, slots=True)
class _StoredSource:
    """One tensor of a folder."""

    stored: StoredFolder
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Row-major elements `[start, stop)`."""
        return self.stored.flat(self.name, start, stop)


def _narrowed(
    values: torch.Tensor, origin: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> torch.Tensor:
    for dim, (base, offset, size) in enumerate(zip(origin, offsets, sizes, strict=True)):
        values = values.narrow(dim, offset - base, size)
    return values


def _read_table(folder: Path) -> Metadata:
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            table = _TableUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"The checkpoint {folder} is not complete: {METADATA} is missing.") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is no table of chunks that can be read safely: {type(error).__name__}: {error}. It is truncated, "
            "or another program's."
        ) from error
    if not isinstance(table, Metadata):
        raise CheckpointError(f"{path} is no table of chunks.")
    return table
