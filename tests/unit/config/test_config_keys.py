"""Names, types and ranges of single keys; old names; and that all mistakes come at once."""

import math

import pytest

from ds_lightning.config import DeepSpeedConfig, load
from ds_lightning.config.schema import Fp16Config, ZeroConfig
from ds_lightning.config.schema.base import Block, value_at, walk
from ds_lightning.errors import ConfigError

OPTIONAL_BLOCKS = (
    "sparse_attention",
    "zero_optimization.zenflow",
    "zero_optimization.zeropp_loco_param",
    "autotuning.arg_mappings",
)


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def entry(parsed, key):
    return next(item for item in parsed.report if item.key == key)


@pytest.mark.parametrize(
    ("path", "guess"),
    [
        ("zero_optimisation", "'zero_optimization'"),
        ("zero_optimization.stge", "'zero_optimization.stage'"),
        (
            "zero_optimization.stage3_max_live_parameter",
            "'zero_optimization.stage3_max_live_parameters'",
        ),
        ("zero_optimization.aio", "belongs at 'aio'"),
        ("fp16.enable", "'fp16.enabled'"),
        ("overlap_comm", "belongs at 'zero_optimization.overlap_comm'"),
        ("zero_optimization.offload_param.devise", "'zero_optimization.offload_param.device'"),
        (
            "zero_optimization.offload_param.pipeline_read",
            "belongs at 'zero_optimization.offload_optimizer",
        ),
        ("bf16.check_overflow", "'bf16.check_grad_overflow'"),
        ("activation_checkpointing.partition_activation", "partition_activations'"),
        ("data_efficiency.data_sampling.curiculum_learning", "curriculum_learning'"),
        ("checkpoint.writer.tpye", "'checkpoint.writer.type'"),
        ("aio.thread_cnt", "'aio.thread_count'"),
        ("gradient_acumulation_steps", "'gradient_accumulation_steps'"),
        ("train_micro_batch_size", "'train_micro_batch_size_per_gpu'"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_a_guess(path, guess):
    with pytest.raises(ConfigError) as raised:
        load(nested(path, {} if path.endswith(("aio", "learning")) else 1))
    assert f"{path}: unknown key" in str(raised.value)
    assert guess in str(raised.value)


def test_a_key_like_nothing_gets_no_guess_but_the_names():
    with pytest.raises(ConfigError, match=r"bf16.zzzzqqqq: unknown key; 'bf16' knows 'enabled'"):
        load({"bf16": {"zzzzqqqq": 1}})


def test_dotted_keys_get_a_guess():
    with pytest.raises(ConfigError, match=r"fp16\.enable: unknown key; did you mean 'fp16.enabled'"):
        load({"fp16.enable": True})


@pytest.mark.parametrize(("name", "guess"), [("wieght_decay", "weight_decay"), ("beta", "betas")])
def test_unknown_optimizer_arguments_are_refused(name, guess):
    with pytest.raises(ConfigError, match=f"optimizer.params.{name}: .*did you mean 'optimizer.params.{guess}'"):
        load({"optimizer": {"type": "AdamW", "params": {name: 0.1}}})


def test_arguments_are_checked_whichever_of_type_and_params_comes_first():
    with pytest.raises(ConfigError, match="unknown argument of Adam"):
        load({"optimizer": {"params": {"lrr": 1}, "type": "adam"}})


def test_unknown_scheduler_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"unknown argument of WarmupLR; did you mean .*warmup_num_steps"):
        load({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps_num": 1}}})


def test_all_problems_are_raised_together_and_numbered():
    with pytest.raises(ConfigError) as raised:
        load({"zero_optimization": {"stge": 1, "stage": 7}, "fp16": {"enabled": 1}, "amp": 3, "x": 0})
    lines = str(raised.value).splitlines()
    assert lines[0] == "5 problems in the config dict:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3", "4", "5"]
    for key in ("zero_optimization.stge", "zero_optimization.stage", "fp16.enabled", "amp", "x"):
        assert any(f" {key}: " in line for line in lines)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("zero_optimization.reduce_bucket_size", 5e8, 500_000_000),
        ("zero_optimization.reduce_bucket_size", "5e8", 500_000_000),
        ("zero_optimization.sub_group_size", 1e12, 10**12),
        ("steps_per_print", 1e5, 100_000),
        ("train_batch_size", 8.0, 8),
        ("gradient_clipping", 1, 1.0),
        ("gradient_clipping", "0.5", 0.5),
        ("fp16.loss_scale", "128", 128.0),
        ("fp16.enabled", "true", True),
        ("fp16.enabled", "False", False),
        ("optimizer.params.lr", "1e-5", 1e-5),
        ("optimizer.params.betas", ["0.9", 0.999], [0.9, 0.999]),
        ("optimizer.params.adam_w_mode", "false", False),
        ("communication_data_type", "bfloat16", "bf16"),
        ("communication_data_type", "FP32", "fp32"),
        ("gradient_allreduce_op", "MEAN", "mean"),
        ("checkpoint.tag_validation", "WARN", "Warn"),
        ("optimizer.type", "adamw", "AdamW"),
        ("optimizer.type", "sgd", "SGD"),
        ("zero_optimization.leaf_module.classes", "Block", ["Block"]),
        ("zero_optimization.offload_optimizer.device", "CPU", "cpu"),
    ],
)
def test_values_are_read_generously(path, value, expected):
    data = nested(path, value)
    if path.startswith("optimizer.params"):
        data["optimizer"]["type"] = "Adam"
    found = value_at(load(data).config, path)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("path", "value"),
    [("train_batch_size", "8"), ("fp16.enabled", "true"), ("gradient_clipping", "1e-1")],
)
def test_reading_a_string_as_something_else_is_reported(path, value):
    assert f"the string '{value}' is read as a" in entry(load(nested(path, value)), path).remark


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "zero_optimization.reduce_bucket_size",
            3774873.6,
            "whole number, got 3774873.6; round it to 3774874",
        ),
        ("zero_optimization.reduce_bucket_size", 0, "at least 1, got 0"),
        ("zero_optimization.reduce_bucket_size", -1, "at least 1"),
        ("zero_optimization.stage", 4, "at most 3, got 4"),
        ("zero_optimization.stage", -1, "at least 0"),
        ("zero_optimization.stage", True, "whole number, got the boolean true"),
        ("zero_optimization.stage", "two", "whole number, got the string 'two'"),
        ("zero_optimization.overlap_comm", 1, "true or false, got 1"),
        ("zero_optimization.overlap_comm", "yes", "true or false, got the string 'yes'"),
        (
            "zero_optimization.offload_optimizer.device",
            "disk",
            "'none', 'cpu' or 'nvme', got the string 'disk'",
        ),
        ("zero_optimization.offload_optimizer.device", "ncme", "did you mean 'nvme'"),
        ("zero_optimization.offload_optimizer", "cpu", "expected an object, got the string 'cpu'"),
        ("zero_optimization.offload_optimizer.ratio", 1.5, "at most 1"),
        ("zero_optimization", "on", "expected an object"),
        ("zero_optimization.leaf_module.names", 3, "expected a list, got 3"),
        ("zero_optimization.leaf_module.names", ["a", 1], "entry 1: expected a string, got 1"),
        ("gradient_clipping", True, "a number, got the boolean true"),
        ("gradient_clipping", -0.1, "at least 0"),
        ("gradient_clipping", math.nan, "finite"),
        ("fp16.loss_scale", False, "boolean false"),
        ("fp16.loss_scale", math.inf, "finite"),
        ("fp16.loss_scale", math.nan, "finite"),
        ("fp16.loss_scale", "nan", "finite"),
        ("fp16.loss_scale", -1, "at least 0"),
        ("fp16.loss_scale", "big", "expected a number"),
        ("fp16.loss_scale_window", 0, "above 0 with a dynamic loss scale"),
        ("fp16.loss_scale_window", True, "boolean true"),
        ("fp16.loss_scale_window", 1.5, "whole number"),
        ("fp16.min_loss_scale", 0, "above 0"),
        ("fp16.min_loss_scale", math.inf, "finite"),
        ("fp16.initial_scale_power", True, "boolean"),
        ("fp16.initial_scale_power", 10**400, "finite"),
        ("train_batch_size", 0, "at least 1"),
        ("communication_data_type", "int8", "'fp32', 'fp16' or 'bf16'"),
        ("gradient_allreduce_op", "max", "'mean' or 'sum'"),
        ("checkpoint.tag_validation", "maybe", "'Ignore', 'Warn' or 'Fail'"),
        ("optimizer.params.lr", True, "boolean true"),
        ("optimizer.params.lr", "fast", "expected a number"),
        ("optimizer.params.lr", -1.0, "at least 0"),
        ("optimizer.params.betas", [0.9, True], "entry 1: expected a number, got the boolean true"),
        ("optimizer.params.betas", [0.9, 1.5], r"two numbers in \[0, 1\)"),
        ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
        ("optimizer.type", "Addam", "no optimizer is called 'Addam'; did you mean 'Adam'"),
        ("optimizer.type", 1, "expected a string"),
        ("tensorboard.job_name", 3, "expected a string, got 3"),
    ],
)
def test_wrong_values_are_refused_by_name(path, value, message):
    data = nested(path, value)
    if path.startswith("optimizer.params"):
        data["optimizer"]["type"] = "Adam"
    if path.startswith("fp16"):
        data["fp16"]["enabled"] = True
    with pytest.raises(ConfigError, match=message) as raised:
        load(data)
    assert path in str(raised.value)


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("rest", [{"enabled": False}, {"enabled": True, "loss_scale": 128}])
def test_dynamic_scale_ranges_do_not_matter_when_it_is_static_or_off(name, rest):
    assert getattr(load({"fp16": {**rest, name: 0}}).config.fp16, name) == 0


