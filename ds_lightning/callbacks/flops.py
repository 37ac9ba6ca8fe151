"""The flops profiler in a training run: the `flops_profiler` block of a ds_config."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.hooks import RemovableHandle

from ds_lightning.errors import ConfigError
from ds_lightning.profile.profiler import FlopsProfiler
from ds_lightning.profile.units import flops_text, number_text, percent_text, rate_text, seconds_text
from ds_lightning.zero.hooks import tensors_in


class FlopsProfile(Callback):
    """Counts the operations of one optimizer step on rank 0, takes the time of the next one, and reports both.

    Counting slows a step down, so times are those of the first step behind it that has as many micro-batches. The
    numbers are of the whole step, all its micro-batches together.

    Args:
        profile_step: optimizer steps before the one that is counted; the first ones are slow and show little.
        module_depth: depth of the aggregated part of the report; -1 is the deepest.
        top_modules: modules shown per depth there.
        detailed: show the tree of modules.
        output_file: where to write the report, JSON where it ends in `.json`; None prints it.
        recompute_fwd_factor: forwards that backward computes again, where that happens out of torch's sight (in a
            kernel of its own); what torch sees of activation checkpointing is counted.
        peak_flops: of one device, per second, for the utilization (MFU); None takes that of known GPUs.

    Attributes:
        profiler: has the numbers once the run is over.
    """

    def __init__(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        recompute_fwd_factor: float = 0.0,
        peak_flops: float | None = None,
    ) -> None:
        self.profile_step = profile_step
        self.module_depth = module_depth
        self.top_modules = top_modules
        self.detailed = detailed
        self.output_file = output_file
        self.recompute_fwd_factor = recompute_fwd_factor
        self.peak_flops = peak_flops
        self.profiler: FlopsProfiler | None = None
        self._what: str | None = None  # "count" or "time", in a step under way
        self._counted = 0  # micro-batches of the step that was counted
        self._batches = 0
        self._samples = 0
        self._steps = 0  # before the one under way
        self._reported = False
        self._handles: list[RemovableHandle] = []  # on optimizers, in a step under way
        self._began = self._step_began = 0.0
        self._forward = self._backward = self._step = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the folder of `output_file`, before anything is trained.

        Raises:
            ConfigError: when that cannot be.
        """
        if stage != "fit" or self.output_file is None or not trainer.is_global_zero:
            return
        try:
            Path(self.output_file).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"flops_profiler.output_file={str(self.output_file)!r}: its folder cannot be made ({error.strerror}). "
                "Name a file in a folder that this process may write to."
            ) from error

    # The step ---------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin with the first micro-batch of the step."""
        if not trainer.is_global_zero or self._reported:
            return
        if self._what is None and trainer.global_step >= self.profile_step:
            if self.profiler is None:
                self.profiler = FlopsProfiler(pl_module)
            self._what = "time" if self._counted else "count"
            self._batches = self._samples = 0
            self._steps = trainer.global_step
            self._forward = self._backward = self._step = 0.0
            self._step_began = _now(pl_module)
            self.profiler.start_profile(count=self._what == "count", time=self._what == "time")
            self._leave_out(trainer.optimizers)
        if self._what is not None:
            self._batches += 1
            self._samples += _rows(batch)
            self._began = _now(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """A forward is over."""
        if self._what is not None:
            now = _now(pl_module)
            self._forward += now - self._began
            self._began = now

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A backward is over, its reductions too."""
        if self._what is not None:
            now = _now(pl_module)
            self._backward += now - self._began
            self._began = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End with the step."""
        if self._what is None or trainer.global_step == self._steps:
            return
        assert self.profiler is not None
        now = _now(pl_module)
        self._step = now - self._began
        what = self._what
        self._stop()
        if what == "count":
            self._counted = self._batches
        elif self._batches == self._counted:
            self._report(trainer, pl_module, now - self._step_began)
        else:
            for node in self.profiler.tree.walk():
                node.own.forward_seconds = node.own.backward_seconds = 0.0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind in the model."""
        self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what was counted, if there was no step to time."""
        if not trainer.is_global_zero or self._reported:
            return
        self._stop()
        if self._counted:
            self._report(trainer, pl_module, None)
        else:
            rank_zero_warn(
                f"Training ended after {trainer.global_step} steps, before flops_profiler.profile_step="
                f"{self.profile_step}; nothing was profiled."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop, whatever is under way."""
        self._stop()

    def _leave_out(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The arithmetic of an optimizer is not the model's."""
        profiler = self.profiler
        assert profiler is not None
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: profiler.pause()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: profiler.resume()))

    def _stop(self) -> None:
        self._what = None
        while self._handles:
            self._handles.pop().remove()
        if self.profiler is not None:
            self.profiler.stop_profile()

    # The report -------------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, module: LightningModule, seconds: float | None) -> None:
        assert self.profiler is not None
        self._reported = True
        own = self.profiler.tree.own
        # A Trainer calls `training_step`, which no hook of the module sees.
        own.calls = self._counted
        own.forward_seconds, own.backward_seconds = (self._forward, self._backward) if seconds else (0.0, 0.0)
        total = self.profiler.tree.total()
        if self.recompute_fwd_factor and not total.recomputed_flops:
            own.recomputed_flops = int(self.recompute_fwd_factor * total.forward_flops)
            total = self.profiler.tree.total()
        facts = {
            "world size": str(trainer.world_size),
            "micro-batches in the step": str(self._counted),
            "samples per rank in the step": str(self._samples),
            "params of the model that are trained": number_text(
                sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
            ),
            "fwd flops of all ranks": flops_text(total.forward_flops * trainer.world_size),
        }
        if seconds:
            facts["step latency (optimizer)"] = seconds_text(self._step)
            facts["iter latency"] = seconds_text(seconds)
            facts["FLOPS per rank = (fwd + bwd flops) / iter latency"] = rate_text(total.flops / seconds)
            facts["samples/second of all ranks"] = f"{self._samples * trainer.world_size / seconds:.4g}"
            peak = self.peak_flops or _known_peak(trainer, module)
            if peak:
                useful = (total.flops - total.recomputed_flops) / seconds
                facts["MFU = FLOPS without recomputation / peak FLOPS"] = percent_text(useful, peak)
        else:
            rank_zero_info("ds_lightning: the flops profile has no times: no step followed the one that was counted.")
        self.profiler.print_model_profile(
            self.profile_step, self.module_depth, self.top_modules, self.detailed, self.output_file, facts
        )


def _known_peak(trainer: Trainer, module: LightningModule) -> float | None:
    device = module.device
    if device.type != "cuda":
        return None
    name = str(trainer.precision)
    dtype = torch.float16 if name.startswith("16") else torch.bfloat16 if name.startswith("bf16") else torch.float32
    return get_available_flops(device, dtype)


def _now(module: LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()


def _rows(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    first = next(iter(tensors_in(batch)), None)
    return 0 if first is None else first.shape[0] if first.ndim else 1
