"""Values that are fine alone but not together, and ranges that depend on other keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from ds_lightning.config.amp import check_amp
from ds_lightning.config.problems import Problem
from ds_lightning.config.schema import DeepSpeedConfig
from ds_lightning.config.schema.optimizer import (
    BUILTIN_OPTIMIZERS,
    BUILTIN_SCHEDULES,
    COMMUNICATION_BACKENDS,
    COMPRESSED_OPTIMIZERS,
    ENCODED_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    WHOLE_TENSOR_OPTIMIZERS,
)
from ds_lightning.config.suggest import did_you_mean, listed

Given = frozenset[str]
Problems = Iterator[Problem]


def check(config: DeepSpeedConfig, given: Given) -> list[Problem]:
    """Everything that can be said without knowing the run."""
    found = [problem for rule in _RULES for problem in rule(config, given)]
    if "zero_optimization.stage" in given:
        found += check_stage(config, config.zero_optimization.stage)
    return found


def check_stage(config: DeepSpeedConfig, stage: int) -> list[Problem]:
    """What does not go with a ZeRO stage."""
    return [problem for rule in _STAGE_RULES for problem in rule(config, stage)]


def _precision(config: DeepSpeedConfig, given: Given) -> Problems:
    fp16, bf16 = config.fp16.enabled, config.bf16.enabled
    if fp16 and bf16:
        yield Problem(
            "fp16.enabled",
            "fp16 and bf16 are both enabled; set one of fp16.enabled and bf16.enabled to false",
        )
    low = "fp16" if fp16 else "bf16"
    for other in ("amp", "torch_autocast"):
        if getattr(config, other).enabled and (fp16 or bf16):
            yield Problem(f"{other}.enabled", f"does not go with {low}.enabled; keep one of them")
    if config.bf16.bf16_optimizer_states and not config.bf16.bf16_master_weights_and_grads:
        yield Problem("bf16.bf16_optimizer_states", "needs bf16.bf16_master_weights_and_grads=true")
    wanted = config.data_types.param_dtype
    actual = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    knows = wanted == "fp32" or "fp16.enabled" in given or "bf16.enabled" in given
    if wanted is not None and knows and wanted != actual:
        yield Problem(
            "data_types.param_dtype",
            f"{wanted} does not go with training in {actual}; leave it out",
        )


def _loss_scale(config: DeepSpeedConfig, given: Given) -> Problems:
    fp16 = config.fp16
    if not fp16.enabled and "fp16.enabled" in given:
        return
    if fp16.loss_scale == 0:
        for name in ("loss_scale_window", "min_loss_scale"):
            value = getattr(fp16, name)
            if value <= 0:
                yield Problem(f"fp16.{name}", f"must be above 0 with a dynamic loss scale, got {value}")


def _amp(config: DeepSpeedConfig, given: Given) -> Problems:
    yield from check_amp(config.amp)
    if config.amp.enabled and config.torch_autocast.enabled:
        yield Problem("amp.enabled", "does not go with torch_autocast.enabled; keep one of them")


def _optimizer(config: DeepSpeedConfig, given: Given) -> Problems:
    kind, params = config.optimizer.type, config.optimizer.params
    if "max_grad_norm" in params:
        text = "clipping is no business of the optimizer; use the top-level key gradient_clipping"
        yield Problem("optimizer.params.max_grad_norm", text)
    if kind is None:
        for name in ("params", "param_groups"):
            if getattr(config.optimizer, name):
                yield Problem("optimizer.type", f"is missing, but optimizer.{name} is given; name the optimizer")
        return
    if kind not in _known_optimizers() and not _is_in_torch("torch.optim", kind):
        guess = did_you_mean(kind, _known_optimizers())
        yield Problem(
            "optimizer.type",
            f"no optimizer is called '{kind}'; {guess or 'use one of torch.optim'}",
        )
    if params.get("amsgrad") is True and kind in BUILTIN_OPTIMIZERS and not params.get("torch_adam"):
        yield Problem(
            "optimizer.params.amsgrad",
            "is not available; use torch_adam=true, or another optimizer",
        )
    if kind in WHOLE_TENSOR_OPTIMIZERS and config.zero_optimization.offload_optimizer.device == "nvme":
        yield Problem(
            "zero_optimization.offload_optimizer.device",
            f"{kind} looks at whole tensors, so its states cannot be on nvme, where steps go tile by tile; set it to "
            "'cpu', or use Adam",
        )


def _compressed(config: DeepSpeedConfig, given: Given) -> Problems:
    kind, params = config.optimizer.type, config.optimizer.params
    if kind not in COMPRESSED_OPTIMIZERS:
        return
    name = params.get("comm_backend_name", "nccl")
    if isinstance(name, str) and name not in COMMUNICATION_BACKENDS:
        text = f"'{name}' is no backend that {kind} knows; {listed(COMMUNICATION_BACKENDS)}"
        yield Problem("optimizer.params.comm_backend_name", text)
    if params.get("amsgrad") is True:
        yield Problem("optimizer.params.amsgrad", f"{kind} has no such variant; leave it out")
    for key in ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
        value = params.get(key)
        if isinstance(value, int) and value < 1:
            yield Problem(f"optimizer.params.{key}", f"must be at least 1, got {value}")
    if config.zero_optimization.offload_optimizer.is_on:
        yield Problem(
            "zero_optimization.offload_optimizer.device",
            f"{kind} keeps its states where it computes; set the device to 'none' or use Adam",
        )
    if config.gradient_allreduce_op == "sum":
        yield Problem("gradient_allreduce_op", f"'sum' does not go with {kind}, which averages momenta; use 'mean'")


def _optimizer_ranges(config: DeepSpeedConfig, given: Given) -> Problems:
    groups = ((f"param_groups.{g.get('name') or k}", g) for k, g in enumerate(config.optimizer.param_groups))
    for path, params in (("params", config.optimizer.params), *groups):
        for name in ("lr", "eps", "weight_decay", "momentum", "max_ndim"):
            value = params.get(name)
            if isinstance(value, float | int) and value < 0:
                yield Problem(f"optimizer.{path}.{name}", f"must be at least 0, got {value:g}")
        betas = params.get("betas")
        if isinstance(betas, list) and not (len(betas) in (2, 3) and all(0 <= beta < 1 for beta in betas)):
            yield Problem(f"optimizer.{path}.betas", f"expected two numbers in [0, 1), got {betas}")


def _scheduler(config: DeepSpeedConfig, given: Given) -> Problems:
    kind, params = config.scheduler.type, config.scheduler.params
    if kind is None:
        if params:
            yield Problem("scheduler.type", "is missing, but scheduler.params is given; name the schedule")
        return
    if kind not in BUILTIN_SCHEDULES:
        if not _is_in_torch("torch.optim.lr_scheduler", kind):
            guess = did_you_mean(kind, BUILTIN_SCHEDULES)
            yield Problem(
                "scheduler.type",
                f"no schedule is called '{kind}'; {guess or listed(BUILTIN_SCHEDULES)}",
            )
        return
    for name in _REQUIRED_SCHEDULE_PARAMS.get(kind, ()):
        if name not in params:
            yield Problem(f"scheduler.params.{name}", f"{kind} needs it")
    for name, smallest in _SMALLEST_SCHEDULE_PARAMS.items():
        value = params.get(name)
        if isinstance(value, int) and value < smallest:
            yield Problem(f"scheduler.params.{name}", f"must be at least {smallest}, got {value}")
    warmup = params.get("warmup_type")
    if isinstance(warmup, str) and warmup not in ("log", "linear", "auto"):
        guess = did_you_mean(warmup, ("log", "linear"))
        text = f"must be 'log' or 'linear', got '{warmup}'" + (f"; {guess}" if guess else "")
        yield Problem("scheduler.params.warmup_type", text)


def _activation(config: DeepSpeedConfig, given: Given) -> Problems:
    block = config.activation_checkpointing
    if not block.contiguous_memory_optimization:
        return
    here = "activation_checkpointing.contiguous_memory_optimization"
    if block.number_checkpoints is None:
        yield Problem(here, "needs activation_checkpointing.number_checkpoints (the number of layers)")
    if not block.partition_activations:
        yield Problem(here, "needs activation_checkpointing.partition_activations=true")


def _nvme(config: DeepSpeedConfig, given: Given) -> Problems:
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(config.zero_optimization, name)
        if block.device == "nvme" and not block.nvme_path:
            here = f"zero_optimization.{name}"
            yield Problem(
                f"{here}.nvme_path",
                f"{here}.device=nvme needs the directory of a fast local disk: set it, or pass "
                "ZeroStrategy(nvme_path=...), or set DS_LIGHTNING_NVME_PATH",
            )


def _encoded_states(config: DeepSpeedConfig, given: Given) -> Problems:
    kind = config.optimizer.type
    if kind in ENCODED_OPTIMIZERS and config.zero_optimization.offload_optimizer.device == "nvme":
        yield Problem(
            "zero_optimization.offload_optimizer.device",
            f"nvme does not hold the encoded states of {kind}; use cpu (they are small), or {kind[:-4]}",
        )


def _elasticity(config: DeepSpeedConfig, given: Given) -> Problems:
    block = config.elasticity
    if not block.enabled:
        return
    if block.min_gpus > block.max_gpus:
        yield Problem("elasticity.min_gpus", f"{block.min_gpus} is above max_gpus {block.max_gpus}")
    if not block.ignore_non_elastic_batch_info:
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        ):
            if name in given:
                way_out = "elasticity.ignore_non_elastic_batch_info=true"
                text = f"is chosen by elasticity; drop it or set {way_out}"
                yield Problem(name, text)


def _removed(config: DeepSpeedConfig, given: Given) -> Problems:
    if config.zero_optimization.legacy_stage1:
        yield Problem("zero_optimization.legacy_stage1", "was removed; there is one stage 1 only")


def _offload_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    param, optimizer = (
        config.zero_optimization.offload_param,
        config.zero_optimization.offload_optimizer,
    )
    if param.is_on and stage < 3:
        yield Problem(
            "zero_optimization.offload_param.device",
            f"{param.device} needs stage 3: parameters are not sharded at stage {stage}; "
            "set the stage to 3 or the device to 'none'",
        )
    here = "zero_optimization.offload_optimizer"
    if optimizer.is_on and stage < 1:
        yield Problem(f"{here}.device", f"{optimizer.device} needs stage 1, 2 or 3: nothing is sharded at stage 0")
    if optimizer.super_offload and (stage < 1 or optimizer.device != "cpu"):
        yield Problem(
            f"{here}.super_offload",
            f"needs stage 1, 2 or 3 and {here}.device=cpu: the stage is {stage}, the device {optimizer.device}",
        )


def _accumulation_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    wanted = config.data_types.grad_accum_dtype
    if wanted not in (None, "fp32") and config.zero_optimization.offload_optimizer.device == "nvme":
        yield Problem(
            "data_types.grad_accum_dtype",
            f"{wanted} does not go with zero_optimization.offload_optimizer.device=nvme, where gradients are kept like "
            "master values; leave it out",
        )


def _compressed_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    kind = config.optimizer.type
    highest = COMPRESSED_OPTIMIZERS.get(kind or "")
    if highest is not None and stage > highest:
        stages = "stage 0 only" if highest == 0 else f"stages 0 and {highest}"
        yield Problem(
            "optimizer.type",
            f"{kind} compresses whole momenta and works at {stages}, the stage is {stage}; "
            f"set the stage to {highest} or use Adam",
        )


def _sparse_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    zero = config.zero_optimization
    for name, is_on in (
        ("zero_quantized_gradients", stage == 3 and zero.zero_quantized_gradients),
        ("mics_shard_size", stage == 3 and zero.mics_shard_size > 0),
    ):
        if config.sparse_gradients and is_on:
            text = f"does not go with zero_optimization.{name}, which reduces dense shards; set one of the two"
            yield Problem("sparse_gradients", text)


def _quantized_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    zero = config.zero_optimization
    if zero.zero_quantized_gradients and not zero.reduce_scatter:
        yield Problem(
            "zero_optimization.zero_quantized_gradients",
            "needs zero_optimization.reduce_scatter=true",
        )
    if stage == 3 and zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        yield Problem(
            "zero_optimization.zeropp_loco_param",
            "carries errors of quantized gradients and needs zero_optimization.zero_quantized_gradients=true",
        )


def _frozen_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    zero = config.zero_optimization
    if stage == 3 and zero.zero_quantized_nontrainable_weights and zero.offload_param.is_on:
        yield Problem(
            "zero_optimization.zero_quantized_nontrainable_weights",
            "keeps int8 weights on the device and does not go with offload_param; set one of the two",
        )


def _copies_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    zero = config.zero_optimization
    if stage < 3 or zero.mics_shard_size < 1:
        return
    here = "zero_optimization.mics_shard_size"
    if zero.zero_hpz_partition_size > 1:
        yield Problem(
            here,
            "does not go with zero_hpz_partition_size: a shard group gathers inside itself already; set one of the two",
        )
    if zero.zero_quantized_gradients:
        yield Problem(
            here,
            "does not go with zero_quantized_gradients, which reduces over all ranks; set one of the two",
        )


def _masters_stage(config: DeepSpeedConfig, stage: int) -> Problems:
    for block, name in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
    ):
        if getattr(getattr(config, block), name) and stage == 0:
            yield Problem(f"{block}.{name}", "needs stage 1, 2 or 3")
        if getattr(getattr(config, block), name) and config.zero_optimization.offload_optimizer.device == "nvme":
            yield Problem(
                f"{block}.{name}",
                "does not go with offload_optimizer.device=nvme, whose files are stepped on as they are; set that to "
                "'cpu', or drop one of the two",
            )
        if getattr(getattr(config, block), name) and config.optimizer.type in WHOLE_TENSOR_OPTIMIZERS:
            yield Problem(
                f"{block}.{name}",
                f"does not go with {config.optimizer.type}, which would need all masters in fp32 at once; use Adam, or "
                "leave it out",
            )


def _known_optimizers() -> tuple[str, ...]:
    return (*BUILTIN_OPTIMIZERS, *TORCH_OPTIMIZERS)


@cache
def _is_in_torch(module: str, name: str) -> bool:
    """Whether torch has such a class; torch is imported only for names unknown here."""
    import importlib

    return isinstance(getattr(importlib.import_module(module), name, None), type)


_REQUIRED_SCHEDULE_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_SMALLEST_SCHEDULE_PARAMS = {
    **dict.fromkeys(("warmup_num_steps", "total_num_steps", "lr_range_test_step_size", "cycle_first_step_size"), 1),
    **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count"), 0),
    **dict.fromkeys(("cycle_second_step_size", "decay_step_size"), 0),
    "last_batch_iteration": -1,
}
_RULES: tuple[Callable[[DeepSpeedConfig, Given], Problems], ...] = (
    _precision,
    _loss_scale,
    _amp,
    _optimizer,
    _optimizer_ranges,
    _compressed,
    _scheduler,
    _activation,
    _nvme,
    _encoded_states,
    _elasticity,
    _removed,
)
_STAGE_RULES: tuple[Callable[[DeepSpeedConfig, int], Problems], ...] = (
    _offload_stage,
    _accumulation_stage,
    _compressed_stage,
    _sparse_stage,
    _quantized_stage,
    _frozen_stage,
    _copies_stage,
    _masters_stage,
)
