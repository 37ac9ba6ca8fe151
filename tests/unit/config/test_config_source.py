"""Where a configuration may come from, and what is said when it cannot be read."""

import base64
import copy
import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ds_lightning.config import DeepSpeedConfig, load, resolve
from ds_lightning.config.schema import Fp16Config, OptimizerConfig, ZeroConfig
from ds_lightning.errors import ConfigError

DATA = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "fp16": {"enabled": True}}


def _as_base64(data):
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode()


@pytest.fixture
def written(tmp_path):
    def write(text, name="ds_config.json"):
        path = tmp_path / name
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    return write


def test_every_kind_of_source_gives_the_same_configuration(written, monkeypatch):
    path = written(DATA)
    monkeypatch.setenv("DSL_TEST_DIR", str(path.parent))
    monkeypatch.setenv("HOME", str(path.parent))
    sources = [
        DATA,
        path,
        str(path),
        "$DSL_TEST_DIR/ds_config.json",
        "${DSL_TEST_DIR}/ds_config.json",
        Path("~/ds_config.json"),
        _as_base64(DATA),
        _as_base64(DATA).rstrip("="),
        OmegaConf.create(DATA),
        DeepSpeedConfig(zero_optimization=ZeroConfig(stage=2), fp16=Fp16Config(enabled=True)),
    ]
    for source in sources:
        assert load(source).config == load(DATA).config, source


def test_no_source_is_an_absent_configuration():
    parsed = load(None)
    assert parsed.is_absent
    assert parsed.config == DeepSpeedConfig()
    assert (parsed.given, parsed.autos, parsed.report, parsed.unsupported) == (set(), set(), (), [])


def test_a_parsed_configuration_is_returned_as_it_is():
    parsed = load(DATA)
    assert load(parsed) is parsed


def test_the_dict_of_the_user_is_not_changed_and_not_shared():
    data = {
        "zero_optimization": True,
        "optimizer": {"type": "adam", "params": {"betas": [0.9, 0.99]}},
    }
    before = copy.deepcopy(data)
    parsed = load(data)
    parsed.config.optimizer.params["betas"].append(1)
    resolve(load(data))
    assert data == before


def test_schema_objects_inside_a_dict_are_read():
    assert load({"zero_optimization": ZeroConfig(stage=3)}).config.zero_optimization.stage == 3


def test_only_changed_values_of_a_schema_object_count_as_given():
    parsed = load(DeepSpeedConfig(optimizer=OptimizerConfig(type="Adam", params={"lr": 1.0})))
    assert parsed.given == {
        "optimizer",
        "optimizer.type",
        "optimizer.params",
        "optimizer.params.lr",
    }


def test_hjson_is_read_with_its_comments_and_commas(written):
    path = written('{\n  // stage\n  "zero_optimization": {"stage": 1,},\n}')
    assert load(path).config.zero_optimization.stage == 1


def test_comments_without_hjson_name_the_package_to_install(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = written('{\n  "bf16": {"enabled": true},\n}')
    with pytest.raises(ConfigError, match=r"ds_config\.json:3:1: .*pip install hjson"):
        load(path)


def test_plain_json_needs_no_hjson(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert load(written(DATA)).config == load(DATA).config


def test_broken_json_is_reported_with_path_line_and_column(written):
    path = written('{\n  "fp16": {"enabled": true},\n  "bf16" {}\n}')
    with pytest.raises(ConfigError, match=rf"{path}:3:10: broken JSON"):
        load(path)


@pytest.mark.parametrize("name", ["ds_config.json", "ds_config.hjson"])
def test_duplicate_keys_are_named_with_their_lines(written, name):
    comma = "," if name.endswith("hjson") else ""
    path = written(f'{{\n "bf16": {{}},\n "fp16": {{}},\n "bf16": {{}}{comma}\n}}', name)
    with pytest.raises(ConfigError, match=rf"{path}: given twice in one object: 'bf16' \(line 2, 4\)"):
        load(path)


def test_a_missing_file_suggests_its_neighbour(written):
    path = written(DATA)
    with pytest.raises(ConfigError, match=r"no configuration file at .*did you mean 'ds_config.json'"):
        load(str(path.with_name("ds_confg.json")))


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the directory .*nowhere does not exist"):
        load(tmp_path / "nowhere" / "ds_config.json")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a directory; name the JSON file"):
        load(tmp_path)


def test_an_unset_environment_variable_is_named(monkeypatch):
    monkeypatch.delenv("DSL_NOT_SET", raising=False)
    with pytest.raises(ConfigError, match="environment variable DSL_NOT_SET is not set"):
        load("$DSL_NOT_SET/ds_config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("[1]", "one JSON object, got a list"), ("null", "got null")],
)
def test_a_file_without_an_object_is_refused(written, text, message):
    with pytest.raises(ConfigError, match=message):
        load(written(text))


@pytest.mark.parametrize("source", [3, ["a"], True])
def test_other_types_are_refused(source):
    with pytest.raises(ConfigError, match="a configuration can be"):
        load(source)


def test_keys_are_strings():
    with pytest.raises(ConfigError, match="keys of a configuration are strings, got 1"):
        load({"fp16": {1: 2}})


def test_a_missing_omegaconf_value_is_named():
    with pytest.raises(ConfigError, match=r"zero_optimization.stage"):
        load(OmegaConf.create({"zero_optimization": {"stage": "???"}}))


def test_omegaconf_interpolations_are_resolved():
    source = OmegaConf.create({"n": {"a": 3}, "zero_optimization": {"stage": "${n.a}"}})
    assert load({"zero_optimization": source.zero_optimization}).config.zero_optimization.stage == 3
