"""Saves checkpoints: decides the form, when they are complete, and what may be removed then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_lightning.checkpoint import keys, state
from ds_lightning.checkpoint.background import BackgroundWriter, Write
from ds_lightning.checkpoint.full import FullWrite, gathered, unwritten
from ds_lightning.checkpoint.placement import (
    links_to,
    make_folder,
    partial_of,
    point_to,
    pointed_to,
    relink,
    tidy,
)
from ds_lightning.checkpoint.snapshot import Snapshot
from ds_lightning.comm.agreement import Agreement
from ds_lightning.errors import CheckpointError
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.topology import Topology
from ds_lightning.zero.engine import ZeroEngine

Log = Callable[[str], None]

LINGER_SECONDS = 60.0
"""How long a job that has failed still waits for the checkpoint under way: other ranks may be gone."""


class CheckpointSaver:
    """Owns what is being saved: the snapshot that a checkpoint dict points into, and the write under way.

    Args:
        sharded: write folders instead of files.
        background: write beside training, where no values are on disk.
        log: tells the user something, on rank 0.
    """

    def __init__(self, sharded: bool, background: bool, log: Log) -> None:
        self.sharded = sharded
        self.background = background
        self._log = log
        self._snapshot: Snapshot | None = None
        self._parameters: dict[str, torch.Tensor] = {}  # of the snapshot, by canonical name
        self._writer = BackgroundWriter()
        self._staged: Snapshot | None = None  # the last copies: their memory serves the next ones
        self._swapped = False  # whether values of the snapshot are on disk; the same on all ranks
        self._begun = False  # whether a write was begun in the background and not yet waited for; the same on all ranks
        self._open = False
        self._tidied: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        """What points into an engine belongs to its process."""
        return {**self.__dict__, "_snapshot": None, "_staged": None, "_begun": False, "_open": False}

    def open(self) -> None:
        """Training begins: until `finish`, checkpoints may be written beside it."""
        self._open = True

    def tidy(self, folders: Iterable[Path]) -> None:
        """Remove what writers that were killed left behind, and say so; once per folder. On rank 0."""
        fresh = {folder.absolute() for folder in folders} - self._tidied
        self._tidied |= fresh
        for message in tidy(sorted(fresh)):
            self._log(message)

    # What a checkpoint dict holds -----------------------------------------------------------------------------------

    def module_state(self, engine: ZeroEngine, module: nn.Module, exclude_frozen: bool) -> dict[str, Any]:
        """The module's `state_dict`, with logical tensors for parameters. Every rank begins a checkpoint with it."""
        engine.follow_groups()
        engine.settle(everything=True)
        self._drop_snapshot()
        self._snapshot = Snapshot(engine.topology)
        self._swapped = engine.swaps
        self._parameters = state.parameters(engine, self._snapshot)
        return _state_dict(engine, module, self._parameters, exclude_frozen)

    def companion_state(
        self,
        engine: ZeroEngine,
        module: nn.Module,
        exclude_frozen: bool,
        what: str,
        vectors: Mapping[int, torch.Tensor],
    ) -> dict[str, Any]:
        """As `module_state`, after it, with other values in the place of some parameters: see `state.companions`."""
        assert self._snapshot is not None, "a checkpoint begins with the module's state"
        others = state.companions(engine, self._snapshot, what, vectors)
        return _state_dict(engine, module, {**self._parameters, **others}, exclude_frozen)

    def optimizer_state(self, engine: ZeroEngine, sharded: ShardedOptimizer) -> dict[str, Any]:
        """An optimizer's state in torch's own format, with logical tensors. Collective."""
        if self._snapshot is None:
            engine.follow_groups()
            engine.settle(everything=True)
            self._snapshot = Snapshot(engine.topology)
            self._swapped = engine.swaps
        return state.optimizer_state(engine, sharded, self._snapshot)

    def _drop_snapshot(self) -> None:
        self._parameters = {}
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    # Writing --------------------------------------------------------------------------------------------------------

    def answer(self, topology: Topology) -> None:
        """Every rank's hooks have run, or run still and ask for tensors: nothing else may be sent before this is over.

        Collective; the first thing after the hooks.
        """
        self._snapshot = self._snapshot or Snapshot(topology)
        self._parameters = {}
        self._snapshot.serve()

    def save(
        self,
        checkpoint: Mapping[str, Any],
        target: Path,
        topology: Topology,
        complete: Callable[[], None],
    ) -> None:
        """Write a checkpoint to `target`, now or beside training. Collective, after `answer`.

        Args:
            checkpoint: rank 0's is written.
            target: a file or a folder.
            topology: ranks and groups.
            complete: what to do on rank 0 once it is in its place.

        Raises:
            CheckpointError: on every rank, when it cannot be written, or when the last one in the background was not.
        """
        snapshot = self._taken()
        if topology.rank == 0:
            self.tidy([target.parent])
        # What is on disk is there because it does not fit into memory: no copies of it.
        beside = self.background and self._open and not self._swapped
        if beside:
            self._probe(target, topology)
        copies = self._copies(snapshot, topology) if beside else None
        if copies is None:
            self.wait(f"{target} is saved", topology)
            copies = snapshot
            if beside:
                copies = self._staged = snapshot.staged(self._staged)
        write = self._write(checkpoint, target, copies, topology.for_checkpoints(), complete)
        if beside:
            write.stage()
            self._begun = True
            self._writer.add(write)
        else:
            write.run()

    def _probe(self, target: Path, topology: Topology) -> None:
        """A folder that cannot be written to is told now, and not when others have built on the checkpoint."""
        problem = None
        if topology.rank == 0:
            try:
                make_folder(target.parent)
                probe = partial_of(target.with_name(f"{target.name}.probe"))
                probe.touch()
                probe.unlink()
            except OSError as error:
                problem = unwritten(target, error)
        problem = Agreement(topology).from_rank(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def _copies(self, snapshot: Snapshot, topology: Topology) -> Snapshot | None:
        """Those of the one write under way, if on every rank nothing has changed since. Collective."""
        if not self._begun:
            return None
        writes = self._writer.writes
        same = len(writes) == 1 and snapshot.same(writes[0].snapshot)
        return writes[0].snapshot if all(Agreement(topology).everyone(same)) else None

    def save_through(self, write: Callable[[Any], None], checkpoint: Mapping[str, Any], topology: Topology) -> None:
        """Hand a checkpoint of ordinary tensors to somebody else's writer, on rank 0. Collective, after `answer`.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        snapshot = self._taken()
        whole = gathered(checkpoint, snapshot, topology.for_checkpoints())
        problem: str | None = None
        if topology.rank == 0:
            try:
                write(whole)
            except (CheckpointError, OSError, RuntimeError) as error:
                problem = str(error)
        problem = Agreement(topology).from_rank(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def _taken(self) -> Snapshot:
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "answer comes first"
        return snapshot

    def _write(
        self,
        checkpoint: Mapping[str, Any],
        target: Path,
        snapshot: Snapshot,
        ranks: Topology,
        complete: Callable[[], None],
    ) -> Write:
        if not self.sharded:
            return FullWrite(checkpoint, target, snapshot, ranks, complete)
        from ds_lightning.checkpoint.sharded import ShardedWrite  # torch.distributed.checkpoint is slow to import

        return ShardedWrite(checkpoint, target, snapshot, ranks, complete)

    # Around a write -------------------------------------------------------------------------------------------------

    def wait(self, what: str, topology: Topology) -> None:
        """Wait for what is under way. Collective.

        Args:
            what: what happens afterwards, for the message.
            topology: ranks and groups.

        Raises:
            CheckpointError: on every rank, when it failed on one of them.
        """
        if not self._begun:
            return
        targets = self._targets()
        seconds, error = self._writer.wait()
        self._begun = False
        if targets and seconds > 0.1:
            self._log(f"training waited {seconds:.1f} s for the checkpoint {targets} to be written, before {what}")
        problems = Agreement(topology).everyone(str(error) if error is not None else None)
        for problem in problems:
            if problem is not None:
                raise CheckpointError(f"A checkpoint written in the background failed. {problem}") from error

    def _targets(self) -> str:
        return " and ".join(str(write.target) for write in self._writer.writes)

    def then(self, action: Callable[[], None]) -> None:
        """Do something once what is under way is complete, or at once; not at all if it fails."""
        self._writer.then(action)

    def guard_links(self) -> None:
        """Let no link name a checkpoint under way: until it is complete, links name the one before. On rank 0.

        `ModelCheckpoint(save_last="link")` links to what it has just asked to be saved.
        """
        for target in (write.target for write in self._writer.writes):
            for link in links_to(target) if not os.path.lexists(target) else ():
                destination = os.readlink(link)
                before = pointed_to(target.parent)
                relink(link, before.name if before is not None else None)
                self.then(partial(relink, link, destination))

    def finish(self, failed: bool, topology: Topology | None) -> None:
        """The run ends: wait for what is under way. Collective, unless this rank has failed.

        Raises:
            CheckpointError: on every rank, when it failed on one of them, and nothing else did before.
        """
        self._open = False
        self._staged = None
        self._drop_snapshot()
        if not failed:
            self.wait("the end of the run", topology or Topology.single())
            return
        _, error = self._writer.wait(LINGER_SECONDS)
        if error is not None:
            self._log(f"a checkpoint was being written when the run failed, and is not complete. {error}")
        elif targets := self._targets():
            self._log(f"the run failed; {targets} is still not complete after {LINGER_SECONDS:g} s and is given up")


def _state_dict(
    engine: ZeroEngine, module: nn.Module, values: Mapping[str, torch.Tensor], exclude_frozen: bool
) -> dict[str, Any]:
    with engine.state_dicts.collected(values):
        found = module.state_dict()
    if exclude_frozen:
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        found = {key: value for key, value in found.items() if key not in frozen}
    return keys.strip_compiled(found)


def complete(target: Path, folders: Iterable[Path]) -> None:
    """A checkpoint is complete: where its folder is one that keeps checkpoints, `latest` names it."""
    hidden = target.name.startswith(".")  # what Lightning's tuner saves for itself
    if not hidden and target.parent.resolve() in {folder.resolve() for folder in folders}:
        point_to(target)
