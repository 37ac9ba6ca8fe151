"""The demo data: windows of the standard library's sources as a LightningDataModule."""

from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from ds_lightning.demo.corpus import read_stdlib, unigram_entropy
from ds_lightning.demo.loader import ResumableLoader
from ds_lightning.demo.windows import Windows


class StdlibText(LightningDataModule):
    """Python's standard library as training text, some of its files held out.

    Args:
        batch_size: Windows per step and rank.
        block_size: Bytes per window.
        held_out_windows: Number of fixed held-out windows, over all ranks.
        seed: Seed of the training windows' places.
        num_workers: Worker processes of each loader.
        max_megabytes: Read at most this much text.
    """

    def __init__(
        self,
        batch_size: int = 8,
        block_size: int = 128,
        held_out_windows: int = 256,
        seed: int = 0,
        num_workers: int = 0,
        max_megabytes: float = 16.0,
    ) -> None:
        super().__init__()
        # Not to the logger: Lightning refuses a name that the module logs with another value.
        self.save_hyperparameters(logger=False)
        self._text: tuple[Tensor, Tensor] | None = None

    @property
    def text(self) -> tuple[Tensor, Tensor]:
        """(training bytes, held-out bytes), read at first use."""
        if self._text is None:
            self._text = read_stdlib(max_megabytes=self.hparams["max_megabytes"])
        return self._text

    def unigram_entropy(self) -> float:
        """Return the entropy of single held-out bytes in nats, the loss to beat."""
        return unigram_entropy(self.text[1])

    def train_dataloader(self) -> DataLoader[Any]:
        """Random windows, reshuffled each epoch."""
        windows = Windows(self.text[0], self.hparams["block_size"], seed=self.hparams["seed"])
        return ResumableLoader(windows, shuffle=True, drop_last=True, **self._loader_arguments())

    def val_dataloader(self) -> DataLoader[Any]:
        """The same held-out windows every time."""
        windows = Windows(self.text[1], self.hparams["block_size"], count=self.hparams["held_out_windows"])
        return DataLoader(windows, **self._loader_arguments())

    def _loader_arguments(self) -> dict[str, Any]:
        workers = self.hparams["num_workers"]
        return {
            "batch_size": self.hparams["batch_size"],
            "num_workers": workers,
            "persistent_workers": workers > 0,
        }
