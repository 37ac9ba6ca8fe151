"""Configurations people use: each loads unchanged."""

import json
from pathlib import Path

import pytest

from ds_lightning.config import Facts, check_table, load, resolve
from ds_lightning.errors import ConfigError

FILES = sorted((Path(__file__).parents[2] / "data" / "ds_configs").glob("*.json"))
UNSUPPORTED = {
    "adam": set(),
    "amp": {"amp.enabled"},
    "autotuning": {"autotuning.enabled"},
    "data_efficiency": {"data_efficiency.enabled"},
    "full_zero3_nvme": set(),
    "minimal_fp16": set(),
    "onebit_adam": set(),
    "onebit_lamb": set(),
    "sparse_attention_fixed": {"sparse_attention"},
    "zero2_auto": set(),
    "zero3_auto": set(),
    "zero_one_adam": set(),
}
FACTS = Facts(
    world_size=2,
    accumulate_grad_batches=1,
    accumulate_is_default=True,
    micro_batch_size=4,
    precision="32-true",
    precision_is_default=True,
    hidden_size=64,
    max_steps=100,
    optimizer_defaults={"lr": 1e-3},
)


def without_unbuilt(data):
    """The configuration without what is not built yet, to see the rest of it resolve."""
    for name in (
        "amp",
        "autotuning",
        "data_efficiency",
        "sparse_attention",
    ):
        data.pop(name, None)
    return data


def test_all_files_are_here():
    assert {path.stem for path in FILES} == set(UNSUPPORTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_and_says_what_is_missing(path):
    parsed = load(path)
    assert {key for key, _ in parsed.unsupported} == UNSUPPORTED[path.stem]
    if parsed.unsupported:
        with pytest.raises(ConfigError, match="not supported yet"):
            resolve(parsed, FACTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_rest_of_it_resolves(path):
    data = without_unbuilt(json.loads(path.read_text()))
    assert resolve(load(data), FACTS).train_batch_size in (8, 16)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_table_has_no_errors(path):
    assert [row for row in check_table(path, FACTS) if row.status == "error"] == []


def test_the_large_example_means_what_it_says():
    data = without_unbuilt(json.loads(next(p for p in FILES if p.stem == "full_zero3_nvme").read_text()))
    resolved = resolve(load(data), FACTS)
    assert (resolved.stage, resolved.precision, resolved.gradient_accumulation_steps) == (
        3,
        "bf16-mixed",
        2,
    )
    assert resolved.zero_optimization.sub_group_size == 10**12
    assert resolved.communication_data_type == "fp32"
    assert resolved.aio.intra_op_parallelism == 1
