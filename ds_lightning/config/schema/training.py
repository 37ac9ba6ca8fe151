"""Small training features."""

from __future__ import annotations

from dataclasses import dataclass

from ds_lightning.config.schema.base import Block, key


@dataclass
class ProgressiveLayerDropConfig(Block):
    """Drop layers more and more."""

    enabled: bool = key(False, "Turn it on.")
    theta: float = key(1.0, "Share kept in the end.", at_least=0, at_most=1)
    gamma: float = key(0.001, "Speed.", at_least=0)


@dataclass
class EigenvalueConfig(Block):
    """Power iteration over Hessian blocks."""

    enabled: bool = key(False, "Turn it on.")
    verbose: bool = key(False, "Print values.")
    max_iter: int = key(100, "Iterations.", at_least=1)
    tol: float = key(1e-2, "Relative change at which to stop.", above=0)
    stability: float = key(1e-6, "Added to denominators.", at_least=0)
    gas_boundary_resolution: int = key(1, "Steps between computations.", at_least=1)
    layer_name: str = key("bert.encoder.layer", "Where the layers are.")
    layer_num: int = key(0, "Number of layers.", at_least=0)
