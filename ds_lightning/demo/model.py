"""The demo model: a byte-level GPT, an ordinary LightningModule that knows no sharding."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lightning.demo.block import Block
from ds_lightning.demo.rotary import rotation
from ds_lightning.errors import ConfigError

VOCABULARY = 256  # a token is a byte, so any text works without a tokenizer


class ByteGPT(LightningModule):
    """A GPT over bytes.

    Args:
        layers: Number of transformer blocks.
        width: Size of the residual stream.
        heads: Attention heads per block.
        block_size: Longest context in bytes.
        dropout: Dropout probability.
        tie_head: Use the token embedding as the output layer as well.
        lr: Highest learning rate.
        min_lr_ratio: The cosine ends at `lr * min_lr_ratio`.
        warmup_steps: Optimizer steps of linear warm-up.
        total_steps: Optimizer steps of the whole schedule; None takes them from the Trainer.
        weight_decay: Decay of matrices; vectors (biases, norms) are never decayed.
        betas: The two Adam coefficients.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 256,
        heads: int = 8,
        block_size: int = 128,
        dropout: float = 0.0,
        tie_head: bool = False,
        lr: float = 2e-3,
        min_lr_ratio: float = 0.1,
        warmup_steps: int = 20,
        total_steps: int | None = None,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise ConfigError(f"width={width} with heads={heads}: a head needs an even, whole number of elements.")
        betas = [float(beta) for beta in betas]  # a plain list, whatever kind of sequence a config system passed
        self.save_hyperparameters()
        self.lr = lr  # the name that Lightning's LearningRateFinder looks for
        self.block_size = block_size
        self.head_size = width // heads
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tie_head:
            self.head.weight = self.token_embedding.weight
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        std = 0.02
        nn.init.normal_(self.token_embedding.weight, std=std)
        nn.init.normal_(self.head.weight, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters(std, std / math.sqrt(2 * len(self.blocks)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte, (batch, time, 256), for tokens (batch, time)."""
        turns = rotation(tokens.shape[1], self.head_size, tokens.device)
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), targets.reshape(-1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the batch in nats per byte."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("bits_per_byte", loss.detach() / math.log(2))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the held-out loss, averaged over all batches of all ranks."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in two parameter groups, linear warm-up, then a cosine, both per optimizer step."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": self.hparams["weight_decay"],
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        # With Lightning's own gradient scaler a fused optimizer un-scales by itself, and then
        # refuses to be clipped.
        fused = self.trainer.precision != "16-mixed"
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=tuple(self.hparams["betas"]), fused=fused)
        total = self.hparams["total_steps"] or self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(self._lr_factor, total))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, total: float, step: int) -> float:
        warmup = int(self.hparams["warmup_steps"])
        if step < warmup:
            return float(step + 1) / warmup
        if total == float("inf") or total <= warmup:
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        floor = float(self.hparams["min_lr_ratio"])
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.7, seed: int = 0) -> str:
        """Continue `prompt` by `length` bytes.

        Every rank draws from its own generator with the same seed, so a model that is spread over
        ranks gives the same text on all of them, and they stay in step.

        Args:
            prompt: Text to start from; not empty.
            length: Number of bytes to add.
            temperature: Below 1 prefers likely bytes; 0 always takes the likeliest.
            seed: Seed of the draw.
        """
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.block_size :])[0, -1].float().cpu()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen.to(tokens.device)[None]], dim=1)
        self.train(was_training)
        return bytes(tokens[0].tolist()).decode(errors="replace")
