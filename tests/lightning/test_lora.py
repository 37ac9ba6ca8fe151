"""Adapters of peft: they train, are saved without their base, and are merged into it, at every stage."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import distributed as dist
from torch import nn

import ds_lightning as dsl
from ds_lightning.checkpoint.lightning_io import ZeroCheckpointIO
from ds_lightning.checkpoint.loading import load
from tests.lightning.runs import (
    WIDTH,
    WORDS,
    AtTrainStart,
    Block,
    Model,
    close,
    full_weights,
    loader,
    same,
    trainer,
)
from tests.pool import run_ranks

STAGES = (0, 1, 2, 3)
TARGETS = ["up", "down"]


class Base(nn.Module):
    """What is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(make, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def adapted(base, seed=1, **config):
    settings = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS, "init_lora_weights": False, **config}
    return seeded(lambda: get_peft_model(base, LoraConfig(**settings)), seed)


class Tuned(Model):
    """An adapted network; its optimizer takes all parameters, or those that are trained."""

    def __init__(self, seed=1, everything=True, **config):
        super().__init__()
        for name in ("embedding", "blocks", "frozen", "unused", "head", "gain", "temperature"):
            delattr(self, name)
        self.everything = everything
        self.net = adapted(seeded(Base, 0), seed, **config)

    def forward(self, tokens):
        return self.net(tokens)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if self.everything or p.requires_grad], lr=0.01)


def fit(kind, precision="32-true", steps=4, source=None, model=None, **options):
    model = model or Tuned()
    run = trainer(kind, precision, steps=steps, **options)
    run.fit(model, loader(), ckpt_path=source)
    return run, model


ADAPTERS = [
    f"net.base_model.model.blocks.{block}.{target}.lora_{matrix}.default.weight"
    for block, target, matrix in product(range(3), TARGETS, "AB")
]


def logits(model):
    return model(next(iter(loader())))


# Training -----------------------------------------------------------------------------------------------------------


def against_ddp(everything):
    _, plain = fit("ddp", model=Tuned(everything=everything))
    wanted = full_weights(plain)
    for stage in STAGES:
        run, model = fit(stage, model=Tuned(everything=everything))
        assert close(full_weights(model), wanted) < 1e-6, stage
        held = run.strategy.engine.resting
        moments = [n for n, p in model.named_parameters() if dsl.full_optimizer_state(p, "exp_avg") is not None]
        assert sorted(moments) == sorted(ADAPTERS)
        assert not held.unfrozen


@pytest.mark.parametrize("everything", [True, False], ids=["all_parameters", "trainable"])
def test_adapters_train_as_under_ddp(everything):
    run_ranks(against_ddp, 2, everything)


# Checkpoints --------------------------------------------------------------------------------------------------------


def save_small(folder, stage, form):
    options = {"zero": {"exclude_frozen": True, "checkpoint": form}}
    _, model = fit(stage, "bf16-mixed", 4, **options)
    expected = full_weights(model)
    run, model = fit(stage, "bf16-mixed", 2, **options)
    path = f"{folder}/{form}.ckpt"
    run.save_checkpoint(path)
    half = full_weights(model)
    start = AtTrainStart(lambda _, module: full_weights(module))
    _, model = fit(stage, "bf16-mixed", 4, path, Tuned(seed=2), callbacks=[start], **options)
    assert same(start.result, half) == []
    return same(expected, full_weights(model)), half


@pytest.mark.parametrize(("stage", "form"), [(0, "full"), (1, "sharded"), (2, "full"), (3, "sharded"), (3, "full")])
def test_checkpoints_of_adapters_alone_are_small_and_resumed_bit_for_bit(tmp_path, stage, form):
    (differences, half), _ = run_ranks(save_small, 2, str(tmp_path), stage, form)
    assert differences == []
    saved = load(tmp_path / f"{form}.ckpt", ZeroCheckpointIO().load_checkpoint, print)
    weights = saved["state_dict"]
    parameters = {name for name in weights if name.startswith("net.")}
    assert parameters == set(ADAPTERS)
    assert len(weights) < 20  # with the buffers
    assert same({name: weights[name] + 0 for name in ADAPTERS}, {name: half[name] for name in ADAPTERS}) == []
    states = saved["optimizer_states"][0]["state"]
    assert sum(entry["exp_avg"].numel() for entry in states.values()) == sum(weights[n].numel() for n in ADAPTERS)


