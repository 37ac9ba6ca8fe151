"""Every file of conf/ composes, says what the schema says, and is there for any Hydra app."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from ds_lightning.callbacks import EMA
from ds_lightning.config import load
from ds_lightning.config import schema as known
from ds_lightning.config.arguments import with_offload
from ds_lightning.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
OPTIONS = sorted((file.parent.name, file.stem) for file in CONF.glob("*/*.yaml") if not file.stem.startswith("_"))
# Options that ask for a value, with one.
WANTED = {
    ("model", "custom"): "model._target_=ds_lightning.demo.ByteGPT",
    ("data", "custom"): "data._target_=ds_lightning.demo.StdlibText",
    ("strategy", "ds_config"): "strategy.config=ds_config.json",
}


@pytest.fixture(autouse=True)
def _hydra():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def _ds_config(*overrides: str) -> dict:
    return instantiate(compose("config", list(overrides)).strategy.config, _convert_="all")


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda word: word)
def test_every_option_composes_and_resolves(group, option):
    overrides = [f"{group}={option}"]
    if (group, option) in WANTED:
        overrides.append(WANTED[group, option])
    config = compose("config", overrides)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _targets(node: DictConfig) -> list[str]:
    found = []
    for key, value in node.items():
        if key == "_target_" and value is not None:
            found.append(value)
        elif isinstance(value, DictConfig):
            found.extend(_targets(value))
    return found


@pytest.mark.parametrize("strategy", ["zero", "ddp"])
def test_every_target_exists(strategy):
    config = compose("config", [f"strategy={strategy}"])
    for target in _targets(config):
        if not target.endswith("from_groups"):
            get_class(target)


def test_averages_are_one_word_away():
    callbacks = compose("config", ["callbacks=ema", "callbacks.ema.decay=0.99"]).callbacks
    assert set(compose("config").callbacks) < set(callbacks)
    assert type(instantiate(callbacks.ema)) is EMA


def _keys(group: str, option: str, *path: str) -> set[str]:
    node = compose("config", [f"{group}={option}"])[group]
    for name in path:
        node = node[name]
    return set(node)


def _names(block: type) -> set[str]:
    return {field.name for field in fields(block)}


def test_the_groups_list_exactly_the_keys_of_the_schema():
    deprecated = {"cpu_offload_use_pin_memory", "grad_hooks", "legacy_stage1"}
    offload = {"offload_optimizer", "offload_param"}
    zero = _names(known.ZeroConfig) - deprecated - offload
    assert _keys("zero", "stage0") == _keys("zero", "stage3") == zero
    assert _keys("zero", "stage0", "leaf_module") == _names(known.LeafModuleConfig)
    assert _keys("offload", "none") == offload
    assert _keys("offload", "nvme", "offload_optimizer") == _names(known.OffloadOptimizerConfig)
    assert _keys("offload", "nvme", "offload_param") == _names(known.OffloadParamConfig)
    named, enabled_by_name = {"name", "plugin"}, {"enabled"}
    assert _keys("precision", "fp16") - named == _names(known.Fp16Config) - enabled_by_name
    assert _keys("precision", "bf16") - named == _names(known.Bf16Config) - enabled_by_name
    activation = _names(known.ActivationCheckpointingConfig)
    assert _keys("activation_checkpointing", "none") == activation


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_is_chosen_by_option_or_by_key(stage):
    by_option = _ds_config(f"zero=stage{stage}")
    by_key = _ds_config(f"zero.stage={stage}")
    assert by_option == by_key
    assert by_option["zero_optimization"] == {"stage": stage}
    assert load(by_option).config.zero_optimization.stage == stage


def test_keys_reach_the_ds_config():
    config = _ds_config(
        "zero=stage3",
        "zero.stage3_prefetch_bucket_size=1e6",
        "precision=fp16",
        "precision.initial_scale_power=8",
        "optimizer=adamw",
        "optimizer.params.lr=3e-4",
        "+strategy.config.steps_per_print=5",
    )
    loaded = load(config).config
    assert loaded.zero_optimization.stage3_prefetch_bucket_size == 1_000_000
    assert (loaded.fp16.enabled, loaded.fp16.initial_scale_power) == (True, 8)
    assert (loaded.optimizer.type, loaded.optimizer.params["lr"]) == ("AdamW", 3e-4)
    assert loaded.steps_per_print == 5


def test_what_the_default_options_leave_alone_is_absent():
    assert _ds_config() == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("option", ["cpu", "nvme"])
def test_offload_composes_with_a_stage_given_as_a_key(option):
    path = ["offload.offload_optimizer.nvme_path=disk"] if option == "nvme" else []
    config = _ds_config("zero.stage=3", f"offload={option}", *path)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == option


def test_one_folder_serves_both_kinds_of_swap_files():
    config = _ds_config("offload=nvme", "offload.offload_optimizer.nvme_path=disk", "offload.offload_param.device=nvme")
    zero = config["zero_optimization"]
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "disk"}
    assert zero["offload_optimizer"]["pipeline_read"] is True


def test_a_variable_names_the_folder_of_swap_files(monkeypatch):
    monkeypatch.setenv("DS_LIGHTNING_NVME_PATH", "/a")
    zero = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "nvme_path": "/b"}}
    found = with_offload({"zero_optimization": zero}, None, None, None)["zero_optimization"]
    assert [found[key]["nvme_path"] for key in zero] == ["/a", "/b"]
    found = with_offload({"zero_optimization": zero}, None, None, "/c")["zero_optimization"]
    assert [found[key]["nvme_path"] for key in zero] == ["/c", "/c"]
    plain = {"bf16": {"enabled": True}}
    assert with_offload(plain, None, None, None) is plain
    with pytest.raises(ConfigError, match="written out"):
        with_offload({"zero_optimization": True}, "cpu", None, None)


def test_a_wrong_value_is_refused_by_the_schema():
    with pytest.raises(ConfigError, match="stage"):
        load(_ds_config("zero.stage=7"))


# What follows starts Hydra apps of their own, as a user of another package would.


@pytest.fixture
def environment(tmp_path):
    """An environment that finds the plugin, as an installation does."""
    path = [str(ROOT), *sys.path]
    try:
        installed = importlib.util.find_spec("hydra_plugins.ds_lightning") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        site = tmp_path / "site"
        site.mkdir()
        (site / "hydra_plugins").symlink_to(ROOT / "ds_lightning" / "hydra_plugins")
        path.insert(0, str(site))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _app(tmp_path: Path, environment: dict[str, str], body: str, *overrides: str) -> str:
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "app.yaml").write_text("defaults:\n  - zero: stage3\n  - strategy: zero\n")
    app = tmp_path / "app.py"
    app.write_text(
        "import sys\n"
        "import hydra\n"
        "@hydra.main(config_path='conf', config_name='app', version_base='1.3')\n"
        f"def main(config):\n{body}\n"
        "main()\n"
    )
    run = subprocess.run(
        [sys.executable, str(app), *overrides],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_any_app_finds_the_groups_and_hydra_starts_without_torch(tmp_path, environment):
    body = "    print(config.zero.stage, config.strategy.checkpoint, 'torch' in sys.modules)"
    assert _app(tmp_path, environment, body, "zero.stage=1") == "1 full False\n"


def test_any_app_knows_the_strategy_names_without_importing_us(tmp_path, environment):
    body = (
        "    from lightning.pytorch.strategies import StrategyRegistry\n"
        "    import lightning.pytorch\n"
        "    names = [n for n in StrategyRegistry.available_strategies() if 'dszero' in n]\n"
        "    hooks = [f for f in sys.meta_path if type(f).__name__ == '_AfterImport']\n"
        "    print(sorted(names)[:4], hooks, type(lightning.pytorch.__loader__).__name__)"
    )
    expected = "['dszero0', 'dszero1', 'dszero1_offload', 'dszero2'] [] SourceFileLoader\n"
    assert _app(tmp_path, environment, body) == expected
