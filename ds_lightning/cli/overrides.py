"""Hydra overrides as typed: what they name, and what a wrong one was meant to name."""

from collections.abc import Iterator, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ds_lightning.cli.conf import conf_folder
from ds_lightning.config.suggest import did_you_mean


def named_keys(overrides: Sequence[str], package: str) -> list[str]:
    """Return the keys below `package` that the overrides name: model.lr=1 names `lr` of `model`."""
    keys = [override.key_or_group for override in _parse(overrides)]
    return [key.removeprefix(f"{package}.") for key in keys if key.startswith(f"{package}.")]


def without_defaults_of_another_class(config: DictConfig, package: str, overrides: Sequence[str]) -> DictConfig:
    """Return the node `package`, reduced to what the user wrote when the user replaced its class.

    `model._target_=my.Model` replaces the class but not the arguments that the chosen option lists
    for its own class; passing those to another class would be nonsense, so only arguments named on
    the command line stay.
    """
    node: DictConfig = config[package]
    named = named_keys(overrides, package)
    if "_target_" not in named:
        return node
    kept = {key.split(".")[0] for key in named}
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return OmegaConf.create({key: value for key, value in plain.items() if key in kept})


def hints(overrides: Sequence[str]) -> list[str]:
    """Return a guess for each override that names a group, option or key that does not exist."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.list_groups("")
        known = sorted(_paths(compose("config")))
        found: list[str] = []
        for override in _parse(overrides):
            key = override.key_or_group
            if override.is_add() or override.is_delete() or key.startswith("hydra"):
                continue
            if key in groups:
                options = loader.get_group_options(key, results_filter=ObjectType.CONFIG)
                value = str(override.value())
                guess = did_you_mean(value, options, prefix=f"{key}=") if value not in options else ""
            else:
                guess = did_you_mean(key, known) if key not in known else ""
            if guess:
                found.append(f"{override.input_line}: {guess}")
    return found


def _parse(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(overrides))


def _paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        path = prefix + str(key)
        yield path
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_interpolation():
            yield from _paths(child, f"{path}.")
