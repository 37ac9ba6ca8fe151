"""Plain Lightning: train a sharded GPT, save it, go on from the file at any stage."""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import ds_lightning  # noqa: F401  (registers dszero0 ... dszero3)
from ds_lightning.demo import ByteGPT, StdlibText

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--strategy", default="dszero3")
parser.add_argument("--precision", default="32-true")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--resume", help="a checkpoint of any stage, world size or precision")


def main() -> None:
    args = parser.parse_args()
    seed_everything(1234)
    model = ByteGPT(layers=args.layers, width=args.width)
    data = StdlibText(batch_size=8, block_size=model.block_size, held_out_windows=64)
    checkpoint = ModelCheckpoint(dirpath="checkpoints", filename="gpt", enable_version_counter=False)
    trainer = Trainer(
        strategy=args.strategy,
        precision=args.precision,
        accelerator="auto",
        devices=args.devices,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 2),
        gradient_clip_val=1.0,
        callbacks=[checkpoint],
        logger=False,
    )
    trainer.fit(model, data, ckpt_path=args.resume)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["val_loss"]
        print(f"held-out loss {loss:.3f}, saved {checkpoint.best_model_path}")


if __name__ == "__main__":
    main()
