"""The table of `ds-lightning check`."""

import sys

import pytest

from ds_lightning.config import Facts, check_table, render

DATA = {
    "zero_optimization": {
        "stage": 2,
        "prefetch_bucket_size": 5,
        "stage3_max_live_parameters": 5,
        "stge": 1,
    },
    "bf16": {"enabled": "auto"},
    "autotuning": {"enabled": True},
    "nebula": {"a": 1},
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": True,
    "train_batch_size": 33,
}


def table(data=DATA, facts=None):
    return {row.key: row for row in check_table(data, facts)}


def test_every_given_key_has_a_row_with_its_status():
    assert {key: row.status for key, row in table().items()} == {
        "zero_optimization.stage": "used",
        "zero_optimization.prefetch_bucket_size": "renamed",
        "zero_optimization.stage3_max_live_parameters": "inert",
        "zero_optimization.stge": "error",
        "bf16.enabled": "auto",
        "autotuning.enabled": "not supported yet",
        "nebula": "ignored",
        "gradient_clipping": "used",
        "wall_clock_breakdown": "inert",
        "train_batch_size": "used",
    }


def test_remarks_explain():
    rows = table()
    assert rows["zero_optimization.stge"].remark == "unknown key; did you mean 'zero_optimization.stage'?"
    assert rows["zero_optimization.stage3_max_live_parameters"].remark == "inert at stage 2"
    assert rows["bf16.enabled"].remark == "comes from Trainer(precision=...)"
    assert rows["autotuning.enabled"].remark == "true is not supported yet; set it to false"
    assert rows["zero_optimization.prefetch_bucket_size"].value == 5


def test_facts_show_conflicts_and_what_auto_becomes():
    rows = table(facts=Facts(world_size=2, precision="bf16-mixed", gradient_clip_val=2.0))
    assert rows["bf16.enabled"].remark == "becomes true"
    assert rows["train_batch_size"].status == "error"
    assert rows["gradient_clipping"].status == "error"
    assert "Trainer(gradient_clip_val=1.0)" in rows["gradient_clipping"].remark


def test_the_stage_of_the_strategy_decides_what_is_inert():
    data = {"zero_optimization": {"stage3_max_live_parameters": 5}}
    assert table(data, Facts(stage=3))["zero_optimization.stage3_max_live_parameters"].status == "used"
    assert table(data, Facts(stage=1))["zero_optimization.stage3_max_live_parameters"].remark == "inert at stage 1"


def test_problems_without_a_key_get_rows_of_their_own():
    rows = table({"optimizer": {"params": {"lr": 1}}})
    assert rows["optimizer.type"].status == "error"


def test_unresolved_autos_are_errors_only_once_the_run_is_known():
    data = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    assert table(data)["optimizer.params.lr"].status == "auto"
    assert "the module" in table(data)["optimizer.params.lr"].remark
    assert table(data, Facts(world_size=1))["optimizer.params.lr"].status == "error"


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_table_is_drawn_with_and_without_rich(with_rich, monkeypatch):
    if not with_rich:
        for name in ("rich", "rich.table", "rich.console", "rich.text"):
            monkeypatch.setitem(sys.modules, name, None)
    text = render(check_table(DATA), width=200)
    for row in check_table(DATA):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{row.key} "))
        assert row.status in line
        assert row.remark in line


def test_rows_carry_the_names_the_user_wrote():
    data = {
        "bfloat16": {"enabled": "auto", "chck_grad_overflow": True},
        "zero_optimization": {"prefetch_bucket_size": True, "cpu_offload": True},
        "aio": {"thread_count": 0},
    }
    rows = table(data)
    enabled = rows["bfloat16.enabled"]
    assert enabled.status == "auto"
    assert enabled.remark == "now 'bf16.enabled'; comes from Trainer(precision=...)"
    unknown = rows["bfloat16.chck_grad_overflow"]
    assert unknown.status == "error"
    assert unknown.remark == "unknown key; did you mean 'bf16.check_grad_overflow'?"
    assert rows["zero_optimization.prefetch_bucket_size"].status == "error"
    assert rows["zero_optimization.cpu_offload"].status == "renamed"
    assert rows["aio.thread_count"].remark == "must be at least 1, got 0"