@pytest.mark.parametrize("name", ["loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"])
def test_one_fp16_key_leaves_the_initial_scale_alone(name):
    fp16 = load({"fp16": {"enabled": True, name: 2}}).config.fp16
    assert fp16.initial_scale_power == 16


@pytest.mark.parametrize("value", [None, {}])
@pytest.mark.parametrize("path", ["zero_optimization.offload_param", "scheduler", "optimizer", "fp16", "comms_logger"])
def test_null_and_empty_blocks_hold_defaults(path, value):
    parsed = load(nested(path, value))
    assert parsed.config == DeepSpeedConfig()
    assert (path in parsed.given) == (value == {})
    assert parsed.unsupported == []


def test_an_empty_sparse_attention_block_is_present():
    assert load({"sparse_attention": None}).config.sparse_attention is None
    assert load({"sparse_attention": {}}).config.sparse_attention.mode == "fixed"


def test_null_is_accepted_for_every_key():
    for path, rule in walk(DeepSpeedConfig):
        if "*" not in path and not path.startswith(OPTIONAL_BLOCKS):
            assert load(nested(path, None)).config == DeepSpeedConfig(), rule.doc


def test_defaults_are_those_of_the_specification():
    zero = DeepSpeedConfig().zero_optimization
    assert zero.stage3_prefetch_bucket_size == 50_000_000
    assert zero.stage3_param_persistence_threshold == 100_000
    assert zero.sub_group_size == 10**9
    assert zero.overlap_comm is None
    assert zero.offload_param.pin_memory
    assert zero.offload_param.device == "none"


