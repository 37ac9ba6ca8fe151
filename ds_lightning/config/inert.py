"""Why a key that was given changes nothing in this run."""

from __future__ import annotations

from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import Block, rules


def inert_reason(path: str, config: DeepSpeedConfig, stage: int, autos: frozenset[str] = frozenset()) -> str | None:
    """The reason, or None when the key matters.

    A key is inert when its feature is off, or when it acts at other stages only.
    """
    block: Block = config
    names = path.split(".")
    for depth, name in enumerate(names):
        rule = rules(type(block)).get(name)
        if rule is None:
            return None
        if stage not in rule.stages:
            return f"inert at stage {stage}"
        child = getattr(block, name)
        if not isinstance(child, Block):
            return None
        here = ".".join(names[: depth + 1])
        is_switch = depth + 2 == len(names) and names[-1] in ("enabled", "device")
        if not (child.is_on or is_switch or f"{here}.enabled" in autos or here == path):
            return f"inert while {here} is off"
        block = child
    return None
