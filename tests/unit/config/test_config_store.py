"""The groups of a Hydra app."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from ds_lightning.config import from_groups, load, register_configs
from ds_lightning.config.schema import ZeroConfig
from ds_lightning.errors import ConfigError


@pytest.fixture
def composed(tmp_path):
    register_configs()
    (tmp_path / "zero").mkdir()
    (tmp_path / "precision").mkdir()
    (tmp_path / "zero" / "stage2.yaml").write_text("defaults: [schema, _self_]\nstage: 2\nreduce_bucket_size: 5e8\n")
    (tmp_path / "precision" / "bf16.yaml").write_text("defaults: [schema, _self_]\nname: bf16\n")
    (tmp_path / "config.yaml").write_text("defaults: [{zero: stage2}, {offload: schema}, {precision: bf16}]\n")

    def build(*overrides):
        with initialize_config_dir(str(tmp_path), version_base=None):
            return compose("config", overrides=list(overrides))

    return build


def test_groups_compose_and_become_a_configuration(composed):
    config = composed("zero.stage=3", "zero.stage3_prefetch_bucket_size=auto", "offload.offload_param.device=cpu")
    data = from_groups(zero=config.zero, offload=config.offload, precision=config.precision)
    parsed = load(data)
    assert parsed.config.zero_optimization.stage == 3
    assert parsed.config.zero_optimization.reduce_bucket_size == 500_000_000
    assert parsed.config.zero_optimization.offload_param.device == "cpu"
    assert parsed.autos == {"zero_optimization.stage3_prefetch_bucket_size"}
    assert parsed.precision() == "bf16-mixed"


@pytest.mark.parametrize(
    "typo",
    [
        "zero.stgae=2",
        "offload.offload_param.devise=cpu",
        "zero.leaf_module.class=x",
        "precision.los_scale=1",
    ],
)
def test_hydra_refuses_misspelt_names(composed, typo):
    with pytest.raises(ConfigCompositionException, match=typo.split("=")[0]):
        composed(typo)


def test_missing_groups_and_nones_are_left_out():
    assert from_groups() == {}
    assert from_groups(zero={"stage": None, "leaf_module": {"names": None}}, fp16=None) == {}
    assert from_groups(zero={"stage": 2}, offload={"offload_param": {"device": None}}) == {
        "zero_optimization": {"stage": 2}
    }
    assert from_groups(gradient_clipping=1.0, optimizer={"type": "Adam"}, zero={}) == {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {},
    }


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, {}),
        ("bf16", {"bf16": {"enabled": True}}),
        (
            {"name": "bf16-mixed", "check_grad_overflow": True},
            {"bf16": {"enabled": True, "check_grad_overflow": True}},
        ),
        (
            {"name": "fp16", "loss_scale": 8, "hysteresis": None},
            {"fp16": {"enabled": True, "loss_scale": 8}},
        ),
        ({"name": 16}, {"fp16": {"enabled": True}}),
        ("fp32", {}),
        ({"name": "32-true", "loss_scale": None}, {}),
    ],
)
def test_the_precision_group(precision, expected):
    assert from_groups(precision=precision) == expected


def test_an_unknown_precision_is_refused_with_a_guess():
    with pytest.raises(ConfigError, match="did you mean 'bf16-mixed'"):
        from_groups(precision="bf16-mixd")


def test_typos_of_assembled_groups_are_found_by_load():
    with pytest.raises(ConfigError, match=r"zero_optimization.stge"):
        load(from_groups(zero={"stge": 1}))


def test_the_schema_itself_is_a_structured_config():
    node = OmegaConf.structured(ZeroConfig)
    node.stage = 3
    assert load({"zero_optimization": node}).config.zero_optimization.stage == 3