def test_bf16_lets_non_finite_gradients_through_unless_asked():
    assert not load({"bf16": {"enabled": True}}).config.bf16.check_grad_overflow
    assert load({"bf16": {"enabled": True, "check_grad_overflow": True}}).config.bf16.check_grad_overflow


@pytest.mark.parametrize(
    ("old", "new", "value", "expected"),
    [
        (
            "zero_optimization.prefetch_bucket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            7,
            7,
        ),
        (
            "zero_optimization.max_live_parameters",
            "zero_optimization.stage3_max_live_parameters",
            7,
            7,
        ),
        (
            "zero_optimization.cpu_offload",
            "zero_optimization.offload_optimizer.device",
            True,
            "cpu",
        ),
        (
            "zero_optimization.cpu_offload",
            "zero_optimization.offload_optimizer.device",
            False,
            "none",
        ),
        (
            "zero_optimization.cpu_offload_param",
            "zero_optimization.offload_param.device",
            True,
            "cpu",
        ),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
            True,
        ),
        ("aio.thread_count", "aio.intra_op_parallelism", 4, 4),
        ("elasticity.prefer_large_batch", "elasticity.prefer_larger_batch", False, False),
        ("bfloat16.enabled", "bf16.enabled", True, True),
    ],
)
def test_old_names_are_read_and_reported(old, new, value, expected):
    parsed = load(nested(old, value))
    assert value_at(parsed.config, new) == expected
    assert entry(parsed, old).status == "renamed"
    assert "now '" in entry(parsed, old).remark


