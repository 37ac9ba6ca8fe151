"""What is understood but not built yet: one row per switch. Build the feature, delete the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import Block, value_at


class Row(NamedTuple):
    """A key, the values of it that need something unbuilt, and what to do meanwhile."""

    key: str
    needs_it: Callable[[Any], bool]
    instead: str


def _true(value: Any) -> bool:
    return value is True


def _not(*built: Any) -> Callable[[Any], bool]:
    return lambda value: value not in built


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


_LOGGERS = "use Lightning's loggers"
_SWITCH_OFF = "set it to false"

PLANNED = (
    Row("aio.use_gds", _true, _SWITCH_OFF),
    Row("zero_optimization.zenflow", _not(None), "leave the block out"),
    Row("managed_gradient_accumulation", lambda value: value is False, "use manual optimization"),
    Row("sequence_parallel_size", _above_one, "set it to 1"),
    Row("sparse_attention", _not(None), "leave the block out"),
    Row("curriculum_learning.enabled", _true, _SWITCH_OFF),
    Row("data_efficiency.enabled", _true, _SWITCH_OFF),
    Row("autotuning.enabled", _true, _SWITCH_OFF),
    Row("elasticity.enabled", _true, _SWITCH_OFF),
    Row("tensorboard.enabled", _true, _LOGGERS),
    Row("csv_monitor.enabled", _true, _LOGGERS),
    Row("wandb.enabled", _true, _LOGGERS),
    Row("comet.enabled", _true, _LOGGERS),
    Row("comms_logger.enabled", _true, _SWITCH_OFF),
    Row("progressive_layer_drop.enabled", _true, _SWITCH_OFF),
    Row("eigenvalue.enabled", _true, _SWITCH_OFF),
    Row("checkpoint.load_universal", _true, "Lightning checkpoints resume at any world size"),
)


def unsupported(config: DeepSpeedConfig) -> list[tuple[str, str]]:
    """(dotted key, message) of everything the configuration switches on that is not built yet."""
    found = []
    for row in PLANNED:
        value = value_at(config, row.key)
        if row.needs_it(value):
            found.append((row.key, f"{_shown(value)}is not supported yet; {row.instead}"))
    return found


def _shown(value: Any) -> str:
    """The value for the head of a sentence; a block has none worth showing."""
    return "" if isinstance(value, Block) else f"{json.dumps(value)} "
