"""Checkpoints as folders of `torch.distributed.checkpoint`, written by all ranks straight from their shards.

| file | content |
|---|---|
| `__R_0.distcp` | what rank R owns, as ordinary chunks of N-dimensional tensors: see `layout/boxes.py` |
| `.metadata` | torch's table of chunks |
| `__R_0.json` | where in that file the values lie: readers that know it need not unpickle each chunk |
| `meta.pt` | everything that is no tensor of the model or its optimizers, in Lightning's usual place |

Tensors are named `model.NAME` and `optimizer_I.state.NAME.KEY`, as Lightning's own strategies name them, so `dcp.load`,
`dcp_to_torch_save` and `python -m lightning.pytorch.utilities.consolidate_checkpoint` read such a folder. Nothing in it
depends on the stage, the number of ranks or the precision.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save, save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ds_lightning.checkpoint.full import unwritten
from ds_lightning.checkpoint.loading import META
from ds_lightning.checkpoint.placement import make_folder, partial_of, place, remove, sync
from ds_lightning.checkpoint.snapshot import ShardSource, Snapshot
from ds_lightning.comm.agreement import Agreement
from ds_lightning.errors import CheckpointError
from ds_lightning.topology import Topology
from ds_lightning.zero.logical import LogicalTensor, memory

PLACES = ".json"
"""Suffix of a file beside each of chunks: where in it the values of each lie, so that ranges can be read directly."""
LEAST_NOTED = 4096
"""Bytes of the smallest values whose place is noted."""
TENSORS = "tensors"
"""Key in `meta.pt["ds_lightning"]`: for each tensor that was taken out, its path in the checkpoint and its name."""

# torch 2.6: only the older name of `save` can be told that there is one rank.
_save_alone = partial(save if "no_dist" in inspect.signature(save).parameters else save_state_dict, no_dist=True)

Key = str | int
Path_ = tuple[Key, ...]


class ShardedWrite:
    """One checkpoint on its way into a folder. Construction is not collective; every rank makes one.

    Args:
        checkpoint: rank 0's; that of other ranks does not matter.
        target: the folder, replaced in one step when the new one is complete.
        snapshot: whose vectors the checkpoint's logical tensors point into.
        ranks: all ranks, over CPU memory.
        complete: what to do on rank 0 once it is in its place; a failure of that is one of the write.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        target: Path,
        snapshot: Snapshot,
        ranks: Topology,
        complete: Callable[[], None],
    ) -> None:
        self.target = target
        self.snapshot = snapshot
        self._partial = partial_of(target)
        self._complete = complete
        self._ranks = ranks
        self._taken: _Taken | None = None
        self._problem: str | None = None
        if ranks.rank == 0:
            try:
                self._taken = _Taken(checkpoint)
            except Exception as error:  # something in it cannot be pickled
                self._problem = unwritten(target, error)

    def stage(self) -> None:
        """Copy what may change from now on and is not in the snapshot. Not collective."""
        if self._taken is not None:
            self._taken.stage()

    def run(self) -> None:
        """Write. Collective.

        Raises:
            CheckpointError: on every rank, when any of them cannot write; what was there before stays.
        """
        try:
            self._run()
        except BaseException:  # another rank is gone, or the user interrupts
            if self._ranks.rank == 0:
                remove(self._partial)
            raise

    def _run(self) -> None:
        agreement = Agreement(self._ranks)
        if self._ranks.rank == 0 and self._problem is None:
            try:
                make_folder(self.target.parent)
                self._partial.mkdir()
            except OSError as error:
                self._problem = unwritten(self.target, error)
        plan = (self._problem, str(self._partial), self._taken.places if self._taken is not None else {})
        problem, folder, places = agreement.from_rank(plan)
        if problem is None:
            problem = self._write_tensors(Path(folder), places)
        if self._ranks.rank == 0:
            problem = self._finish(problem)
        problem = agreement.from_rank(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def _write_tensors(self, folder: Path, places: Mapping[Path_, tuple[int, int, torch.Size]]) -> str | None:
        copies = places if self._ranks.first_replica else {}  # of several copies (MiCS) the first is written
        tensors = {name: self.snapshot.tensor(*place) for name, place in copies.items()}
        if self._taken is not None:
            tensors.update(self._taken.whole)
        alone = self._ranks.world_size == 1
        try:
            with warnings.catch_warnings() if alone else nullcontext():
                if alone:  # torch warns of what it was told
                    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                    warnings.filterwarnings("ignore", "`save_state_dict` is deprecated", FutureWarning)
                write: Callable[..., Any] = _save_alone if alone else save
                write(_nested(tensors), storage_writer=_Writer(folder), process_group=self._ranks.data_group)
        except CheckpointException as error:  # torch tells every rank of every rank's failure
            rank, (cause, _) = next(iter(error.failures.items()))
            return unwritten(self.target, RuntimeError(f"rank {rank}: {type(cause).__name__}: {cause}"))
        except Exception as error:
            return unwritten(self.target, error)
        return None

    def _finish(self, problem: str | None) -> str | None:
        """Put the folder in its place. Returns what went wrong, if anything did."""
        try:
            if problem is None:
                assert self._taken is not None
                with (self._partial / META).open("wb") as file:
                    file.write(self._taken.rest.getbuffer())
                    file.flush()
                    os.fsync(file.fileno())
                sync(self._partial)
                place(self._partial, self.target)
                self._complete()
        except Exception as error:
            problem = unwritten(self.target, error)
        if problem is not None:
            remove(self._partial)
        return problem


def _nested(tensors: Mapping[Path_, Any]) -> dict[Key, Any]:
    root: dict[Key, Any] = {}
    for path, tensor in tensors.items():
        folder = root
        for key in path[:-1]:
            folder = folder.setdefault(key, {})
        folder[path[-1]] = tensor
    return root


class _Taken:
    """A checkpoint taken apart, on rank 0.

    Attributes:
        places: by name, where in the snapshot a tensor lies: vector, first element, shape.
        whole: by name, tensors that rank 0 has whole: buffers, and what hooks have touched.
        rest: `meta.pt`: the checkpoint without them, and how to put it together again.
    """

    def __init__(self, checkpoint: Mapping[str, Any]) -> None:
        self.places: dict[Path_, tuple[int, int, torch.Size]] = {}
        self.whole: dict[Path_, torch.Tensor] = {}
        self._names = checkpoint.get("ds_lightning", {}).get("optimizer_parameter_names") or []
        self._first: dict[object, Path_] = {}
        order: list[tuple[Path_, str | None]] = []
        rest = dict(self._take(dict(checkpoint), (), order))
        rest["ds_lightning"] = {**checkpoint.get("ds_lightning", {}), TENSORS: order}
        self.rest = io.BytesIO()
        torch.save(rest, self.rest)

    def stage(self) -> None:
        """Copy what may change from now on."""
        self.whole = {name: value.cpu().clone() for name, value in self.whole.items()}

    def _take(self, item: Any, path: Path_, order: list[tuple[Path_, str | None]]) -> Any:
        """A copy of a container without what goes into the chunks; anything else as it is."""
        if type(item) not in (dict, OrderedDict, defaultdict, list, tuple):
            return item
        before = len(order)
        indexed = isinstance(item, list | tuple)
        kept: dict[Any, Any] = {}
        for key, value in enumerate(item) if indexed else item.items():
            here = (*path, key)
            if self._belongs(value, here):
                name = self._name(here)
                # One tensor of several names is read by the first, so that it is one tensor again. Every name of a
                # weight has its chunks all the same, for readers that do not know this.
                first = self._first.setdefault(memory(value), name)
                order.append((here, _dotted(first)))
                if name == first or path == ("state_dict",):
                    self._note(name, value)
                if indexed:
                    kept[key] = None
            else:
                kept[key] = self._take(value, here, order)
                if path == ("state_dict",):
                    order.append((here, None))  # no tensor, but it has its place in the order
        if len(order) == before:
            return item
        return list(kept.values()) if indexed else kept

    def _belongs(self, value: Any, path: Path_) -> bool:
        """Whether a value goes into the chunks: logical tensors, and all tensors of the model."""
        return isinstance(value, LogicalTensor) or (torch.is_tensor(value) and path[0] == "state_dict")

    def _name(self, path: Path_) -> Path_:
        if path[0] == "state_dict":
            return ("model", *path[1:])
        if path[0] == "optimizer_states" and len(path) == 5 and path[2] == "state":
            index, number = int(path[1]), int(path[3])
            names = self._names[index] if index < len(self._names) else []
            return f"optimizer_{index}", "state", names[number] if number < len(names) else str(number), path[4]
        return path

    def _note(self, name: Path_, value: torch.Tensor) -> None:
        if not isinstance(value, LogicalTensor):
            self.whole[name] = value.detach()
        elif value.value is not None or not isinstance(value.source, ShardSource):
            self.whole[name] = value.whole()
        else:
            source = value.source
            self.places[name] = (source.vector, source.start, source.shape)


def _dotted(name: Path_) -> str:
    return ".".join(str(part) for part in name)


class _Writer(FileSystemWriter):
    """torch's writer, one tensor at a time: torch's own keeps a copy of every tensor until the file is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The folder must be the one that rank 0 has made: torch would make another one on another disk."""
        if not Path(self.path).is_dir():
            raise FileNotFoundError(f"{self.path} is not there; all ranks must see the file system of rank 0")
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to one file."""
        results: list[WriteResult] = []
        places: dict[str, list[tuple[tuple[int, ...], int]]] = {}
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(Path(self.path) / name, "wb") as file:
                stream = _Noting(file)
                for item in plan.items:
                    start = stream.position
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    else:
                        stream.expect(data.nbytes)
                        _save(data, stream)
                        if stream.found is not None:
                            place = (tuple(item.index.offset or (0,) * data.ndim), stream.found)
                            places.setdefault(item.index.fqn, []).append(place)
                    length = stream.position - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                file.flush()
                os.fsync(file.fileno())
            with (Path(self.path) / name).with_suffix(PLACES).open("w") as table:
                json.dump(places, table)
                table.flush()
                os.fsync(table.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _save(data: torch.Tensor, stream: _Noting) -> None:
    try:
        torch.save(_alone(data), cast("IO[bytes]", stream))
    except RuntimeError as error:  # torch has words of its own for a full disk
        raise stream.error or error from error


class _Noting:
    """A file that notes where the values of a tensor lie in what `torch.save` writes: one write of just their size.

    Args:
        file: the file.

    Attributes:
        position: bytes written.
        found: where the values began.
        error: what went wrong, if the system refused a write.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._expected = 0
        self.position = 0
        self.found: int | None = None
        self.error: OSError | None = None

    def expect(self, nbytes: int) -> None:
        """Values of so many bytes come next; few ones could be mistaken for headers."""
        self._expected = nbytes if nbytes >= LEAST_NOTED else -1
        self.found = None

    def write(self, data: Any) -> int:
        """Write, as in every file."""
        nbytes = memoryview(data).nbytes
        if nbytes == self._expected and self.found is None:
            self.found = self.position
        self.position += nbytes
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """As in every file."""


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The tensor over a storage of its own size, without a copy: `torch.save` writes whole storages."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return flat.view(values.shape)
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(values.dtype).view(values.shape)


def put_together(rest: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The checkpoint that was taken apart.

    Args:
        rest: `meta.pt`.
        tensors: by name.

    Raises:
        CheckpointError: when a tensor is missing.
    """
    own = dict(rest.get("ds_lightning", {}))
    order = own.pop(TENSORS)
    rest = {**rest, "ds_lightning": own, "state_dict": dict(rest.get("state_dict", {}))}
    missing = [name for _, name in order if name is not None and name not in tensors]
    if missing:
        raise CheckpointError(f"The checkpoint lacks {', '.join(missing[:10])}; it is not complete.")
    for path, name in order:
        folder: Any = rest
        for key in path[:-1]:
            if isinstance(folder, dict):
                folder.setdefault(key, {})
            folder = folder[key]
        value = folder.pop(path[-1], None) if name is None else tensors[name]
        folder[path[-1]] = value
    return rest
