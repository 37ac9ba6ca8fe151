"""Exponential moving averages of the weights as a callback: averaged where they are trained, shown for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from ds_lightning.checkpoint.keys import align_compiled
from ds_lightning.errors import ConfigError
from ds_lightning.optim.ema import Averages, warmed_up
from ds_lightning.zero.access import full_param

if TYPE_CHECKING:
    from ds_lightning.strategy import ZeroStrategy

_EVALUATIONS = ("validate", "test", "predict")


class EMA(Callback):
    """Averages the weights exponentially, at every stage, precision and number of ranks, without communication.

    Each rank averages the master values that it owns, `4/N` bytes per parameter, after each optimizer step; the
    numbers are those of `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`: the
    first update copies the weights. Steps that were skipped (fp16 overflow) and batches inside of an accumulation
    window do not count; with several optimizers, a batch in which any of them stepped counts once. Training is not
    affected, bit for bit.

    The averages take the place of the weights during evaluation, once there are any; then the weights come back bit
    for bit, without communication, after an exception too. Meanwhile each rank keeps a copy of what it holds of the
    weights, all of them at stages 0 to 2. Buffers are not averaged: the module's own are used, and saved, as they are
    (`use_buffers=False` there). Frozen parameters are their own averages.

    A checkpoint has `checkpoint["ema"]` with `state_dict` (every key of the module's `state_dict`; it loads into the
    plain module), `updates`, `steps` and `decay`. `checkpoint["state_dict"]` always has the weights that are trained,
    also if saved while averages are shown. It resumes at any stage, number of ranks and precision; from a checkpoint
    without averages they begin with the weights in it. `trainer.test(ckpt_path=...)` evaluates the averages of that
    checkpoint. Checkpoints with `save_weights_only` have no averages: Lightning asks no callback for them.

    Args:
        decay: between 0 and 1, or a function of the number of optimizer steps made so far (this one included).
        warmup: use `min(decay, (1 + n) / (10 + n))` for the update after n updates.
        update_after_step: make the first update after one step more than this.
        update_every: steps from one update to the next; as in Lightning's `EMAWeightAveraging`, the steps 1, 1 + k,
            1 + 2k ... count.
        dtype: of the averages, such as `torch.float32` or `"float32"`; None takes fp32, or fp64 for fp64 weights. In
            16 bit a decay near 1 changes nothing any more.
        swap: the evaluations that see the averages, of "validate", "test" and "predict", during and after `fit`.

    Raises:
        ConfigError: for values that make no sense; in set-up, under another strategy or with a second `EMA`.
    """

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        warmup: bool = False,
        update_after_step: int = 0,
        update_every: int = 1,
        dtype: torch.dtype | str | None = None,
        swap: Sequence[str] = ("validate", "test"),
    ) -> None:
        self._decay = decay if callable(decay) else _checked(decay)
        self._warmup = warmup
        if update_after_step < 0 or update_every < 1:
            raise ConfigError(
                f"EMA(update_after_step={update_after_step}, update_every={update_every}): the first must be at least "
                "0, the second at least 1."
            )
        self._update_after_step = update_after_step
        self._update_every = update_every
        self._dtype = _dtype(dtype)
        self._swap = (swap,) if isinstance(swap, str) else tuple(swap)
        for name in self._swap:
            if name not in _EVALUATIONS:
                raise ConfigError(
                    f"EMA(swap={list(self._swap)}): there is no {name!r}; choose among {', '.join(_EVALUATIONS)}."
                )
        self._averages: Averages | None = None
        self._steps = 0
        self._last_decay: float | None = None
        self._ready = False  # averages belong to the engine that trains
        self._saved: Mapping[str, Any] | None = None  # to go on from
        self._evaluated: Mapping[str, Any] | None = None  # the checkpoint of an evaluation
        self._loaded = False  # its averages are in the module
        self._shown: Averages | None = None  # by an evaluation, not by hand
        self._before = 0  # optimizer steps when this batch began

    # What users read ------------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Updates made so far; 0 before there are averages. Equal on all ranks."""
        return 0 if self._averages is None else self._averages.updates

    @property
    def nbytes(self) -> int:
        """Bytes of the averages on this rank."""
        return 0 if self._averages is None else self._averages.nbytes

    def full_param(self, parameter: nn.Parameter) -> Tensor:
        """The average of a parameter, in its logical shape and the averages' dtype. Collective.

        Returns:
            A new tensor on every rank; before the first update, and for a frozen parameter, the weight itself.
        """
        found = self._live()
        return full_param(parameter) if found is None else found.full_param(parameter)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the module's weights are the averages; afterwards they are what they were, bit for bit.

        Collective on entry. Nothing happens before the first update, or inside of itself and of an evaluation that
        sees the averages anyway. Changes that are made to the weights inside are lost.

        Raises:
            ConfigError: inside a step or `ds_lightning.gathered(...)`.
        """
        found = self._live()
        if found is None or found.engine.values.showing:
            yield
            return
        found.engine.settle()
        found.engine.values.show(found.vectors)
        try:
            yield
        except BaseException:
            found.engine.values.hide(together=False)
            raise
        found.engine.values.hide()

    def _live(self) -> Averages | None:
        """The averages, if there are any and their engine still runs the module."""
        found = self._averages
        return None if found is None or not found.updates or found.engine.dissolved else found

    # Set-up ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work; a run begins."""
        if not hasattr(trainer.strategy, "companion_state_dict"):
            raise ConfigError(
                f"ds_lightning.callbacks.EMA averages the shards of ZeroStrategy, not under "
                f"{type(trainer.strategy).__name__}. Use Lightning's EMAWeightAveraging there."
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, EMA) for callback in callbacks) > 1:
            raise ConfigError("There are several EMA callbacks. Use one: only one can be shown and saved.")
        self._ready = False
        self._saved = self._evaluated = None
        self._loaded = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the averages of a checkpoint; they are read once the module is sharded."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._evaluated = checkpoint
        else:
            self._saved = checkpoint.get("ema")
            self._ready = False

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimizers are restored: find the averages to go on from."""
        self._settle(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_sanity_check_start`, if there was none."""
        self._settle(trainer, pl_module)

    def _settle(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages of a checkpoint, of an earlier `fit`, or none yet. Collective."""
        if self._ready:
            return
        self._ready = True
        engine = _strategy(trainer).engine
        assert engine is not None, "training without an engine"
        engine.follow_groups()  # finetuning callbacks may just have put theirs back
        if self._averages is None or self._averages.engine is not engine:
            self._averages, self._steps = Averages(engine, self._dtype), 0
        saved, self._saved = self._saved, None
        if saved is not None:
            self._steps, self._last_decay = int(saved["steps"]), saved["decay"]
            self._averages.clear()
            if saved["updates"]:
                missing = self._averages.load(align_compiled(saved["state_dict"], pl_module), int(saved["updates"]))
                if missing:
                    _tell(f"the checkpoint has no averages of {', '.join(missing[:5])}: they begin with the weights")
        elif trainer.ckpt_path:
            self._steps, self._last_decay = trainer.global_step, None
            self._averages.clear()
            if self._steps > self._update_after_step:
                self._averages.begin()
            _tell(f"{trainer.ckpt_path} has no averages (ema): they begin with its weights")

    # Update ---------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Steps are counted from here."""
        self._before = _steps(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the averages if some optimizer stepped, which does not communicate."""
        if _steps(trainer) == self._before:
            return
        self._settle(trainer, pl_module)  # a checkpoint may have been loaded in the midst of training
        self._steps += 1
        if self._steps > self._update_after_step and (self._steps - 1) % self._update_every == 0:
            assert self._averages is not None
            self._last_decay = self._decay_now()
            self._averages.update(self._last_decay)

    def _decay_now(self) -> float:
        decay = _checked(self._decay(self._steps)) if callable(self._decay) else self._decay
        return warmed_up(decay, self.updates) if self._warmup else decay

    # Evaluation -----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the averages. Collective."""
        self._show(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        self._hide(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the averages. Collective."""
        self._show(trainer, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        self._hide(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the averages. Collective."""
        self._show(trainer, "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        self._hide(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the weights back without communication: other ranks may be gone."""
        self._hide(trainer, together=False)

    def _show(self, trainer: Trainer, what: str) -> None:
        if what not in self._swap:
            return
        if trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path:
            self._load_evaluated(trainer)
            return
        found = self._live()
        if found is not None and found.engine is _strategy(trainer).engine and not found.engine.values.showing:
            self._shown = found
            found.engine.settle()
            found.engine.values.show(found.vectors)

    def _load_evaluated(self, trainer: Trainer) -> None:
        """An evaluation of a checkpoint sees its averages. Not collective."""
        checkpoint = self._evaluated or {}
        averages = checkpoint.get("ema", {})
        if not averages.get("updates"):
            _tell(f"{trainer.ckpt_path} has no averages (ema): its weights are evaluated")
            return
        self._loaded = True
        _load_weights(trainer, {**checkpoint, "state_dict": averages["state_dict"]})

    def _hide(self, trainer: Trainer, together: bool = True) -> None:
        if self._loaded:
            assert self._evaluated is not None
            self._loaded = False
            _load_weights(trainer, self._evaluated)
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.engine.values.hide(together)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages, which stay where they are until they are written. Every rank takes part."""
        strategy = _strategy(trainer)
        if self._saved is not None:  # saved before training began
            checkpoint["ema"] = self._saved
            return
        found = self._averages
        if found is None or found.engine is not strategy.engine:
            return
        checkpoint["ema"] = {
            "state_dict": strategy.companion_state_dict("averages", found.vectors),
            "updates": found.updates,
            "steps": self._steps,
            "decay": self._last_decay,
        }


def _strategy(trainer: Trainer) -> ZeroStrategy:
    strategy: Any = trainer.strategy
    return strategy  # type: ignore[no-any-return]


def _steps(trainer: Trainer) -> int:
    engine = _strategy(trainer).engine
    return 0 if engine is None else engine.steps


def _load_weights(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    _strategy(trainer).load_model_state_dict(checkpoint, strict=trainer.lightning_module.strict_loading)


def _checked(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"EMA: the decay must be between 0 and 1, not {decay}.")
    return float(decay)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is not None and isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    if dtype is None:
        return None
    raise ConfigError(f"EMA(dtype={dtype!r}) is no floating dtype. Use torch.float32 or 'float32'.")


def _tell(message: str) -> None:
    rank_zero_info(f"ds_lightning: {message}")
