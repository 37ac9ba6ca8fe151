"""Fine-tune a model of transformers that no rank ever holds whole, and give it back to transformers.

python examples/pretrained.py                       # two ranks, stage 3; makes a tiny model in ./base first
python examples/pretrained.py --base FOLDER         # any causal language model with 256 tokens or more
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer, seed_everything
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import ds_lightning as dsl
from ds_lightning.cli import main as ds_lightning
from ds_lightning.demo import StdlibText

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base", default="base", help="a folder as the hub has them")
parser.add_argument("--tuned", default="tuned", help="the folder to write")
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)


class FineTuning(pl.LightningModule):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            # Made layer by layer, each cut at once; then every rank reads the part of the files that it keeps.
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.hparams.base))
            dsl.load_pretrained(self.model, self.hparams.base)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, _ = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_base(folder: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=256, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="1MB")


def main() -> None:
    args = parser.parse_args()
    seed_everything(1234)
    if not Path(args.base).exists():
        make_base(args.base)
    trainer = Trainer(
        strategy=dsl.ZeroStrategy(stage=args.stage, checkpoint="sharded"),
        devices=args.devices,
        max_steps=args.steps,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(FineTuning(args.base), StdlibText(batch_size=8, block_size=128))
    trainer.save_checkpoint("tuned.ckpt")
    if trainer.is_global_zero:
        words = ["--strip-prefix", "model.", "--max-shard-size", "1MB", "--overwrite"]
        assert ds_lightning(["export", "tuned.ckpt", args.tuned, *words]) == 0
        AutoConfig.from_pretrained(args.base).save_pretrained(args.tuned)
        model = AutoModelForCausalLM.from_pretrained(args.tuned)
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.3f}, {args.tuned} has {model.num_parameters()} parameters for transformers")


if __name__ == "__main__":
    main()
