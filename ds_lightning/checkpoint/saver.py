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
from ds_lightning.checkpoint.full import FullWrite, gathered
from ds_lightning.checkpoint.placement import point_to, pointed_to, remove_leftovers
from ds_lightning.checkpoint.snapshot import Snapshot
from ds_lightning.comm.agreement import Agreement
from ds_lightning.errors import CheckpointError
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.topology import Topology
from ds_lightning.zero.engine import ZeroEngine

Log = Callable[[str], None]


class CheckpointSaver:
    """Owns what is being saved: the snapshot that a checkpoint dict points into, and the write under way.

    Args:
        sharded: write folders instead of files.
        background: write beside training.
        log: tells the user something, on rank 0.
    """

    def __init__(self, sharded: bool, background: bool, log: Log) -> None:
        self.sharded = sharded
        self.background = background
        self._log = log
        self._snapshot: Snapshot | None = None
        self._parameters: dict[str, torch.Tensor] = {}  # of the snapshot, by canonical name
        self._writer = BackgroundWriter()

    # What a checkpoint dict holds -----------------------------------------------------------------------------------

    def module_state(self, engine: ZeroEngine, module: nn.Module, exclude_frozen: bool) -> dict[str, Any]:
        """The module's `state_dict`, with logical tensors for parameters. Every rank begins a checkpoint with it."""
        engine.follow_groups()
        self._drop_snapshot()
        self._snapshot = Snapshot(engine.topology)
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
            self._snapshot = Snapshot(engine.topology)
        return state.optimizer_state(engine, sharded, self._snapshot)

    @property
    def snapshot(self) -> Snapshot | None:
        """What the checkpoint that is being put together points into; others may add vectors of their own."""
        return self._snapshot

    def _drop_snapshot(self) -> None:
        self._parameters = {}
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    # Writing --------------------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: Mapping[str, Any],
        target: Path,
        topology: Topology,
        training: bool,
        after: Callable[[], None],
    ) -> None:
        """Write a checkpoint to `target`, now or beside training. Collective.

        Args:
            checkpoint: rank 0's is written.
            target: a file or a folder.
            topology: ranks and groups.
            training: whether something can go on meanwhile.
            after: what to do on rank 0 when it is complete.

        Raises:
            CheckpointError: on every rank, when it cannot be written, or when the last one in the background was not.
        """
        snapshot = self._answered(topology)
        self.wait(f"{target} is saved")
        write = self._write(checkpoint, target, snapshot, topology.for_checkpoints())
        on_rank_0 = after if topology.rank == 0 else _nothing
        if self.background and training:
            write.stage()
            self._writer.start(write, on_rank_0)
        else:
            write.run()
            on_rank_0()

    def save_through(self, write: Callable[[Any], None], checkpoint: Mapping[str, Any], topology: Topology) -> None:
        """Hand a checkpoint of ordinary tensors to somebody else's writer, on rank 0. Collective.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        snapshot = self._answered(topology)
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

    def _answered(self, topology: Topology) -> Snapshot:
        """The snapshot, once every rank's hooks have seen what they wanted."""
        snapshot = self._snapshot or Snapshot(topology)
        self._snapshot = None
        self._parameters = {}
        snapshot.serve()
        return snapshot

    def _write(self, checkpoint: Mapping[str, Any], target: Path, snapshot: Snapshot, ranks: Topology) -> Write:
        if not self.sharded:
            return FullWrite(checkpoint, target, snapshot, ranks)
        from ds_lightning.checkpoint.sharded import ShardedWrite  # torch.distributed.checkpoint is slow to import

        return ShardedWrite(checkpoint, target, snapshot, ranks)

    # Around a write -------------------------------------------------------------------------------------------------

    def wait(self, what: str = "the run goes on") -> None:
        """Wait for the write under way.

        Args:
            what: what happens afterwards, for the message.

        Raises:
            CheckpointError: when it failed.
        """
        target = self._writer.target
        self._writer.wait(
            lambda seconds: self._log(
                f"the checkpoint {target} was still being written; training waited {seconds:.1f} s for it before {what}"
            )
        )

    def then(self, action: Callable[[], None]) -> None:
        """Do something once the write under way is complete, or at once; not at all if it fails."""
        self._writer.then(action)

    def guard_links(self) -> None:
        """Let no link name the checkpoint under way: until it is complete, links name the one before. On rank 0.

        `ModelCheckpoint(save_last="link")` links to what it has just asked to be saved.
        """
        target = self._writer.target
        if target is None or target.exists() or not target.parent.is_dir():
            return
        for link in _links_to(target):
            destination = os.readlink(link)
            before = pointed_to(target.parent)
            _link(link, before.name if before is not None else None)
            self.then(partial(_link, link, destination))

    def finish(self, failed: bool) -> None:
        """The run ends: wait for the write under way, unless ranks may be gone.

        Raises:
            CheckpointError: when it failed.
        """
        self._drop_snapshot()
        if failed:
            self._writer.abandon()
        else:
            self.wait("the end of the run")


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
    if target.parent.absolute() in {folder.absolute() for folder in folders}:
        point_to(target)


def clean(folders: Iterable[Path], log: Log) -> None:
    """Remove what writers that were killed left behind, and say so."""
    for path in remove_leftovers(folders):
        log(f"removed {path}, which a run that was killed had not completed")


def _links_to(target: Path) -> list[Path]:
    return [
        entry
        for entry in target.parent.iterdir()
        if entry.is_symlink() and (entry.parent / os.readlink(entry)).absolute() == target.absolute()
    ]


def _link(link: Path, destination: str | None) -> None:
    """Let a link name something else, in one step."""
    if destination is None:
        link.unlink(missing_ok=True)
        return
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(destination)
    fresh.replace(link)


def _nothing() -> None:
    """On other ranks than 0."""
