"""The schedules against their equations, in plain loops."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ds_lightning as dsl
from ds_lightning.errors import ConfigError
from ds_lightning.schedules.from_config import build_schedule

STEPS = 2000


def optimizer_of(kind: str = "AdamW", lrs: tuple[float, ...] = (0.05, 0.2), **arguments: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return getattr(torch.optim, kind)(groups, **arguments)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def walk(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[list[float]]:
    """The rates with which each of so many steps is taken."""
    found = []
    for _ in range(steps):
        found.append(rates_of(optimizer))
        assert schedule.get_last_lr() == found[-1]
        optimizer.step()
        schedule.step()
    return found


# The equations once more, written from the documentation of DeepSpeed. `it` is its last_batch_iteration.


def gamma(it: int, n: int, kind: str) -> float:
    if it < 0:
        return 0.0
    if it >= n:
        return 1.0
    return math.log(it + 1) / math.log(n) if kind == "log" else it / n


def warmup(it: int, low: float, high: float, n: int, kind: str) -> float:
    return low + (high - low) * gamma(it, max(2, n), kind)


def decay(it: int, low: float, high: float, n: int, kind: str, total: int) -> float:
    n = max(2, n)
    factor = gamma(it, n, kind) if it < n else max(0.0, (total - it) / max(1, total - n))
    return low + (high - low) * factor


def cosine(it: int, base: float, r0: float, n: int, c: float, kind: str, total: int) -> float:
    n = max(2, n)
    if it < n:
        return base * (r0 + (1 - r0) * gamma(it, n, kind))
    q = min(1.0, (it - n + 1) / max(1, total - n))
    return base * (c + (1 - c) * (1 + math.cos(math.pi * q)) / 2)


def range_test(it: int, low: float, size: int, rate: float, stairs: bool) -> float:
    interval = (it + 1) / size
    return low * (1 + rate * (math.floor(interval) if stairs else interval))


def one_cycle(it: int, low: float, high: float, first: int, second: int, size: int = 0, rate: float = 0.0) -> float:
    """The rate; the momentum is the same curve upside down, see `one_momentum`."""
    if it < first + second:
        return low + (high - low) * cycle_scale(it, first, second)
    if size == 0 or rate == 0:
        return low
    return low / (1 + rate * (it - first - second + 1) / size)


def one_momentum(it: int, low: float, high: float, first: int, second: int, size: int = 0, rate: float = 0.0) -> float:
    if it < first + second:
        return high - (high - low) * cycle_scale(it, first, second)
    if size == 0 or rate == 0:
        return high
    return high * (1 + rate * (it - first - second + 1) / size)


def cycle_scale(it: int, first: int, second: int) -> float:
    total = first + second
    ratio = first / total
    x = 1 + (it + 1) / total
    x -= math.floor(x)
    return x / ratio if x <= ratio else (x - 1) / (ratio - 1)


BASE = (0.05, 0.2)
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {}
for kind in ("log", "linear"):
    words = {"warmup_type": kind}
    for n in (1, 2, 3, 700):
        CASES[f"WarmupLR {kind} {n}"] = (
            "WarmupLR",
            {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": n, **words},
            lambda it, i, n=n, kind=kind: warmup(it, 0.001, 0.1, n, kind),
        )
        CASES[f"WarmupDecayLR {kind} {n}"] = (
            "WarmupDecayLR",
            {"total_num_steps": 1500, "warmup_min_lr": [0, 0.01], "warmup_max_lr": [1, 2], "warmup_num_steps": n}
            | words,
            lambda it, i, n=n, kind=kind: decay(it, (0, 0.01)[i], (1, 2)[i], n, kind, 1500),
        )
        CASES[f"WarmupCosineLR {kind} {n}"] = (
            "WarmupCosineLR",
            {"total_num_steps": 1500, "warmup_min_ratio": 0.25, "warmup_num_steps": n, "cos_min_ratio": 0.1, **words},
            lambda it, i, n=n, kind=kind: cosine(it, BASE[i], 0.25, n, 0.1, kind, 1500),
        )
CASES |= {
    "WarmupLR by default": ("WarmupLR", {}, lambda it, i: warmup(it, 0, BASE[i], 1000, "log")),
    "WarmupDecayLR by default": (
        "WarmupDecayLR",
        {"total_num_steps": STEPS},
        lambda it, i: decay(it, 0, 0.001, 1000, "log", STEPS),
    ),
    "WarmupCosineLR by default": (
        "WarmupCosineLR",
        {"total_num_steps": STEPS},
        lambda it, i: cosine(it, BASE[i], 0.0, 1000, 1e-4, "log", STEPS),
    ),
    "LRRangeTest by default": ("LRRangeTest", {}, lambda it, i: range_test(it, 1e-3, 2000, 1.0, False)),
    "LRRangeTest stairs": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [1e-4, 1e-3],
            "lr_range_test_step_size": 7,
            "lr_range_test_step_rate": 5.0,
            "lr_range_test_staircase": True,
        },
        lambda it, i: range_test(it, (1e-4, 1e-3)[i], 7, 5.0, True),
    ),
    "OneCycle by default": (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": [0.1, 0.3]},
        lambda it, i: one_cycle(it, 0.01, (0.1, 0.3)[i], 2000, 2000),
    ),
    "OneCycle with decay": (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 300,
            "cycle_second_step_size": 501,
            "decay_step_size": 13,
            "decay_lr_rate": 0.5,
        },
        lambda it, i: one_cycle(it, 0.01, 0.1, 300, 501, 13, 0.5),
    ),
    "OneCycle of one half": (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.1,
            "cycle_first_step_size": 300,
            "cycle_second_step_size": 0,
            "decay_step_size": 1,
        },
        lambda it, i: one_cycle(it, 0.01, 0.1, 300, 0),
    ),
}


@pytest.mark.filterwarnings("ignore:total_num_steps")
@pytest.mark.parametrize("name", CASES)
def test_every_step_uses_the_rate_of_the_equation(name):
    kind, params, equation = CASES[name]
    optimizer = optimizer_of()
    schedule = getattr(dsl.schedules, kind)(optimizer, **params)
    assert isinstance(schedule, lr_scheduler.LRScheduler)
    for step, found in enumerate(walk(optimizer, schedule, STEPS)):
        expected = [equation(step - 1, group) for group in range(2)]
        assert found == pytest.approx(expected, rel=2e-13, abs=1e-16), step
        assert all(map(math.isfinite, found))
    assert schedule.last_epoch == schedule.last_batch_iteration + 1 == STEPS


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_the_momentum_of_one_cycle_runs_against_its_rate(kind):
    arguments = {"betas": (0.7, 0.95)} if kind == "AdamW" else {"momentum": 0.7}
    optimizer = optimizer_of(kind, **arguments)
    halves = {"cycle_first_step_size": 300, "cycle_second_step_size": 501}
    decays = {"decay_step_size": 50, "decay_mom_rate": 0.01, "cycle_min_mom": [0.8, 0.6], "cycle_max_mom": 0.9}
    schedule = dsl.schedules.OneCycle(optimizer, 0.01, 0.1, **halves, **decays)
    for step in range(STEPS):
        expected = [one_momentum(step - 1, low, 0.9, 300, 501, 50, 0.01) for low in (0.8, 0.6)]
        found = [g["betas"][0] if kind == "AdamW" else g["momentum"] for g in optimizer.param_groups]
        assert found == pytest.approx(expected, rel=1e-13), step
        assert schedule.get_mom() == found
        optimizer.step()
        schedule.step()
    if kind == "AdamW":
        assert all(isinstance(g["betas"], tuple) and g["betas"][1:] == (0.95,) for g in optimizer.param_groups)


def test_stairs_are_as_many_as_asked_for():
    optimizer = optimizer_of(lrs=(1.0,))
    schedule = dsl.schedules.OneCycle(
        optimizer,
        0.0,
        1.0,
        cycle_first_step_size=10,
        cycle_second_step_size=9,
        cycle_first_stair_count=5,
        cycle_second_stair_count=3,
    )
    up = [step // 2 / 5 for step in range(11)]
    down = [1 - (step * 3 // 9) / 3 for step in range(1, 10)]
    assert [rates[0] for rates in walk(optimizer, schedule, 22)] == [*up, *down, 0.0, 0.0]


def test_an_optimizer_without_momentum_is_a_warning():
    with pytest.warns(UserWarning, match="cycle_momentum is off: Adagrad"):
        schedule = dsl.schedules.OneCycle(optimizer_of("Adagrad"), 0.01, 0.1)
    assert schedule.get_mom() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dsl.schedules.OneCycle(optimizer_of("Adagrad"), 0.01, 0.1, cycle_momentum=False)


def make(name: str, optimizer: torch.optim.Optimizer) -> Any:
    kind, params, _ = CASES[name]
    return getattr(dsl.schedules, kind)(optimizer, **params)


RESUMED = ("WarmupLR by default", "WarmupDecayLR log 700", "WarmupCosineLR linear 3", "LRRangeTest stairs")
RESUMED = (*RESUMED, "OneCycle with decay")


@pytest.mark.parametrize("with_optimizer", [True, False], ids=["whole", "schedule alone"])
@pytest.mark.parametrize("at", [0, 1, 50, 1400])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_schedule_goes_on_as_the_unbroken_one(name, at, with_optimizer):
    optimizer = optimizer_of()
    schedule = make(name, optimizer)
    walk(optimizer, schedule, at)
    state = json.loads(json.dumps(schedule.state_dict()))
    new = optimizer_of()
    resumed = make(name, new)
    if with_optimizer:
        new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(state)
    assert [g["betas"] for g in new.param_groups] == [g["betas"] for g in optimizer.param_groups]
    assert walk(new, resumed, 100) == walk(optimizer, schedule, 100)


def test_the_state_of_deepspeed_is_understood_and_others_are_refused():
    optimizer = optimizer_of()
    schedule = dsl.schedules.WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    schedule.load_state_dict({"last_batch_iteration": 4})
    assert (schedule.last_epoch, rates_of(optimizer)) == (5, [0.05 * 0.4, 0.2 * 0.4])
    with pytest.raises(ValueError, match="not the state of a WarmupLR"):
        schedule.load_state_dict(lr_scheduler.ExponentialLR(optimizer_of(), 0.9).state_dict())
    with pytest.raises(ValueError, match="1 base_lrs, the optimizer 2"):
        schedule.load_state_dict({"last_batch_iteration": 4, "base_lrs": [0.1]})


@pytest.mark.parametrize("name", RESUMED)
def test_it_begins_at_a_given_iteration(name):
    optimizer = optimizer_of()
    walk(optimizer, make(name, optimizer), 50)
    kind, params, _ = CASES[name]
    later = optimizer_of()
    getattr(dsl.schedules, kind)(later, **params, last_batch_iteration=49)
    assert rates_of(later) == rates_of(optimizer)


@pytest.mark.parametrize("name", RESUMED)
def test_copies_go_their_own_way(name):
    optimizer = optimizer_of()
    schedule = make(name, optimizer)
    walk(optimizer, schedule, 5)
    for twin in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert twin.optimizer is not optimizer
        before = rates_of(optimizer)
        found = walk(twin.optimizer, twin, 20)
        assert rates_of(optimizer) == before
        again = optimizer_of()
        assert walk(again, make(name, again), 25)[5:] == found


def test_a_rate_that_is_a_tensor_is_filled_in_place():
    rate = torch.tensor(0.05, dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False)
    schedule = dsl.schedules.WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate.dtype, rate.shape, float(rate)) == (torch.float64, (), 0.05 * (4 / 10))
    assert json.dumps(schedule.state_dict())


def test_a_group_that_is_added_later_follows():
    optimizer = optimizer_of()
    schedule = dsl.schedules.WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    walk(optimizer, schedule, 3)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 3.0})
    optimizer.step()
    schedule.step()
    assert rates_of(optimizer) == [0.05 * 0.3, 0.2 * 0.3, 3.0 * 0.3]
    assert len(schedule.get_last_lr()) == len(schedule.state_dict()["base_lrs"]) == 3


def test_it_goes_with_the_schedules_of_torch():
    optimizer = optimizer_of()
    first = dsl.schedules.WarmupLR(optimizer, warmup_num_steps=5, warmup_type="linear")
    whole = lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.StepLR(optimizer, 2, 0.5)], [7])
    found = [rates[0] for rates in walk(optimizer, whole, 11)]
    assert found == pytest.approx([0.05 * f for f in (0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 0.5, 0.5)])
    state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = optimizer_of()
    first = dsl.schedules.WarmupLR(again, warmup_num_steps=5, warmup_type="linear")
    resumed = lr_scheduler.SequentialLR(again, [first, lr_scheduler.StepLR(again, 2, 0.5)], [7])
    again.load_state_dict(state[1])
    resumed.load_state_dict(state[0])
    assert walk(again, resumed, 5) == walk(optimizer, whole, 5)
    chained = optimizer_of()
    parts = [dsl.schedules.WarmupLR(chained, warmup_num_steps=2), lr_scheduler.ConstantLR(chained, 1.0, 3)]
    assert walk(chained, lr_scheduler.ChainedScheduler(parts), 4)[-1] == [0.05, 0.2]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a whole number of at least 1, got 0"),
    ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps must be a whole number"),
    ("WarmupLR", {"warmup_type": "Linear"}, "warmup_type .* got 'Linear'; did you mean 'linear'"),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "cosine"}, "warmup_type"),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "cosine"}, "warmup_type"),
    ("WarmupCosineLR", {"total_num_steps": 0, "warmup_num_steps": 3}, "total_num_steps"),
    ("WarmupLR", {"warmup_max_lr": [1.0]}, "warmup_max_lr has 1 values, the optimizer 2 parameter groups"),
    ("WarmupLR", {"last_batch_iteration": -2}, "last_batch_iteration"),
    ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
    ("LRRangeTest", {"lr_range_test_min_lr": [1.0, 2.0, 3.0]}, "lr_range_test_min_lr has 3 values"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": -1}, "cycle_second_step_size"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_step_size": -1}, "decay_step_size"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_min_mom": [0.1]}, "cycle_min_mom has 1 values"),
]


@pytest.mark.parametrize(("kind", "params", "said"), REFUSED, ids=[f"{kind} {params}" for kind, params, _ in REFUSED])
def test_wrong_values_are_refused_by_name(kind, params, said):
    with pytest.raises(ValueError, match=said):
        getattr(dsl.schedules, kind)(optimizer_of(), **params)
    with pytest.raises(ConfigError, match=f"(?s)scheduler.params do not fit ds_lightning.schedules.{kind}: .*{said}"):
        build_schedule(kind, params, optimizer_of())


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_warmup_that_is_longer_than_the_run_is_a_warning(kind):
    with pytest.warns(UserWarning, match="total_num_steps=10 is less than warmup_num_steps=11"):
        getattr(dsl.schedules, kind)(optimizer_of(), total_num_steps=10, warmup_num_steps=11)


def test_names_of_torch_work_too():
    assert dsl.schedules.StepLR is lr_scheduler.StepLR
    assert type(build_schedule("StepLR", {"step_size": 3}, optimizer_of())) is lr_scheduler.StepLR
    assert type(build_schedule("onecycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}, optimizer_of())).__name__ == (
        "OneCycle"
    )
    for kind, params, said in (
        ("StepLr", {}, "did you mean 'StepLR'"),
        ("StepLR", {}, "step_size"),
        ("Counter", {}, "not known"),
        ("ReduceLROnPlateau", {}, "follows a metric"),
        ("SequentialLR", {"schedulers": [1], "milestones": []}, "do not fit"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_schedule(kind, params, optimizer_of())


def test_what_is_no_optimizer_is_refused_as_by_torch():
    with pytest.raises(TypeError, match="not an Optimizer"):
        dsl.schedules.OneCycle(object(), 0.1, 1.0, last_batch_iteration=4)
