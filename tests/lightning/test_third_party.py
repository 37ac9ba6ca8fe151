"""Models that were not written for us: transformers from a configuration, and a convolutional net with batch norm."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import ds_lightning as dsl
from tests.lightning.runs import SHARD_EVERYTHING, Words, close, full_weights, loader, strategy_of, trainer
from tests.pool import run_ranks


class Language(pl.LightningModule):
    """A causal language model of Hugging Face with tied embeddings."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = gpt2() if kind == "gpt2" else llama()
        self.losses = []

    def training_step(self, tokens, index):
        loss = self.net(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, tokens, index):
        self.log("val_loss", self.net(input_ids=tokens, labels=tokens).loss, sync_dist=True)

    def predict_step(self, tokens, index):
        return self.net.generate(tokens[:, :2], max_new_tokens=3 + index, do_sample=False, pad_token_id=0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 13}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=13, tie_word_embeddings=True, pad_token_id=0)
    return LlamaForCausalLM(config)


class Picture(pl.LightningModule):
    """Convolutions with batch norm, in channels-last memory order."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()),
            nn.Sequential(nn.Conv2d(5, 7, 3, stride=2), nn.BatchNorm2d(7), nn.ReLU()),
            nn.Sequential(nn.ConvTranspose2d(7, 5, 3), nn.BatchNorm2d(5), nn.ReLU()),
            nn.Flatten(),
            nn.Linear(5 * 5 * 5, 3),
        ).to(memory_format=torch.channels_last)
        self.losses = []

    def training_step(self, batch, index):
        pictures, labels = batch
        loss = F.cross_entropy(self.net(pictures.to(memory_format=torch.channels_last)).float(), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def pictures():
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(3, 8, 8, generator=generator), i % 3) for i in range(24)]
    words = Words(24)
    words.data = data
    sampler = torch.utils.data.DistributedSampler(words, shuffle=False)
    return DataLoader(words, batch_size=2, sampler=sampler)


def train(kind, stage, precision, config, folder):
    model = (Picture if kind == "conv" else Language)(kind)
    data = pictures if kind == "conv" else loader
    chosen = strategy_of(stage) if stage == "ddp" else dsl.ZeroStrategy(stage=stage, config=config)
    run = trainer(chosen, precision, steps=5)
    run.fit(model, data(), data())
    loss = run.validate(model, data(), verbose=False)[0]["val_loss"]
    texts = run.predict(model, loader(size=8)) if kind != "conv" else []
    run.save_checkpoint(f"{folder}/{stage}.ckpt")
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return full_weights(model), model.losses, loss, texts, statistics


KINDS = ("gpt2", "llama", "conv")
CONFIGS = {
    0: SHARD_EVERYTHING,
    1: SHARD_EVERYTHING,
    2: SHARD_EVERYTHING,
    3: {"zero_optimization": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 500}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_are_those_of_ddp_and_the_file_loads_anywhere(tmp_path, kind):
    if kind != "conv":
        pytest.importorskip("transformers")
    expected = run_ranks(train, 2, kind, "ddp", "32-true", None, str(tmp_path))
    plain = torch.load(tmp_path / "ddp.ckpt", weights_only=True)["state_dict"]
    for stage, config in CONFIGS.items():
        found = run_ranks(train, 2, kind, stage, "32-true", config, str(tmp_path))
        for (weights, losses, loss, texts, statistics), ours in zip(expected, found, strict=True):
            assert close(weights, ours[0]) < 1e-6, stage
            assert ours[1] == pytest.approx(losses, rel=1e-5)
            assert ours[2] == pytest.approx(loss, rel=1e-5)
            assert all(torch.equal(a, b) for a, b in zip(texts, ours[3], strict=True))
            torch.testing.assert_close(ours[4], statistics, rtol=1e-5, atol=1e-6)
        saved = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)["state_dict"]
        assert {n: v.shape for n, v in saved.items()} == {n: v.shape for n, v in plain.items()}
        restored = (Picture if kind == "conv" else Language)(kind)
        restored.load_state_dict(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_mixed_trains_alike_at_every_stage_and_near_ddp(tmp_path, kind):
    if kind != "conv":
        pytest.importorskip("transformers")
    (expected, losses, *_), _ = run_ranks(train, 2, kind, "ddp", "bf16-mixed", None, str(tmp_path))
    (first, *_), _ = run_ranks(train, 2, kind, 1, "bf16-mixed", CONFIGS[1], str(tmp_path))
    (third, ours, *_), _ = run_ranks(train, 2, kind, 3, "bf16-mixed", CONFIGS[3], str(tmp_path))
    assert all(torch.equal(first[name], third[name]) for name in first)
    assert close(expected, third) < 2**-8  # gradients are rounded to bf16, where DDP's autocast rounds activations
    assert ours == pytest.approx(losses, rel=2**-6)
