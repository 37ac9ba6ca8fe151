"""A scheduler that stands still after a skipped step is an ordinary one in every other way."""

import copy
import pickle

import pytest
import torch

from ds_lightning.schedules import WarmupLR
from ds_lightning.zero.skip import hold_on_skip

MAKERS = {
    "torch": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "ours": lambda optimizer: WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear"),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))], ids=["copy", "pickle"]
)
def test_a_held_scheduler_can_be_copied_and_the_copy_is_an_ordinary_one(make, copied):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    schedule = MAKERS[make](optimizer)
    kind, skipped = type(schedule), [False]
    hold_on_skip(schedule, lambda: skipped[0])
    hold_on_skip(schedule, lambda: skipped[0])  # a second fit
    optimizer.step()
    schedule.step()
    twin = copied(schedule)
    assert type(twin) is kind
    assert twin.state_dict() == schedule.state_dict()
    skipped[0] = True
    schedule.step()
    assert schedule.last_epoch == 1
    twin.optimizer.step()
    twin.step()
    assert twin.last_epoch == 2
    skipped[0] = False
    schedule.step()
    assert schedule.last_epoch == 2
    assert isinstance(schedule, kind)
