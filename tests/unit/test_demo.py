"""The demo model and text: what a newcomer's first run stands on."""

import math
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import TensorDataset

from ds_lightning.callbacks import Throughput
from ds_lightning.callbacks.throughput import count_tokens
from ds_lightning.cli.model_states import bytes_per_parameter
from ds_lightning.demo import ByteGPT, StdlibText
from ds_lightning.demo.corpus import read_stdlib, stdlib_files, unigram_entropy
from ds_lightning.demo.loader import ResumableLoader
from ds_lightning.demo.windows import Windows
from ds_lightning.errors import ConfigError

TINY = {"layers": 2, "width": 32, "heads": 2, "block_size": 16}


def test_the_text_is_the_same_in_every_process():
    code = "from ds_lightning.demo.corpus import *; print(*stdlib_files(), sep='\\n')"
    other = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == list(map(str, stdlib_files())) != []


def test_the_text_holds_no_tests_and_no_installed_packages():
    folders = {part for file in stdlib_files() for part in file.parts}
    assert not folders & {"site-packages", "test", "tests", "__pycache__"}


def test_held_out_files_are_not_in_the_training_text():
    training, held_out = read_stdlib(max_megabytes=2)
    assert 0.8e6 < len(training) < 3e6
    assert len(held_out) > 10_000
    sample = bytes(held_out[5000:5200].tolist())
    assert sample not in bytes(training.tolist())


def test_a_cap_that_leaves_nothing_to_hold_out_is_refused():
    with pytest.raises(ConfigError, match="max_megabytes"):
        read_stdlib(max_megabytes=0.01)


@pytest.mark.parametrize(
    ("text", "entropy"),
    [(b"aaaa", 0.0), (b"abab", math.log(2)), (bytes(range(256)), math.log(256))],
)
def test_unigram_entropy(text, entropy):
    assert unigram_entropy(text) == pytest.approx(entropy)
    assert unigram_entropy(torch.tensor(list(text), dtype=torch.uint8)) == pytest.approx(entropy)


def test_windows_are_shifted_by_one_byte_and_depend_on_index_and_seed_only():
    text = torch.arange(200, dtype=torch.uint8)
    windows = Windows(text, 16, seed=3)
    tokens, targets = windows[5]
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[1:], targets[:-1])
    assert torch.equal(Windows(text, 16, seed=3)[5][0], tokens)
    starts = {int(windows[i][0][0]) for i in range(len(windows))}
    others = {int(Windows(text, 16, seed=4)[i][0][0]) for i in range(len(windows))}
    assert starts != others


def test_fixed_windows_do_not_overlap_and_span_the_text():
    windows = Windows(torch.arange(200, dtype=torch.uint8), 16, count=4)
    starts = [int(tokens[0]) for tokens, _ in (windows[i] for i in range(4))]
    assert starts == [0, 49, 98, 147]
    assert len(Windows(torch.zeros(33, dtype=torch.uint8), 16)) == 2
    with pytest.raises(IndexError):
        windows[4]
    with pytest.raises(ConfigError, match="block_size=300"):
        Windows(torch.zeros(200, dtype=torch.uint8), 300)


def test_a_resumed_loader_goes_on_behind_the_last_batch():
    data = TensorDataset(torch.arange(10))
    loader = ResumableLoader(data, batch_size=2)
    batches = iter(loader)
    next(batches), next(batches)
    other = ResumableLoader(data, batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert [batch[0].tolist() for batch in other] == [[4, 5], [6, 7], [8, 9]]
    assert len(list(other)) == 5, "the epoch after that is whole"
    assert other.state_dict() == {"batches": 0}


def test_the_default_model_has_a_few_million_parameters():
    with torch.device("meta"):
        assert 4e6 < sum(p.numel() for p in ByteGPT().parameters()) < 6e6


def test_a_tied_head_is_the_embedding():
    model = ByteGPT(**TINY, tie_head=True)
    assert model.head.weight is model.token_embedding.weight
    untied = ByteGPT(**TINY)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, untied)]
    assert count[1] - count[0] == 256 * TINY["width"]


def test_a_byte_depends_on_earlier_bytes_only():
    torch.manual_seed(0)
    model = ByteGPT(**TINY).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0


def test_an_untrained_model_guesses_evenly():
    torch.manual_seed(0)
    batch = (torch.randint(256, (4, 16)), torch.randint(256, (4, 16)))
    assert ByteGPT(**TINY)._loss(batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ConfigError, match="width=32 with heads=5"):
        ByteGPT(width=32, heads=5)


