"""What Lightning asks a strategy to save and load, delegated to `ds_lightning.checkpoint`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from ds_lightning.checkpoint import beside, keys, lightning_io, state
from ds_lightning.checkpoint.deepspeed import pickles
from ds_lightning.checkpoint.loading import load
from ds_lightning.checkpoint.placement import remove, withdraw
from ds_lightning.checkpoint.resume import Resumption
from ds_lightning.checkpoint.saver import CheckpointSaver, complete
from ds_lightning.comm.agreement import Agreement
from ds_lightning.config import ResolvedConfig
from ds_lightning.errors import CheckpointError, ConfigError
from ds_lightning.schedules.base import Schedule
from ds_lightning.topology import Topology
from ds_lightning.zero.engine import ZeroEngine
from ds_lightning.zero.init import ShardedConstruction
from ds_lightning.zero.logical import is_stored, settle
from ds_lightning.zero.plan import StagePlan


class Checkpointing(DDPStrategy):
    """The part of `ZeroStrategy` that saves and loads. It owns no engine; `ZeroStrategy` sets what it works on.

    Args:
        checkpoint: "full" or "sharded".
        exclude_frozen: leave parameters that need no gradient out.
        async_save: write beside training.
        strategy_options: for `DDPStrategy`.
    """

    _engine: ZeroEngine | None
    _topology: Topology | None
    _construction: ShardedConstruction | None
    _failed: bool

    def __init__(self, checkpoint: str, exclude_frozen: bool, async_save: bool, **strategy_options: Any) -> None:
        if checkpoint not in ("full", "sharded"):
            raise ConfigError(f"checkpoint={checkpoint!r} does not exist. Use 'full' or 'sharded'.")
        self._exclude_frozen = exclude_frozen
        self._saver = CheckpointSaver(checkpoint == "sharded", async_save, tell)
        self._resumption = Resumption()
        self._load_later: Callable[[], None] | None = None
        super().__init__(**strategy_options)

    @property
    @abc.abstractmethod
    def config(self) -> ResolvedConfig:
        """The configuration in force."""

    @property
    @abc.abstractmethod
    def engine(self) -> ZeroEngine | None:
        """The runtime of the module, if it is sharded."""

    @property
    @abc.abstractmethod
    def skipped_steps(self) -> int:
        """Steps skipped because gradients overflowed."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoint files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = lightning_io.ZeroCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = lightning_io.ZeroCheckpointIO()
        io: CheckpointIO = self._checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def _run(self) -> tuple[pl.Trainer, Topology]:
        assert self.lightning_module is not None
        assert self._topology is not None
        return self.lightning_module.trainer, self._topology

    # Saving ---------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's `state_dict`; parameters are logical tensors, made whole when someone touches them. Collective.

        See `checkpoint/snapshot.py`: every rank sees every key, and the values that rank 0 leaves are saved.
        """
        module = self.lightning_module
        assert module is not None
        self._rendezvous("saving a checkpoint")
        if self.engine is None:
            return keys.strip_compiled(module.state_dict())
        return self._saver.module_state(self.engine, module, self._exclude_frozen)

    def companion_state_dict(self, what: str, vectors: Mapping[int, Tensor]) -> dict[str, Any]:
        """The module's `state_dict` with other values in the place of parameters, for a checkpoint under way.

        For callbacks, in `on_save_checkpoint`, on every rank. The values are logical tensors as those of
        `lightning_module_state_dict`, and are saved with them.

        Args:
            what: they are, for messages.
            vectors: by index of the engine's units, this rank's elements, `[chunk]`; other parameters keep theirs.
        """
        engine, module = self.engine, self.lightning_module
        assert engine is not None, "nothing is sharded"
        assert module is not None
        return self._saver.companion_state(engine, module, self._exclude_frozen, what, vectors)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state in torch's own format and logical shapes, as logical tensors. Collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._engine is None:
            return dict(super().optimizer_state(optimizer))
        if self._engine.dissolved:
            raise CheckpointError(
                "The module has been moved or cast, or trained by another Trainer, since this one trained it; its "
                "optimizer states are gone. Save before, or with save_checkpoint(..., weights_only=True)."
            )
        return self._saver.optimizer_state(self._engine, self._engine.sharded(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write rank 0's checkpoint. Collective: if it fails, every rank raises.

        A file is streamed: beside its shards rank 0 holds one unit, other ranks nothing. A folder is written by all
        ranks. Nothing is ever half there: see `checkpoint/placement.py`.

        Raises:
            CheckpointError: when it cannot be written.
        """
        if not str(filepath or ""):
            raise CheckpointError("No path for the checkpoint was given.")
        topology = self._topology or Topology.single(self.root_device)
        self._saver.answer(topology)
        whole = "optimizer_states" in checkpoint and self._topology is not None
        place = self._resumption.state(*self._run()) if whole else {}
        checkpoint["ds_lightning"] = {**checkpoint.get("ds_lightning", {}), **self._metadata(), **place}
        own = type(self.checkpoint_io) is lightning_io.ZeroCheckpointIO and not lightning_io.is_remote(filepath)
        if self._saver.sharded and not own:
            raise CheckpointError(
                "checkpoint='sharded' writes local folders itself: leave checkpoint_io out, and give a local path, or "
                "use checkpoint='full'."
            )
        if storage_options is not None and own:
            raise TypeError("storage_options are not used for local checkpoints.")
        if not own:
            write = partial(self.checkpoint_io.save_checkpoint, path=filepath, storage_options=storage_options)
            self._saver.save_through(write, checkpoint, topology)
            if self._weights_beside:
                self._tell_without_weights(own_format=False)
            return
        target = Path(filepath)
        self._saver.save(checkpoint, target, topology, partial(self._complete, target, self._folders()))

    def _complete(self, target: Path, folders: list[Path]) -> None:
        """On rank 0, perhaps beside training."""
        dtype = beside.dtype_of(str(self.precision_plugin.precision))
        if self._weights_beside and dtype is not None:
            beside.write_weights(target, dtype, pickles.read, tell)
        complete(target, folders)

    @property
    def _weights_beside(self) -> bool:
        return bool(self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save)

    def _tell_without_weights(self, own_format: bool) -> None:
        reason = beside.why_none(str(self.precision_plugin.precision), own_format)
        if reason is not None:
            tell(reason)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; one under way is completed first. Rank 0 acts."""
        if not self.is_global_zero:
            return
        if type(self.checkpoint_io) is lightning_io.ZeroCheckpointIO and not lightning_io.is_remote(filepath):
            self._saver.then(partial(withdraw, Path(filepath)))
            self._saver.then(partial(remove, beside.weights_path(Path(filepath))))
        else:
            self._saver.then(partial(self.checkpoint_io.remove_checkpoint, filepath))

    def _folders(self) -> list[Path]:
        """Where this run keeps checkpoints."""
        module = self.lightning_module
        callbacks = module.trainer.checkpoint_callbacks if module is not None else []
        found = (getattr(callback, "dirpath", None) for callback in callbacks)
        return [Path(folder) for folder in found if folder and not lightning_io.is_remote(folder)]

    def _tidy(self) -> None:
        """Not before all ranks have met: what is removed, or put back, may have been read from."""
        if self.is_global_zero:
            self._saver.tidy(self._folders())

    def _metadata(self) -> dict[str, Any]:
        """What a reader may want to know; plain data, and not needed for loading."""
        engine, module = self._engine, self.lightning_module
        assert module is not None
        excluded = [n for n, p in module.named_parameters() if not p.requires_grad] if self._exclude_frozen else []
        every = module.named_parameters(remove_duplicate=False)
        frozen = keys.strip_compiled({name: None for name, p in every if not p.requires_grad})
        names: list[list[str]] = []
        if engine is not None:
            names = [
                [engine.table.name_of(parameter) for group in sharded.user_params() for parameter in group]
                for sharded in engine.optimizers
            ]
        return {
            "version": 1,
            "stage": self.config.zero_optimization.stage,
            "world_size": self.world_size,
            "precision": str(self.precision_plugin.precision),
            "skipped_steps": self.skipped_steps,
            "excluded_parameters": excluded,
            "frozen_parameters": list(frozen),
            "optimizer_parameter_names": names,
        }

    # Loading --------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, a file or a folder; tensors stay there until they are copied. Collective.

        Files are mapped, and of folders ranges are read: a rank copies what it owns, at stage 3 of the weights too, and
        holds one parameter more at a time.

        Raises:
            CheckpointError: on every rank, when it cannot be read on one of them.
        """
        loaded: dict[str, Any] = {}
        problem: str | None = None
        try:
            self._saver.wait("a checkpoint is loaded", self._topology or Topology.single(self.root_device))
            loaded = self._read_checkpoint(checkpoint_path, weights_only)
        except CheckpointError as error:
            problem = str(error)
        # A file may be there for some ranks and not for others, which would wait for them.
        problems = Agreement(self._topology).everyone(problem) if self._topology is not None else [problem]
        for found in problems:
            if found is not None:
                raise CheckpointError(found)
        if self._topology is not None:
            self._resumption.load(*self._run(), loaded)
        return self._under_own_names(loaded)

    def _under_own_names(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What another program saved of a network that is a part of the module here."""
        own = checkpoint.get("ds_lightning", {})
        if self.lightning_module is None or not ("imported_from" in own or own.get("weights_alone")):
            return checkpoint
        prefix = keys.prefix_between(self.lightning_module, checkpoint["state_dict"])
        if not prefix:
            return checkpoint
        tell(f"the names of the checkpoint are those of {prefix.rstrip('.')} in {type(self.lightning_module).__name__}")
        return keys.with_prefix(checkpoint, prefix)

    def _read_checkpoint(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        io = self.checkpoint_io
        inner = io.checkpoint_io if isinstance(io, _WrappingCheckpointIO) else io
        if not isinstance(inner, lightning_io.ZeroCheckpointIO) or lightning_io.is_remote(path):
            return dict(super().load_checkpoint(path, weights_only=weights_only))
        read = partial(inner.load_checkpoint, weights_only=weights_only)
        return {"pytorch-lightning_version": lightning.__version__, **load(Path(path), read, tell)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; each rank keeps what it owns.

        Raises:
            CheckpointError: when keys or shapes do not fit, before anything is changed.
        """
        module = self.lightning_module
        assert module is not None
        saved = keys.align_compiled(checkpoint["state_dict"], module)
        own = checkpoint.get("ds_lightning", {})
        excluded = set(own.get("excluded_parameters", ()))
        if "imported_from" in own:  # DeepSpeed does not note what it left out
            frozen = (n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)
            excluded |= {name for name in frozen if name not in saved}
        if excluded:
            tell(f"the checkpoint is without {len(excluded)} frozen parameters, which keep the values they have")
        if strict:
            keys.check_keys(module, saved, excluded)
        else:
            missing, unexpected = keys.differences(module, saved)
            if missing and unexpected and not any(name in saved for name, _ in module.named_parameters()):
                keys.check_keys(module, saved, set())  # nothing would be loaded
            for what, names in (("lacks", missing), ("also holds", unexpected)):
                if names:
                    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
                    tell(f"the checkpoint {what} {len(names)} of the names of {type(module).__name__}: {shown}")
        load = partial(self._load_weights, saved, strict and not excluded)
        # What lies in shards is read once each rank knows its own: no rank reads the whole model.
        if self.engine is None and self._shards_parameters and keys.loads_as_usual(module) and is_stored(saved):
            self._load_later = load
        else:
            load()

    @property
    def _strict(self) -> bool:
        return self.lightning_module is None or bool(self.lightning_module.strict_loading)

    def _load_weights(self, saved: Mapping[str, Any], strict: bool) -> None:
        assert self.lightning_module is not None
        with self._loading():
            self.lightning_module.load_state_dict(saved, strict=strict)
        settle(self.lightning_module)

    @property
    def _shards_parameters(self) -> bool:
        zero = self.config.zero_optimization
        alone = self._topology is None or self._topology.world_size == 1
        on_disk = "nvme" in (zero.offload_optimizer.device, zero.offload_param.device)  # even one rank's is too much
        return StagePlan.of(zero.stage).shard_params and (on_disk or not alone) and self._topology is not None

    def _loading(self) -> AbstractContextManager[Any]:
        if self.engine is not None:
            return self.engine.state_dicts.loading()
        return nullcontext() if self._construction is None else self._construction.building()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; each rank keeps what it owns."""
        saved = checkpoint["optimizer_states"]
        if checkpoint.get("ds_lightning", {}).get("weights_alone"):
            return
        self._keep_schedules(checkpoint)
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        if len(saved) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has states of {len(saved)} optimizers, configure_optimizers makes "
                f"{len(self.optimizers)}."
            )
        own = checkpoint.get("ds_lightning", {})
        rounded = self.engine.rounded()
        self.engine.follow_groups()  # finetuning callbacks have just put theirs back
        names = own.get("optimizer_parameter_names") or [None] * len(saved)
        still = set(own.get("frozen_parameters", ()))
        trained = [name for order in names if order for name in order if keys.without_compiled(name) not in still]
        self.engine.resting.wake(trained)  # frozen for the moment
        for optimizer, entry, order in zip(self.optimizers, saved, names, strict=False):
            sharded = self.engine.sharded(optimizer)
            # DeepSpeed leaves frozen parameters out of its groups.
            part = not self._strict or "imported_from" in own
            fresh = state.load_optimizer_state(self.engine, sharded, entry, order, part)
            if fresh:
                tell(f"{type(optimizer).__name__} begins without a state for {', '.join(fresh)}")
        self._load_masters(checkpoint["state_dict"], rounded - self.engine.rounded())

    def _keep_schedules(self, checkpoint: Mapping[str, Any]) -> None:
        """Drop states of DeepSpeed's schedules, which Lightning loads next, where no schedule here understands them."""
        saved = checkpoint.get("lr_schedulers", [])
        schedules = (config.scheduler for config in self.lr_scheduler_configs)
        known = [isinstance(schedule, Schedule) for schedule in schedules]
        known += [True] * (len(saved) - len(known))  # nothing takes it
        fitting = [state for state, ours in zip(saved, known, strict=False) if ours or "last_epoch" in state]
        if len(fitting) < len(saved):
            tell("the state of DeepSpeed's scheduler is not taken over: schedulers of this run begin anew")
            assert isinstance(checkpoint, dict)
            checkpoint["lr_schedulers"] = fitting

    def _load_masters(self, saved: Mapping[str, Any], names: set[str]) -> None:
        """Load parameters again that had no masters when the weights were loaded, because they were frozen then."""
        module = self.lightning_module
        assert module is not None
        if not names:
            return
        aligned = keys.align_compiled(saved, module)
        if keys.loads_as_usual(module):
            aligned = {name: value for name, value in aligned.items() if name in names}
        self._load_weights(aligned, False)

    def _rendezvous(self, what: str) -> None:
        if self._failed:
            raise CheckpointError("This job has failed: a sharded model cannot be gathered any more.")
        if self._topology is not None:
            agreement = Agreement(self._topology) if self.engine is None else self.engine.agreement
            agreement.rendezvous(
                what, "Call trainer.save_checkpoint on all ranks, not only where trainer.is_global_zero."
            )


def tell(message: str) -> None:
    """Tell the user something, on rank 0."""
    rank_zero_info(f"ds_lightning: {message}")
