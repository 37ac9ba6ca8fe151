"""What runs save, exported: back in plain Lightning, in torch and in transformers; and weights beside checkpoints."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import ds_lightning as dsl
from ds_lightning.checkpoint.deepspeed.convert import DeepSpeedCheckpoint
from ds_lightning.cli import main
from ds_lightning.errors import CheckpointError
from tests.lightning.runs import AtTrainStart, Model, listening, loader, same, trainer
from tests.lightning.test_checkpoints import compare, copy_run
from tests.pool import run_ranks

SHARDED = {"checkpoint": "sharded"}
GATHER = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}


def export(*words) -> int:
    return main(["export", *map(str, words)])


def read(path) -> dict:
    return torch.load(path, weights_only=True)


def save_both(folder, stage, precision="32-true", zero=None):
    run = trainer(stage, precision, steps=3, zero={**SHARDED, **(zero or {})})
    run.fit(Model(), loader())
    run.save_checkpoint(f"{folder}/sharded.ckpt")
    run.strategy._saver.sharded = False
    run.save_checkpoint(f"{folder}/full.ckpt")


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def saved(request, tmp_path_factory):
    """One state as a file and as a folder, saved at stage 3."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_both, request.param, str(folder), 3, "bf16-mixed")
    return folder


@pytest.mark.parametrize("source", ["full.ckpt", "sharded.ckpt"])
def test_every_form_holds_the_same_bits_and_the_same_ties(saved, tmp_path, source, capsys):
    expected = dict(read(saved / "full.ckpt")["state_dict"])
    for name in ("w.pt", "w.safetensors", "one.ckpt"):
        assert export(saved / source, tmp_path / name) == 0
    assert export(saved / source, tmp_path / "bins", "--format", "torch", "--max-shard-size", "500") == 0
    assert export(saved / source, tmp_path / "tensors", "--max-shard-size", "500") == 0
    assert "head.weight (as embedding.weight)" in capsys.readouterr().out
    index = json.loads((tmp_path / "bins" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    bins = {}
    for file in sorted(set(index.values())):
        bins.update(read(tmp_path / "bins" / file))
    assert bins.keys() == index.keys()
    for values in (read(tmp_path / "w.pt"), read(tmp_path / "one.ckpt")["state_dict"], bins):
        assert same(dict(values), expected) == []
        assert values["head.weight"].data_ptr() == values["embedding.weight"].data_ptr()
    expected.pop("head.weight")
    assert same(load_file(tmp_path / "w.safetensors"), expected) == []
    files = {}
    for file in (tmp_path / "tensors").glob("*.safetensors"):
        files.update(load_file(file))
    assert same(files, expected) == []
    plain = Model(seed=5)
    plain.load_state_dict(read(tmp_path / "w.pt"))


@pytest.mark.parametrize("source", ["full.ckpt", "sharded.ckpt"])
def test_frozen_weights_can_be_left_out(saved, tmp_path, source, capsys):
    assert export(saved / source, tmp_path / "w.pt", "--exclude-frozen") == 0
    assert "frozen and left out: frozen.weight, frozen.bias" in capsys.readouterr().out
    assert set(read(saved / "full.ckpt")["state_dict"]) - set(read(tmp_path / "w.pt")) == {
        "frozen.weight",
        "frozen.bias",
    }
    assert export(saved / source, tmp_path / "one.ckpt", "--exclude-frozen") == 0
    with pytest.warns(UserWarning, match="not in the checkpoint: .'frozen"):
        module = dsl.load_from_checkpoint(Model, tmp_path / "one.ckpt", seed=9)
    assert torch.equal(module.frozen.weight, Model(seed=9).frozen.weight)


def resume(source, target, kind):
    copy_run(source, target, kind)


def test_a_folder_becomes_a_file_that_plain_lightning_goes_on_from(saved, tmp_path):
    assert export(saved / "sharded.ckpt", tmp_path / "one.ckpt") == 0
    assert compare(saved / "full.ckpt", tmp_path / "one.ckpt") == []
    for kind, world in (("single", 1), ("ddp", 2), (3, 2)):
        run_ranks(resume, world, str(tmp_path / "one.ckpt"), str(tmp_path / f"{kind}.ckpt"), kind)
        assert compare(saved / "full.ckpt", tmp_path / f"{kind}.ckpt") == [], kind
        assert read(tmp_path / f"{kind}.ckpt")["optimizer_states"][0]["state"]


def test_sixteen_bit_weights_are_exported_as_stored_or_wider(tmp_path):
    run_ranks(save_both, 2, str(tmp_path), 3, "bf16-true")
    stored = {n: v for n, v in read(tmp_path / "full.ckpt")["state_dict"].items() if n != "head.weight"}
    assert stored["blocks.0.up.weight"].dtype == torch.bfloat16
    assert export(tmp_path / "sharded.ckpt", tmp_path / "a.safetensors") == 0
    assert same(load_file(tmp_path / "a.safetensors"), stored) == []
    assert export(tmp_path / "sharded.ckpt", tmp_path / "b.safetensors", "--dtype", "fp32") == 0
    wide = {n: v.float() if v.is_floating_point() else v for n, v in stored.items()}
    assert same(load_file(tmp_path / "b.safetensors"), wide) == []


@pytest.mark.parametrize("name", ["stage1_bf16", "stage3_fp32", "stage3_bf16_world3_subgroups", "universal_stage3"])
def test_what_deepspeed_wrote_is_exported(tmp_path, name):
    source = Path(__file__).parents[1] / "data" / "deepspeed" / name
    expected = read(source / "reference.pt")["weights"]
    assert export(source, tmp_path / "w.pt", "--dtype", "fp32") == 0
    assert export(source, tmp_path / "w.safetensors", "--dtype", "fp32") == 0
    found, safe = read(tmp_path / "w.pt"), load_file(tmp_path / "w.safetensors")
    assert same({key: found[key] for key in expected}, dict(expected)) == []
    assert same(safe, {key: found[key] for key in safe}) == []
    assert set(found) - set(safe) == {"head.weight"}


def save_average(folder):
    run = trainer(3, steps=3, zero=SHARDED, callbacks=[dsl.callbacks.EMA(decay=0.5)])
    run.fit(Model(), loader())
    run.save_checkpoint(f"{folder}/sharded.ckpt")
    run.strategy._saver.sharded = False
    run.save_checkpoint(f"{folder}/full.ckpt")


def test_averaged_weights_are_exported_by_their_key(tmp_path):
    run_ranks(save_average, 2, str(tmp_path))
    full = read(tmp_path / "full.ckpt")
    average = dict(full["ema"]["state_dict"])
    assert same(average, dict(full["state_dict"])) != []
    for source in ("full.ckpt", "sharded.ckpt"):
        assert export(tmp_path / source, tmp_path / f"{source}.pt", "--key", "ema.state_dict") == 0
        assert same(read(tmp_path / f"{source}.pt"), average) == []


# transformers -------------------------------------------------------------------------------------------------------


def network(kind):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=33, n_positions=16, n_embd=12, n_layer=2, n_head=2))
    config = LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=kind == "tied llama",
    )
    return LlamaForCausalLM(config)


