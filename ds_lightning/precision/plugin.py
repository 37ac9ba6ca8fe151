"""Lightning's precision plugin over the engine: casting, loss scaling, clipping, and the order of a step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor, _DtypeContextManager
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from ds_lightning.config.suggest import closest
from ds_lightning.errors import ConfigError
from ds_lightning.optim import clip
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.precision.dtypes import DtypePolicy
from ds_lightning.precision.loss_scale import LossScaleOptions, LossScaler
from ds_lightning.precision.safe_modules import DEFAULT, unused
from ds_lightning.zero.engine import ZeroEngine

_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
NAMES = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@dataclass(frozen=True, slots=True)
class Autocast:
    """Mixed precision over parameters that stay in fp32.

    A gather at stage 3 moves fp32 and an optimizer has no masters beside the parameters. Whoever wants 16-bit gathers
    and shards uses the mixed precisions without this: the arithmetic is the same wherever autocast casts weights.

    Attributes:
        safe: classes of modules whose gradients travel in 16 bit; all others travel in fp32.
    """

    safe: tuple[type[nn.Module], ...] = ()


class ZeroPrecision(Precision):
    """Precision of a model that ds_lightning shards.

    | name | parameters compute in | masters | loss scale |
    |---|---|---|---|
    | `32-true` | fp32 | the parameters | no |
    | `bf16-mixed` | bf16 (vectors: fp32), under autocast | fp32 | no |
    | `16-mixed` | fp16 (vectors: fp32), under autocast | fp32 | yes |
    | `*-mixed` with `autocast` | fp32, cast by autocast operation by operation | the parameters | as above |
    | `bf16-true`, `16-true` | 16 bit throughout | none | no, `16-true`: if `fp16` is given |
    | `64-true` | fp64 | the parameters | no |

    Args:
        precision: one of the names above, or Lightning's short forms (16, "bf16", 32 ...).
        fp16: the loss scale of `16-mixed` and `16-true`.
        cast_inputs: cast floating inputs to the compute dtype (`fp16.auto_cast`); always done for `*-true`.
        check_grad_overflow: `bf16.check_grad_overflow`: skip steps with non-finite gradients.
        device: where autocast acts; None takes it from the engine.
        autocast: leave parameters of `*-mixed` in fp32, as plain Lightning does.

    Raises:
        ConfigError: for an unknown name, or `autocast` with a precision that is not mixed.
    """

    precision: Any = "32-true"

    def __new__(cls, precision: str | int = "32-true", *_: Any, **__: Any) -> ZeroPrecision:
        """Pick the class: Lightning's callbacks ask a plugin's class for its dtype."""
        if cls is ZeroPrecision:
            cls = _CLASSES[_canonical(precision)]
        return object.__new__(cls)

    def __init__(
        self,
        precision: str | int = "32-true",
        fp16: LossScaleOptions | None = None,
        cast_inputs: bool = False,
        check_grad_overflow: bool = False,
        device: str | None = None,
        autocast: Autocast | None = None,
    ) -> None:
        self.precision = _canonical(precision)
        width, _, kind = self.precision.partition("-")
        self.dtype = _DTYPES[width]
        self.mixed = kind == "mixed"
        self.cast_inputs = cast_inputs or (kind == "true" and self.dtype != torch.float32)
        self.check_grad_overflow = check_grad_overflow
        self.fp16 = fp16
        self.loss_scaler = self._make_scaler(fp16)
        self.autocast = autocast
        self._check_autocast()
        self.skipped_steps = 0
        self.last_step_skipped = False
        self._autocast_device = device
        self._noted = False
        self._engine: ZeroEngine | None = None
        self._scale_in_backward = 1.0
        self._unscaled: dict[int, tuple[bool, int]] = {}  # by optimizer: overflow, and after how many backwards
        # Attributes of Lightning's own classes, for code that looks at them.
        self.device = device or "cpu"
        self.scaler: Any = None
        self._desired_input_dtype = self.dtype

    @classmethod
    def from_lightning(cls, plugin: Precision) -> Precision:
        """The counterpart of one of Lightning's plugins; a user's own plugin class stays as it is.

        Raises:
            ConfigError: for plugins that cannot work with sharded parameters.
        """
        if isinstance(plugin, ZeroPrecision):
            return plugin
        kind = type(plugin)
        if isinstance(plugin, MixedPrecision) and kind is MixedPrecision:
            if plugin.scaler is not None and plugin.precision == "16-mixed":
                defaults = torch.amp.GradScaler("cpu")
                mine = plugin.scaler
                settings = ("_init_scale", "_growth_interval", "_growth_factor", "_backoff_factor", "_enabled")
                if any(getattr(mine, name) != getattr(defaults, name) for name in settings):
                    raise ConfigError(
                        "MixedPrecision with a GradScaler of your own: give its settings to "
                        "ZeroPrecision('16-mixed', fp16=LossScaleOptions(...)) or the fp16 block of the configuration."
                    )
            return ZeroPrecision(plugin.precision, device=plugin.device)
        if kind in (Precision, HalfPrecision, DoublePrecision):
            return ZeroPrecision(plugin.precision)
        raise ConfigError(
            f"The precision plugin {kind.__name__} is not supported by ZeroStrategy. Use one of "
            f"{', '.join(NAMES)}, or a subclass of ds_lightning.ZeroPrecision."
        )

    def _make_scaler(self, fp16: LossScaleOptions | None) -> LossScaler | None:
        wanted = self.precision == "16-mixed" or (self.precision == "16-true" and fp16 is not None)
        return LossScaler(fp16) if wanted else None

    def _check_autocast(self) -> None:
        if self.autocast is not None and not self.mixed:
            raise ConfigError(
                f"ZeroPrecision(autocast=...) with {self.precision}: autocast computes in 16 bit with fp32 weights. "
                "Use 'bf16-mixed' or '16-mixed'."
            )

    def complete(
        self,
        fp16: LossScaleOptions | None,
        cast_inputs: bool,
        check_grad_overflow: bool,
        autocast: Autocast | None = None,
    ) -> None:
        """Take from a configuration what the arguments left open.

        Args:
            fp16: the configuration's loss scale; None when it says nothing about it.
            cast_inputs: as in the constructor.
            check_grad_overflow: as in the constructor.
            autocast: the configuration's.

        Raises:
            ConfigError: when both say something different.
        """
        if autocast is not None:
            if self.autocast not in (None, autocast):
                raise ConfigError(
                    f"The configuration ({autocast}) and ZeroPrecision(autocast={self.autocast}) differ. Keep one of "
                    "the two."
                )
            self.autocast = autocast
            self._check_autocast()
        if self.dtype == torch.float16 and fp16 is not None:
            if self.fp16 not in (None, fp16):
                raise ConfigError(
                    f"The {fp16.block} block of the configuration ({fp16}) and ZeroPrecision(fp16={self.fp16}) "
                    "differ. Keep one of the two."
                )
            self.loss_scaler = self._make_scaler(fp16)
        self.cast_inputs = self.cast_inputs or (cast_inputs and self.precision == "16-mixed")
        self.check_grad_overflow = self.check_grad_overflow or (
            check_grad_overflow and self.precision.startswith("bf16")
        )

    # Engine ---------------------------------------------------------------------------------------------------------

    def attach(self, engine: ZeroEngine | None) -> None:
        """Work with this engine from now on."""
        if engine is not self._engine:
            self._unscaled.clear()
            self._scale_in_backward = 1.0
        self._engine = engine
        if engine is not None and self._autocast_device is None:
            self.device = engine.topology.device.type

    @property
    def dtypes(self) -> DtypePolicy:
        """In which dtypes parameters compute and are updated."""
        if self.autocast is not None:
            safe = self.autocast.safe
            return DtypePolicy(low=self.dtype if safe else None, safe=safe)
        return DtypePolicy(self.dtype if self.mixed else None)

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward; 1 without loss scaling."""
        return self.loss_scaler.scale if self.loss_scaler else 1.0

    # Casting --------------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """`*-true`: the whole module takes the dtype. Mixed: parameters are cast when they are sharded."""
        if self.autocast is not None and self.autocast.safe is not DEFAULT:
            names = unused(self.autocast.safe, module)
            if names:
                rank_zero_info(
                    f"ds_lightning: the model has no module of lower_precision_safe_modules {', '.join(names)}"
                )
        if self.mixed or self.dtype == torch.float32:
            return module
        if any(parameter.dtype.itemsize == 1 for parameter in module.parameters()):
            raise ConfigError(f"{self.precision} would cast quantized parameters. Use a mixed precision.")
        return module.to(dtype=self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Cast floating tensors, whatever container they are in; nothing else changes."""
        if not self.cast_inputs:
            return data
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=self.dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """New floating tensors have the dtype of `*-true`."""
        return nullcontext() if self.mixed else _DtypeContextManager(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As `tensor_init_context`."""
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast, without its weight cache: it would keep 16-bit copies of gathered weights alive."""
        if self.mixed:
            self._note_outer_autocast()
            with torch.autocast(self.device, dtype=self.dtype, cache_enabled=False):
                yield
        else:
            with self.tensor_init_context():
                yield

    def _note_outer_autocast(self) -> None:
        """Say once that an autocast around the whole run does not act; one inside the module's code does."""
        if self._noted or not torch.is_autocast_enabled(self.device):
            return
        outer = torch.get_autocast_dtype(self.device)
        if outer != self.dtype:
            self._noted = True
            rank_zero_warn(
                f"An autocast to {outer} around the step is overridden by precision {self.precision}, which casts to "
                f"{self.dtype}. Autocast inside the module's own code acts as usual."
            )

    # Backward and step ----------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss."""
        if self.loss_scaler is not None:
            self._rescale(self.loss_scaler.scale)
            tensor = tensor * self._scale_in_backward
        return Precision.pre_backward(self, tensor, module)

    def backward(self, tensor: Tensor, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Run backward; gradients are reduced when it returns."""
        if self._engine is None:
            Precision.backward(self, tensor, model, *args, **kwargs)
            return
        with self._engine.passes.backward_scope():
            Precision.backward(self, tensor, model, *args, **kwargs)

    def _rescale(self, scale: float) -> None:
        """Bring gradients of earlier backwards, which this one adds to, to its scale."""
        for sharded in self._engine.optimizers if self._engine is not None else ():
            current = 1.0 if sharded.first_group in self._unscaled else self._scale_in_backward
            if current != scale:
                sharded.reduced_gradients().scale_(scale / current)
        feedback = None if self._engine is None else self._engine.transport.feedback
        if feedback is not None and scale != self._scale_in_backward:
            feedback.rescale(scale / self._scale_in_backward)
        if self._engine is not None:
            self._engine.scaled(scale)
        self._unscaled.clear()
        self._scale_in_backward = scale

    def _unscale(self, sharded: ShardedOptimizer) -> bool:
        """Unscale an optimizer's gradients, once; whether they overflowed on any rank. Collective."""
        engine = self._engine
        assert engine is not None
        engine.reducer.settle()
        if self.loss_scaler is None and not self.check_grad_overflow:
            return False
        overflow, backwards = self._unscaled.get(sharded.first_group, (False, -1))
        if backwards != engine.passes.backwards:
            inverse = 1.0 / self._scale_in_backward
            with engine.unscaling(inverse):
                overflow = clip.unscale(sharded.reduced_gradients(), inverse, engine.agreement)
            self._unscaled[sharded.first_group] = overflow, engine.passes.backwards
        return overflow

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Closure, unscale, hooks and clipping, then the step, or none if gradients overflowed on any rank."""
        engine = self._engine
        assert engine is not None, "a step before set-up"
        result = closure()
        sharded = engine.sharded(optimizer)
        overflow = self._unscale(sharded)
        self._after_closure(model, optimizer)
        self.last_step_skipped = overflow
        if not sharded.has_gradients():
            return result
        if overflow:
            engine.norms.step_begins(sharded)
            self.skipped_steps += 1
            if engine.transport.feedback is not None:
                engine.transport.feedback.forget()
        else:
            try:
                optimizer.step(**kwargs)
            except BaseException:
                engine.give_up_step()  # who catches this may go on
                raise
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow)
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the averaged, unscaled gradients of an optimizer: by their global norm or by value. Collective."""
        if clip_val is None or clip_val <= 0 or self._engine is None:
            return
        sharded = self._engine.sharded(optimizer)
        self._unscale(sharded)  # in manual optimization users clip before the step
        norm = self._engine.norms.start(sharded)
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip.clip_by_value(sharded.reduced_gradients(), clip_val)
        else:
            clip.clip_by_norm(sharded.reduced_gradients(), clip_val, norm.value())
        self._engine.norms.clipped(sharded)

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see `on_save_checkpoint`, whose keys do not depend on the class."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see `on_load_checkpoint`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scale, for us and, as `MixedPrecision`, for plain Lightning."""
        if self.loss_scaler is not None:
            checkpoint["ZeroPrecision"] = self.loss_scaler.state_dict()
            checkpoint["MixedPrecision"] = self.loss_scaler.grad_scaler_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with a saved loss scale, ours or a `GradScaler`'s, and with the count of skipped steps."""
        self.skipped_steps = checkpoint.get("ds_lightning", {}).get("skipped_steps", 0)
        if self.loss_scaler is None:
            return
        if "ZeroPrecision" in checkpoint:
            self.loss_scaler.load_state_dict(checkpoint["ZeroPrecision"])
            self.skipped_steps = self.loss_scaler.skipped
            return
        for name in ("MixedPrecision", "FSDPPrecision"):
            if "scale" in checkpoint.get(name, {}):
                self.loss_scaler.load_grad_scaler_state(checkpoint[name])
                return


class _Full(ZeroPrecision):
    """fp32."""


class _Mixed(ZeroPrecision, MixedPrecision):
    """fp16 or bf16 compute with fp32 masters."""


class _Half(ZeroPrecision, HalfPrecision):
    """fp16 or bf16 throughout."""


class _Double(ZeroPrecision, DoublePrecision):
    """fp64."""


_CLASSES: dict[str, type[ZeroPrecision]] = {
    "32-true": _Full,
    "bf16-mixed": _Mixed,
    "16-mixed": _Mixed,
    "bf16-true": _Half,
    "16-true": _Half,
    "64-true": _Double,
}


def _canonical(precision: str | int) -> str:
    name = _ALIASES.get(str(precision), str(precision))
    if name not in NAMES:
        guess = closest(name, NAMES)
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"Unknown precision {precision!r}.{hint} Known are {', '.join(NAMES)}.")
    return name
