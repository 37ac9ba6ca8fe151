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

from ds_lightning.ops.blocks import Blocks
from ds_lightning.ops.rounding import round_stochastic
from ds_lightning.optim.elementwise import plain_step
from ds_lightning.optim.native import NativeOptimizer
from ds_lightning.optim.sharded import Run, ShardedOptimizer, per_element

COUNT = "rounded_steps"
"""Key of a parameter group: steps whose results were rounded, which seeds the dice of the next one."""

_KEYS = 16  # of one step; one for the master values, the others for states


def step_narrow(sharded: ShardedOptimizer, states: torch.dtype | None) -> None:
    """Step on the runs of a step that is under way whose masters have 16 bits, and take them out of it.

    Args:
        sharded: the optimizer, in a step.
        states: dtype of its states with one value per element between steps; None leaves them in fp32.
    """
    narrow = [run for run in sharded.near if run.parameter.dtype.itemsize == 2]
    step = plain_step(sharded.optimizer)
    with torch.no_grad():
        for run in narrow:
            with _wide(sharded, run, states):
                sharded.show([run])
                if isinstance(sharded.optimizer, NativeOptimizer):
                    blocks: dict[torch.Tensor, Blocks] = {} if run.blocks is None else {run.parameter: run.blocks}
                    sharded.optimizer.prepare_step(gradients={run.parameter: run.gradient}, blocks=blocks)
                else:
                    run.parameter.grad = run.gradient.to(torch.float32)
                step()
    for group in sharded.optimizer.param_groups:
        group[COUNT] = group.get(COUNT, 0) + 1
    sharded.done(narrow)


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
