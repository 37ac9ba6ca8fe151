"""The closing report of a training job: speed, memory, held-out loss, a sample."""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
from hydra.utils import get_original_cwd
from lightning.pytorch.callbacks import ModelCheckpoint

import ds_lightning
from ds_lightning.callbacks import MemoryUse, Throughput
from ds_lightning.cli.model_states import bytes_per_parameter
from ds_lightning.cli.table import print_table
from ds_lightning.comm.quantized import BLOCK

_Callback = TypeVar("_Callback", bound=pl.Callback)


class Report:
    """Collects the numbers of one job on every rank; rank 0 shows them.

    Args:
        trainer: The job's Trainer.
        model: Any LightningModule; one with `generate(prompt, length)` gives a sample.
        data: Any LightningDataModule or None; one with `unigram_entropy()` gives the number to
            beat.
    """

    def __init__(self, trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule | None) -> None:
        self._trainer = trainer
        self._model = model
        self._data = data
        self._losses: dict[str, float] = {}
        # Counted now: a strategy may leave a rank with only its part of the parameters.
        self._sizes = [parameter.numel() for parameter in model.parameters()]
        self._parameters = sum(self._sizes)

    def before(self, ckpt_path: str | None) -> None:
        """Measure the held-out loss before training, of the checkpoint when there is one."""
        self._measure("before", ckpt_path)

    def after(self) -> None:
        """Measure the held-out loss after training."""
        self._measure("after", None)

    def _measure(self, name: str, ckpt_path: str | None) -> None:
        # A datamodule replaces every loader of the module, also those that it does not have.
        loaders = self._model if self._data is None else self._data
        if not _overrides(loaders, "val_dataloader"):
            return
        if not _overrides(self._model, "validation_step"):
            return
        metrics = self._trainer.validate(self._model, datamodule=self._data, ckpt_path=ckpt_path, verbose=False)
        losses = {key: value for metric in metrics for key, value in metric.items() if "loss" in key}
        if losses:
            self._losses[name] = next(iter(losses.values()))

    def sample(self, prompt: str, length: int) -> str | None:
        """Generate text; every rank takes part, as each may hold only a part of the model."""
        generate = getattr(self._model, "generate", None)
        if generate is None or length < 1:
            return None
        with self._whole_model(), self._trainer.strategy.precision_plugin.forward_context():
            return str(generate(prompt, length))

    def _whole_model(self) -> AbstractContextManager[Any]:
        gathered: Any = getattr(ds_lightning, "gathered", nullcontext)
        return gathered(self._model) if _is_zero(self._trainer) else nullcontext()

    def show(self, sample: str | None, overrides: Sequence[str]) -> None:
        """Print the closing table, the sample and the command that goes on."""
        print_table("Training finished", self._rows())
        if sample is not None:
            print(f"\nSample:\n{sample}\n")
        checkpoint = self._checkpoint()
        if checkpoint:
            ahead = [word for word in overrides if not word.startswith(("ckpt_path=", "trainer.max_steps="))]
            steps = 2 * self._trainer.global_step
            words = [
                "ds-lightning",
                "train",
                *ahead,
                f"ckpt_path={checkpoint}",
                f"trainer.max_steps={steps}",
            ]
            print(f"Checkpoint: {checkpoint}\nGo on with: {shlex.join(words)}")

    def _rows(self) -> Iterator[tuple[str, str]]:
        trainer = self._trainer
        stage = _stage(trainer)
        yield (
            "strategy",
            type(trainer.strategy).__name__ + (f", stage {stage}" if stage is not None else ""),
        )
        yield "processes", f"{trainer.world_size} x {trainer.strategy.root_device.type}"
        yield "precision", str(trainer.precision)
        yield "parameters", f"{self._parameters:,}"
        yield "optimizer steps", str(trainer.global_step)
        throughput = self._callback(Throughput)
        if throughput and throughput.seconds_per_step:
            yield "time per step", f"{1e3 * throughput.seconds_per_step:.0f} ms (median)"
            yield "tokens per second", f"{throughput.per_second:,.0f}"
        memory = self._callback(MemoryUse)
        if memory and memory.peak:
            yield "peak memory per rank", _megabytes(memory.peak)
            yield "  of it before training", _megabytes(memory.baseline)
            yield "model states per rank", _megabytes(memory.model_states)
            per_parameter = bytes_per_parameter(
                stage or 0,
                self._shards(),
                str(trainer.precision),
                self._share_kept_whole(),
                *self._transport_costs(),
            )
            if per_parameter:
                measured = max(memory.model_states) / self._parameters
                yield "  bytes per parameter", f"{measured:.2f}, at most {per_parameter:.2f} by the formula"
        if "before" in self._losses:
            yield "held-out loss before", _nats(self._losses["before"])
        if "after" in self._losses:
            yield "held-out loss after", _nats(self._losses["after"])
        entropy = getattr(self._data, "unigram_entropy", None)
        if entropy is not None:
            yield "unigram entropy", _nats(entropy())

    def _shards(self) -> int:
        engine = getattr(self._trainer.strategy, "engine", None)
        return int(self._trainer.world_size if engine is None else engine.topology.shard_count)

    def _transport_costs(self) -> tuple[int, float]:
        """Ranks that share a second copy of gathered parameters, and bytes of carried errors per parameter."""
        engine = getattr(self._trainer.strategy, "engine", None)
        if engine is None:
            return 0, 0.0
        teams = engine.topology.teams
        secondary = teams.secondary.size if teams.secondary is not None else 0
        if engine.transport.feedback is None or teams.shards.size == 1:
            return secondary, 0.0
        steps = 1.0 + (1.0 / teams.inside.size if teams.inside is not None else 0.0)
        return secondary, steps * (1.0 + 4.0 / BLOCK)

    def _share_kept_whole(self) -> float:
        if _stage(self._trainer) != 3:
            return 0.0
        strategy: Any = self._trainer.strategy
        zero = strategy.config.zero_optimization
        small = sum(size for size in self._sizes if size <= zero.stage3_param_persistence_threshold)
        whole = min(small, int(zero.stage3_model_persistence_threshold))
        return whole / self._parameters

    def _callback(self, kind: type[_Callback]) -> _Callback | None:
        return next((c for c in self._trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]

    def _checkpoint(self) -> str | None:
        callback = self._callback(ModelCheckpoint)
        path = (callback.last_model_path or callback.best_model_path) if callback else ""
        here = get_original_cwd()  # where the command to go on will be typed
        return os.path.relpath(path, here) if path.startswith(here) else path or None


def _overrides(owner: pl.LightningModule | pl.LightningDataModule, hook: str) -> bool:
    bases = (pl.LightningModule, pl.LightningDataModule)
    base = next(base for base in bases if isinstance(owner, base))
    return getattr(type(owner), hook) is not getattr(base, hook)


def _is_zero(trainer: pl.Trainer) -> bool:
    return isinstance(trainer.strategy, getattr(ds_lightning, "ZeroStrategy", ()))


def _stage(trainer: pl.Trainer) -> int | None:
    if not _is_zero(trainer):
        return None
    strategy: Any = trainer.strategy
    return int(strategy.config.zero_optimization.stage)


def _megabytes(every: Sequence[int]) -> str:
    return ", ".join(f"{value / 1e6:,.0f}" for value in every) + " MB"


def _nats(value: float) -> str:
    return f"{value:.3f} nats per byte"
