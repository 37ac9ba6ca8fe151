"""Why a key that was given changes nothing in this run."""

from __future__ import annotations

from ds_lightning.config.amp import is_dynamic
from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.base import Block, rules
from ds_lightning.config.schema.optimizer import COMPRESSED_OPTIMIZERS

_ON_DISK = {
    "aio": frozenset({"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"}),
    "zero_optimization.offload_optimizer": frozenset(
        {"nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"}
    ),
    "zero_optimization.offload_param": frozenset({"nvme_path", "buffer_count", "buffer_size", "max_in_cpu"}),
}
"""Keys that act on swap files alone, by block."""

_OF_THE_RUN = frozenset({"optimizer.params.comm_backend_name", "optimizer.params.cuda_aware"})


def _on_disk(path: str, config: DeepSpeedConfig) -> bool:
    """Whether the swap files on which a key acts are used, or it acts on others as well."""
    block, _, name = path.rpartition(".")
    if name not in _ON_DISK[block]:
        return True
    zero = config.zero_optimization
    devices = {"offload_optimizer": zero.offload_optimizer.device, "offload_param": zero.offload_param.device}
    own = devices.get(block.rpartition(".")[2])
    if own == "none":
        return True  # the block is off, which is told otherwise
    return "nvme" in (devices.values() if own is None else (own,))


def inert_reason(path: str, config: DeepSpeedConfig, stage: int, autos: frozenset[str] = frozenset()) -> str | None:
    """The reason, or None when the key matters.

    A key is inert when its feature is off, or when it acts at other stages only.
    """
    if path in _OF_THE_RUN and config.optimizer.type in COMPRESSED_OPTIMIZERS:
        return "without effect (communication is the run's own)"
    block: Block = config
    names = path.split(".")
    if path == "gradient_predivide_factor" and (config.prescale_gradients or config.gradient_allreduce_op == "sum"):
        return "inert with prescale_gradients, and with sums"
    if path == "prescale_gradients" and config.gradient_allreduce_op == "sum":
        return "inert with gradient_allreduce_op: sum"
    if path in ("amp.min_loss_scale", "amp.max_loss_scale") and config.amp.enabled and not is_dynamic(config.amp):
        return "inert without a dynamic loss scale"
    early = config.zero_optimization.offload_optimizer.super_offload
    if path == "zero_optimization.offload_optimizer.buffer_count" and early:
        return None
    if path.rpartition(".")[0] in _ON_DISK and not _on_disk(path, config):
        return "inert without NVMe offload"
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
