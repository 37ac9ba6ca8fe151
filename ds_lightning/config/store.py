"""The groups of a Hydra app: names for Hydra to check, and their way back into one ds_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, make_dataclass
from typing import Any

from ds_lightning.config.schema import Bf16Config, Block, DeepSpeedConfig, Fp16Config, ZeroConfig
from ds_lightning.config.schema.base import block_type, is_table, rules
from ds_lightning.config.suggest import did_you_mean, listed
from ds_lightning.errors import ConfigError

OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param")
PRECISION_BLOCKS = {
    **dict.fromkeys(("fp16", "16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp32", "32", "32-true", "64", "64-true", "16-true", "bf16-true", "none"), ""),
}


def register_configs(name: str = "schema") -> None:
    """Put one entry `name` per group into Hydra's ConfigStore, so that `zero.stgae=2` fails.

    A group file opts in with `defaults: [schema, _self_]`. Values are `Any` there: "auto" and `5e8`
    pass Hydra and are
    checked by `load`.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for group, node in groups():
        store.store(group=group, name=name, node=node)


def groups() -> Iterator[tuple[str, type]]:
    """(group, dataclass of names) of every group."""
    zero = _names_of(ZeroConfig)
    yield "zero", _loose("Zero", {k: v for k, v in zero.items() if k not in OFFLOAD_BLOCKS})
    yield "offload", _loose("Offload", {k: zero[k] for k in OFFLOAD_BLOCKS})
    precision = {"name": None, **_names_of(Fp16Config), **_names_of(Bf16Config)}
    yield "precision", _loose("Precision", {k: v for k, v in precision.items() if k != "enabled"})
    for name in rules(DeepSpeedConfig):
        child = block_type(DeepSpeedConfig, name)
        if child is not None and name != "zero_optimization":
            yield name, _loose(child.__name__, _names_of(child))


def from_groups(
    zero: Mapping[str, Any] | None = None,
    offload: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | str | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> dict[str, Any]:
    """One ds_config from the groups of a Hydra app; what is missing or None is left out.

    Args:
        zero: The `zero_optimization` block without its offload blocks.
        offload: `offload_optimizer` and `offload_param`.
        precision: `name` (fp16, bf16, fp32, or Lightning's names) and the keys of the fp16 or bf16
            block.
        optimizer: The `optimizer` block.
        **blocks: Every other top-level key under its own name.

    Raises:
        ConfigError: The precision has an unknown name.
    """
    sharding = {**(zero or {}), **(offload or {})}
    config = {
        **_precision(precision),
        "zero_optimization": sharding,
        "optimizer": optimizer,
        **blocks,
    }
    pruned: dict[str, Any] = _without_none(config)
    if zero is None and not pruned.get("zero_optimization"):
        pruned.pop("zero_optimization", None)
    return pruned


def _precision(group: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if group is None:
        return {}
    values = {"name": group} if isinstance(group, str) else dict(group)
    name = values.pop("name", None)
    if name is None:
        return {}
    block = PRECISION_BLOCKS.get(str(name))
    if block is None:
        guess = did_you_mean(str(name), PRECISION_BLOCKS)
        names = guess or listed(list(PRECISION_BLOCKS))
        raise ConfigError(f"precision.name: no precision is called '{name}'; {names}")
    return {block: {"enabled": True, **values}} if block else {}


def _without_none(value: Any) -> Any:
    """Plain dicts without None; a block that had something but only Nones is left out too."""
    if not isinstance(value, Mapping):
        return value
    pruned = {name: _without_none(item) for name, item in value.items() if item is not None}
    return {name: item for name, item in pruned.items() if item != {} or value[name] == {}}


def _names_of(cls: type[Block]) -> dict[str, Any]:
    """The keys of a block; nested blocks as dataclasses of their own."""
    names: dict[str, Any] = {}
    for name in rules(cls):
        child = block_type(cls, name)
        is_block = child is not None and not is_table(cls, name)
        names[name] = _loose(child.__name__, _names_of(child)) if is_block and child else None
    return names


def _loose(title: str, names: Mapping[str, Any]) -> type:
    """A dataclass with these names; every value is Any and None, nested dataclasses are built."""
    made: list[tuple[str, Any, Any]] = [
        (name, Any, field(default=None)) if nested is None else (name, nested, field(default_factory=nested))
        for name, nested in names.items()
    ]
    return make_dataclass(f"{title}Names", made)
