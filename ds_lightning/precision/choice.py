"""Which precision a run has: what the Trainer's flag, a plugin and the configuration say, brought together."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from ds_lightning.config import ParsedConfig
from ds_lightning.config.precision import AskedPrecision
from ds_lightning.errors import ConfigError
from ds_lightning.precision.loss_scale import LossScaleOptions
from ds_lightning.precision.plugin import Autocast, ZeroPrecision
from ds_lightning.precision.safe_modules import safe_modules


def zero_precision(plugin: Precision, parsed: ParsedConfig) -> Precision:
    """The plugin to train with in the place of the one that Lightning, or the user, has made.

    Args:
        plugin: from the Trainer.
        parsed: the configuration.

    Raises:
        ConfigError: when the two do not agree.
    """
    fp16, bf16 = parsed.config.fp16, parsed.config.bf16
    wanted = parsed.asked_precision()
    autocast = _autocast(parsed)
    if isinstance(plugin, ZeroPrecision):
        _check(plugin.precision, wanted)
        plugin.complete(
            _loss_scale(parsed) if _says_loss_scale(parsed) else None,
            cast_inputs=fp16.auto_cast is True,
            check_grad_overflow=bf16.check_grad_overflow is True,
            autocast=autocast,
        )
        return plugin
    converted = ZeroPrecision.from_lightning(plugin)
    if not isinstance(converted, ZeroPrecision):
        return converted
    name = converted.precision
    if name == "32-true" and wanted is not None:
        name = wanted.name  # Lightning's default cannot be told from an explicit 32-true
    device = getattr(plugin, "device", None)
    _check(name, wanted, device)
    return ZeroPrecision(
        name,
        # `16-true` has a loss scale only where a block asks for one.
        fp16=_loss_scale(parsed) if name == "16-mixed" or _says_loss_scale(parsed) else None,
        cast_inputs=fp16.auto_cast is True and name == "16-mixed",
        check_grad_overflow=bf16.check_grad_overflow is True and name.startswith("bf16"),
        device=device,
        autocast=autocast,
    )


def _autocast(parsed: ParsedConfig) -> Autocast | None:
    """Autocast over fp32 parameters, where a block asks for it."""
    asked = parsed.asked_precision()
    if asked is None or not asked.keeps_fp32:
        return None
    if asked.block == "amp":
        return Autocast()
    return Autocast(safe_modules(parsed.config.torch_autocast.lower_precision_safe_modules))


def _loss_scale(parsed: ParsedConfig) -> LossScaleOptions | None:
    asked = parsed.asked_precision()
    if asked is None or asked.block in ("fp16", "bf16"):
        return LossScaleOptions.from_block(parsed.config.fp16)
    return None if asked.scale is None else LossScaleOptions(**asked.scale)


def _says_loss_scale(parsed: ParsedConfig) -> bool:
    asked = parsed.asked_precision()
    if asked is not None and asked.scale is not None:
        return True
    names = {f"fp16.{name}" for name in LossScaleOptions.__dataclass_fields__}
    return (asked is None or asked.block == "fp16") and bool(names & parsed.given)


def _check(name: str, asked: AskedPrecision | None, device: str | None = None) -> None:
    if asked is None:
        return
    wanted, block = asked.name, asked.block
    if wanted == "16-mixed" and name == "bf16-mixed" and device == "cpu":
        raise ConfigError(
            f"The configuration has {block}.enabled, but on CPUs Lightning turns Trainer(precision='16-mixed') into "
            "'bf16-mixed'. Leave precision out: the configuration's holds; or pass "
            "plugins=[ds_lightning.ZeroPrecision('16-mixed')]."
        )
    if name != wanted:
        raise ConfigError(
            f"The configuration has {block}.enabled, which is precision={wanted!r}, but the Trainer asks for "
            f"{name!r}. Pass Trainer(precision={wanted!r}), or drop {block} from the configuration."
        )
