"""Where a model is cut: which modules are gathered together, and what is known of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_lightning.errors import ConfigError

ROOT = ""
"""Name of the root scope: everything that lies in no repeated block."""

LARGE_LEAF_NUMEL = 1 << 20
"""A layer outside every block that has this many elements (an embedding, a head) is gathered by itself."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter.

    Attributes:
        name: canonical name, the first under which the module registers it.
        aliases: further names of the same tensor (tied weights).
        shape: logical shape.
        dtype: dtype in which the parameter computes and travels.
        master_dtype: dtype of the values that the optimizer updates.
        group: index into the parameter groups of all optimizers laid end to end; -1 when no optimizer has it.
        scope: name of the module with which it is gathered, `ROOT` for the rest.
        active: whether it required a gradient when the layout was made; those that do not are kept apart.
        given_dtype: dtype in which the user gave it; None where that is `master_dtype`.
        travels: dtype in which its gradient travels; None where that is `dtype`.
        row: elements of a row, where its gradient is exchanged as rows; 0 where it is dense.
    """

    name: str
    aliases: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    master_dtype: torch.dtype
    group: int
    scope: str
    active: bool = True
    given_dtype: torch.dtype | None = None
    travels: torch.dtype | None = None
    row: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it."""
        return self.group >= 0


@dataclass(frozen=True, slots=True)
class LeafModules:
    """Modules that the user wants gathered as one, beside the repeated blocks (`zero_optimization.leaf_module`)."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether `module`, known as `name`, is one of them."""
        if name in self.names or (name and name.endswith(self.name_suffixes)):
            return True
        cls = type(module)
        return cls.__name__ in self.classes or f"{cls.__module__}.{cls.__qualname__}" in self.classes


@dataclass(slots=True)
class _Names:
    """All names of one parameter, in order of registration."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)


def find_scopes(module: nn.Module, leaves: LeafModules | None = None) -> list[str]:
    """Names of the sub-modules that are gathered as one, in order of registration.

    A scope is an element of a repeated `ModuleList` or `Sequential`: a container of which at least two elements have
    parameters and the same class. The outermost such container wins, so a block of experts is one scope. Large layers
    outside of blocks are scopes too. `leaves` names further ones; scopes inside a leaf are dropped.
    """
    leaves = leaves or LeafModules()
    found: list[str] = []

    def visit(name: str, node: nn.Module) -> None:
        if name and leaves.matches(name, node) and _has_parameters(node):
            found.append(name)
            return
        if name and _is_large_leaf(node):
            found.append(name)
            return
        repeated = _is_repeated(node)
        for child_name, child in node.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if repeated and _has_parameters(child):
                found.append(path)
            else:
                visit(path, child)

    visit(ROOT, module)
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_large_leaf(module: nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    return sum(parameter.numel() for parameter in module.parameters()) >= LARGE_LEAF_NUMEL


def _is_repeated(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    kinds = [type(child) for child in module if _has_parameters(child)]
    return len(kinds) > len(set(kinds))


def named_parameters(module: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Every parameter once, with all its names, in order of first registration."""
    table: dict[int, _Names] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        table.setdefault(id(parameter), _Names(parameter)).names.append(name)
    return [(tuple(entry.names), entry.parameter) for entry in table.values()]


def scope_of(names: Iterable[str], scopes: Sequence[str]) -> str:
    """The scope that holds every one of `names`, `ROOT` when they lie in several.

    A tensor tied across blocks belongs to all of them, so it is gathered with the rest of the model.
    """
    holders = {
        next((s for s in scopes if name.startswith(s + ".")), ROOT)  # scopes never nest
        for name in names
    }
    return holders.pop() if len(holders) == 1 else ROOT


def check_parameters(named: Sequence[tuple[tuple[str, ...], nn.Parameter]]) -> None:
    """Refuse tensors that cannot be laid into flat memory, all of them in one message.

    Raises:
        ConfigError: for complex, sparse, meta or uninitialised parameters.
    """
    problems = []
    for names, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problems.append(f"{names[0]}: lazy and not initialised yet; run one forward before training")
        elif parameter.is_meta:
            problems.append(f"{names[0]}: on the meta device; materialise it (to_empty + reset_parameters)")
        elif parameter.is_complex():
            problems.append(f"{names[0]}: {parameter.dtype}; store it as a real view (torch.view_as_real)")
        elif parameter.layout is not torch.strided:
            problems.append(f"{names[0]}: layout {parameter.layout}; only dense parameters can be sharded")
    if problems:
        raise ConfigError("These parameters cannot be sharded:\n  " + "\n  ".join(problems))
