"""Adapters of peft on a frozen model: a GPT that knows Python's sources learns the prose of its manual.

python examples/lora.py                             # two ranks; trains the base first, if ./base.ckpt is not there
python examples/lora.py --rank 16 --stage 2
"""

import argparse
from pathlib import Path
from pydoc_data import topics

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT, StdlibText
from ds_lightning.demo.windows import Windows

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    raise SystemExit("This example needs peft: pip install peft") from None

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base", default="base.ckpt", help="a checkpoint of the demo's model")
parser.add_argument("--rank", type=int, default=8, help="of the adapters")
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--base-steps", type=int, default=200)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=6)


class Tuning(pl.LightningModule):
    def __init__(self, base: str, rank: int, layers: int, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            # At stage 3 each layer is cut as soon as it is made, and each rank reads the part of the file it keeps.
            base = ByteGPT(self.hparams.layers, self.hparams.width)
            dsl.load_pretrained(base, self.hparams.base)
            layers = ["qkv", "attention_out", "mlp_in", "mlp_out"]
            self.model = get_peft_model(base, LoraConfig(r=self.hparams.rank, target_modules=layers))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        loss = torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)  # the frozen ones cost it nothing


def main() -> None:
    args = parser.parse_args()
    seed_everything(1234)
    common = {"devices": args.devices, "precision": "bf16-mixed", "logger": False, "enable_checkpointing": False}

    if not Path(args.base).exists():
        trainer = Trainer(strategy=dsl.ZeroStrategy(stage=2), max_steps=args.base_steps, **common)
        trainer.fit(ByteGPT(args.layers, args.width), StdlibText(batch_size=8))
        trainer.save_checkpoint(args.base)

    manual = torch.frombuffer(bytearray(Path(topics.__file__).read_bytes()), dtype=torch.uint8)
    data = DataLoader(Windows(manual, block_size=128, seed=0), batch_size=8)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    held = {}
    for stage in (0, 1, 2, 3):
        trainer = Trainer(strategy=dsl.ZeroStrategy(stage=stage), max_steps=1, **common, **quiet)
        trainer.fit(Tuning(args.base, args.rank, args.layers, args.width), data)
        held[stage] = trainer.strategy.model_state_bytes()

    module = Tuning(args.base, args.rank, args.layers, args.width)
    trainer = Trainer(strategy=dsl.ZeroStrategy(stage=args.stage, exclude_frozen=True), max_steps=args.steps, **common)
    trainer.fit(module, data)
    trainer.save_checkpoint("adapters.ckpt")
    loss = trainer.callback_metrics["loss"]
    module.cpu()  # made whole on every rank; peft does the rest
    trained, every = module.model.get_nb_trainable_parameters()
    merged = module.model.merge_and_unload()
    if trainer.is_global_zero:
        torch.save(merged.state_dict(), "merged.pt")
        print(f"{trained:,} of {every:,} parameters are trained ({trained / every:.1%}), loss {loss:.3f}")
        for stage, nbytes in held.items():
            print(f"stage {stage}: {nbytes / 2**20:.2f} MiB of states per rank")
        for file in (args.base, "adapters.ckpt"):
            print(f"{file}: {Path(file).stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
