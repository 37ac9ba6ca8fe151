"""Which parameters Muon updates, and which Adam."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ds_lightning.errors import ConfigError

MUON, ADAM = "muon-params", "adam-params"
"""Names of the two groups."""

_NOT_IN_NAME = ("embed", "lm_head")


def is_for_muon(names: Sequence[str], parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or more, and none of its names is that of an embedding or an output layer."""
    return parameter.ndim >= 2 and not any(word in name for name in names for word in _NOT_IN_NAME)


def muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups for `Muon`: matrices of the hidden layers, and all other parameters; empty ones are left out.

    A matrix is not Muon's if it is the weight of an `nn.Embedding`, or if one of its names, tied layers give it
    several, has "embed" or "lm_head" in it.

    Args:
        module: its parameters that require gradients are taken.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    embeddings = {
        id(parameter)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag)
        for parameter in child.parameters(recurse=False)
    }
    trained = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    chosen = {key for key, p in trained.items() if key not in embeddings and is_for_muon(names[key], p)}
    return _groups([p for k, p in trained.items() if k in chosen], [p for k, p in trained.items() if k not in chosen])


def split_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups of `Muon`: those given, or two for named parameters.

    Raises:
        ConfigError: for parameters of which nothing says what they are.
    """
    given = list(params)
    if given and all(isinstance(each, dict) for each in given):
        return given
    if not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise ConfigError(
            "Muon must know which parameters are embeddings or output layers, which it does not update. Give it "
            "model.named_parameters(), or ds_lightning.optim.muon_groups(model), or groups with use_muon=True and "
            "use_muon=False."
        )
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in given:
        if parameter.requires_grad:
            found[not is_for_muon([name], parameter)].append(parameter)
    return _groups(*found)


def _groups(matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups = [
        {"params": matrices, "use_muon": True, "name": MUON},
        {"params": others, "use_muon": False, "name": ADAM},
    ]
    return [group for group in groups if group["params"]]
