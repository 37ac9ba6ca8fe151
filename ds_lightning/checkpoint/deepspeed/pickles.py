"""Reads files of `torch.save` without running anything they ask for, and without the classes they name.

[Note: inert records] DeepSpeed pickles objects of its own into its checkpoints (enums, loss scalers, addresses of
fragments). `torch.load` would need those classes, and would run what the file says. Here a file can make tensors,
numbers, strings and plain containers; whatever else it names becomes a `Record`, which keeps what it was given and does
nothing. No callable that a file can reach has attributes that the file could change.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_lightning.errors import CheckpointError

_MAGIC = 0x1950A86A20F9469CFC6C  # of files that torch wrote before it used zip archives
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,
}
# A file that names one of these packages, or reaches one through another module, is not damaged but hostile; it is
# refused as a whole.
_HOSTILE_ANYWHERE = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "shutil", "builtins", "importlib", "ctypes", "socket"}
)
_HOSTILE = _HOSTILE_ANYWHERE | frozenset(
    {
        *("asyncio", "atexit", "bdb", "cloudpickle", "code", "codeop", "commands", "dill", "ftplib", "gc", "imp"),
        *("inspect", "joblib", "marshal", "multiprocessing", "pdb", "pickle", "_pickle", "pkgutil", "pty", "requests"),
        *("runpy", "signal", "smtplib", "tempfile", "timeit", "urllib", "webbrowser", "zipimport"),
    }
)
# Protocol 2, which torch.save uses, has the names of Python 2.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
_HARMLESS_BUILTINS = frozenset({"getattr", "object", "type", "slice", "range", "property"})
# What numpy calls the dtypes of its scalars, as `struct` does.
_NUMPY_CODES = {
    **{"f2": "e", "f4": "f", "f8": "d", "b1": "?"},
    **{"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
}


class Record:
    """What a file says of an object whose class is not used here; see [Note: inert records].

    Attributes:
        kind: the full name of the class, or function, that the file names.
        args: the arguments it was called with.
        attributes: its attributes by name; a state that is no dict is under the key "".
        entries: its items, if it is a kind of dict.
        elements: its elements, if it is a kind of list.
    """

    __slots__ = ("args", "attributes", "elements", "entries")

    kind = ""
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    entries: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *args: Any, **attributes: Any) -> Record:  # noqa: D102
        made = object.__new__(cls)
        made.args, made.attributes, made.entries, made.elements = args, attributes, {}, []
        return made

    def __init__(self, *args: Any, **attributes: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.attributes.update(part or {})
        else:
            self.attributes[""] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        """Keep an element."""
        self.elements.append(value)

    def extend(self, values: list[Any]) -> None:
        """Keep elements."""
        self.elements.extend(values)

    def __repr__(self) -> str:
        return f"<record of {self.kind}>"


class _Safe:
    """A function that a file may call. There is nothing on it that a file could set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a state for a function")


