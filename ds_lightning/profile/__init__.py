"""Where FLOPs, parameters and time go."""

from ds_lightning.profile.profiler import FlopsProfiler, get_model_profile
from ds_lightning.profile.tree import Measured, ModuleProfile

__all__ = ["FlopsProfiler", "Measured", "ModuleProfile", "get_model_profile"]
