"""What was measured of a model, per module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from torch import nn


@dataclass(slots=True)
class Measured:
    """Work and time, summed over calls.

    Attributes:
        forward_flops: of forward.
        forward_macs: multiply-accumulates of forward.
        backward_flops: of backward, without what is recomputed there.
        recomputed_flops: of forwards that activation checkpointing runs again within backward.
        forward_seconds: wall time from a module's call to its return.
        backward_seconds: wall time from the gradient of its output to that of its input.
        calls: how often it was called, recomputation not counted.
    """

    forward_flops: int = 0
    forward_macs: int = 0
    backward_flops: int = 0
    recomputed_flops: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    calls: int = 0

    @property
    def flops(self) -> int:
        """Everything that was executed."""
        return self.forward_flops + self.backward_flops + self.recomputed_flops

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    def add_work(self, other: Measured) -> None:
        """Add FLOPs and MACs, not times: a module's time has that of its children in it."""
        self.forward_flops += other.forward_flops
        self.forward_macs += other.forward_macs
        self.backward_flops += other.backward_flops
        self.recomputed_flops += other.recomputed_flops

    def clear(self) -> None:
        """Back to zero."""
        for item in fields(self):
            setattr(self, item.name, item.default)


@dataclass(slots=True, eq=False)
class ModuleProfile:
    """One module and what lies in it.

    Attributes:
        name: its path in the model, empty for the model itself.
        kind: its class.
        described: its `extra_repr`.
        parameters: elements of all parameters in it, each counted once, whole ones also where they are sharded.
        own: of operations directly in it; times include children.
        children: in order of registration.
    """

    name: str
    kind: str
    described: str
    parameters: int
    own: Measured = field(default_factory=Measured)
    children: list[ModuleProfile] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Its name within its parent."""
        return self.name.rpartition(".")[2]

    def total(self) -> Measured:
        """The work of it and all that lies in it; its own times and calls."""
        own = self.own
        found = Measured(forward_seconds=own.forward_seconds, backward_seconds=own.backward_seconds, calls=own.calls)
        for node in self.walk():
            found.add_work(node.own)
        if not own.calls:  # a container whose children are called one by one
            for child in self.children:
                total = child.total()
                found.forward_seconds += total.forward_seconds
                found.backward_seconds += total.backward_seconds
        return found

    def walk(self) -> Iterator[ModuleProfile]:
        """It and all that lies in it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def levels(self) -> list[list[ModuleProfile]]:
        """By depth: the model alone, its children, theirs ..."""
        found = [[self]]
        while found[-1]:
            found.append([child for node in found[-1] for child in node.children])
        return found[:-1]


def build(model: nn.Module) -> dict[nn.Module, ModuleProfile]:
    """A profile of every module of a model, the model's own first; shared modules have one, under their first name."""
    known: dict[nn.Module, ModuleProfile] = {}

    def visit(name: str, module: nn.Module) -> ModuleProfile:
        numel = sum(parameter.numel() for parameter in module.parameters())
        node = ModuleProfile(name, type(module).__name__, module.extra_repr(), numel)
        known[module] = node
        for label, child in module.named_children():
            if child not in known:
                node.children.append(visit(f"{name}.{label}" if name else label, child))
        return node

    visit("", model)
    return known
