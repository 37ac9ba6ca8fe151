"""The `amp` and `torch_autocast` blocks: what they mean, and every key that does not go with a level."""

import pytest

from ds_lightning.config import Facts, load, resolve
from ds_lightning.config.amp import scale_options
from ds_lightning.errors import ConfigError
from ds_lightning.precision.loss_scale import LossScaleOptions, LossScaler
from ds_lightning.precision.safe_modules import DEFAULT, safe_modules


def amp(level="O1", **rest):
    return {"amp": {"enabled": True, "opt_level": level, **rest}}


@pytest.mark.parametrize(
    ("level", "precision", "scale"),
    [("O0", "32-true", None), ("O1", "16-mixed", 2.0**16), ("O2", "16-mixed", 2.0**16), ("O3", "16-true", None)],
)
def test_a_level_is_a_precision_and_a_loss_scale(level, precision, scale):
    parsed = load(amp(level))
    resolved = resolve(parsed)
    assert resolved.precision == precision
    assert not resolved.fp16.enabled
    assert resolve(load(resolved.to_dict())).precision == precision
    options = scale_options(parsed.config.amp)
    assert (options and LossScaler(LossScaleOptions(**options)).scale) == scale


@pytest.mark.parametrize(
    ("level", "keys", "message"),
    [
        ("O1", {"keep_batchnorm_fp32": False}, "amp.keep_batchnorm_fp32: False does not go with opt_level O1"),
        ("O2", {"keep_batchnorm_fp32": "False"}, "amp.keep_batchnorm_fp32"),
        ("O3", {"keep_batchnorm_fp32": True}, "amp.keep_batchnorm_fp32"),
        ("O2", {"master_weights": False}, "O3 has none"),
        ("O3", {"master_weights": True}, "O2 has fp32 masters"),
        ("O2", {"cast_model_type": "torch.bfloat16"}, "for bf16 use bf16.enabled"),
        ("O1", {"cast_model_type": "torch.float16"}, "amp.cast_model_type"),
        ("O1", {"patch_torch_functions": False}, "O1 and O2 run under autocast"),
        ("O3", {"patch_torch_functions": True}, "amp.patch_torch_functions"),
        ("O1", {"cast_model_outputs": "torch.float32"}, "cast them at the end of forward"),
        ("O1", {"loss_scale": 0}, "amp.loss_scale: must be"),
        ("O1", {"loss_scale": True}, "amp.loss_scale: must be"),
        ("O1", {"loss_scale": float("nan")}, "amp.loss_scale"),
        ("O1", {"loss_scale": "fast"}, "amp.loss_scale: must be"),
        ("O0", {"loss_scale": 128}, "O0 trains in fp32"),
        ("O0", {"loss_scale": "dynamic"}, "O0 trains in fp32"),
        ("O1", {"min_loss_scale": -1}, "amp.min_loss_scale: must be"),
        ("O1", {"min_loss_scale": 64, "max_loss_scale": 32}, "is above amp.max_loss_scale"),
        ("O1", {"max_loss_scale": 0}, "amp.max_loss_scale"),
        ("O4", {}, "amp.opt_level"),
    ],
)
def test_what_a_level_does_not_do_is_refused(level, keys, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load(amp(level, **keys)))


@pytest.mark.parametrize(
    ("level", "keys"),
    [
        ("O0", {"cast_model_type": "torch.float32", "loss_scale": 1.0, "patch_torch_functions": False}),
        ("O1", {"keep_batchnorm_fp32": "True", "loss_scale": "dynamic", "patch_torch_functions": True}),
        ("O2", {"keep_batchnorm_fp32": True, "master_weights": True, "cast_model_type": "torch.float16"}),
        ("O3", {"keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": "1.0"}),
    ],
)
def test_what_a_level_does_anyway_may_be_said(level, keys):
    resolve(load(amp(level, **keys)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_amp_works_at_every_stage(stage):
    assert resolve(load({**amp(), "zero_optimization": {"stage": stage}})).stage == stage


def test_the_scale_of_amp_has_its_own_limits():
    block = load(amp(min_loss_scale=4, max_loss_scale=2.0**17)).config.amp
    scaler = LossScaler(LossScaleOptions(**scale_options(block)))
    for _ in range(6001):
        scaler.update(False)
    assert scaler.scale == 2.0**17
    scaler.update(True)
    assert scaler.scale == 2.0**16  # at once: apex has no hysteresis
    for _ in range(14):
        scaler.update(True)
    assert scaler.scale == 4
    with pytest.raises(ConfigError, match=r"amp\.min_loss_scale=4"):
        scaler.update(True)
    assert scale_options(load(amp(loss_scale="128.0")).config.amp) == {"loss_scale": 128.0, "block": "amp"}


def test_keys_without_effect_are_named():
    notes = " ".join(resolve(load(amp(num_losses=2, verbosity=0, loss_scale=8, max_loss_scale=16))).notes)
    assert "one loss scale serves all losses" in notes
    assert "amp.verbosity" in notes
    assert "inert without a dynamic loss scale: amp.max_loss_scale" in notes


@pytest.mark.parametrize("block", [amp(), {"torch_autocast": {"enabled": True}}], ids=["amp", "autocast"])
def test_the_trainer_must_agree(block):
    name = next(iter(block))
    with pytest.raises(ConfigError, match=rf"{name}\.enabled: the configuration asks for"):
        resolve(load(block), Facts(precision="64-true"))
    asked = load(block).precision()
    assert resolve(load(block), Facts(precision=asked)).precision == asked


def test_the_two_blocks_do_not_go_together():
    with pytest.raises(ConfigError, match=r"amp\.enabled: does not go with torch_autocast"):
        load({**amp(), "torch_autocast": {"enabled": True}})


def test_safe_modules_are_found_by_path_or_refused():
    assert safe_modules(None) == DEFAULT
    assert safe_modules(["torch.nn.Linear", "torch.nn.modules.sparse.Embedding"])[1].__name__ == "Embedding"
    with pytest.raises(ConfigError) as raised:
        safe_modules(["torch.nn.Linaer", "nowhere.Linear", "torch.nn.Parameter", "Linear"])
    for text in (
        "torch.nn has no Linaer",
        "No module named 'nowhere'",
        "'torch.nn.Parameter': no class of",
        "'Linear'",
    ):
        assert text in str(raised.value)


def test_autocast_at_stage_3_says_what_it_costs():
    block = {"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 3}}
    assert any("gathered in fp32" in note for note in resolve(load(block)).notes)
