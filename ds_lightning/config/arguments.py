"""Arguments of `ZeroStrategy` that say the same as keys of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_lightning.config.source import read
from ds_lightning.errors import ConfigError


def with_offload(
    config: Any,
    optimizer: str | None,
    param: str | None,
    nvme_path: str | Path | None,
) -> Any:
    """The configuration with the constructor's offload arguments in it."""
    wanted = {"offload_optimizer": optimizer, "offload_param": param}
    wanted = {key: device for key, device in wanted.items() if device is not None}
    if not wanted and nvme_path is None:
        return config
    merged = dict(read(config).data)
    zero = dict(merged.get("zero_optimization") or {})
    for key, device in wanted.items():
        block = dict(zero.get(key) or {})
        if block.get("device", device) != device:
            raise ConfigError(f"{key}={device!r} as an argument, but {block['device']!r} in the configuration.")
        zero[key] = {**block, "device": device}
        if nvme_path is not None and device == "nvme":
            zero[key]["nvme_path"] = str(nvme_path)
    return {**merged, "zero_optimization": zero}
