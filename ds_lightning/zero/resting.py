"""Frozen parameters in groups of optimizers: which of them are trained all the same, and when the others are again.

[Note: frozen parameters] A parameter that needs no gradient, and has had none so far, costs its values and nothing
else: no master, no gradient, no states. It makes no difference whether it is in a group of an optimizer, where it
rests until it is unfrozen. One that is frozen in its group after it was trained keeps all of it, as torch's optimizers
keep its states: it may go on. Whoever takes it out of its group gives them up. All of this is decided between steps,
where the units concerned are laid out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from ds_lightning.errors import ConfigError
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.zero.hooks import HookSet
from ds_lightning.zero.table import ParameterTable


class RestingParameters:
    """Owns which parameters of groups rest. See [Note: frozen parameters].

    Args:
        table: names and places.
        hooks: where those that rest are hooked: a gradient of theirs would be lost.
        laid_out_anew: called when some must not rest any more. Collective.
    """

    def __init__(self, table: ParameterTable, hooks: HookSet, laid_out_anew: Callable[[], None]) -> None:
        self._table = table
        self._hooks = hooks
        self._laid_out_anew = laid_out_anew
        self._resting: dict[str, nn.Parameter] = {}
        self._woken: set[str] = set()  # frozen, but with states in an optimizer

    def groups(self, optimizers: Sequence[ShardedOptimizer], anew: bool = False) -> dict[int, int]:
        """Parameter group by `id` of the parameter, of those that are trained.

        Args:
            optimizers: all of them.
            anew: they are new: forget what was trained before.
        """
        if anew:
            self._woken.clear()
        return {
            id(parameter): group
            for sharded, group, parameter in _members(optimizers)
            if parameter.requires_grad or self._was_trained(sharded.optimizer, parameter, anew)
        }

    def _was_trained(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, anew: bool) -> bool:
        if optimizer.state.get(parameter):
            return True
        if anew or parameter not in self._table:
            return False
        name = self._table.name_of(parameter)
        place = self._table.place_of(name)
        return name in self._woken or (place is not None and place[0].slots[place[1]].group >= 0)

    def take_stock(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Units are new: note who rests."""
        table = self._table
        self._resting = {
            table.name_of(parameter): parameter
            for _, _, parameter in _members(optimizers)
            if parameter in table and not table.unit_of(parameter).trainable
        }
        refusals = [(parameter, partial(_refuse, name)) for name, parameter in self._resting.items()]
        self._hooks.resting(refusals)

    @property
    def unfrozen(self) -> bool:
        """Whether one of them needs a gradient by now."""
        return any(parameter.requires_grad for parameter in self._resting.values())

    def wake(self, names: Iterable[str]) -> None:
        """These parameters have states in an optimizer: they do not rest, frozen or not.

        Collective if one of them rests; all ranks give the same names.
        """
        found = self._resting.keys() & set(names)
        if found:
            self._woken |= found
            self._laid_out_anew()

    def wake_stateful(self, optimizer: torch.optim.Optimizer) -> None:
        """As `wake`, for the states that an optimizer holds by the user's parameters."""
        self.wake([name for name, parameter in self._resting.items() if optimizer.state.get(parameter)])


def _members(optimizers: Sequence[ShardedOptimizer]) -> Iterator[tuple[ShardedOptimizer, int, nn.Parameter]]:
    for sharded in optimizers:
        for place, parameters in enumerate(sharded.user_params()):
            for parameter in parameters:
                yield sharded, sharded.first_group + place, parameter


def _refuse(name: str, _: torch.Tensor) -> None:
    raise ConfigError(
        f"{name} was frozen when this step began and has been unfrozen within it, where its gradient is not reduced. "
        "Set requires_grad between steps (on_train_epoch_start, on_train_batch_start), or freeze it after training has "
        "begun."
    )
