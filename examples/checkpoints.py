"""Sharded folders, written beside training, with averages of the weights; `--resume last` on any number of ranks.

python examples/checkpoints.py                      # two ranks, stage 3
python examples/checkpoints.py --resume last --devices 1 --stage 1 --steps 200
ds-lightning export checkpoints/last.ckpt gpt.safetensors --key ema.state_dict --dtype bf16
"""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import ds_lightning as dsl
from ds_lightning.demo import ByteGPT, StdlibText

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--resume", help="a checkpoint, a folder with `latest`, or `last`")


def main() -> None:
    args = parser.parse_args()
    seed_everything(1234)
    model = ByteGPT(layers=args.layers, width=args.width)
    data = StdlibText(batch_size=8, block_size=model.block_size, held_out_windows=64)
    saving = ModelCheckpoint(
        dirpath="checkpoints", filename="{step}", every_n_train_steps=max(1, args.steps // 4), save_last="link"
    )
    trainer = Trainer(
        strategy=dsl.ZeroStrategy(stage=args.stage, checkpoint="sharded", async_save=True),
        devices=args.devices,
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 2),
        callbacks=[saving, dsl.callbacks.EMA(decay=0.99)],
        logger=False,
    )
    trainer.fit(model, data, ckpt_path=args.resume)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["val_loss"]
        steps, last = trainer.global_step, saving.last_model_path
        print(f"held-out loss of the averages {loss:.3f} after {steps} steps, saved {last}")


if __name__ == "__main__":
    main()
