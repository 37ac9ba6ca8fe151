"""Which precision a run has: what the Trainer's flag, a plugin and the configuration say, brought together."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from ds_lightning.config import ParsedConfig
from ds_lightning.errors import ConfigError
from ds_lightning.precision.loss_scale import LossScaleOptions
from ds_lightning.precision.plugin import ZeroPrecision


def zero_precision(plugin: Precision, parsed: ParsedConfig) -> Precision:
    """The plugin to train with in the place of the one that Lightning, or the user, has made.

    Args:
        plugin: from the Trainer.
        parsed: the configuration.

    Raises:
        ConfigError: when the two do not agree.
    """
    fp16, bf16 = parsed.config.fp16, parsed.config.bf16
    wanted = parsed.precision()
    if isinstance(plugin, ZeroPrecision):
        _check(plugin.precision, wanted)
        names = {f"fp16.{name}" for name in LossScaleOptions.__dataclass_fields__}
        plugin.complete(
            LossScaleOptions.from_block(fp16) if names & parsed.given else None,
            cast_inputs=fp16.auto_cast is True,
            check_grad_overflow=bf16.check_grad_overflow is True,
        )
        return plugin
    converted = ZeroPrecision.from_lightning(plugin)
    if not isinstance(converted, ZeroPrecision):
        return converted
    name = converted.precision
    if name == "32-true" and wanted is not None:
        name = wanted  # Lightning's default cannot be told from an explicit 32-true
    device = getattr(plugin, "device", None)
    _check(name, wanted, device)
    return ZeroPrecision(
        name,
        fp16=LossScaleOptions.from_block(fp16),
        cast_inputs=fp16.auto_cast is True and name == "16-mixed",
        check_grad_overflow=bf16.check_grad_overflow is True and name.startswith("bf16"),
        device=device,
    )


def _check(name: str, wanted: str | None, device: str | None = None) -> None:
    if wanted == "16-mixed" and name == "bf16-mixed" and device == "cpu":
        raise ConfigError(
            "The configuration has fp16.enabled, but on CPUs Lightning turns Trainer(precision='16-mixed') into "
            "'bf16-mixed'. Leave precision out: the configuration's holds; or pass "
            "plugins=[ds_lightning.ZeroPrecision('16-mixed')]."
        )
    if wanted is not None and name != wanted:
        block = "fp16" if wanted == "16-mixed" else "bf16"
        raise ConfigError(
            f"The configuration has {block}.enabled, which is precision={wanted!r}, but the Trainer asks for "
            f"{name!r}. Pass Trainer(precision={wanted!r}), or drop {block} from the configuration."
        )