def test_an_old_name_and_its_replacement_together_are_refused():
    with pytest.raises(ConfigError, match="prefetch_bucket_size: means the same as"):
        load({"zero_optimization": {"stage3_prefetch_bucket_size": 5, "prefetch_bucket_size": 5}})
    with pytest.raises(ConfigError, match=r"cpu_offload: means the same as 'zero_optimization.offload_opt"):
        load({"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "cpu_offload": True}})
    with pytest.raises(ConfigError, match="bfloat16: means the same as 'bf16'"):
        load({"bf16": {}, "bfloat16": {}})


def test_cpu_offload_wants_a_boolean():
    with pytest.raises(ConfigError, match="cpu_offload: expected true or false, got the string 'cpu'"):
        load({"zero_optimization": {"cpu_offload": "cpu"}})


@pytest.mark.parametrize(
    ("data", "stage", "bucket"),
    [
        ({"zero_optimization": True}, 1, 500_000_000),
        ({"zero_optimization": True, "allgather_size": 2e8}, 1, 200_000_000),
        ({"zero_optimization": False}, 0, 500_000_000),
    ],
)
def test_the_boolean_form_of_zero_optimization(data, stage, bucket):
    parsed = load(data)
    zero = parsed.config.zero_optimization
    assert (zero.stage, zero.allgather_bucket_size, parsed.stage) == (stage, bucket, stage)
    assert entry(parsed, "zero_optimization").status == "renamed"


def test_dead_keys_are_accepted_and_reported_as_ignored():
    parsed = load(
        {
            "zero_optimization": {"grad_hooks": True, "cpu_offload_use_pin_memory": True},
            "hybrid_engine": {"anything": {"goes": 1}},
            "pipeline": {},
            "tensor_parallel": {"autotp_size": "auto"},
        }
    )
    assert {item.status for item in parsed.report} == {"ignored"}
    assert parsed.unsupported == []
    assert parsed.autos == set()


def test_auto_is_accepted_for_every_scalar():
    for path, rule in walk(DeepSpeedConfig):
        default = value_at(DeepSpeedConfig(), path)
        if "*" in path or path.startswith(OPTIONAL_BLOCKS) or rule.status == "ignored":
            continue
        if isinstance(default, (Block, dict)) or rule.selectors is not None:
            continue
        parsed = load(nested(path, "auto"))
        assert (parsed.autos, path in parsed.given) == ({path}, False)
        assert parsed.config == DeepSpeedConfig()


def test_schema_objects_check_and_normalise_themselves():
    assert Fp16Config(loss_scale="128").loss_scale == 128.0
    assert ZeroConfig(reduce_bucket_size=5e8).reduce_bucket_size == 500_000_000
    assert Fp16Config(enabled="auto").enabled == "auto"
    with pytest.raises(ConfigError, match=r"ZeroConfig.stage: must be at most 3, got 9"):
        ZeroConfig(stage=9)


def test_every_key_is_documented():
    assert [path for path, rule in walk(DeepSpeedConfig) if not rule.doc.endswith(".")] == []
