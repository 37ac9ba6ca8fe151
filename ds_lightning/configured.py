"""What a configuration adds to a run: optimizers and schedules where the module makes none, and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from ds_lightning.config import Facts, ResolvedConfig, resolve
from ds_lightning.config.deepspeed import ParsedConfig
from ds_lightning.errors import ConfigError
from ds_lightning.optim.from_config import build_optimizer
from ds_lightning.optim.groups import HOOK, groups_of_module, param_groups
from ds_lightning.schedules.from_config import build_schedule


class Made(NamedTuple):
    """What a run optimizes with.

    Attributes:
        optimizers: All of them.
        schedules: With Lightning's word on when each is stepped.
        has_optimizer: The module made the optimizers itself.
        has_schedule: The module made the schedules itself.
    """

    optimizers: list[Optimizer]
    schedules: list[LRSchedulerConfig]
    has_optimizer: bool = False
    has_schedule: bool = False


def make_optimizers(module: pl.LightningModule, parsed: ParsedConfig, facts: Callable[[Made], Facts]) -> Made:
    """Call `configure_optimizers`, and make what it leaves to the configuration.

    A schedule of the configuration is stepped after every step of the optimizer, whoever made that.

    Args:
        module: of the run.
        parsed: the configuration.
        facts: about the run, once this much has been made.

    Raises:
        ConfigError: both make an optimizer, or both a schedule; or a block is wrong.
    """
    made = _with_optimizer(module, parsed, facts)
    block = parsed.config.scheduler
    if block.type is None:
        return made
    name = type(module).__name__
    if made.schedules:
        if not block.params or not _is_automatic(block.params):
            raise ConfigError(
                f"Both the configuration (scheduler.type={block.type}) and {name}.configure_optimizers make a "
                "schedule. Drop one of the two: return the optimizer alone from configure_optimizers, or remove the "
                "scheduler block (values that are all 'auto' may stay)."
            )
        return made
    if len(made.optimizers) != 1 or isinstance(made.optimizers[0], _MockOptimizer):
        found = "none" if len(made.optimizers) == 1 else len(made.optimizers)
        raise ConfigError(
            f"The schedule of the configuration (scheduler.type={block.type}) needs one optimizer, {name} has {found}. "
            "Return one from configure_optimizers, or name one in optimizer.type; with several, return their schedules "
            "from configure_optimizers and remove the scheduler block."
        )
    if not module.automatic_optimization:
        rank_zero_info(
            f"ds_lightning: {name} optimizes manually, so it steps the schedule of the configuration too: call "
            "self.lr_schedulers().step() after each step of the optimizer"
        )
    params = resolve(parsed, facts(made)).scheduler.params or {}
    schedule = build_schedule(block.type, params, made.optimizers[0])
    return made._replace(schedules=[LRSchedulerConfig(schedule, interval="step")])


def _with_optimizer(module: pl.LightningModule, parsed: ParsedConfig, facts: Callable[[Made], Facts]) -> Made:
    block = parsed.config.optimizer
    if block.type is None:
        return _of_module(module)
    if _overrides_configure_optimizers(module) and module.configure_optimizers() is not None:
        if not _is_automatic(block.params or {}) or block.param_groups:
            raise ConfigError(
                f"Both the configuration (optimizer.type={block.type}) and {type(module).__name__}."
                "configure_optimizers make an optimizer. Drop one of the two: return None from "
                "configure_optimizers, or remove the optimizer block (values that are all 'auto' may stay)."
            )
        return _of_module(module)
    params = resolve(parsed, facts(Made([], []))).optimizer.params or {}
    return Made([build_optimizer(block.type, params, *_parameters(module, block.param_groups), module)], [])


def _parameters(module: pl.LightningModule, blocks: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """The parameters of the module or their groups, and where these come from."""
    by_module = groups_of_module(module)
    if by_module is not None and blocks:
        raise ConfigError(
            f"Both the configuration (optimizer.param_groups) and {type(module).__name__}.{HOOK} make parameter "
            "groups. Drop one of the two."
        )
    if by_module is not None:
        return by_module, f"{type(module).__name__}.{HOOK}()"
    if blocks:
        return param_groups(module, blocks, "optimizer.param_groups"), "optimizer.param_groups"
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(
            f"No parameter of {type(module).__name__} requires a gradient, so the optimizer of the configuration has "
            "nothing to train. Unfreeze some (requires_grad_(True)), or call trainer.validate instead of fit."
        )
    return trained, ""


def _of_module(module: pl.LightningModule) -> Made:
    optimizers, schedules = _init_optimizers_and_lr_schedulers(module)
    return Made(optimizers, schedules, has_optimizer=True, has_schedule=bool(schedules))


def _is_automatic(params: dict[str, object]) -> bool:
    return all(value == "auto" for value in params.values())


def _overrides_configure_optimizers(module: pl.LightningModule) -> bool:
    return type(module).configure_optimizers is not pl.LightningModule.configure_optimizers


def add_callbacks(trainer: pl.Trainer, module: pl.LightningModule, config: ResolvedConfig) -> None:
    """Give a Trainer the callbacks that a configuration asks for, once."""
    block = config.flops_profiler
    if not block.enabled:
        return
    from ds_lightning.callbacks.flops import FlopsProfile

    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, FlopsProfile) for callback in callbacks):
        profile = FlopsProfile(
            profile_step=block.profile_step,
            module_depth=block.module_depth,
            top_modules=block.top_modules,
            detailed=block.detailed,
            output_file=block.output_file,
            recompute_fwd_factor=block.recompute_fwd_factor,
        )
        profile.setup(trainer, module, "fit")  # Lightning has done so with the others
        callbacks.append(profile)
