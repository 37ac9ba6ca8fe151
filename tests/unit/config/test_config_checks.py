"""Values that do not go together, and what is not built yet."""

import pytest

from ds_lightning.config import Facts, load, resolve
from ds_lightning.errors import ConfigError

MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}


def stage(number, **rest):
    return {"zero_optimization": {"stage": number, **rest}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        (
            {"amp": {"enabled": True}, "fp16": {"enabled": True}},
            "amp.enabled: does not go with fp16",
        ),
        (
            {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
            "torch_autocast.enabled",
        ),
        ({"bf16": {"bf16_optimizer_states": True}}, "needs bf16.bf16_master_weights_and_grads"),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            "data_types.param_dtype",
        ),
        (stage(2, offload_param={"device": "cpu"}), "offload_param.device: cpu needs stage 3"),
        (stage(2, cpu_offload_param=True), "offload_param.device: cpu needs stage 3"),
        (stage(3, offload_optimizer={"device": "nvme"}), "offload_optimizer.nvme_path"),
        (stage(0, offload_optimizer={"device": "cpu"}), "cpu needs stage 1, 2 or 3"),
        (stage(0, offload_optimizer={"device": "nvme", "nvme_path": "/x"}), "nvme needs stage 1, 2 or 3"),
        (stage(0, offload_optimizer={"super_offload": True}), "super_offload: needs stage 1, 2 or 3"),
        (
            stage(3, offload_optimizer={"device": "nvme", "nvme_path": "/x", "super_offload": True}),
            "offload_optimizer.device=cpu: the stage is 3, the device nvme",
        ),
        (stage(2, legacy_stage1=True), "legacy_stage1"),
        (stage(3, zero_quantized_gradients=True, reduce_scatter=False), "reduce_scatter=true"),
        (stage(3, zeropp_loco_param={}), "needs zero_optimization.zero_quantized_gradients=true"),
        (
            stage(3, zero_quantized_nontrainable_weights=True, offload_param={"device": "cpu"}),
            "does not go with offload_param",
        ),
        (stage(3, mics_shard_size=2, zero_hpz_partition_size=2), "does not go with zero_hpz_partition_size"),
        (stage(3, mics_shard_size=2, zero_quantized_gradients=True), "does not go with zero_quantized_gradients"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: is missing"),
        ({"scheduler": {"params": {"warmup_min_lr": 1}}}, "scheduler.type: is missing"),
        ({"scheduler": {"type": "WarmpLR"}}, "did you mean 'WarmupLR'"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps: WarmupDecayLR needs it"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "at least 1, got 0",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "Linear"}}},
            "scheduler.params.warmup_type: must be 'log' or 'linear', got 'Linear'; did you mean 'linear'?",
        ),
        (
            {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
            "scheduler.params.lr_range_test_step_size: must be at least 1, got 0",
        ),
        (
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1},
                }
            },
            "scheduler.params.cycle_second_step_size: must be at least 0, got -1",
        ),
        (
            {"optimizer": {"type": "Muon"}, **stage(3, offload_optimizer={"device": "nvme", "nvme_path": "x"})},
            "Muon looks at whole tensors, .* set it to 'cpu'",
        ),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad"),
        (
            {
                "activation_checkpointing": {
                    "partition_activations": True,
                    "contiguous_memory_optimization": True,
                }
            },
            "number_checkpoints",
        ),
        (
            {
                "activation_checkpointing": {
                    "number_checkpoints": 2,
                    "contiguous_memory_optimization": True,
                }
            },
            "needs activation_checkpointing.partition_activations",
        ),
        (
            {"elasticity": {"enabled": True}, "train_batch_size": 4},
            "train_batch_size: is chosen by elasticity",
        ),
        ({"elasticity": {"enabled": True, "min_gpus": 5, "max_gpus": 4}}, "elasticity.min_gpus"),
        ({"fp16": {"fp16_master_weights_and_grads": True}, **stage(0)}, "needs stage 1, 2 or 3"),
        (
            {"bf16": MASTERS, **stage(2, offload_optimizer={"device": "nvme", "nvme_path": "x"})},
            "bf16_master_weights_and_grads: does not go with offload_optimizer.device=nvme",
        ),
        ({"bf16": MASTERS, **stage(2), "optimizer": {"type": "Lamb"}}, "does not go with Lamb"),
        ({"bf16": MASTERS, **stage(2), "optimizer": {"type": "Muon"}}, "does not go with Muon"),
    ],
)
def test_conflicts_are_refused_when_the_configuration_is_read(data, message):
    with pytest.raises(ConfigError, match=message):
        load(data)


def test_masters_of_16_bits_go_with_optimizers_in_host_memory():
    assert load({"bf16": MASTERS, **stage(2, offload_optimizer={"device": "cpu"})}).given


@pytest.mark.parametrize("scale", [0, 8])
def test_lamb_takes_a_static_loss_scale(scale):
    data = {"optimizer": {"type": "Lamb"}, "fp16": {"enabled": True, "loss_scale": scale}}
    assert resolve(load(data), Facts()).optimizer.type == "Lamb"