def test_generation_repeats_and_leaves_the_mode_as_it_was():
    model = ByteGPT(**TINY).train()
    first = model.generate("def ", 30, seed=1)
    assert first == model.generate("def ", 30, seed=1) != model.generate("def ", 30, seed=2)
    assert first.startswith("def ")
    assert model.training


def _trainer(tmp_path, **options):
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def _data():
    return StdlibText(batch_size=4, block_size=16, held_out_windows=8, max_megabytes=2)


def test_hyperparameters_are_plain_and_a_checkpoint_restores_the_model(tmp_path):
    model = ByteGPT(**TINY, betas=(0.9, 0.95))
    assert model.hparams["betas"] == [0.9, 0.95]
    assert type(model.hparams["betas"]) is list
    trainer = _trainer(tmp_path, max_steps=2, enable_checkpointing=False)
    trainer.fit(model, _data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    restored = ByteGPT.load_from_checkpoint(tmp_path / "a.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), restored.parameters(), strict=True))


def test_the_schedule_warms_up_and_ends_at_its_floor(tmp_path):
    model = ByteGPT(**TINY, warmup_steps=2, lr=1.0, min_lr_ratio=0.1)
    rates = [model._lr_factor(10, step) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates == sorted(rates[:1]) + sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert model._lr_factor(float("inf"), 500) == 1.0


def test_vectors_are_not_decayed(tmp_path):
    model = ByteGPT(**TINY)
    trainer = _trainer(tmp_path, max_steps=1, enable_checkpointing=False)
    trainer.fit(model, _data())
    decayed, others = trainer.optimizers[0].param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}


def test_an_interrupted_run_goes_on_with_the_batches_it_had_not_seen(tmp_path):
    seen: list[torch.Tensor] = []

    class Spy(ByteGPT):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    def fit(steps, ckpt_path=None):
        torch.manual_seed(7)
        seen.clear()
        trainer = _trainer(tmp_path, max_steps=steps, enable_checkpointing=False)
        model = Spy(**TINY, total_steps=6)
        data = _data()
        # One order for all runs, as a DistributedSampler gives it.
        data.train_dataloader = lambda: ResumableLoader(Windows(data.text[0], 16, seed=0), batch_size=4)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model, torch.stack(seen)

    whole, all_batches = fit(6)
    fit(3)
    resumed, last_batches = fit(6, tmp_path / "3.ckpt")
    assert torch.equal(last_batches, all_batches[3:])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_throughput_counts_tokens_over_accumulated_batches(tmp_path):
    throughput = Throughput(every_n_steps=1, warmup_steps=0)
    trainer = _trainer(
        tmp_path,
        max_steps=3,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        callbacks=[throughput],
    )
    trainer.fit(ByteGPT(**TINY), _data())
    assert [count for _, count in throughput._steps] == [2 * 4 * 16] * 3
    assert throughput.per_second > 0
    assert throughput.seconds_per_step > 0
    assert trainer.callback_metrics["tokens/s"] > 0


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ((torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16)), 64),
        ({"images": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.long)}, 4),
        ({"mask": torch.zeros(2, 5), "ids": torch.zeros(2, 5, dtype=torch.long)}, 10),
        ("text", 1),
    ],
)
def test_tokens_of_a_batch(batch, count):
    assert count_tokens(batch) == count


@pytest.mark.parametrize(
    ("stage", "precision", "expected"),
    [(0, "32-true", 16), (1, "32-true", 12), (2, "32-true", 10), (3, "32-true", 8), (3, "x", None)],
)
def test_bytes_per_parameter_on_two_ranks(stage, precision, expected):
    assert bytes_per_parameter(stage, 2, precision) == expected


def test_small_parameters_stay_whole_at_stage_3_only():
    assert bytes_per_parameter(3, 2, "32-true", whole=1.0) == 10
    assert bytes_per_parameter(3, 2, "32-true", whole=0.5) == 9
    assert bytes_per_parameter(1, 2, "32-true", whole=1.0) == 12
    assert bytes_per_parameter(3, 4, "bf16-mixed", secondary=2) == 18 / 4 + 2 / 2
    assert bytes_per_parameter(3, 4, "bf16-mixed", whole=0.5, carried=1.5) == 1 + 0.25 + 16 / 4 + 0.75
