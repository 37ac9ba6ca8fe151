"""Reconciling a configuration with the run."""

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import hypothesis
import hypothesis.strategies as st
import pytest

from ds_lightning.config import DeepSpeedConfig, Facts, load, resolve
from ds_lightning.errors import ConfigError

TB, MB, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def triangle(resolved):
    return (
        resolved.train_batch_size,
        resolved.train_micro_batch_size_per_gpu,
        resolved.gradient_accumulation_steps,
    )


def given(tb=None, mb=None, gas=None):
    return {key: value for key, value in ((TB, tb), (MB, mb), (GAS, gas)) if value is not None}


@pytest.mark.parametrize(
    ("data", "world", "expected"),
    [
        (given(32, 16, 1), 2, (32, 16, 1)),
        (given(32, 8, 2), 2, (32, 8, 2)),
        (given(32, 8), 2, (32, 8, 2)),
        (given(32, gas=4), 2, (32, 4, 4)),
        (given(mb=8, gas=2), 2, (32, 8, 2)),
        (given(32), 2, (32, 16, 1)),
        (given(mb=8), 2, (16, 8, 1)),
        (given(14), 7, (14, 2, 1)),
        (given(gas=3), 2, (None, None, 3)),
        (given(), 2, (None, None, 1)),
        ({TB: "auto", MB: 4, GAS: "auto"}, 3, (12, 4, 1)),
    ],
)
def test_the_triangle_is_completed_as_specified(data, world, expected):
    assert triangle(resolve(load(data), Facts(world_size=world))) == expected


@pytest.mark.parametrize(
    ("data", "world", "numbers"),
    [
        (given(33, 17, 2), 2, ("33", "17", "2", "68")),
        (given(32, 18), 2, ("32", "18", "world size 2", "0.8889")),
        (given(256, 2), 7, ("256", "2", "world size 7")),
        (given(256, gas=2), 7, ("256", "2", "world size 7")),
        (given(15), 2, ("15", "world size 2", "7.5")),
        (given(32, 8, 1), 2, ("32", "8", "1", "world size 2")),
    ],
)
def test_a_remainder_is_an_error_with_the_numbers(data, world, numbers):
    with pytest.raises(ConfigError, match=TB) as raised:
        resolve(load(data), Facts(world_size=world))
    for number in numbers:
        assert number in str(raised.value)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(*[st.integers(1, 9)] * 3, st.integers(0, 7))
def test_any_subset_of_a_fitting_triangle_gives_it_back(micro, steps, world, left_out):
    numbers = {TB: micro * steps * world, MB: micro, GAS: steps}
    kept = {key: value for bit, (key, value) in enumerate(numbers.items()) if not left_out >> bit & 1}
    facts = Facts(world_size=world, micro_batch_size=micro, accumulate_grad_batches=steps)
    assert triangle(resolve(load(kept), facts)) == tuple(numbers.values())
    if len(kept) >= 2:
        assert triangle(resolve(load(kept), Facts(world_size=world))) == tuple(numbers.values())


def test_an_unknown_world_size_skips_the_check_with_a_note():
    resolved = resolve(load(given(32, 8)))
    assert triangle(resolved) == (32, 8, None)
    assert "world size is not known" in " ".join(resolved.notes)
    with pytest.raises(ConfigError, match="any world size"):
        resolve(load(given(33, 17, 2)))


def test_everything_comes_from_the_trainer_without_keys():
    facts = Facts(world_size=2, accumulate_grad_batches=3, micro_batch_size=5)
    assert triangle(resolve(load({}), facts)) == (30, 5, 3)
    assert triangle(resolve(load(dict.fromkeys((TB, MB, GAS), "auto")), facts)) == (30, 5, 3)
    assert resolve(load({}), facts).notes == []


@pytest.mark.parametrize(
    ("data", "facts", "expected"),
    [
        (given(32), Facts(world_size=2, accumulate_grad_batches=4), (32, 4, 4)),
        (given(32), Facts(world_size=2, micro_batch_size=4), (32, 4, 4)),
        (
            given(gas=4),
            Facts(world_size=2, accumulate_grad_batches=4, micro_batch_size=2),
            (16, 2, 4),
        ),
        (given(mb=2), Facts(world_size=2, accumulate_grad_batches=4), (16, 2, 4)),
        (
            given(32, 8, 2),
            Facts(world_size=2, accumulate_grad_batches=2, micro_batch_size=8),
            (32, 8, 2),
        ),
        (
            given(gas=4),
            Facts(world_size=1, accumulate_grad_batches=1, accumulate_is_default=True),
            (None, None, 4),
        ),
    ],
)
def test_the_trainer_fills_and_confirms_the_triangle(data, facts, expected):
    assert triangle(resolve(load(data), facts)) == expected