class Wrapped(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.model = network(kind)

    def training_step(self, tokens, index):
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train_network(folder, kind):
    tokens = torch.randint(0, 33, (8, 10), generator=torch.Generator().manual_seed(2))
    module = Wrapped(kind)
    run = trainer(3, zero=SHARDED)
    run.fit(module, DataLoader(tokens, batch_size=2))
    run.save_checkpoint(f"{folder}/a.ckpt")
    with dsl.gathered(module):
        module.model.eval()
        with torch.no_grad():
            logits = module.model(input_ids=tokens).logits
    return tokens, logits.clone()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("kind", ["gpt2", "tied llama", "llama"])
def test_transformers_opens_an_export(tmp_path, kind, form):
    from transformers import AutoModelForCausalLM

    (tokens, expected), *_ = run_ranks(train_network, 2, str(tmp_path), kind)
    for size in ("3KB", "1GB"):
        out = tmp_path / f"hf-{size}"
        words = ["--format", form, "--max-shard-size", size, "--strip-prefix", "model."]
        assert export(tmp_path / "a.ckpt", out, *words) == 0
        network(kind).config.save_pretrained(out)
        model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (kind != "llama")
        with torch.no_grad():
            assert torch.equal(model.eval()(input_ids=tokens).logits, expected)


# A module from a checkpoint -----------------------------------------------------------------------------------------


class Hooked(Model):
    """Builds late and looks into its checkpoint."""

    def __init__(self, seed=1, width=3):
        super().__init__(seed=seed)
        self.save_hyperparameters()
        self.late = None

    def configure_model(self):
        if self.late is None:
            self.late = nn.Linear(self.hparams["width"], 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 7

    def on_load_checkpoint(self, checkpoint):
        self.seen_there = checkpoint["mine"]
        self.norm = float(checkpoint["state_dict"]["late.weight"].norm())


def save_hooked(folder):
    run = trainer(3, zero=SHARDED)
    run.fit(Hooked(width=4), loader())
    run.save_checkpoint(f"{folder}/sharded.ckpt")
    run.strategy._saver.sharded = False
    run.save_checkpoint(f"{folder}/full.ckpt")


def test_a_module_is_made_from_a_file_or_a_folder_as_lightning_does(tmp_path):
    run_ranks(save_hooked, 2, str(tmp_path))
    expected = Hooked.load_from_checkpoint(tmp_path / "full.ckpt", seed=3)
    for name in ("full.ckpt", "sharded.ckpt"):
        made = dsl.load_from_checkpoint(Hooked, tmp_path / name, seed=3, map_location="cpu")
        assert same(dict(made.state_dict()), dict(expected.state_dict())) == []
        assert (made.seen_there, made.norm, made.hparams) == (7, expected.norm, expected.hparams)
        assert (made.hparams["seed"], made.hparams["width"]) == (3, 4)
        assert made.head.weight is made.embedding.weight
        assert not any(p.is_meta for p in made.parameters())
        with pytest.raises(RuntimeError, match="size mismatch"):
            dsl.load_from_checkpoint(Hooked, tmp_path / name, width=5)
        with pytest.raises(RuntimeError, match="Unexpected key"):
            dsl.load_from_checkpoint(NoHead, tmp_path / name)
        with pytest.warns(UserWarning, match="not in the model state dict"):
            dsl.load_from_checkpoint(NoHead, tmp_path / name, strict=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        dsl.load_from_checkpoint(Hooked, tmp_path / "no.ckpt")


class NoHead(Hooked):
    def __init__(self, seed=1, width=3):
        super().__init__(seed, width)
        del self.head


def test_a_module_keeps_its_frozen_weights_where_the_checkpoint_has_none(tmp_path):
    run_ranks(save_both, 2, str(tmp_path), 2, "32-true", {"exclude_frozen": True})
    for name in ("full.ckpt", "sharded.ckpt"):
        with pytest.warns(UserWarning, match="not in the checkpoint: .'frozen"):
            made = dsl.load_from_checkpoint(Model, tmp_path / name, seed=9)
        assert torch.equal(made.frozen.weight, Model(seed=9).frozen.weight)
        assert torch.equal(made.gain, read(tmp_path / "full.ckpt")["state_dict"]["gain"])
        with (
            pytest.raises(CheckpointError, match=r"late\.weight: missing"),
            pytest.warns(UserWarning, match="not in the checkpoint"),
        ):
            dsl.load_from_checkpoint(Late, tmp_path / name)


class Late(Model):
    def __init__(self, **options):
        super().__init__()
        self.late = nn.Linear(2, 2)


def test_a_file_with_objects_needs_trust(tmp_path):
    torch.save({"state_dict": Model().state_dict(), "hyper_parameters": {"seed": 2}, "call": print}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="not plain data"):
        dsl.load_from_checkpoint(Model, tmp_path / "a")
    made = dsl.load_from_checkpoint(Model, tmp_path / "a", weights_only=False)
    assert made.hparams["seed"] == 2


# 16-bit weights beside checkpoints ----------------------------------------------------------------------------------


def train_and_keep(folder, stage, precision, options=None, config=GATHER):
    keep = ModelCheckpoint(
        folder,
        monitor="global_step",
        mode="max",
        save_top_k=2,
        every_n_train_steps=1,
        save_last=True,
        filename="{step}",
    )

    class Monitored(Model):
        def training_step(self, tokens, index):
            self.log("global_step", float(self.trainer.global_step))
            return super().training_step(tokens, index)

    run = trainer(
        stage,
        precision,
        steps=4,
        enable_checkpointing=True,
        callbacks=[keep],
        zero={"config": config, **(options or {})},
    )
    run.fit(Monitored(), loader())


@pytest.mark.parametrize(
    ("stage", "precision", "options"),
    [
        (3, "bf16-mixed", {}),
        (3, "16-mixed", {"checkpoint": "sharded"}),
        (1, "bf16-true", {"async_save": True}),
        (2, "bf16-mixed", {"checkpoint": "sharded", "async_save": True}),
    ],
    ids=str,
)
def test_weights_lie_beside_each_checkpoint_and_go_with_it(tmp_path, stage, precision, options):
    run_ranks(train_and_keep, 2, str(tmp_path), stage, precision, options)
    found = {path.name for path in tmp_path.iterdir() if path.name != "latest"}
    checkpoints = {name for name in found if name.endswith(".ckpt")}
    assert len(checkpoints) == 3
    assert found - checkpoints == {name.removesuffix(".ckpt") + ".weights.safetensors" for name in checkpoints}
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for name in checkpoints:
        module = dsl.load_from_checkpoint(Model, tmp_path / name)
        expected = {n: v.to(dtype) if v.is_floating_point() else v for n, v in module.state_dict().items()}
        expected.pop("head.weight")
        assert same(load_file(tmp_path / (name.removesuffix(".ckpt") + ".weights.safetensors")), expected) == []


def test_weights_that_were_not_asked_for_or_make_no_sense_are_not_written(tmp_path):
    run_ranks(train_and_keep, 1, str(tmp_path / "off"), 3, "bf16-mixed", {}, {})
    run_ranks(train_and_keep, 1, str(tmp_path / "fp32"), 3, "32-true")
    for folder in ("off", "fp32"):
        assert not list((tmp_path / folder).glob("*.safetensors"))


def told(folder):
    with listening() as messages:
        train_and_keep(folder, 3, "32-true")
    return messages


def test_at_other_precisions_the_run_says_that_there_are_none(tmp_path):
    (messages,) = run_ranks(told, 1, str(tmp_path))
    assert any("no 16-bit weights are written beside checkpoints at precision 32-true" in text for text in messages)


def start_from_weights(folder):
    start = AtTrainStart(lambda run, module: {n: dsl.full_param(p) for n, p in module.named_parameters()})
    run = trainer(3, callbacks=[start])
    run.fit(Model(seed=8), loader(), ckpt_path=f"{folder}/bare.pt")
    return start.result


def test_exported_weights_start_a_run(saved, tmp_path):
    assert export(saved / "sharded.ckpt", tmp_path / "bare.pt") == 0
    (found,) = run_ranks(start_from_weights, 1, str(tmp_path))
    expected = read(saved / "full.ckpt")["state_dict"]
    assert same(found, {name: expected[name] for name in found}) == []


def test_deepspeeds_universal_layout_holds_weights_and_moments(saved, tmp_path):
    assert export(saved / "sharded.ckpt", tmp_path / "universal", "--format", "universal") == 0
    assert (tmp_path / "latest_universal").read_text() == "universal"
    expected = read(saved / "full.ckpt")
    found = DeepSpeedCheckpoint(tmp_path / "universal")
    names = expected["ds_lightning"]["optimizer_parameter_names"][0]
    states = expected["optimizer_states"][0]["state"]
    assert len(states) > 5
    for number, state in states.items():
        assert torch.equal(found.parameter(names[number]), expected["state_dict"][names[number]])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.state(names[number])[key], state[key]), (names[number], key)
    assert export(saved / "sharded.ckpt", tmp_path / "universal", "--format", "universal") == 2
    assert export(saved / "sharded.ckpt", tmp_path / "other", "--format", "universal", "--dtype", "bf16") == 2
    assert not (tmp_path / "other").exists()
