"""Two optimizers and manual optimization under sharding: a GAN for points on a ring."""

import argparse
import math

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ds_lightning  # noqa: F401  (registers dszero0 ... dszero3)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--strategy", default="dszero2")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=10)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class RingGAN(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = mlp(8, 2)
        self.discriminator = mlp(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        noise = torch.randn(len(real), 8, device=self.device)
        generator_optimizer, discriminator_optimizer = self.optimizers()

        self.toggle_optimizer(discriminator_optimizer)
        logits = self.discriminator(torch.cat([real, self.generator(noise).detach()]))
        labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(logits)
        discriminator_loss = F.binary_cross_entropy_with_logits(logits, labels)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.toggle_optimizer(generator_optimizer)
        logits = self.discriminator(self.generator(noise))
        generator_loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        self.clip_gradients(generator_optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log_dict({"g_loss": generator_loss, "d_loss": discriminator_loss}, prog_bar=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        fake = self.generator(torch.randn(256, 8, device=self.device))
        self.log("radius", fake.norm(dim=1).mean(), sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        ]


def main() -> None:
    args = parser.parse_args()
    seed_everything(1)
    angles = torch.rand(4096) * 2 * math.pi
    ring = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1) + 0.02 * torch.randn(4096, 2))
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="auto",
        devices=args.devices,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(RingGAN(), DataLoader(ring, batch_size=64, shuffle=True), DataLoader(ring, batch_size=256))
    if trainer.is_global_zero:
        radius = trainer.callback_metrics["radius"]
        print(f"mean radius of generated points {radius:.2f} (the ring's is 1.00)")


if __name__ == "__main__":
    main()