@pytest.mark.parametrize(
    ("data", "facts", "fixes"),
    [
        (
            given(gas=4),
            Facts(accumulate_grad_batches=1),
            ("Trainer(accumulate_grad_batches=4)", "to 1"),
        ),
        (
            given(32, 4),
            Facts(world_size=2, accumulate_grad_batches=2),
            ("Trainer(accumulate_grad_batches=4)",),
        ),
        (given(mb=4), Facts(micro_batch_size=8), ("DataLoader(batch_size=4)", f"{MB} to 8")),
        (given(8, gas=1), Facts(world_size=2, micro_batch_size=8), ("DataLoader(batch_size=4)",)),
    ],
)
def test_conflicts_with_the_trainer_name_both_numbers_and_the_fix(data, facts, fixes):
    with pytest.raises(ConfigError) as raised:
        resolve(load(data), facts)
    for fix in fixes:
        assert fix in str(raised.value)


def test_an_unknown_micro_batch_is_noted():
    notes = resolve(load(given(mb=4)), Facts(world_size=2)).notes
    assert any("dataloader's batch size is unknown" in note for note in notes)


@pytest.mark.parametrize(
    ("data", "asked", "expected"),
    [
        (None, None, 2),
        (None, 3, 3),
        ({}, None, 0),
        ({"fp16": {"enabled": True}}, None, 0),
        ({}, 1, 1),
        ({"zero_optimization": {"stage": 3}}, None, 3),
        ({"zero_optimization": {"stage": 3}}, 3, 3),
        ({"zero_optimization": {"reduce_bucket_size": 9}}, None, 0),
        ({"zero_optimization": {"reduce_bucket_size": 9}}, 2, 2),
        ({"zero_optimization": {"stage": "auto"}}, 1, 1),
        ({"zero_optimization": {"stage": "auto"}}, None, 2),
        ({"zero_optimization": True}, None, 1),
    ],
)
def test_the_stage_comes_from_whoever_says_it(data, asked, expected):
    resolved = resolve(load(data), Facts(stage=asked))
    assert resolved.stage == resolved.zero_optimization.stage == expected


def test_two_different_stages_are_refused_with_both():
    with pytest.raises(ConfigError, match=r"configuration says 2, ZeroStrategy\(stage=3\) says 3"):
        resolve(load({"zero_optimization": {"stage": 2}}), Facts(stage=3))
    with pytest.raises(ConfigError, match="expected 0, 1, 2 or 3, got 5"):
        resolve(load(None), Facts(stage=5))


@pytest.mark.parametrize(("number", "overlap"), [(0, False), (2, False), (3, True)])
def test_overlap_follows_the_stage(number, overlap):
    assert resolve(load({"zero_optimization": {"stage": number}})).zero_optimization.overlap_comm is overlap


@pytest.mark.parametrize(
    ("clipping", "facts", "expected"),
    [
        (None, Facts(), None),
        (None, Facts(gradient_clip_val=0.5), 0.5),
        ("auto", Facts(gradient_clip_val=0.5), 0.5),
        (1.0, Facts(), 1.0),
        (1.0, Facts(gradient_clip_val=1), 1.0),
        (1.0, Facts(gradient_clip_val=None, clip_is_default=True), 1.0),
        (0, Facts(), 0.0),
    ],
)
def test_clipping(clipping, facts, expected):
    data = {} if clipping is None else {"gradient_clipping": clipping}
    assert resolve(load(data), facts).gradient_clipping == expected


def test_clipping_conflicts_are_refused():
    parsed = load({"gradient_clipping": 1.0})
    with pytest.raises(ConfigError, match=r"says 1.0, Trainer\(gradient_clip_val=0.5\) says 0.5; use Trainer"):
        resolve(parsed, Facts(gradient_clip_val=0.5))
    with pytest.raises(ConfigError, match="clips by norm"):
        resolve(parsed, Facts(gradient_clip_val=1.0, gradient_clip_algorithm="value"))


