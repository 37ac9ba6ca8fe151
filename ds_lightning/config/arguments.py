"""Arguments of `ZeroStrategy` that say the same as keys of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_lightning.config.source import read
from ds_lightning.errors import ConfigError

NVME_PATH = "DS_LIGHTNING_NVME_PATH"
"""The variable that names the folder of swap files where no argument does: a strategy chosen by name has none."""

_OFFLOAD = ("offload_optimizer", "offload_param")
_PIPELINED = {"pipeline_read": True, "pipeline_write": True}


def with_offload(
    config: Any,
    optimizer: str | None,
    param: str | None,
    nvme_path: str | Path | None,
) -> Any:
    """The configuration with the constructor's offload arguments in it.

    Reading and writing of the disk are pipelined then, unless the configuration says otherwise.
    """
    wanted = {"offload_optimizer": optimizer, "offload_param": param}
    wanted = {key: device for key, device in wanted.items() if device is not None}
    given, nvme_path = nvme_path, nvme_path or os.environ.get(NVME_PATH)
    if not wanted and nvme_path is None:
        return config
    merged = dict(read(config).data)
    before = merged.get("zero_optimization") or {}
    if not isinstance(before, Mapping):
        if wanted:
            raise ConfigError(
                f"{' and '.join(wanted)} as arguments need the block zero_optimization written out in the "
                f"configuration, which has {before!r}: use {{'stage': 1}} for true."
            )
        return config
    zero = dict(before)
    for key, device in wanted.items():
        block = dict(zero.get(key) or {})
        if block.get("device", device) != device:
            raise ConfigError(f"{key}={device!r} as an argument, but {block['device']!r} in the configuration.")
        zero[key] = {**block, "device": device}
        if device == "nvme" and key == "offload_optimizer":
            zero[key] = {**_PIPELINED, **zero[key]}
    for key in _OFFLOAD:
        found = zero.get(key)
        if nvme_path is not None and isinstance(found, Mapping) and found.get("device") == "nvme":
            zero[key] = {**found, "nvme_path": str(given or found.get("nvme_path") or nvme_path)}
    return config if zero == before else {**merged, "zero_optimization": zero}
