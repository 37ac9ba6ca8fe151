"""`optimizer.param_groups` in a ds_config: how it is read, checked and shown."""

import pytest

from ds_lightning.config import load
from ds_lightning.config.report import check_table
from ds_lightning.config.store import from_groups
from ds_lightning.errors import ConfigError

NO_DECAY = {"names": ["*.bias"], "modules": "LayerNorm", "weight_decay": "0", "betas": [0.9, 0.99]}


def config(groups, kind="adamw", **rest):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3}, "param_groups": groups, **rest}}


def test_blocks_are_a_list_or_an_object_by_name():
    wanted = {"names": ["*.bias"], "modules": ["LayerNorm"], "weight_decay": 0.0, "betas": [0.9, 0.99]}
    assert load(config([NO_DECAY])).config.optimizer.param_groups == [wanted]
    assert load(config({"plain": NO_DECAY})).config.optimizer.param_groups == [{"name": "plain", **wanted}]
    assert load(config([])).config.optimizer.param_groups == []
    assert load(config(None)).config.optimizer.param_groups == []


def test_groups_of_hydra_reach_the_ds_config():
    made = from_groups(optimizer={"type": "AdamW", "params": {"lr": 1e-3}, "param_groups": [NO_DECAY]})
    assert load(made).config.optimizer.param_groups[0]["weight_decay"] == 0.0
    assert load(from_groups(optimizer={"type": "AdamW", "param_groups": None})).config.optimizer.param_groups == []


@pytest.mark.parametrize(
    ("groups", "kind", "said"),
    [
        (
            [{"nmaes": ["a"]}],
            "AdamW",
            r"optimizer\.param_groups\.0\.nmaes: .*did you mean 'optimizer\.param_groups\.0\.names'",
        ),
        ([{"names": "a", "wieght_decay": 0}], "AdamW", r"did you mean 'optimizer\.param_groups\.0\.weight_decay'"),
        ({"x": {"names": "a", "amsgard": True}}, "AdamW", r"param_groups\.x\.amsgard"),
        ([{"names": "a", "lr": "auto"}], "AdamW", "leave it out"),
        ([{"names": "a", "lr": "fast"}], "AdamW", "expected a number"),
        ([{"names": "a", "lr": -1}], "AdamW", r"param_groups\.0\.lr: must be at least 0"),
        ([{"names": "a", "betas": [2, 0]}], "Adam", r"param_groups\.0\.betas: expected two numbers"),
        ([{"max_ndim": -1}], "RAdam", r"param_groups\.0\.max_ndim: must be at least 0"),
        ([{"max_ndim": 1.5}], "RAdam", "whole number"),
        ([3], "AdamW", "expected an object"),
        (3, "AdamW", "expected a list of objects"),
        ([{"names": "a"}], None, "optimizer.type: is missing, but optimizer.param_groups is given"),
    ],
    ids=str,
)
def test_mistakes_are_named_with_a_guess(groups, kind, said):
    block = config(groups, kind)
    if kind is None:
        block["optimizer"] = {"param_groups": groups}
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        load(block)


def test_the_report_shows_them_as_ours():
    rows = {row.key: row for row in check_table(config([NO_DECAY]))}
    for name in NO_DECAY:
        row = rows[f"optimizer.param_groups.0.{name}"]
        assert row.status == "used"
        assert "DeepSpeed does not know it" in row.remark
    assert "DeepSpeed" not in rows["optimizer.params.lr"].remark
