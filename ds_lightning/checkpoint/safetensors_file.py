"""The safetensors format, written tensor by tensor: the library's own writer wants all of them in memory.

A file is the length of the header (8 bytes, little-endian), the header (JSON, padded with spaces), and the values of
all tensors without gaps. Tensors with larger elements come first, so that every one begins at a multiple of its element
size: readers map the file.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import torch

from ds_lightning.checkpoint.torch_file import memory_of

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
_ALIGNMENT = 8


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
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
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
