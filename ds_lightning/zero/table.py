"""Where each parameter is: names, aliases, unit and slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ds_lightning.layout.flat import Unit


class ParameterTable:
    """Owns the table from parameters to their names and places; nothing is hung on the tensors themselves.

    Args:
        named: every parameter with all its names, in order of registration.
    """

    def __init__(self, named: Sequence[tuple[tuple[str, ...], nn.Parameter]]) -> None:
        self._names = {id(parameter): names[0] for names, parameter in named}
        self._parameters = {names[0]: parameter for names, parameter in named}
        self._aliases = {names[0]: names[1:] for names, _ in named}
        self._places: dict[str, tuple[Unit, int]] = {}

    def place(self, unit: Unit) -> None:
        """Note where a unit's parameters are."""
        for index, slot in enumerate(unit.slots):
            self._places[slot.name] = (unit, index)

    def __contains__(self, parameter: object) -> bool:
        """Whether something is one of the parameters."""
        return id(parameter) in self._names

    def name_of(self, parameter: nn.Parameter) -> str:
        """Canonical name of a parameter."""
        return self._names[id(parameter)]

    def unit_of(self, parameter: nn.Parameter) -> Unit:
        """The unit that holds a parameter."""
        return self._places[self.name_of(parameter)][0]

    def slot_of(self, name: str) -> tuple[Unit, int]:
        """Unit and slot index of a parameter, by canonical name."""
        return self._places[name]

    def place_of(self, name: str) -> tuple[Unit, int] | None:
        """As `slot_of`; None before the parameter is laid out."""
        return self._places.get(name)

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter with this canonical name."""
        return self._parameters[name]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, by canonical name."""
        yield from self._parameters.items()

    def aliases(self, name: str) -> tuple[str, ...]:
        """Further names of a tied parameter."""
        return self._aliases[name]