def test_clipping_by_value_stays_the_trainers_business():
    resolved = resolve(load({}), Facts(gradient_clip_val=0.5, gradient_clip_algorithm="value"))
    assert (resolved.gradient_clipping, resolved.gradient_clip_algorithm) == (0.5, "value")


def half(name, value=True):
    return {name: {"enabled": value}}


@pytest.mark.parametrize(
    ("data", "precision", "is_default", "expected"),
    [
        ({}, None, False, "32-true"),
        ({}, "32-true", True, "32-true"),
        ({}, "16-mixed", False, "16-mixed"),
        ({}, "bf16-true", False, "bf16-true"),
        ({}, 16, False, "16-mixed"),
        ({}, "64", False, "64-true"),
        (half("fp16"), None, False, "16-mixed"),
        (half("fp16"), "32-true", True, "16-mixed"),
        (half("fp16"), "16-mixed", False, "16-mixed"),
        (half("bf16"), "32-true", True, "bf16-mixed"),
        (half("bf16"), "bf16", False, "bf16-mixed"),
        (half("bfloat16", "auto"), "bf16-mixed", False, "bf16-mixed"),
        (half("fp16", "auto"), "32-true", True, "32-true"),
        (half("fp16", False), "bf16-mixed", False, "bf16-mixed"),
    ],
)
def test_precision_comes_from_whoever_says_it(data, precision, is_default, expected):
    resolved = resolve(load(data), Facts(precision=precision, precision_is_default=is_default))
    assert resolved.precision == expected
    assert resolved.fp16.enabled == (expected == "16-mixed" or data == half("fp16"))
    assert resolved.bf16.enabled == (expected == "bf16-mixed" or data == half("bf16"))


@pytest.mark.parametrize(
    ("data", "precision"),
    [
        (half("fp16"), "32-true"),
        (half("fp16"), "bf16-mixed"),
        (half("bf16"), "16-mixed"),
        (half("bf16"), "64-true"),
        (half("fp16"), "16-true"),
        (half("bf16"), "bf16-true"),
        (half("fp16", False), "16-mixed"),
        (half("bfloat16", False), "bf16-true"),
    ],
)
def test_precisions_that_contradict_each_other_are_refused(data, precision):
    with pytest.raises(ConfigError, match=f"precision='{precision}'"):
        resolve(load(data), Facts(precision=precision))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, None),
        (half("fp16"), "16-mixed"),
        (half("bfloat16"), "bf16-mixed"),
        (half("bf16", "auto"), None),
        (half("fp16", False), None),
    ],
)
def test_the_precision_asked_for_before_any_facts(data, expected):
    assert load(data).precision() == expected


AUTO_SIZES = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": "auto",
}


def test_sizes_follow_the_hidden_size():
    parsed = load({"zero_optimization": {"stage": 3, **AUTO_SIZES}})
    zero = resolve(parsed, Facts(hidden_size=2048)).zero_optimization
    assert zero.reduce_bucket_size == 2048 * 2048
    assert zero.stage3_prefetch_bucket_size == 3774873
    assert zero.stage3_param_persistence_threshold == 20480
    assert zero.stage3_gather_16bit_weights_on_model_save is False


def test_without_a_hidden_size_the_defaults_are_used_with_a_note():
    resolved = resolve(load({"zero_optimization": {"stage": 3, **AUTO_SIZES}}))
    assert resolved.zero_optimization == resolve(load({"zero_optimization": {"stage": 3}})).zero_optimization
    assert sum("hidden size" in note for note in resolved.notes) == 3


def test_optimizer_arguments_follow_the_module():
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    parsed = load({"optimizer": {"type": "AdamW", "params": params}})
    defaults = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    resolved = resolve(parsed, Facts(optimizer_defaults=defaults))
    assert resolved.optimizer.params == {**defaults, "betas": [0.8, 0.9]}
    assert parsed.config.optimizer.params == params
    partly = resolve(parsed, Facts(optimizer_defaults={"lr": 0.1}))
    assert partly.optimizer.params == {"lr": 0.1}
    assert sum("default is used" in note for note in partly.notes) == 3


def test_unresolved_autos_are_listed_together_with_their_origins():
    data = {"optimizer": {"type": "Adam", "params": {"lr": "auto", "amsgrad": "auto"}}}
    with pytest.raises(ConfigError, match="2 problems") as raised:
        resolve(load(data))
    assert "optimizer.params.lr: 'auto' cannot be resolved: the module" in str(raised.value)
    assert "optimizer.params.amsgrad: 'auto'" in str(raised.value)


