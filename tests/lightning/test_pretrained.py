"""Models of transformers filled with `load_pretrained`: as `from_pretrained` fills them, and no rank reads it all."""

import os
import shutil
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.utils.data import DataLoader

import ds_lightning as dsl
from ds_lightning.checkpoint.file_tensors import FileSource
from ds_lightning.cli import main
from ds_lightning.errors import CheckpointError, ConfigError, TopologyError
from ds_lightning.zero.init import SMALLEST
from tests.lightning.runs import everywhere, full_weights, listening, same, short_timeout, trainer
from tests.pool import run_ranks

VOCABULARY = 96
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def make(kind, folder, seed=1):
    """A folder as the hub has them, in several files."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=kind == "tied")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
    return str(folder)


class Causal(pl.LightningModule):
    """A language model, made and filled in one of several ways."""

    def __init__(self, folder, way, rename=None):
        super().__init__()
        self.folder, self.way, self.rename = folder, way, rename
        self.model = None
        self.losses = []

    def configure_model(self):
        if self.model is not None:
            return
        if self.way == "from_pretrained":
            self.model = transformers.AutoModelForCausalLM.from_pretrained(self.folder).train()
            return
        config = transformers.AutoConfig.from_pretrained(self.folder)
        torch.manual_seed(7 + dist.get_rank())
        model = transformers.AutoModelForCausalLM.from_config(config)
        if self.way == "before it is a part":
            self.load(model)
        self.model = model
        if self.way == "configure_model":
            self.load(self.model)
        elif self.way == "whole":
            self.load(self)
        elif self.way == "touched":  # gathered when it is loaded
            torch.nn.init.ones_(self.model.get_input_embeddings().weight)
            self.load(self.model)
            assert self.model.get_input_embeddings().weight.std() > 0

    def setup(self, stage):
        if self.way == "setup":
            self.configure_model()
            self.load(self.model)

    def on_fit_start(self):
        if self.way == "on_fit_start":
            self.load(self.model)

    def load(self, module):
        dsl.load_pretrained(module, self.folder, rename=self.rename)

    def training_step(self, tokens, index):
        if self.way == "training_step":
            self.load(self.model)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        if self.way == "on_train_batch_end":
            self.load(self.model)

    def test_step(self, tokens, index):
        self.log("loss", self.model(input_ids=tokens, labels=tokens).loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches():
    tokens = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens[dist.get_rank() :: dist.get_world_size()], batch_size=2)


def trained(folder, way, kind, precision="32-true"):
    model = Causal(folder, way)
    trainer(kind, precision).fit(model, batches())
    return full_weights(model)


def started(folder, way, kind, precision="32-true"):
    """Full values as training begins."""
    model = Causal(folder, way)
    trainer(kind, precision, steps=0).fit(model, batches())
    return full_weights(model)


@pytest.fixture(scope="module", params=["llama", "tied", "gpt2"])
def hub(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("llama"))


def check_training(folder):
    """Everything that is to be equal, in one call."""
    expected = trained(folder, "from_pretrained", "ddp")
    for kind in (3, 1):
        assert not same(trained(folder, "configure_model", kind), expected), kind
    expected = trained(folder, "from_pretrained", 3, "bf16-mixed")
    assert not same(trained(folder, "configure_model", 3, "bf16-mixed"), expected)
    return expected


def test_training_goes_on_as_from_pretrained_under_ddp(hub):
    everywhere(run_ranks(check_training, 2, hub))


def check_ways(folder, precision):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = {f"model.{name}": p.detach() for name, p in whole.named_parameters(remove_duplicate=False)}
    ways = ["configure_model", "before it is a part", "whole", "touched", "setup", "on_fit_start"]
    for stage in (3, 1):
        for way in ways if precision == "32-true" else ways[::5]:
            assert not same(started(folder, way, stage, precision), expected), (stage, way)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_bit_arrives_wherever_it_is_loaded(llama, precision):
    run_ranks(check_ways, 2, llama, precision)


def check_between_steps(folder):
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    expected = [plain(input_ids=tokens, labels=tokens).loss.item() for tokens in batches()]
    for stage in (3, 1):
        model = Causal(folder, "on_train_batch_end")
        trainer(stage).fit(model, batches())
        assert model.losses[1:] == expected[1:], stage
        assert model.losses[0] != expected[0]


def test_what_is_loaded_between_steps_computes_next(llama):
    run_ranks(check_between_steps, 2, llama)


def bytes_read(folder, way):
    counted = []
    original = FileSource._range

    def counting(self, start, stop):
        counted.append((stop - start) * self.dtype.itemsize)
        return original(self, start, stop)

    FileSource._range = counting
    try:
        started(folder, way, 3)
    finally:
        FileSource._range = original
    return sum(counted)


def test_a_rank_reads_what_it_keeps(llama):
    tensors = [tensor for file in Path(llama).glob("*.safetensors") for tensor in load_file(file).values()]
    small = sum(tensor.nbytes for tensor in tensors if tensor.numel() < SMALLEST)  # whole until set-up
    every = sum(tensor.nbytes for tensor in tensors)
    assert run_ranks(bytes_read, 2, llama, "configure_model") == [(every - small) // 2 + small] * 2
    counts = run_ranks(bytes_read, 2, llama, "on_fit_start")
    assert sum(counts) == every
    assert max(counts) < every / 2 + 2048  # units are padded at their ends


def fails(folders, way, stage, spoil=False):
    """What each rank raises; their folders may differ."""
    folder = folders[dist.get_rank() % len(folders)]

    def cut(name):  # after the headers were read
        if dist.get_rank() == 1:
            for file in Path(folder).glob("*.safetensors"):
                os.truncate(file, file.stat().st_size - 64)
        return name

    model = Causal(folder, way, rename=cut if spoil else None)
    with pytest.raises((CheckpointError, ConfigError, TopologyError)) as caught:
        trainer(stage, zero={"timeout": short_timeout()}).fit(model, batches())
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("way", ["configure_model", "on_fit_start"])
@pytest.mark.parametrize("fault", ["missing", "cut", "other"])
@pytest.mark.parametrize("stage", [3, 1])
def test_what_fails_on_one_rank_is_an_error_on_all(llama, tmp_path, way, fault, stage):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(llama, folder)
    if fault == "missing":
        next(folders[1].glob("model-00002*")).unlink()
    elif fault == "other":
        path = next(folders[1].glob("model-00002*"))
        save_file({name: value.double() for name, value in load_file(path).items()}, path)
    results = run_ranks(fails, 2, [str(folder) for folder in folders], way, stage, fault == "cut")
    assert [kind for kind, _ in results] == ["CheckpointError"] * 2
    text = {"missing": "model-00002", "cut": "ends too early", "other": "not the same on all ranks"}[fault]
    assert all(text in message for _, message in results), results
    assert fault == "other" or "on rank 1" in results[0][1]


def test_not_inside_a_step(llama):
    for kind, message in run_ranks(fails, 2, [llama], "training_step", 3):
        assert kind == "ConfigError"
        assert "load_pretrained inside a step" in message


class Alone(Causal):
    def load(self, module):
        if self.trainer.is_global_zero:
            super().load(module)


def fails_alone(folder):
    model = Alone(folder, "on_fit_start")
    with pytest.raises((TopologyError, RuntimeError)) as caught:  # rank 1 waits for rank 0 somewhere else
        trainer(3, zero={"timeout": timedelta(seconds=2)}).fit(model, batches())
    return str(caught.value)


def test_a_rank_that_does_not_call_it_is_an_error(llama):
    assert "load_pretrained needs every rank" in run_ranks(fails_alone, 2, llama)[0]


def told(folder, way):
    with listening() as messages:
        started(folder, way, 3)
    return messages


def test_from_pretrained_in_configure_model_is_told_to_hold_the_model_whole(llama):
    def about(way):
        messages, _ = run_ranks(told, 2, llama, way)
        return [message for message in messages if "ds_lightning.load_pretrained" in message]

    assert len(about("from_pretrained")) == 1
    assert "LlamaForCausalLM came whole into configure_model" in about("from_pretrained")[0]
    assert about("configure_model") == []


def evaluated(folder, way, kind):
    (result,) = trainer(kind).test(Causal(folder, way), batches(), verbose=False)
    return result["loss"]


def test_an_evaluation_of_what_was_loaded(llama):
    losses = [
        run_ranks(evaluated, 2, llama, way, kind) for way, kind in (("from_pretrained", "ddp"), ("configure_model", 3))
    ]
    assert losses[0] == losses[1]


# There and back ---------------------------------------------------------------------------------------------------


def save(source, target, form):
    run = trainer(3, zero={"checkpoint": form})
    model = Causal(source, "configure_model")
    run.fit(model, batches())
    run.save_checkpoint(target)
    return full_weights(model)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_what_was_fine_tuned_goes_back_to_transformers_and_to_other_runs(llama, tmp_path, form):
    weights = everywhere(run_ranks(save, 2, llama, str(tmp_path / "a.ckpt"), form))
    out = tmp_path / "out"
    shutil.copytree(llama, out)
    words = ["--strip-prefix", "model.", "--max-shard-size", "60KB", "--overwrite"]
    assert main(["export", str(tmp_path / "a.ckpt"), str(out), *words]) == 0
    assert len(list(out.glob("*.safetensors"))) > 3
    found = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert not same({f"model.{name}": value for name, value in found.items()}, weights)
    again = run_ranks(started, 2, str(out), "configure_model", 3)[0]
    assert not same(again, weights)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama))
    dsl.load_pretrained(plain, tmp_path / "a.ckpt")  # `model.` is found
    assert not same({f"model.{name}": value for name, value in plain.state_dict().items()}, weights)


# Names as from_pretrained understands them ------------------------------------------------------------------------

BERT = {**SMALL, "num_attention_heads": 4, "max_position_embeddings": 32}


def bert(kind, seed):
    torch.manual_seed(seed)
    return getattr(transformers, kind)(transformers.BertConfig(**BERT))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("BertModel", "BertForSequenceClassification"),
        ("BertForSequenceClassification", "BertModel"),
        ("BertForPreTraining", "BertForSequenceClassification"),
        ("BertForMaskedLM", "BertForMaskedLM"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_bodies_and_heads_load_what_from_pretrained_loads(tmp_path, there, here):
    bert(there, 1).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in load_file(path).items()}
    save_file(old, path, {"format": "pt"})
    theirs, info = getattr(transformers, here).from_pretrained(tmp_path, output_loading_info=True)
    ours = bert(here, 2)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    loaded = dsl.load_pretrained(ours, tmp_path, strict=False)
    assert set(loaded.missing) == set(info["missing_keys"])
    values = ours.state_dict()
    expected = {n: before[n] if n in loaded.missing else value for n, value in theirs.state_dict().items()}
    assert not same(values, expected)
