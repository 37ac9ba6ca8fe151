"""One plain file in `torch.save`'s format, streamed to rank 0.

Beside its own shards, rank 0 holds one unit's vector and what is no logical tensor (buffers, callbacks' states); the
other ranks nothing. That is so at every stage, for parameters and optimizer states.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from ds_lightning.checkpoint.placement import make_folder, partial_of, place, remove
from ds_lightning.checkpoint.snapshot import ShardSource, Snapshot
from ds_lightning.checkpoint.torch_file import StreamedFile, read
from ds_lightning.comm.agreement import Agreement
from ds_lightning.comm.collectives import Collectives
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import CheckpointError
from ds_lightning.topology import Topology
from ds_lightning.zero.logical import LogicalTensor


class FullWrite:
    """One checkpoint on its way into one file. Construction is not collective; every rank makes one.

    Args:
        checkpoint: rank 0's; that of other ranks does not matter.
        target: the file, replaced in one step when the new one is complete.
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
        self._ranks = ranks
        self._sink = _Sink(checkpoint, target, complete) if ranks.rank == 0 else None

    def stage(self) -> None:
        """Copy what may change from now on and is not in the snapshot. Not collective."""
        if self._sink is not None:
            self._sink.stage()

    def run(self) -> None:
        """Write. Collective.

        Raises:
            CheckpointError: on every rank, when rank 0 cannot write; what was there before stays.
        """
        try:
            self._run()
        except BaseException:  # another rank is gone, or the user interrupts
            if self._sink is not None:
                self._sink.drop()
            raise

    def _run(self) -> None:
        agreement, sink = Agreement(self._ranks), self._sink
        wanted = agreement.from_rank(sink.open() if sink is not None else None)
        for number, full in _collected(self.snapshot, wanted, self._ranks):
            if sink is not None:
                sink.take(number, full)
        problem = agreement.from_rank(sink.finish() if sink is not None else None)
        if problem is not None:
            raise CheckpointError(problem)


def gathered(checkpoint: Any, snapshot: Snapshot, ranks: Topology) -> Any:
    """Rank 0's checkpoint with ordinary tensors, for writers of other formats. Collective; None on other ranks."""
    agreement = Agreement(ranks)
    tensors = _by_vector(logical_tensors(checkpoint)) if ranks.rank == 0 else {}
    wanted = agreement.from_rank(sorted(tensors))
    whole: dict[int, torch.Tensor] = {}
    for number, full in _collected(snapshot, wanted, ranks):
        for tensor, start in tensors.get(number, ()):
            whole[id(tensor)] = full[start : start + tensor.numel()].reshape(tensor.shape).clone()
    return _replaced(checkpoint, whole) if ranks.rank == 0 else None


class _Sink:
    """Rank 0's side. After a failure it goes on taking, because the other ranks go on sending.

    Args:
        checkpoint: what to write.
        target: where to.
        complete: what to do once it is there.
    """

    def __init__(self, checkpoint: Mapping[str, Any], target: Path, complete: Callable[[], None]) -> None:
        self._target = target
        self._complete = complete
        self._partial = partial_of(target)
        self._problem: str | None = None
        self._tensors: dict[int, list[tuple[LogicalTensor, int]]] = {}  # by vector
        self._stream: IO[bytes] | None = None
        try:
            self._file = StreamedFile(checkpoint)
            self._tensors = _by_vector(self._file.pending)
        except Exception as error:  # something in it cannot be pickled
            self._fail(error)

    def stage(self) -> None:
        """Copy what is no logical tensor."""
        if self._problem is None:
            self._file.stage()

    def open(self) -> list[int]:
        """Begin the file. Returns the vectors that it needs."""
        if self._problem is not None:
            return []
        try:
            if self._target.is_dir() and not self._target.is_symlink():
                raise IsADirectoryError(f"{self._target} is a directory")
            make_folder(self._target.parent)
            self._stream = self._partial.open("wb")
            self._file.open(self._stream)
            for tensor in self._file.pending:
                if not isinstance(tensor.source, ShardSource):  # it came out of another checkpoint
                    self._file.write(tensor, read(tensor))
        except Exception as error:
            self._fail(error)
        return sorted(self._tensors)

    def take(self, number: int, full: torch.Tensor) -> None:
        """Write what lies in a vector."""
        if self._problem is not None:
            return
        try:
            for tensor, start in self._tensors[number]:
                self._file.write(tensor, [full[start : start + tensor.numel()]])
        except Exception as error:
            self._fail(error)

    def finish(self) -> str | None:
        """Put the file in its place. Returns what went wrong, if anything did."""
        if self._problem is None:
            try:
                assert self._stream is not None
                self._file.close()
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._stream.close()
                place(self._partial, self._target)
                self._complete()
            except Exception as error:
                self._fail(error)
        return self._problem

    def _fail(self, error: Exception) -> None:
        self._problem = unwritten(self._target, error)
        self._tensors = {}
        self.drop()

    def drop(self) -> None:
        """Remove what is incomplete."""
        if self._stream is not None:
            self._file.abandon()
            with suppress(OSError):  # what is buffered does not fit either
                self._stream.close()
        remove(self._partial)


def unwritten(target: Path, error: BaseException) -> str:
    """The message for a checkpoint that could not be written."""
    return (
        f"The checkpoint {target} could not be written: {type(error).__name__}: {error}. Free some space or choose "
        "another directory; earlier checkpoints are untouched."
    )


def logical_tensors(content: Any) -> Iterable[LogicalTensor]:
    """Untouched logical tensors of a snapshot in nested containers, each once."""
    found: dict[int, LogicalTensor] = {}
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, LogicalTensor):
            if item.value is None and isinstance(item.source, ShardSource):
                found[id(item)] = item
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return found.values()


def _replaced(content: Any, whole: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(content, LogicalTensor):
        return whole[id(content)] if id(content) in whole else content.whole()
    if type(content) in (dict, OrderedDict, defaultdict):
        copy_ = content.copy()
        copy_.update({key: _replaced(value, whole) for key, value in content.items()})
        return copy_
    if type(content) in (list, tuple):
        return type(content)(_replaced(value, whole) for value in content)
    return content


def _by_vector(tensors: Iterable[LogicalTensor]) -> dict[int, list[tuple[LogicalTensor, int]]]:
    """The tensors that lie in each vector, with the places where they begin."""
    found: dict[int, list[tuple[LogicalTensor, int]]] = defaultdict(list)
    for tensor in tensors:
        if isinstance(tensor.source, ShardSource):
            found[tensor.source.vector].append((tensor, tensor.source.start))
    return found


def _collected(snapshot: Snapshot, wanted: list[int], ranks: Topology) -> Iterator[tuple[int, torch.Tensor]]:
    """Each wanted vector on rank 0, one at a time. Collective; other ranks get a tensor without elements.

    Of several copies of the model (MiCS) the first is collected.
    """
    collectives = Collectives.create(ranks, Ledger())
    for number in wanted:
        vector = snapshot.vectors[number]
        full = torch.empty(vector.numel if ranks.rank == 0 else 0, dtype=vector.dtype)
        if ranks.first_replica:
            collectives.collect(vector.chunk(), full if ranks.rank == 0 else None, vector.what, number).wait()
        yield number, full
