"""Configuration: read once at the boundary, validated, reconciled with the run, then frozen."""

from ds_lightning.config.deepspeed import ParsedConfig, load
from ds_lightning.config.facts import Facts
from ds_lightning.config.free import Entry
from ds_lightning.config.report import Row, check_table, render
from ds_lightning.config.resolve import ResolvedConfig, resolve
from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.store import from_groups, register_configs

__all__ = [
    "DeepSpeedConfig",
    "Entry",
    "Facts",
    "ParsedConfig",
    "ResolvedConfig",
    "Row",
    "check_table",
    "from_groups",
    "load",
    "register_configs",
    "render",
    "resolve",
]