def through_peft(folder, stage):
    run, model = fit(stage, "bf16-mixed")
    masters = {n: dsl.full_param(p) for n, p in model.net.named_parameters() if p.requires_grad}
    whole = get_peft_model_state_dict(model.net)  # collective: the module's state_dict
    assert same(whole, get_peft_model_state_dict(model.net, state_dict=masters)) == []
    assert {value.dtype for value in whole.values()} == {torch.float32}
    with dsl.gathered(model):
        shown = get_peft_model_state_dict(model.net)
        assert same(shown, {name: value.bfloat16() for name, value in whole.items()}) == []
    model.net.save_pretrained(f"{folder}/adapter", state_dict=masters, is_main_process=run.is_global_zero)
    dist.barrier()
    base = seeded(Base, 0)
    fresh = PeftModel.from_pretrained(base, f"{folder}/adapter")
    assert same(get_peft_model_state_dict(fresh), whole) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_peft_saves_what_it_loads_again(tmp_path, stage):
    run_ranks(through_peft, 2, str(tmp_path), stage)


# Merging ------------------------------------------------------------------------------------------------------------


def merge(stage, precision):
    run, model = fit(stage, precision)
    values = full_weights(model)
    up = model.net.base_model.model.blocks[1].up
    name = "net.base_model.model.blocks.1.up."
    delta = 2.0 * values[name + "lora_B.default.weight"] @ values[name + "lora_A.default.weight"]
    wanted = values[name + "base_layer.weight"] + delta
    if precision == "32-true":
        with dsl.gathered(model, modifier_rank=0):
            model.net.merge_adapter()
        assert torch.allclose(dsl.full_param(up.base_layer.weight), wanted, rtol=1e-6, atol=1e-7)
        with dsl.gathered(model, modifier_rank=0):
            model.net.unmerge_adapter()
        assert close(full_weights(model), values) < 1e-6
    model.cpu()  # whole and plain on every rank
    assert run.strategy.engine is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.eval()
    before = logits(model)
    model.net = model.net.merge_and_unload()
    assert torch.allclose(logits(model), before, rtol=1e-4, atol=1e-5)
    merged = model.state_dict()
    assert torch.allclose(merged["net.blocks.1.up.weight"], wanted, rtol=1e-6, atol=1e-7)
    assert model.net.state_dict().keys() == Base().state_dict().keys()
    return model.net.state_dict()


@pytest.mark.parametrize(("stage", "precision"), [(0, "32-true"), (1, "bf16-mixed"), (3, "32-true"), (3, "bf16-mixed")])
def test_adapters_are_merged_on_every_rank_after_training(stage, precision):
    first, second = run_ranks(merge, 2, stage, precision)
    assert same(first, second) == []


# Pretrained ---------------------------------------------------------------------------------------------------------


class Built(Tuned):
    """Its base comes from a file, its adapters from a small checkpoint."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.net = None

    def configure_model(self):
        if self.net is None:
            base = Base()
            dsl.load_pretrained(base, f"{self.folder}/base.pt")
            self.net = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS))
            dsl.load_pretrained(self, f"{self.folder}/small.ckpt", strict=False)


def build_on_pretrained(folder, stage):
    torch.save(seeded(Base, 0).state_dict(), f"{folder}/base.pt") if dist.get_rank() == 0 else None
    run, model = fit(stage, "bf16-mixed", zero={"exclude_frozen": True})
    run.save_checkpoint(f"{folder}/small.ckpt")
    start = AtTrainStart(lambda _, module: full_weights(module))
    fit(stage, "bf16-mixed", 1, model=Built(folder), callbacks=[start])
    return same(start.result, full_weights(model))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_pretrained_base_and_then_the_adapters_are_loaded_as_the_model_is_built(tmp_path, stage):
    assert run_ranks(build_on_pretrained, 2, str(tmp_path), stage) == [[], []]
