"""Files in `torch.save`'s format whose tensors are written one after the other.

[Note: streaming] `torch.save` needs every tensor in memory at once. The format itself does not: it is an uncompressed
zip with one pickle, in which tensors refer to storages by number, and one record per storage. Here logical tensors
become references right away, and their records follow as their values come in. Records are aligned as torch aligns
them, so that files can be mapped, and have their checksums, so that any zip tool can verify them.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import IO, Any

import torch

from ds_lightning.zero.logical import LogicalTensor

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes before the name
_ZIP64_EXTRA = 20  # what zipfile puts behind our own extra field
_PADDING_ID = 0x4246  # torch's own number for padding
_PROTOCOL = 2  # what torch.save writes and the safe unpickler reads
PIECE = 1 << 22
"""Elements of a logical tensor that are read and written at a time, where its values are read from a file."""


class StreamedFile:
    """One file in the making. Its structure is fixed at once, its tensors may follow later.

    Args:
        content: what `torch.load` will return; logical tensors anywhere in it.

    Attributes:
        pending: logical tensors that nobody has touched, to be written with `write`, each once and in any order.
    """

    def __init__(self, content: Any) -> None:
        self._pickle = io.BytesIO()
        pickler = _Pickler(self._pickle)
        pickler.dump(content)
        self.pending: list[LogicalTensor] = list(pickler.logical.values())
        self._storages = pickler.storages
        self._zip: zipfile.ZipFile | None = None
        self._numbers = {key: pickler.numbers["logical", key] for key in pickler.logical}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        pending = sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.pending)
        return pending + sum(storage.nbytes() for storage in self._storages.values())

    def stage(self) -> None:
        """Copy what is no logical tensor: it may change from now on."""
        self._storages = {number: storage.cpu().clone() for number, storage in self._storages.items()}

    def open(self, stream: IO[bytes]) -> None:
        """Begin to write into a seekable binary file."""
        self._stream = stream
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._record("data.pkl", [self._pickle.getbuffer()], self._pickle.getbuffer().nbytes)
        self._record("byteorder", [sys.byteorder.encode()], len(sys.byteorder))
        for number, storage in self._storages.items():
            self._record(f"data/{number}", [memory_of(_as_tensor(storage.cpu()))], storage.nbytes())

    def write(self, tensor: LogicalTensor, values: Iterable[torch.Tensor]) -> None:
        """Write the values of a pending tensor.

        Args:
            tensor: one of `pending`.
            values: its row-major elements in order, as 1-D tensors on CPU, in its dtype.
        """
        number = self._numbers.pop(id(tensor))
        self._record(f"data/{number}", (memory_of(part) for part in values), tensor.numel() * tensor.dtype.itemsize)

    def close(self) -> None:
        """Finish the file, which is not complete before."""
        assert not self._numbers, "some tensors were not written"
        self._record("version", [b"3\n"], 2)
        assert self._zip is not None
        self._zip.close()

    def abandon(self) -> None:
        """Write no more; without that, an archive that is dropped would try to complete itself."""
        if self._zip is not None:
            self._zip.fp = None

    def _record(self, name: str, parts: Iterable[Any], nbytes: int) -> None:
        assert self._zip is not None
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = nbytes
        start = self._stream.tell() + _LOCAL_HEADER + len(info.filename) + _ZIP64_EXTRA + 4
        padding = -start % _ALIGNMENT
        info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        with self._zip.open(info, "w", force_zip64=True) as record:
            for part in parts:
                record.write(part)


def read(tensor: LogicalTensor) -> Iterator[torch.Tensor]:
    """The values of a logical tensor, piece by piece."""
    for start in range(0, tensor.numel(), PIECE):
        yield tensor.flat(start, min(start + PIECE, tensor.numel()))


class _Reference:
    """Stands for the storage of a logical tensor in the pickle."""

    def __init__(self, number: str, tensor: LogicalTensor) -> None:
        self.number = number
        self.dtype = tensor.dtype
        self.numel = tensor.numel()


class _Pickler(pickle.Pickler):
    """Writes what `torch.save` writes, with references in the place of storages.

    Attributes:
        storages: ordinary ones, by number.
        logical: logical tensors by `id`.
        numbers: all numbers, by kind and the address of a storage or the `id` of a logical tensor.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, _PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.logical: dict[int, LogicalTensor] = {}
        self.numbers: dict[tuple[str, int], str] = {}

    def _number(self, kind: str, key: int) -> str:
        return self.numbers.setdefault((kind, key), str(len(self.numbers)))

    def reducer_override(self, obj: Any) -> Any:
        """Logical tensors are rebuilt from a storage as others are."""
        if not isinstance(obj, LogicalTensor):
            return NotImplemented
        if obj.value is not None:
            return obj.value.detach().__reduce_ex__(_PROTOCOL)
        self.logical[id(obj)] = obj
        reference = _Reference(self._number("logical", id(obj)), obj)
        stride = torch.empty(obj.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (reference, 0, tuple(obj.shape), stride, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        """Storages are references."""
        if isinstance(obj, _Reference):
            return "storage", _storage_class(obj.dtype), obj.number, "cpu", obj.numel
        if isinstance(obj, torch.storage.TypedStorage):
            storage, kind, numel = obj._untyped_storage, _storage_class(obj.dtype), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, numel = obj, torch.UntypedStorage, obj.nbytes()
        else:
            return None
        assert storage.device.type != "meta", "a tensor without values"
        number = self._number("storage", storage._cdata)
        self.storages[number] = storage
        return "storage", kind, number, torch.serialization.location_tag(storage), numel


def _storage_class(dtype: torch.dtype) -> Any:
    return getattr(torch, torch.empty(0, dtype=dtype)._typed_storage()._pickle_storage_type())


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def memory_of(values: torch.Tensor | memoryview | bytes) -> Any:
    """The memory of a tensor, without a copy where it is contiguous."""
    if not isinstance(values, torch.Tensor):
        return values
    flat = values.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
