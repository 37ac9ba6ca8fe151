"""`ZeroStrategy`: ZeRO stages 0-3 as a Lightning strategy. Life cycle only; the engine does the work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from ds_lightning.activation.run import ActivationRun
from ds_lightning.checkpointing import Checkpointing, tell
from ds_lightning.children import end_children
from ds_lightning.comm.agreement import agreed
from ds_lightning.config import Facts, ResolvedConfig, load, resolve
from ds_lightning.config.arguments import with_offload
from ds_lightning.config.problems import Problem, raise_all
from ds_lightning.config.resolve import try_resolve
from ds_lightning.configured import Made, add_callbacks, make_optimizers
from ds_lightning.errors import ConfigError, TopologyError
from ds_lightning.offload.policy import OffloadPolicy
from ds_lightning.offload.shelf import shelf_for
from ds_lightning.precision.choice import zero_precision
from ds_lightning.precision.dtypes import DTYPES, DtypePolicy
from ds_lightning.precision.module_buffers import CastBuffers
from ds_lightning.precision.plugin import ZeroPrecision
from ds_lightning.refusals import refuse_callbacks, refuse_ddp_options
from ds_lightning.topology import Topology
from ds_lightning.trainer_facts import collect_facts, total_steps
from ds_lightning.zero import access
from ds_lightning.zero.engine import ZeroEngine
from ds_lightning.zero.init import ShardedConstruction, constructing
from ds_lightning.zero.meeting import Meeting, metrics_of
from ds_lightning.zero.options import EngineOptions, grouping, remarks
from ds_lightning.zero.placement import equalize, move_all_but_parameters
from ds_lightning.zero.plan import StagePlan
from ds_lightning.zero.skip import hold_on_skip


class ZeroStrategy(Checkpointing):
    """Shards optimizer states, gradients and parameters over ranks (ZeRO, arXiv:1910.02054), on CPUs and GPUs.

    Any `LightningModule` trains as under DDP, with the same numbers; it is not wrapped, `strategy.model` is the module.

    Args:
        stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too. None takes the configuration's,
            or 2 when there is no configuration.
        config: a ds_config: path of a JSON/HJSON file, dict, DictConfig or base64 text.
        offload_optimizer: "none", "cpu" or "nvme"; None takes the configuration's.
        offload_param: as `offload_optimizer`, for parameters (stage 3).
        nvme_path: directory of swap files.
        checkpoint: "full" writes one plain Lightning file, "sharded" a folder of `torch.distributed.checkpoint`, to
            which every rank writes what it owns. Either loads at any stage, number of ranks and precision.
        exclude_frozen: leave parameters that need no gradient out of checkpoints.
        async_save: write checkpoints beside training, which stalls only while its values are copied. A write that
            fails raises at the next save or at the end of the run.
        frozen_masters: in mixed precision, keep fp32 values of frozen parameters that were given in fp32. Otherwise
            these are rounded to the dtype they compute in, once, and cost 2 bytes per element (over the number of
            ranks, at stage 3); checkpoints hold the rounded values, in fp32.
        accelerator: as in every Lightning strategy.
        parallel_devices: as in every Lightning strategy.
        cluster_environment: as in every Lightning strategy.
        checkpoint_io: as in every Lightning strategy.
        precision_plugin: one of Lightning's, or `ZeroPrecision`.
        process_group_backend: "gloo" or "nccl"; None chooses by device.
        timeout: bound of every collective: a rank that is missing for longer is an error that names it.
        start_method: "popen", "spawn", "fork" or "forkserver".

    Raises:
        ConfigError: for anything wrong in the configuration, all of it in one message.
    """

    strategy_name = "dszero"

    def __init__(
        self,
        stage: int | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        offload_optimizer: Literal["none", "cpu", "nvme"] | None = None,
        offload_param: Literal["none", "cpu", "nvme"] | None = None,
        nvme_path: str | Path | None = None,
        checkpoint: Literal["full", "sharded"] = "full",
        exclude_frozen: bool = False,
        async_save: bool = False,
        frozen_masters: bool = False,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_options: Any,
    ) -> None:
        refuse_ddp_options(ddp_options, inspect.signature(ZeroStrategy).parameters)
        self._stage = stage
        self._frozen_masters = frozen_masters
        self._parsed = load(with_offload(config, offload_optimizer, offload_param, nvme_path))
        self._check_early()
        self._engine: ZeroEngine | None = None
        self._topology: Topology | None = None
        self._resolved: ResolvedConfig | None = None
        self._made = Made([], [])
        self._total_steps: int | None = None
        self._construction: ShardedConstruction | None = None
        self._activation: ActivationRun | None = None
        self._used = False
        self._failed = False
        super().__init__(
            checkpoint,
            exclude_frozen,
            async_save,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def _check_early(self) -> None:
        """What needs no Trainer is checked before there are processes."""
        known = try_resolve(self._parsed, Facts(stage=self._stage)).problems
        certain = [problem for problem in known if problem.key not in self._parsed.autos]
        source = "the arguments of ZeroStrategy" if self._parsed.is_absent else self._parsed.source
        raise_all([*(Problem(*item) for item in self._parsed.unsupported), *certain], source)

    # What users read ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ResolvedConfig:
        """The configuration in force; attributes are named as the ds_config keys. Complete once a run is set up."""
        return self._resolved or try_resolve(self._parsed, Facts(stage=self._stage)).resolved

    @property
    def engine(self) -> ZeroEngine | None:
        """The runtime of the module that is being trained; None before set-up, and once the module is plain again."""
        return None if self._engine is None or self._engine.dissolved else self._engine

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward; 1 without loss scaling. Equal on all ranks."""
        plugin = self.precision_plugin
        return plugin.loss_scale if isinstance(plugin, ZeroPrecision) else 1.0

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because gradients overflowed. Equal on all ranks."""
        plugin = self.precision_plugin
        return plugin.skipped_steps if isinstance(plugin, ZeroPrecision) else 0

    @property
    def last_grad_norm(self) -> float | None:
        """Global 2-norm of the gradients of the last step: averaged, unscaled, before clipping; None before the first.

        In compressed steps of a 1-bit optimizer every rank has its own gradient: then the root of the mean square of
        their norms.

        Equal on all ranks; reading it does not communicate.
        """
        return self.engine.norms.last() if self.engine is not None else None

    def model_state_bytes(self) -> int:
        """Bytes of parameters, reduced gradients and optimizer states that this rank holds between steps."""
        return self.engine.model_state_bytes() if self.engine is not None else 0

    # Plugins --------------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """The precision; always the same object once it is known."""
        if self._precision_plugin is None:
            self._precision_plugin = zero_precision(Precision(), self._parsed)
        plugin: Precision = self._precision_plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Lightning's connector makes its own plugins from the Trainer's flag and cannot be taught ours, so whatever it
        # assigns is converted here.
        self._precision_plugin = None if plugin is None else zero_precision(plugin, self._parsed)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        super(ZeroStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:
            _pass_zero_grad_on(wrapper)

    # Set-up ---------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        if self._used:
            raise ConfigError(
                "This ZeroStrategy belongs to another Trainer already. Make a new strategy object for each Trainer."
            )
        self._used = True
        devices = {device.type for device in self.parallel_devices or ()}
        if not devices <= {"cpu", "cuda"}:
            raise ConfigError(
                f"ZeroStrategy runs on CPUs and CUDA GPUs, not on {', '.join(sorted(devices))}. Use "
                "Trainer(accelerator='cpu') or accelerator='gpu'."
            )
        super()._configure_launcher()

    def connect(self, model: pl.LightningModule) -> None:
        """Called with the module of each run; a module that is sharded already stays so."""
        super().connect(model)
        if self.engine is None or self.engine.module is not model:
            self._engine = None

    def setup_environment(self) -> None:
        """Create the process groups; the same on all ranks, once."""
        super().setup_environment()
        if self._topology is None:
            assert self.cluster_environment is not None
            expected = self.num_nodes * self.num_processes
            timeout = self._timeout or default_pg_timeout
            self._topology = (
                Topology.create(self.root_device, timeout, expected, grouping(self.config))
                if _distributed_is_initialized()
                else Topology.single(self.root_device)
            )

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module, and in `fit` its optimizers."""
        assert self.accelerator is not None
        assert isinstance(self.model, pl.LightningModule)
        self.accelerator.setup(trainer)
        self._failed = False
        fitting = trainer.state.fn == TrainerFn.FITTING
        module = self.model
        refuse_callbacks(trainer, self.config.zero_optimization.stage)
        if self._engine is not None and self._engine.failed:
            self._engine = None  # what it does not communicate any more begins anew
        if self._engine is None:
            self._adopt(module)
            if fitting and self._layer_sync is not None:
                synchronized = self._layer_sync.apply(module)
                assert isinstance(synchronized, pl.LightningModule)
                module = synchronized
            dtype = self._parsed.config.data_types.buffer_dtype
            buffers = CastBuffers(module, DTYPES[dtype]) if dtype else None
            converted = self.precision_plugin.convert_module(module)
            assert isinstance(converted, pl.LightningModule)
            module = converted
            if buffers is not None:
                buffers.put()
            self.model = module
        if fitting:
            self.setup_optimizers(trainer)
        self._resolve(trainer, module)
        self._build(module, fitting)
        if fitting:
            self._checkpoint_activations()
            add_callbacks(trainer, module, self.config)
        if isinstance(self.precision_plugin, ZeroPrecision):
            self.precision_plugin.attach(self._engine)
        self.setup_precision_plugin()
        if self.is_global_zero and fitting and self._weights_beside:
            self._tell_without_weights(own_format=True)
        if fitting:
            self._saver.open()
            self._hold_schedulers()

    def _adopt(self, module: pl.LightningModule) -> None:
        """A module that another strategy object sharded becomes a plain one first."""
        for parameter in module.parameters():
            other = access.engine_of(parameter)
            if other is not None:
                other.dissolve()
                access.forget(other)

    def _resolve(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._resolved = resolve(self._parsed, self._facts(trainer, self._made))
        for note in self._resolved.notes:
            rank_zero_info(f"ds_lightning: {note}")
        clipping = self._resolved.gradient_clipping
        if clipping and trainer.gradient_clip_val is None and trainer.state.fn == TrainerFn.FITTING:
            if not module.automatic_optimization:
                raise ConfigError(
                    f"gradient_clipping={clipping:g} in the configuration, but {type(module).__name__} optimizes "
                    "manually, where Lightning does not clip. Call self.clip_gradients(optimizer, "
                    "gradient_clip_val=...) before each step and drop gradient_clipping from the configuration."
                )
            trainer.gradient_clip_val = clipping

    def _build(self, module: pl.LightningModule, fitting: bool) -> None:
        assert self._topology is not None
        assert self._resolved is not None
        plan = StagePlan.of(self._resolved.zero_optimization.stage)
        if self._engine is not None:
            if fitting:
                self._engine.set_optimizers(self.optimizers)
            return
        move_all_but_parameters(module, self.root_device)
        if not fitting and not plan.shard_params:
            # Nothing to shard without optimizers: a plain module, equal on all ranks.
            self.model_to_device()
            equalize(module, self._topology)
            return
        read = self._construction.take if self._construction is not None else None
        plugin = self.precision_plugin
        dtypes = plugin.dtypes if isinstance(plugin, ZeroPrecision) else DtypePolicy()
        dtypes = replace(dtypes, frozen_masters=self._frozen_masters).with_masters_of(self._resolved)
        options = EngineOptions.from_config(self._resolved, dtypes)
        self._engine = ZeroEngine(module, self.optimizers, self._topology, plan, options, read, tell)
        access.remember(self._engine)
        packed = any(buffers.quantized is not None for buffers in self._engine.units.values())
        for remark in remarks(self._resolved, self._topology, packed):
            rank_zero_info(f"ds_lightning: {remark}")
        if self._construction is not None:
            self._construction.finish()
            self._construction = None
        if self._load_later is not None:
            self._load_later()
            self._load_later = None

    def _checkpoint_activations(self) -> None:
        assert self._engine is not None
        block = self.config.activation_checkpointing
        if block.is_on and self._activation is None:
            before = self._engine.passes.before_scope
            self._activation = ActivationRun(self._engine.scopes, block, before, rank_zero_warn)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Call `configure_optimizers`; what the configuration has takes the place of what is missing."""
        assert self.lightning_module is not None
        automatic = "scheduler.params.total_num_steps" in self._parsed.autos
        self._total_steps = total_steps(trainer) if automatic else None
        self._made = make_optimizers(self.lightning_module, self._parsed, partial(self._facts, trainer))
        self.optimizers, self.lr_scheduler_configs = self._made.optimizers, self._made.schedules
        if trainer._checkpoint_connector._loaded_checkpoint or trainer.ckpt_path is not None:
            # Whoever asked for the number of steps has had the dataloader made, but not for the place to go on from.
            trainer.fit_loop._combined_loader = None

    def _facts(self, trainer: pl.Trainer, made: Made) -> Facts:
        assert self.lightning_module is not None
        return collect_facts(
            trainer,
            self.lightning_module,
            self._stage,
            str(self.precision_plugin.precision),
            made.optimizers,
            has_optimizer=made.has_optimizer,
            has_schedule=made.has_schedule,
            total_steps=self._total_steps,
        )

    def _hold_schedulers(self) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, ZeroPrecision) and (plugin.loss_scaler is not None or plugin.check_grad_overflow):
            for config in self.lr_scheduler_configs:
                if config.interval == "step":
                    hold_on_skip(config.scheduler, lambda: plugin.last_step_skipped)

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def on_train_start(self) -> None:
        """The training data is known now: compare its batch size with the configuration."""
        assert self.lightning_module is not None
        self._tidy()
        if self._parsed.given or self._parsed.autos:
            self._resolved = resolve(self._parsed, self._facts(self.lightning_module.trainer, self._made))
        self._resumption.start_training(*self._run())

    def on_train_end(self) -> None:
        """Training is over: ranks are equal from now on."""
        if self.engine is not None:
            self.engine.settle()

    def process_dataloader(self, dataloader: object) -> object:
        """In a run that resumes within an epoch: the train dataloader without the samples that have been used."""
        return self._resumption.process_dataloader(*self._run(), dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A training batch begins."""
        self._resumption.begin_batch(*self._run(), batch_idx)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Parameters made in `configure_model` are made on CPU at stage 3, and sharded before they move."""
        sharded = self.config.zero_optimization.stage >= 3
        with self.precision_plugin.tensor_init_context() if sharded else super().tensor_init_context(empty_init):
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """At stage 3, blocks built inside are sharded once complete: no rank ever holds the model whole."""
        if self._engine is not None or self._topology is None:
            yield
            return
        assert self.lightning_module is not None
        if self._construction is None and self._shards_parameters:
            policy = OffloadPolicy.from_config(self.config)
            shelf = agreed(lambda: shelf_for(policy), self._topology)
            self._construction = ShardedConstruction(self.lightning_module, self._topology, tell, shelf)
        with constructing(self._topology, self._construction):
            yield

    # Loop -----------------------------------------------------------------------------------------------------------

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.engine is None else self.engine.passes.step_scope()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`."""
        with self._scope():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `validation_step`."""
        with self._scope():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `test_step`."""
        with self._scope():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `predict_step`."""
        with self._scope():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Entered by Lightning around micro-batches that do not end an accumulation window."""
        with nullcontext() if self.engine is None else self.engine.passes.no_sync():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: the precision plugin brackets backward."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: the precision plugin brackets backward."""

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step: see `ZeroPrecision.optimizer_step`."""
        module = model or self.lightning_module
        assert isinstance(module, pl.LightningModule)
        result = self.precision_plugin.optimizer_step(optimizer, model=module, closure=closure, **kwargs)
        self._resumption.between_steps(*self._run())
        return result

    # Ranks meet ------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        if self.engine is not None:
            self.engine.passes.meet()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self._meet()
        if self.is_global_zero:
            self._saver.guard_links()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` holds."""
        self._meet()
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean, or another reduction, over ranks."""
        self._meet()
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Every rank's tensor."""
        self._meet()
        gathered: Tensor = super().all_gather(tensor, *args, **kwargs)
        return gathered

    def _begin_evaluation(self) -> None:
        self._tidy()
        if self.engine is not None:
            self.engine.settle()
            self.engine.passes.begin_evaluation()
            for metric in metrics_of(self.engine.module):
                metric.distributed_available_fn = Meeting(self._meet, metric.distributed_available_fn)

    def _end_evaluation(self) -> None:
        if self.engine is not None:
            self.engine.passes.end_evaluation()
            for metric in metrics_of(self.engine.module):
                if isinstance(metric.distributed_available_fn, Meeting):
                    metric.distributed_available_fn = metric.distributed_available_fn.original

    def on_validation_start(self) -> None:
        """An evaluation loop begins."""
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        """An evaluation loop is over."""
        self._end_evaluation()
        self._resumption.end_validation(*self._run())

    def on_test_start(self) -> None:
        """An evaluation loop begins."""
        self._begin_evaluation()

    def on_test_end(self) -> None:
        """An evaluation loop is over."""
        self._end_evaluation()

    def on_predict_start(self) -> None:
        """An evaluation loop begins."""
        self._begin_evaluation()

    def on_predict_end(self) -> None:
        """An evaluation loop is over."""
        self._end_evaluation()

    # End ------------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Communicate no more: other ranks may be gone."""
        self._failed = True
        self._saver.finish(True, self._topology)
        if self._engine is not None:
            self._engine.abort()
        if isinstance(exception, TopologyError):
            end_children(self._launcher)

    def teardown(self) -> None:
        """Leave the module sharded, for saving and evaluation after `fit`; idempotent, and safe after a failure."""
        self._end_evaluation()
        if self._activation is not None:
            table = self._activation.stop()
            self._activation = None
            if table:
                rank_zero_info(table)
        if self.engine is not None and not self._failed:
            self.engine.norms.last()  # nothing may be in flight when the process ends
        self._saver.finish(self._failed, self._topology)
        if self._precision_plugin is not None:
            self._precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Process groups and engines belong to a process."""
        values: dict[str, Any] = super().__getstate__()
        return {
            **values,
            "_engine": None,
            "_topology": None,
            "_construction": None,
            "_activation": None,
            "_load_later": None,
        }


def _pass_zero_grad_on(wrapper: LightningOptimizer) -> None:
    """Let `zero_grad` of Lightning's wrapper call the optimizer's: it inherits the class's, past what we hook."""
    optimizer = wrapper.optimizer

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        optimizer.zero_grad(*args, **kwargs)

    wrapper.zero_grad = zero_grad  # type: ignore[attr-defined]