@pytest.mark.parametrize(
    ("kind", "number", "allowed"),
    [
        *((kind, number, "stage 0 only") for kind in ("ZeroOneAdam", "OneBitLamb") for number in (1, 2, 3)),
        *((kind, number, "stages 0 and 1") for kind in ("OneBitAdam", "onebitadam") for number in (2, 3)),
    ],
)
def test_compressed_optimizers_do_not_go_with_sharding(kind, number, allowed):
    data = {"optimizer": {"type": kind}}
    with pytest.raises(ConfigError, match=f"works at {allowed}"):
        load({**data, **stage(number)})
    with pytest.raises(ConfigError, match=f"works at {allowed}"):
        resolve(load(data), Facts(stage=number))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"comm_backend_name": "tcp"}, "no backend that OneBitAdam knows"),
        ({"freeze_step": 0}, "freeze_step: must be at least 1"),
        ({"amsgrad": True}, "amsgrad"),
        ({"freeze_stop": 3}, "freeze_step"),
    ],
)
def test_parameters_of_compressed_optimizers_are_checked(params, message):
    with pytest.raises(ConfigError, match=message):
        load({"optimizer": {"type": "OneBitAdam", "params": params}})


@pytest.mark.parametrize("name", ["nccl", "gloo", "mpi", "hccl", "compressed"])
def test_a_communication_backend_is_reported_as_the_runs_own(name):
    data = {"optimizer": {"type": "OneBitAdam", "params": {"comm_backend_name": name, "cuda_aware": True}}}
    notes = " ".join(resolve(load(data), Facts()).notes)
    assert "communication is the run's own): optimizer.params.comm_backend_name, optimizer.params.cuda_aware" in notes


def test_what_does_not_go_with_compressed_optimizers_is_refused():
    data = {"optimizer": {"type": "OneBitAdam"}, "gradient_allreduce_op": "sum"}
    with pytest.raises(ConfigError, match="which averages momenta"):
        load(data)
    with pytest.raises(ConfigError, match="keeps its states where it computes"):
        load({"optimizer": {"type": "OneBitAdam"}, **stage(1, offload_optimizer={"device": "cpu"})})


OFFLOADS = [
    ("none", "cpu", "offload_param.device=cpu moves frozen parameters alone"),
    ("cpu", "nvme", "offload_param.device=nvme moves frozen parameters alone"),
    ("cpu", "cpu", "inert without NVMe offload: zero_optimization.offload_optimizer.nvme_path"),
    ("nvme", "nvme", None),
]


@pytest.mark.parametrize(("optimizer", "param", "said"), OFFLOADS)
def test_what_offload_does_not_do_is_said(optimizer, param, said):
    blocks = {
        "offload_optimizer": {"device": optimizer, "nvme_path": "x"},
        "offload_param": {"device": param, "nvme_path": "x"},
    }
    if optimizer != "none":
        blocks["offload_optimizer"]["buffer_count"] = 5
    notes = " ".join(resolve(load({**stage(3, **blocks), "aio": {"queue_depth": 16}}), Facts()).notes)
    if said is None:
        assert "offload" not in notes
    else:
        assert said in notes


def test_stage_checks_wait_for_the_stage():
    parsed = load({"zero_optimization": {"offload_param": {"device": "cpu"}}})
    with pytest.raises(ConfigError, match=r"cpu needs stage 3: .* at stage 2"):
        resolve(parsed, Facts(stage=2))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (stage(2, zenflow={}), "zero_optimization.zenflow"),
        ({"sparse_attention": {}}, "sparse_attention"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled"),
        ({"tensorboard": {"enabled": True}}, "tensorboard.enabled"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled"),
        ({"eigenvalue": {"enabled": True}}, "eigenvalue.enabled"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    ],
)
def test_what_is_not_built_yet_loads_but_does_not_resolve(data, key):
    parsed = load(data)
    assert [name for name, _ in parsed.unsupported] == [key]
    with pytest.raises(ConfigError, match=rf"{key}: .*not supported yet"):
        resolve(parsed)


def test_all_unsupported_features_are_listed_together_with_other_conflicts():
    parsed = load({"autotuning": {"enabled": True}, "eigenvalue": {"enabled": True}, "gradient_clipping": 1.0})
    with pytest.raises(ConfigError, match="3 problems") as raised:
        resolve(parsed, Facts(gradient_clip_val=2.0))
    for key in ("autotuning.enabled", "eigenvalue.enabled", "gradient_clipping"):
        assert f"{key}: " in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [
        {"sparse_gradients": False, "gradient_predivide_factor": 1.0, "scheduler": None},
        stage(3, offload_param={"device": "none"}, zero_hpz_partition_size=1, mics_shard_size=-1),
        {"activation_checkpointing": dict.fromkeys(("partition_activations", "cpu_checkpointing"), False)},
        {"data_types": {"grad_accum_dtype": "float32"}, "aio": {"queue_depth": 16}},
        {"optimizer": {"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9}}},
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}},
        {"scheduler": {"type": "warmuplr", "params": {"warmup_type": "linear"}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        {"comms_logger": {"enabled": False, "verbose": True}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
        {"checkpoint": {"use_node_local_storage": True}, "dataloader_drop_last": True},
    ],
)
def test_what_is_off_or_built_resolves(data):
    parsed = load(data)
    assert parsed.unsupported == []
    resolve(parsed)