def test_other_autos_fall_back_to_their_defaults():
    resolved = resolve(load({"steps_per_print": "auto", "fp16": {"hysteresis": "auto"}}))
    assert (resolved.steps_per_print, resolved.fp16.hysteresis) == (None, 2)


def values_in(data):
    return [leaf for v in data.values() for leaf in (values_in(v) if isinstance(v, dict) else [v])]


def test_nothing_is_auto_any_more():
    data = {
        "zero_optimization": {"stage": "auto", **AUTO_SIZES},
        "gradient_clipping": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
        **half("bf16", "auto"),
    }
    resolved = resolve(load(data), Facts(optimizer_defaults={"lr": 1.0}))
    assert "auto" in values_in(data)
    assert "auto" not in values_in(resolved.to_dict())


def test_the_resolved_configuration_is_read_only_at_every_level():
    resolved = resolve(load(None))
    for owner, name in (
        (resolved, "train_batch_size"),
        (resolved, "precision"),
        (resolved.fp16, "enabled"),
        (resolved.zero_optimization.offload_param, "device"),
    ):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(owner, name, 1)


def test_the_resolved_configuration_survives_copies_and_processes():
    resolved = resolve(load({"zero_optimization": {"stage": 3}}))
    for twin in (copy.deepcopy(resolved), pickle.loads(pickle.dumps(resolved))):
        assert twin == resolved
        with pytest.raises(FrozenInstanceError):
            twin.zero_optimization.stage = 1


def test_given_holds_what_the_user_set_and_nothing_automatic():
    resolved = resolve(load({"zero_optimization": {"cpu_offload": False, "stage": 1}, "gradient_clipping": "auto"}))
    assert resolved.given == {"zero_optimization", "zero_optimization.stage"}


def test_to_dict_is_a_configuration_that_resolves_to_the_same():
    facts = Facts(world_size=2, micro_batch_size=4, hidden_size=8)
    data = {**half("bf16"), "zero_optimization": {"stage": 3, **AUTO_SIZES}, "train_batch_size": 16}
    first = resolve(load(data), facts)
    assert list(first.to_dict()) == [item.name for item in fields(DeepSpeedConfig)]
    again = resolve(load(first.to_dict()), facts)
    assert again.to_dict() == first.to_dict()
    assert again.precision == first.precision


def test_one_parsed_configuration_serves_two_runs():
    parsed = load({"train_batch_size": 32, GAS: "auto"})
    runs = [resolve(parsed, Facts(world_size=2, accumulate_grad_batches=n)) for n in (2, 4)]
    assert [triangle(run) for run in runs] == [(32, 8, 2), (32, 4, 4)]


def test_notes_tell_what_was_renamed_ignored_or_inert():
    notes = resolve(
        load(
            {
                "zero_optimization": {
                    "stage": 2,
                    "prefetch_bucket_size": 5,
                    "stage3_max_live_parameters": "5e8",
                },
                "nebula": {},
                "wall_clock_breakdown": True,
                "tensorboard": {"enabled": False, "job_name": "x"},
            }
        )
    ).notes
    text = "\n".join(notes)
    assert "prefetch_bucket_size: now 'zero_optimization.stage3_prefetch_bucket_size'" in text
    assert "nebula is ignored" in text
    assert "inert at stage 2: zero_optimization.stage3_max_live_parameters" in text
    assert "inert while tensorboard is off: tensorboard.job_name" in text
    assert "wall_clock_breakdown" in text


def test_the_module_keeps_its_own_optimizer_with_a_note():
    resolved = resolve(load({"optimizer": {"type": "Adam"}}), Facts(has_optimizer=True))
    assert any("brings its own optimizer" in note for note in resolved.notes)


def test_a_configuration_without_clipping_says_that_its_default_is_another_one():
    def told(data, **facts):
        return any("where DeepSpeed clips" in note for note in resolve(load(data), Facts(**facts)).notes)

    data = {"zero_optimization": {"stage": 1}}
    assert told(data)
    assert not told(data, gradient_clip_val=0.5)
    assert not told({**data, "gradient_clipping": 0})
    assert not told({**data, "gradient_clipping": "auto"})
    assert not told({})
