"""Lightning callbacks: averages of the weights, and what measures and shows a run."""

from ds_lightning.callbacks.ema import EMA
from ds_lightning.callbacks.flops import FlopsProfile
from ds_lightning.callbacks.memory import MemoryUse
from ds_lightning.callbacks.progress import ProgressLine
from ds_lightning.callbacks.throughput import Throughput

__all__ = ["EMA", "FlopsProfile", "MemoryUse", "ProgressLine", "Throughput"]
