"""ds-lightning train: compose a job from configuration groups, train, and report."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class, instantiate, to_absolute_path
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from omegaconf import DictConfig, OmegaConf

from ds_lightning.cli.conf import conf_folder
from ds_lightning.cli.errors import explain
from ds_lightning.cli.overrides import hints, without_defaults_of_another_class
from ds_lightning.cli.relaunch import job
from ds_lightning.cli.report import Report
from ds_lightning.errors import ConfigError, DsLightningError


def run(arguments: Sequence[str]) -> int:
    """Run Hydra over `conf/config.yaml` with the overrides in `arguments`."""
    program = sys.argv[0]
    parsed = get_args_parser().parse_args(list(arguments))
    flags = [word for word in arguments if word not in parsed.overrides and word not in ("-m", "--multirun")]

    # The user's own classes are looked for in the current folder, as `python -m` does.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)

    def task(config: DictConfig) -> None:
        _set("HYDRA_FULL_ERROR", full_error)  # neither the job nor its other ranks inherit what is for Hydra
        try:
            start(config)
        finally:
            os.environ["HYDRA_FULL_ERROR"] = "1"

    def start(config: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        overrides = list(hydra_config.overrides.task)
        multirun = hydra_config.mode == RunMode.MULTIRUN
        own_line = [*flags, *overrides] if multirun else list(arguments)
        with job([program, "train", *own_line]) as trainers:
            train(config, overrides, Path(hydra_config.runtime.output_dir), trainers)

    full_error = os.environ.get("HYDRA_FULL_ERROR")
    argv = sys.argv
    sys.argv = [program, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us instead of being printed by Hydra
    try:
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(task)()
    except Exception as error:
        words = explain(error)
        if words is None or full_error == "1":
            raise
        guesses = [] if isinstance(error, DsLightningError) else hints(parsed.overrides)
        if guesses:  # the guess says it better than Hydra's account of its search
            words = "\n".join([words.splitlines()[0], *guesses])
        raise ConfigError(words) from error
    finally:
        sys.argv = argv
        _set("HYDRA_FULL_ERROR", full_error)
    return 0


def _set(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def train(config: DictConfig, overrides: Sequence[str], folder: Path, trainers: list[pl.Trainer]) -> None:
    """Train one job on this rank; rank 0 prints the report.

    Args:
        config: The composed configuration.
        overrides: What the user wrote on the command line for this job.
        folder: Hydra's output folder of this job.
        trainers: Receives the Trainer.
    """
    # Calls of Lightning into what torch has renamed: nothing for somebody who trains.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\b")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"lightning\b")
    # The held-out windows divide evenly, or a few count twice; the loss is the same to all shown
    # digits.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
    ckpt_path = _checkpoint_to_load(config.ckpt_path)
    strategy = instantiate(config.strategy)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = _build(config, "data", overrides)
    model = _build(config, "model", overrides)
    if model is None:
        raise ConfigError("There is no model. Choose one: model=byte_gpt, or model._target_=my_package.MyModule.")
    trainer = _trainer(config, strategy, folder)
    trainers.append(trainer)

    report = Report(trainer, model, data)
    report.before(ckpt_path)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    if trainer.interrupted:
        return
    report.after()
    sample = report.sample(config.sample.prompt, config.sample.length)
    if trainer.is_global_zero:
        report.show(sample, overrides)


def _checkpoint_to_load(ckpt_path: str | None) -> str | None:
    if ckpt_path is None or ckpt_path in ("last", "best", "hpc"):
        return ckpt_path
    absolute = to_absolute_path(ckpt_path)
    if not Path(absolute).exists():
        raise ConfigError(f"ckpt_path={ckpt_path}: there is no such file or folder (looked for {absolute}).")
    return absolute


def _build(config: DictConfig, package: str, overrides: Sequence[str]) -> Any:
    if config.get(package) is None:
        return None
    node = without_defaults_of_another_class(config, package, overrides)
    if OmegaConf.is_missing(node, "_target_"):
        raise ConfigError(f"{package}=custom needs the class: {package}._target_=my_package.MyClass.")
    try:
        get_class(node["_target_"])
    except Exception as error:  # get_class raises ImportError, ValueError or whatever the module raises
        raise ConfigError(
            f"{package}._target_={node['_target_']}: {error}\n"
            f"Modules are looked for in {os.getcwd()} and in the installed packages."
        ) from error
    return instantiate(node, _convert_="all")


def _trainer(config: DictConfig, strategy: Any, folder: Path) -> pl.Trainer:
    options = dict(config.trainer)
    # No GPU means the CPU: the other accelerators that Lightning would find have no process group
    # for us.
    if options["accelerator"] == "auto":
        options["accelerator"] = "cuda" if torch.cuda.is_available() else "cpu"
    if options["devices"] == "auto":
        options["devices"] = _devices(options["accelerator"])
    if options["default_root_dir"] is None:
        options["default_root_dir"] = str(folder)
    if options["precision"] is None and not _is_ours(config.strategy):
        options["precision"] = config.precision.name
    callbacks = [instantiate(node) for node in (config.get("callbacks") or {}).values() if node is not None]
    # A switch of the Trainer counts more than a callback of the default group; Lightning refuses both together.
    switches = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
    off = tuple(kind for switch, kind in switches.items() if options[switch] is False)
    callbacks = [callback for callback in callbacks if not isinstance(callback, off)]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder / "checkpoints")
    trainer: pl.Trainer = instantiate(options, strategy=strategy, callbacks=callbacks, _convert_="all")
    return trainer


def _devices(accelerator: str) -> int | str:
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun has decided
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return 2 if accelerator == "cpu" else "auto"


def _is_ours(strategy: Mapping[str, Any]) -> bool:
    return str(strategy.get("_target_", "")).startswith("ds_lightning.")
