"""The progress bar of `ds-lightning train`: loss and tokens per second on one line."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressLine(TQDMProgressBar):
    """Lightning's plain progress bar without the logger's version, and with rates as whole numbers.

    Args:
        refresh_rate: Batches between updates.
    """

    def __init__(self, refresh_rate: int = 5) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return what the line shows."""
        shown: dict[str, Any] = dict(super().get_metrics(trainer, pl_module))
        shown.pop("v_num", None)
        return {key: f"{value:,.0f}" if key.endswith("/s") else value for key, value in shown.items()}
