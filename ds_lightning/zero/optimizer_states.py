"""`state_dict` and `load_state_dict` that users call on a sharded optimizer: whole states, in torch's own format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ds_lightning.comm.agreement import Agreement
from ds_lightning.errors import ConfigError
from ds_lightning.optim.sharded import ShardedOptimizer
from ds_lightning.zero.table import ParameterTable
from ds_lightning.zero.values import FullValues


class OptimizerStates:
    """Puts whole states in the place of shards while `state_dict` looks, and cuts loaded ones up again.

    Args:
        sharded: the optimizer; its state is keyed by this rank's runs.
        table: names of parameters.
        values: whole states.
        agreement: every rank must call `state_dict`.
        wake: gives parameters a place whose states have been loaded although they are frozen.
        settle: makes equal what differs between ranks. Collective.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        table: ParameterTable,
        values: FullValues,
        agreement: Agreement,
        wake: Callable[[torch.optim.Optimizer], None],
        settle: Callable[[], None],
    ) -> None:
        self._settle = settle
        self._sharded = sharded
        self._table = table
        self._values = values
        self._agreement = agreement
        self._wake = wake
        self._shards: Any = None

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """Show whole states by the user's parameters. Collective."""
        self._agreement.rendezvous(
            "state_dict() of a sharded optimizer", "Call it on every rank, or save with trainer.save_checkpoint."
        )
        self._settle()
        whole: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for gradients in self._sharded.units:
            for name, entry in self._values.full_unit_state(self._sharded, gradients.unit.index).items():
                whole[self._table.parameter(name)] = {
                    key: value.clone() if torch.is_tensor(value) else value for key, value in entry.items()
                }
        self._shards, optimizer.state = optimizer.state, whole

    def after_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Put the shards back."""
        optimizer.state, self._shards = self._shards, None

    def before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Refuse Lightning's wrapper, whose state is not the optimizer's own after loading."""
        if optimizer is not self._sharded.optimizer:
            raise ConfigError(
                "load_state_dict() of Lightning's wrapper would not reach the optimizer. Call it on "
                "optimizer.optimizer, or resume with ckpt_path."
            )

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what this rank owns. All ranks load the same."""
        for gradients in self._sharded.units:
            self._sharded.take_user_state(gradients)
        self._wake(optimizer)
