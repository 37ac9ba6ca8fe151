"""The loss scale against an independent transcription of its specification, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lightning.errors import ConfigError
from ds_lightning.precision.loss_scale import LossScaleOptions, LossScaler


class StopError(Exception):
    """The scale cannot go down."""


@dataclass
class Reference:
    """DeepSpeed's state machine of stages 1-3, as the specification writes it down."""

    scale: float
    shift: int
    window: int
    minimum: float
    consecutive_hysteresis: bool
    iteration: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        self.h = self.shift

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.shift == 1 or self.h == 1:
                if self.scale == self.minimum:
                    raise StopError
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.h -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive_hysteresis:
                self.h = self.shift
            stable = (self.iteration - self.last_overflow) - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive_hysteresis:
                    self.h = self.shift
                self.scale *= 2
        self.iteration += 1


def both(power: int, window: int, shift: int, minimum: float, consecutive: bool) -> tuple[LossScaler, Reference]:
    options = LossScaleOptions(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=shift,
        min_loss_scale=minimum,
        consecutive_hysteresis=consecutive,
    )
    return LossScaler(options), Reference(2.0**power, shift, window, minimum, consecutive)


@given(
    power=st.integers(0, 20),
    window=st.integers(1, 5),
    shift=st.integers(1, 4),
    minimum=st.sampled_from([0.25, 1.0, 8.0]),
    consecutive=st.booleans(),
    overflows=st.lists(st.booleans(), max_size=60),
    saved_at=st.integers(0, 60),
)
@settings(max_examples=300, deadline=None)
def test_any_sequence_of_overflows_gives_the_scales_of_the_specification(
    power, window, shift, minimum, consecutive, overflows, saved_at
):
    scaler, reference = both(power, window, shift, min(minimum, 2.0**power), consecutive)
    for place, overflow in enumerate(overflows):
        if place == saved_at:  # a resumed run goes on with the same sequence
            state = dict(scaler.state_dict())
            scaler = LossScaler(scaler.options)
            scaler.load_state_dict(state)
        try:
            reference.update(overflow)
        except StopError:
            with pytest.raises(ConfigError, match="min_loss_scale"):
                scaler.update(overflow)
            return
        scaler.update(overflow)
        assert scaler.scale == reference.scale
        assert scaler.skipped == sum(overflows[: place + 1])
    assert math.log2(scaler.scale).is_integer()


def test_the_first_growth_comes_in_the_update_after_the_window_and_then_every_window():
    scaler = LossScaler(LossScaleOptions(initial_scale_power=0, loss_scale_window=3))
    scales = []
    for _ in range(10):
        scaler.update(False)
        scales.append(scaler.scale)
    assert scales == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8]


def test_the_first_overflow_is_tolerated_and_each_further_one_halves_the_scale():
    scaler = LossScaler(LossScaleOptions(initial_scale_power=5, hysteresis=2))
    scales = []
    for _ in range(4):
        scaler.update(True)
        scales.append(scaler.scale)
    assert scales == [32, 16, 8, 4]


def test_a_clean_step_refills_the_tolerance_only_if_consecutive():
    for consecutive, expected in ((False, 8), (True, 16)):
        scaler = LossScaler(LossScaleOptions(initial_scale_power=4, consecutive_hysteresis=consecutive))
        for overflow in (True, False, True):
            scaler.update(overflow)
        assert scaler.scale == expected


def test_the_run_ends_at_the_smallest_scale_in_words():
    scaler = LossScaler(LossScaleOptions(initial_scale_power=2, hysteresis=1, min_loss_scale=1.0))
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(ConfigError, match=r"min_loss_scale=1\b.*3 skipped steps"):
        scaler.update(True)


def test_a_fixed_scale_stays_and_counts_what_is_skipped():
    scaler = LossScaler(LossScaleOptions(loss_scale=128.0))
    for overflow in [True] * 20 + [False] * 2000:
        scaler.update(overflow)
    assert scaler.scale == 128.0
    assert scaler.skipped == 20
    other = LossScaler(LossScaleOptions(loss_scale=64.0))
    other.load_state_dict(scaler.state_dict())
    assert other.scale == 64.0
    assert other.skipped == 20


@given(clean=st.integers(0, 12), window=st.integers(1, 5))
@settings(deadline=None)
def test_a_grad_scaler_goes_on_from_our_state_with_the_same_scale(clean, window):
    scaler = LossScaler(LossScaleOptions(initial_scale_power=4, loss_scale_window=window))
    for _ in range(clean):
        scaler.update(False)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.grad_scaler_state())
    assert theirs.get_scale() == scaler.scale
    assert theirs.get_growth_interval() == window
    assert 0 <= theirs._init_growth_tracker < window


@given(tracker=st.integers(0, 4))
@settings(deadline=None)
def test_our_scaler_goes_on_from_a_grad_scaler(tracker):
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=5)
    state = {**theirs.state_dict(), "scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    scaler = LossScaler(LossScaleOptions(loss_scale_window=5))
    scaler.load_grad_scaler_state({**state, "_growth_tracker": tracker, "growth_interval": 5})
    assert scaler.scale == 512.0
    grown = 0
    while scaler.scale == 512.0:
        scaler.update(False)
        grown += 1
    assert grown == 6 - tracker  # DeepSpeed's machine grows one step later than torch's


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_scale": float("inf")},
        {"loss_scale": -1.0},
        {"loss_scale": True},
        {"loss_scale_window": 0},
        {"hysteresis": 0},
        {"min_loss_scale": 0.0},
        {"initial_scale_power": -1},
        {"initial_scale_power": 128},
    ],
    ids=lambda wrong: "{}={}".format(*next(iter(wrong.items()))),
)
def test_options_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=f"fp16.{next(iter(wrong))}"):
        LossScaleOptions(**wrong)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_broken_saved_scale_is_not_taken_over(scale):
    scaler = LossScaler()
    scaler.load_grad_scaler_state({"scale": scale, "_growth_tracker": 3})
    assert scaler.scale == 2.0**16
