"""Lightning callbacks that measure and show a run."""

from ds_lightning.callbacks.memory import MemoryUse
from ds_lightning.callbacks.progress import ProgressLine
from ds_lightning.callbacks.throughput import Throughput

__all__ = ["MemoryUse", "ProgressLine", "Throughput"]
