"""Activation checkpointing by hand, under the names that DeepSpeed's module of this name has.

    from ds_lightning.activation import checkpointing

    checkpointing.configure(mpu, partition_activations=True)
    hidden = checkpointing.checkpoint(block, hidden, mask)

A script sets these once for its process, so this front, and nothing else, keeps what was set. Within a Trainer the
block `activation_checkpointing` of the configuration sets them, unless `configure` was called before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ds_lightning.activation.blocks import is_checkpointed
from ds_lightning.activation.module_buffers import ModuleBuffers
from ds_lightning.activation.options import ActivationOptions, shares_inputs
from ds_lightning.activation.random_states import MODEL_PARALLEL, RandomStateTracker, seed_device
from ds_lightning.activation.region import Region
from ds_lightning.config import load
from ds_lightning.config.schema.activation import ActivationCheckpointingConfig


class Front:
    """What was set for this process.

    Attributes:
        block: the settings.
        tracker: named random generators.
        mpu: what knows the ranks of model parallelism: an object with `get_model_parallel_group()` and
            `get_model_parallel_rank()`.
        configured: whether `configure` was called.
    """

    def __init__(self) -> None:
        self.tracker = RandomStateTracker()
        self.block = ActivationCheckpointingConfig()
        self.mpu: Any = None
        self.configured = False
        self._how: ActivationOptions | None = None
        self._buffers: WeakKeyDictionary[nn.Module, ModuleBuffers] = WeakKeyDictionary()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that compute on the same inputs."""
        group: dist.ProcessGroup | None = self.mpu.get_model_parallel_group() if self.mpu is not None else None
        return group

    @property
    def how(self) -> ActivationOptions:
        """What `checkpoint` does."""
        if self._how is None:
            self._how = ActivationOptions.from_config(self.block, self.group, self.tracker)
        return self._how

    def set(self, block: ActivationCheckpointingConfig, mpu: Any) -> None:
        """Change everything but the random generators.

        Raises:
            ConfigError: for settings that contradict each other; nothing is changed then.
        """
        group = mpu.get_model_parallel_group() if mpu is not None else None
        how = ActivationOptions.from_config(block, group, self.tracker)
        self.block, self.mpu, self._how = block, mpu, how

    def buffers_of(self, module: nn.Module) -> ModuleBuffers:
        """What is known about the buffers of a module that is called by hand."""
        known = self._buffers.get(module)
        if known is None:
            known = self._buffers[module] = ModuleBuffers(module)
        return known

    def reset(self) -> None:
        """Make memory for inputs anew at the next call."""
        self._how = None


_front = Front()


def front() -> Front:
    """What was set for this process."""
    return _front


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without keeping what its backward needs: it is computed again when backward gets there.

    Args:
        function: anything callable. It must do the same when it is called again with the same arguments. A block that
            the configuration checkpoints already is just called.
        args: its arguments: tensors, with a gradient or without, nested ones, and anything else.
        kwargs: its keyword arguments, of the same kinds.

    Returns:
        What the function returns, unchanged.

    Raises:
        RecomputationError: in backward, when an input was changed in place meanwhile or when the function did something
            else the second time.

    Random generators (CPU, CUDA and the named ones of `get_cuda_rng_tracker`) and autocast are in the recomputation as
    they were in the forward. Without gradients (`torch.no_grad`) it is a plain call.
    """
    if not torch.is_grad_enabled() or is_checkpointed(function):
        return function(*args, **kwargs)
    module = getattr(function, "__self__", function)
    if not isinstance(module, nn.Module):
        name = getattr(function, "__qualname__", type(function).__name__)
        return Region(function, _front.how, name).forward(args, kwargs)
    buffers = _front.buffers_of(module)
    return Region(function, _front.how, type(module).__qualname__, module, buffers).forward(args, kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same as `checkpoint`: there is no other variant here."""
    return checkpoint(function, *args, **kwargs)


def configure(
    mpu_: Any,
    deepspeed_config: str | Path | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does from now on.

    Args:
        mpu_: knows the ranks of model parallelism, see `Front.mpu`; None without model parallelism.
        deepspeed_config: a ds_config of which the block `activation_checkpointing` is taken.
        partition_activations: the block's key of this name, as all that follow; given here, they win.
        contiguous_checkpointing: `contiguous_memory_optimization`.
        num_checkpoints: `number_checkpoints`.
        checkpoint_in_cpu: `cpu_checkpointing`.
        synchronize: `synchronize_checkpoint_boundary`.
        profile: `profile`; `profile_table` gives the result.

    Raises:
        ConfigError: for settings that are wrong or contradict each other.
    """
    block = load(deepspeed_config).config.activation_checkpointing if deepspeed_config is not None else None
    given: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    block = replace(block or ActivationCheckpointingConfig(), **changes)
    _front.set(block, mpu_)
    _front.configured = True
    if block.partition_activations and not shares_inputs(_front.group):
        warnings.warn(NOTHING_TO_PARTITION, stacklevel=2)


NOTHING_TO_PARTITION = (
    "activation_checkpointing.partition_activations: there is no model parallelism (configure(mpu_=...)), so each rank "
    "keeps its inputs whole, and contiguous_memory_optimization has nothing to do either; results are the same."
)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _front.configured


def reset() -> None:
    """Start with unused slots (`contiguous_memory_optimization`), after a forward without a backward for example."""
    _front.reset()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch `partition_activations`."""
    _front.set(replace(_front.block, partition_activations=partition_activation), _front.mpu)


def set_num_layers(nlayers: int) -> None:
    """Set `number_checkpoints`."""
    _front.set(replace(_front.block, number_checkpoints=nlayers), _front.mpu)


def get_cuda_rng_tracker() -> RandomStateTracker:
    """The named random generators; without CUDA they stand in for the CPU's."""
    return _front.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with `seed`, and `model-parallel-rng` with `seed + 2718 + rank` in the mpu's group.

    The first is equal within a model-parallel group, if `seed` is, the second differs.
    """
    rank = int(_front.mpu.get_model_parallel_rank()) if _front.mpu is not None else 0
    _front.tracker.reset()
    seed_device(seed)
    _front.tracker.add(MODEL_PARALLEL, seed + 2718 + rank)


def profile_table() -> str:
    """What checkpointed calls cost and saved since `configure(profile=True)`; empty without."""
    profile = _front.how.profile
    return profile.table() if profile is not None and profile.rows else ""