class _Storage:
    """Memory, and the dtype of its elements."""

    __slots__ = ("dtype", "memory")

    def __init__(self, memory: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.memory, self.dtype = memory, dtype

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a state for a storage")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """The layout of a tensor; whether it needs a gradient, and hooks, are of no interest here."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    return torch.empty(0, dtype=dtype).set_(storage.memory, offset, tuple(size), tuple(stride))


def _first(value: Any, *rest: Any) -> Any:
    return value


def _subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of a subclass, or one with attributes: only its values matter."""
    if not isinstance(function, _Safe):
        raise pickle.UnpicklingError(f"a tensor made by {function}")
    return function(*args)


def _reconstructed(kind: Any, *rest: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Record)):
        raise pickle.UnpicklingError(f"an object of {kind}")
    return kind()


def _bytes(value: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if not isinstance(value, str) or encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise pickle.UnpicklingError("bytes made of something else")
    return value.encode(encoding)


class _NumpyType:
    """The dtype of a numpy scalar."""

    __slots__ = ("code", "order")

    def __init__(self, code: str, *rest: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in "<>" else "<"


def _numpy_scalar(kind: Any, data: Any = b"") -> Any:
    """A number; numpy itself is not needed."""
    if not isinstance(kind, _NumpyType) or kind.code not in _NUMPY_CODES:
        raise pickle.UnpicklingError("a numpy scalar of an unusual type")
    return struct.unpack(kind.order + _NUMPY_CODES[kind.code], _bytes(data))[0]


def _defaultdict(factory: Any = None, *rest: Any) -> dict[Any, Any]:
    return defaultdict(factory if isinstance(factory, _Safe) else None, *rest)


_SAFE: dict[str, _Safe] = {
    "collections.OrderedDict": _Safe(OrderedDict),
    "collections.defaultdict": _Safe(_defaultdict),
    "collections.Counter": _Safe(Counter),
    **{f"builtins.{kind.__name__}": _Safe(kind) for kind in (set, frozenset, list, dict, tuple, complex)},
    **{f"builtins.{kind.__name__}": _Safe(kind) for kind in (int, float, bool, str)},
    "builtins.long": _Safe(int),
    "builtins.unicode": _Safe(str),
    "builtins.bytes": _Safe(_bytes),
    "builtins.bytearray": _Safe(lambda *args: bytearray(_bytes(*args))),
    "_codecs.encode": _Safe(_bytes),
    "copyreg._reconstructor": _Safe(_reconstructed),
    "numpy.dtype": _Safe(_NumpyType),
    "numpy.core.multiarray.scalar": _Safe(_numpy_scalar),
    "numpy._core.multiarray.scalar": _Safe(_numpy_scalar),
    "torch.Size": _Safe(lambda sizes=(): torch.Size(sizes)),
    "torch.device": _Safe(lambda *parts: ":".join(str(part) for part in parts)),
    "torch._utils._rebuild_tensor": _Safe(_tensor),
    "torch._utils._rebuild_tensor_v2": _Safe(_tensor),
    "torch._utils._rebuild_tensor_v3": _Safe(_tensor),
    "torch._utils._rebuild_parameter": _Safe(_first),
    "torch._utils._rebuild_parameter_with_state": _Safe(_first),
    "torch._tensor._rebuild_from_type_v2": _Safe(_subclass),
}


class _Unpickler(pickle.Unpickler):
    """See [Note: inert records]."""

    def __init__(self, file: BinaryIO, path: Path, storage: Callable[..., _Storage] | None = None) -> None:
        super().__init__(file, encoding="utf-8")
        self._path, self._storage = path, storage
        self._kinds: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global."""
        module = _RENAMED.get(module, module)
        full = f"{module}.{name}"
        if full in _SAFE:
            return _SAFE[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        harmless = module == "builtins" and (name in _HARMLESS_BUILTINS or name.endswith(("Error", "Exception")))
        parts = full.split(".")
        if not harmless and (parts[0] in _HOSTILE or not _HOSTILE_ANYWHERE.isdisjoint(parts)):
            raise CheckpointError(
                f"{self._path} asks for {full}, which no checkpoint needs: it may have been made to run code on the "
                "machine that loads it. Nothing of it was run, and it is not loaded."
            )
        if full not in self._kinds:
            self._kinds[full] = type(name, (Record,), {"__slots__": (), "kind": full})
        return self._kinds[full]

    def persistent_load(self, pid: Any) -> Any:
        """A storage of the file."""
        known = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] in ("storage", b"storage")
        if not known or self._storage is None or not isinstance(pid[1], torch.dtype):
            raise pickle.UnpicklingError("a reference to something that is no storage")
        return self._storage(*pid[1:])


def read(path: Path) -> Any:
    """What a file of `torch.save` holds, with records in the place of objects.

    Tensors of zip archives stay in the file, as private memory maps, until they are used; those of the older format are
    read.

    Raises:
        CheckpointError: when the file is not there, not complete, of another kind, or asks for dangerous functions.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Copy it back, or load another checkpoint.")
    size = path.stat().st_size
    try:
        return _read_zip(path, size) if zipfile.is_zipfile(path) else _read_legacy(path, size)
    except CheckpointError:
        raise
    except Exception as error:  # of whatever kind: the pickle machine trips in many ways over a damaged file
        text = str(error).splitlines()
        raise CheckpointError(
            f"{path} ({size} bytes) is not a complete file of torch.save: it may be truncated, or of another kind. "
            f"Copy it again, or load another checkpoint. ({type(error).__name__}: {text[0] if text else ''})"
        ) from error


def _read_zip(path: Path, size: int) -> Any:
    memory = torch.UntypedStorage.from_file(str(path), False, size)
    made: dict[str, _Storage] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if "constants.pkl" in names or "data.pkl" not in names:
            raise ValueError("an archive without a data.pkl, or of TorchScript")
        if "byteorder" in names and archive.read(names["byteorder"]).decode() != sys.byteorder:
            raise ValueError("written on a machine of another byte order")

        def storage(dtype: torch.dtype, key: str, location: Any, numel: int, *rest: Any) -> _Storage:
            if key not in made:
                entry = archive.getinfo(names[f"data/{key}"])
                nbytes = numel * dtype.itemsize
                if entry.compress_type != zipfile.ZIP_STORED or not 0 <= nbytes <= entry.file_size:
                    raise ValueError(f"the record of storage {key} has another size")
                file.seek(entry.header_offset + 26)
                start = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
                made[key] = _Storage(memory[start : start + nbytes], dtype)
            return made[key]

        return _Unpickler(io.BytesIO(archive.read(names["data.pkl"])), path, storage).load()


def _read_legacy(path: Path, size: int) -> Any:
    made: dict[str, _Storage] = {}

    def storage(dtype: torch.dtype, key: str, location: Any, numel: int, view: Any = None) -> _Storage:
        if key not in made:
            nbytes = numel * dtype.itemsize
            if not 0 <= nbytes <= size:
                raise ValueError("a storage that is larger than the file")
            made[key] = _Storage(torch.UntypedStorage(nbytes), dtype)
        if view is None:
            return made[key]
        _, start, count = view
        part = slice(start * dtype.itemsize, (start + count) * dtype.itemsize)
        return _Storage(made[key].memory[part], dtype)

    with path.open("rb") as file:
        if _Unpickler(file, path).load() != _MAGIC:
            raise ValueError("another magic number")
        for _ in ("version", "system"):
            _Unpickler(file, path).load()
        result = _Unpickler(file, path, storage).load()
        for key in _Unpickler(file, path).load():
            kept = made[key]
            (numel,) = struct.unpack("<q", file.read(8))
            data = file.read(numel * kept.dtype.itemsize)
            if len(data) != kept.memory.nbytes():
                raise EOFError("the values end early")
            if data:
                bytes_of = torch.empty(0, dtype=torch.uint8).set_(kept.memory)
                bytes_of.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return result
