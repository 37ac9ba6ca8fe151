"""Steps on masters of 16 bits: in fp32, run by run, and rounded so that small updates count on average.

[Note: masters of 16 bits] A weight of 16 bits cannot take an update below half of its last digit: rounded to nearest it
stays where it is, for ever. So a run visits fp32 for its step (4 bytes per element of one run, no longer than that) and
goes back by `ops.rounding.round_stochastic`. The dice depend on the number, the count of steps and nothing else, so
stages agree bit by bit, and so does a run that resumes: the count lies in the groups, which checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from ds_lightning.errors import ConfigError
from ds_lightning.ops.blocks import Blocks
from ds_lightning.ops.rounding import round_stochastic
from ds_lightning.optim.elementwise import plain_step, takes_parts
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.sharded import Run, ShardedOptimizer, per_element

COUNT = "rounded_steps"
"""Key of a parameter group: steps whose results were rounded, which seeds the dice of the next one."""

_KEYS = 16  # of one step; one for the master values, the others for states


class NarrowMasters:
    """Steps on the runs whose masters have 16 bits.

    Args:
        states: dtype of states with one value per element between steps; None leaves them in fp32.
    """

    def __init__(self, states: torch.dtype | None) -> None:
        self._states = states

    def chosen(self, runs: Sequence[Run]) -> list[Run]:
        """Those of `runs` that are stepped on here."""
        return [run for run in runs if run.parameter.dtype.itemsize == 2]

    def step(self, sharded: ShardedOptimizer, runs: Sequence[Run]) -> None:
        """Step on runs, one by one and where they are; the groups of the optimizer hold the last one then.

        Args:
            sharded: the optimizer, in a step.
            runs: with 16-bit masters in memory.
        """
        step = plain_step(sharded.optimizer)
        with torch.no_grad():
            for run in runs:
                with _wide(sharded, run, self._states):
                    sharded.show([run])
                    if isinstance(sharded.optimizer, NativeOptimizer):
                        blocks: dict[torch.Tensor, Blocks] = {} if run.blocks is None else {run.parameter: run.blocks}
                        sharded.optimizer.prepare_step(gradients={run.parameter: run.gradient}, blocks=blocks)
                    else:
                        run.parameter.grad = run.gradient.to(torch.float32)
                    step()

    def stepped(self, sharded: ShardedOptimizer) -> None:
        """All runs have had their step: the next one throws other dice."""
        for group in sharded.optimizer.param_groups:
            group[COUNT] = group.get(COUNT, 0) + 1


def check_narrow(optimizer: torch.optim.Optimizer, on_disk: bool) -> None:
    """Refuse what masters of 16 bits do not go with, where they are asked for.

    Args:
        optimizer: the user's.
        on_disk: masters are on disk.

    Raises:
        ConfigError: in words.
    """
    key = "bf16_master_weights_and_grads (or fp16_master_weights_and_grads)"
    if on_disk:
        raise ConfigError(
            f"{key} does not go with offload_optimizer.device: nvme, whose files are stepped on as they are. Use "
            "offload_optimizer.device: cpu, or leave one of the two out."
        )
    if takes_parts(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} looks at whole tensors, so all of them would be in fp32 at once, which "
            f"{key} is there to avoid. Leave it out, or use an element-wise optimizer (Adam, AdamW, Lion, SGD ...)."
        )


@contextmanager
def _wide(sharded: ShardedOptimizer, run: Run, states: torch.dtype | None) -> Generator[None, None, None]:
    """A run in fp32, with its states; rounded when left, or as it was if its step fails."""
    state = sharded.optimizer.state
    narrow, run.parameter.grad = run.parameter.data, None
    kept = dict(state.get(run.parameter, {}))
    seed = sharded.optimizer.param_groups[run.group].get(COUNT, 0) * _KEYS
    moments = _moments(kept, run) if states is not None else []
    run.parameter.data = narrow.float()
    if moments:
        state[run.parameter].update({key: kept[key].float() for key in moments})
    try:
        yield
        round_stochastic(narrow, run.parameter.data, seed=seed)
        if states is not None:
            found = state.get(run.parameter, {})
            for place, key in enumerate(_moments(found, run), start=1):
                old = kept.get(key)
                target = torch.empty_like(found[key], dtype=states) if old is None or old.dtype != states else old
                round_stochastic(target, found[key], seed=seed + place)
                found[key] = target
    except BaseException:
        if moments:
            state[run.parameter].update({key: kept[key] for key in moments})
        raise
    finally:
        run.parameter.grad = None
        run.parameter.data = narrow


def _moments(state: dict[str, object], run: Run) -> Sequence[str]:
    """Keys of the floating states with one value per element, in an order that does not depend on the run."""
    return sorted(
        key
        for key, value in state.items()
        if torch.is_tensor(value) and value.is_floating_point() and per_element(value, run.shape)
    )
