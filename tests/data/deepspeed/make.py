"""Makes the checkpoints beside this file with DeepSpeed itself; run by hand, the tests only read them.

Needs deepspeed (0.19.8 was used, with torch 2.13 and lightning 2.6, on CPU):

    DS_ACCELERATOR=cpu python make.py [name ...]

Each folder holds what `engine.save_checkpoint` wrote, less the copies of its conversion scripts, and `reference.pt`:
values taken from the live engines just before, loadable with `weights_only=True`:
`{"weights": {name: fp32}, "moments": {name: {"exp_avg", "exp_avg_sq"}}, "step", "groups", ...}`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
STEPS = 3


class Tiny(nn.Module):
    """Odd sizes, a tied pair, a frozen and an unused layer, buffers, one element and none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.body = nn.Linear(5, 5)
        self.unused = nn.Linear(2, 3)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.unused.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.linspace(-0.3, 0.7, 5))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden - self.mean.to(hidden.dtype)
        hidden = torch.tanh(self.body(self.frozen(hidden))) * self.gain
        return self.head(hidden)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 7, (4,), generator=draw), torch.randint(0, 7, (4,), generator=draw)


def groups_of(model: nn.Module, trainable_only: bool = False) -> list[dict]:
    chosen = [p for p in model.parameters() if p.requires_grad or not trainable_only]
    return [
        {"params": [p for p in chosen if p.ndim > 1], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for p in chosen if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def config_of(stage: int, precision: str, **zero) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 6}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp32" and stage == 1:
        config["zero_optimization"]["round_robin_gradients"] = True
    return config


CASES: dict[str, dict] = {
    **{f"stage{stage}_fp32": {"stage": stage, "precision": "fp32"} for stage in range(4)},
    **{
        f"stage{stage}_{precision}": {"stage": stage, "precision": precision, "steps": steps}
        for stage in range(4)
        for precision, steps in (("bf16", STEPS), ("fp16", 9))  # fp16 begins with steps that overflow
    },
    "stage1_bf16_fp32acc": {"stage": 1, "precision": "bf16", "accumulate": "fp32"},
    "stage2_fp32_world3": {"stage": 2, "precision": "fp32", "world": 3},
    "stage3_bf16_world3_subgroups": {"stage": 3, "precision": "bf16", "world": 3, "zero": {"sub_group_size": 20}},
    "stage2_fp32_before_first_step": {"stage": 2, "precision": "fp32", "steps": 0},
    "stage2_fp32_exclude_frozen": {"stage": 2, "precision": "fp32", "exclude_frozen": True},
    "universal_stage1": {"stage": 1, "precision": "bf16", "universal": True},
    "universal_stage3": {"stage": 3, "precision": "fp32", "universal": True},
    "lightning_stage2": {"lightning": 2},
    "lightning_stage3": {"lightning": 3},
}


def run(rank: int, world: int, port: int, case: dict, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo", verbose=False)
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True  # slow on a CPU, but it works
    stage, precision = case["stage"], case["precision"]
    config = config_of(stage, precision, **case.get("zero", {}))
    if "accumulate" in case:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    torch.manual_seed(3)
    model = Tiny()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = groups_of(model, trainable_only=stage == 0 and precision != "fp32")
    order = [[names[id(p)] for p in group["params"]] for group in groups]
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    losses = []
    for step in range(case.get("steps", STEPS)):
        tokens, target = batch(step, rank)
        loss = loss_of(engine(tokens), target)
        losses.append(float(loss))
        engine.backward(loss)
        engine.step()
        engine.module.seen.add_(1)
    client = {"epoch_of_mine": 4, "note": ["some", {"state": 1}], "universal_checkpoint_info": {}}
    engine.save_checkpoint(folder, client_state=client, exclude_frozen_parameters=case.get("exclude_frozen", False))
    link_all(engine.optimizer, bool(losses))
    weights, moments = {}, {}
    half = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    for name, parameter in parameters.items():
        if name in frozen or name == "unused.empty":
            weights[name] = frozen.get(name, torch.empty(0, 3)).to(half).float()
            continue
        if stage == 0:
            master, entry = stage0_of(engine, parameter, precision)
        else:
            master = safe_get_full_fp32_param(parameter)
            keys = ("exp_avg", "exp_avg_sq") if losses else ()
            entry = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        weights[name] = master.detach().clone().float()
        if precision == "fp32" and stage < 3:
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=0)
        moments[name] = {key: value.detach().clone().float() for key, value in entry.items() if value is not None}
    weights["head.weight"] = weights["embed.weight"]
    buffers = {key: engine.module.get_buffer(key).detach().clone() for key in ("mean", "seen")}
    reference = {
        "weights": weights,
        "moments": moments,
        "buffers": buffers,
        "frozen": sorted(frozen),
        "groups": order,
        "losses": losses,
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": scale_of(engine.optimizer) if precision == "fp16" else None,
        "stage": stage,
        "world_size": world,
        "precision": precision,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
    }
    if rank == 0:
        torch.save(reference, Path(folder) / "reference.pt")
    torch.distributed.barrier()


def scale_of(optimizer) -> float:
    config = getattr(optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config is not None else optimizer.loss_scaler.cur_scale)


def link_all(optimizer, stepped: bool) -> None:
    """Let the accessors of values see all of them, and the right ones, at stages 1 and 2.

    DeepSpeed links the states after the first group's step, so that those of other groups are missing, and it looks
    for values in the order of registration where `round_robin_gradients` has laid them out in another one.
    """
    if hasattr(optimizer, "round_robin_bit16_groups"):
        optimizer.bit16_groups = optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
    if stepped and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def stage0_of(engine, parameter, precision):
    """Master and state of one parameter where DeepSpeed shards nothing."""
    wrapper = engine.optimizer
    if precision == "fp32":
        return parameter, {k: v for k, v in wrapper.state[parameter].items() if k != "step"}
    for halves, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for half, master in zip(halves, masters, strict=True):
            if half is parameter:
                return master, {k: v for k, v in wrapper.optimizer.state[master].items() if k != "step"}
    raise KeyError(parameter)


def clean(folder: Path) -> None:
    for script in folder.glob("*.py"):
        script.unlink()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_universal(folder: Path) -> None:
    tag = (folder / "latest").read_text().strip()
    from deepspeed.checkpoint import ds_to_universal

    folders = ["--input_folder", str(folder / tag), "--output_folder", str(folder / "universal")]
    workers = ["--num_extract_workers=1", "--num_merge_workers=1"]
    subprocess.run([sys.executable, ds_to_universal.__file__, *workers, *folders], check=True)
    shutil.rmtree(folder / tag)
    (folder / "latest").unlink()


def make_lightning(stage: int, folder: Path) -> None:
    """DeepSpeedStrategy of Lightning, which insists on CUDA where a CPU would do."""
    import lightning.pytorch as pl
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.strategies import deepspeed as module

    module.CUDAAccelerator = CPUAccelerator
    module._validate_device_index_selection = lambda devices: None

    class OnCPU(DeepSpeedStrategy):
        @property
        def root_device(self):
            return torch.device("cpu", self.local_rank)

    class Module(pl.LightningModule):
        def __init__(self, width: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Tiny()

        def training_step(self, batch, index):
            tokens, target = batch
            return loss_of(self.net(tokens), target)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(groups_of(self))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def train_dataloader(self):
            data = [(t, y) for step in range(STEPS) for t, y in zip(*batch(step, 0), strict=True)]
            return torch.utils.data.DataLoader(data, batch_size=2)

        def on_train_end(self):
            link_all(self.trainer.strategy.deepspeed_engine.optimizer, stepped=True)
            weights, moments = {}, {}
            for name, p in self.named_parameters():
                if p.requires_grad and not name.endswith("empty"):
                    weights[name] = safe_get_full_fp32_param(p).clone()
                    moments[name] = {
                        key: safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq")
                    }
            self.reference = {"weights": weights, "moments": moments}

    torch.manual_seed(3)
    strategy = OnCPU(stage=stage, process_group_backend="gloo")
    strategy.config["train_micro_batch_size_per_gpu"] = 2
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="bf16-mixed",
        default_root_dir=folder,
    )
    model = Module()
    trainer.fit(model)
    trainer.save_checkpoint(folder)
    if trainer.is_global_zero:
        more = {"global_step": trainer.global_step, "epoch": trainer.current_epoch, "stage": stage}
        torch.save(model.reference | more, folder / "reference.pt")


def make(name: str) -> None:
    case, folder = CASES[name], HERE / name
    if "lightning" in case:
        if "LOCAL_RANK" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)
        make_lightning(case["lightning"], folder)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
    else:
        shutil.rmtree(folder, ignore_errors=True)
        world = case.get("world", 2)
        torch.multiprocessing.spawn(run, (world, free_port(), case, str(folder)), nprocs=world)
        if case.get("universal"):
            make_universal(folder)
    clean(folder)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        if len(sys.argv) == 2:
            make(name)
        else:  # a process each: engines leave things behind
            subprocess.run([sys.executable, __file__, name], check=True)
