"""The safetensors format, written tensor by tensor and read range by range.

The library's own writer wants all tensors in memory, and its reader maps the file: [Note: reading without mapping].

A file is the length of the header (8 bytes, little-endian), the header (JSON, padded with spaces), and the values of
all tensors without gaps. Tensors with larger elements come first, so that every one begins at a multiple of its element
size: readers map the file.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from ds_lightning.checkpoint.file_tensors import FileSource, row_major
from ds_lightning.checkpoint.torch_file import memory_of
from ds_lightning.errors import CheckpointError
from ds_lightning.zero.logical import logical

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_ALIGNMENT = 8
_MOST = 1 << 60
"""Bytes, or elements, that no file has: torch counts them in 64 bits."""
_LENGTH = 8
"""Bytes of the length of the header."""
_LARGEST_HEADER = 100_000_000
"""As in the library: a longer one is no header."""


def can_hold(dtype: torch.dtype) -> bool:
    """Whether the format has a dtype, on this machine."""
    return dtype in _NAMES and (sys.byteorder == "little" or dtype.itemsize == 1)


def write(
    stream: IO[bytes],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    read: Callable[[torch.Tensor], Iterable[torch.Tensor]],
) -> None:
    """Write a file.

    Args:
        stream: an empty binary file.
        tensors: by name; of dtypes that the format has, and not sharing memory.
        metadata: what else the header says.
        read: gives the row-major elements of a tensor in order, as 1-D tensors on CPU.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(struct.pack("<Q", len(text)))
    stream.write(text)
    for _, tensor in ordered:
        for values in read(tensor):
            stream.write(memory_of(values))


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, as logical tensors that are read when they are asked for, and what its header says beside.

    Args:
        path: the file.

    Raises:
        CheckpointError: when it is no complete file of this format. All of the header is checked, and no value read.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            before = file.read(_LENGTH)
            length = struct.unpack("<Q", before)[0] if len(before) == _LENGTH else 0
            if not 2 <= length <= min(size - _LENGTH, _LARGEST_HEADER):
                raise ValueError(f"it has {size} bytes, and a header of {length} is announced")
            header = json.loads(file.read(length), object_pairs_hook=_without_repetition)
        if not isinstance(header, dict):
            raise ValueError("the header is no table")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict):
            raise ValueError(f"{_METADATA} is no table")
        start = _LENGTH + length
        places = {name: _place(path, start, name, entry) for name, entry in header.items()}
        _check_places(list(places.values()), start, size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # of json and of text among others
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}. It is truncated, damaged, or something else "
            "(a pointer of git-lfs, an error page of a server). Fetch it again."
        ) from error
    return {name: logical(source) for name, source in places.items()}, metadata


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _place(path: Path, start: int, name: str, entry: Any) -> FileSource:
    """Where a tensor is, as the header says."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} is no description of a tensor")
    dtype, shape, offsets = _DTYPES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
    if dtype is None or not can_hold(dtype):
        raise ValueError(f"{name!r} has dtype {entry['dtype']!r}, which is not known here")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or prod(s for s in shape if s) > _MOST:
        raise ValueError(f"{name!r} has shape {shape!r} at {offsets!r}")
    count = torch.Size(shape).numel()
    if offsets[1] - offsets[0] != count * dtype.itemsize:
        raise ValueError(f"{name!r} has shape {shape!r} of {entry['dtype']}, but lies at {offsets!r}")
    return FileSource(path, start + offsets[0], torch.Size(shape), row_major(shape), dtype)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MOST for value in values)


def _check_places(places: Sequence[FileSource], start: int, size: int) -> None:
    """Tensors lie one behind the other and fill the file."""
    end = start
    for source in sorted(places, key=lambda source: (source.offset, source.shape.numel())):
        if source.offset != end:
            raise ValueError("tensors overlap, or there are gaps between them")
        end += source.shape.numel() * source.dtype.itemsize
    if end != size:
        raise ValueError(f"it has {size} bytes instead of {end}")
