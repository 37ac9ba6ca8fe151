"""States of the random number generators of one rank, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader


def capture(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, and of the CUDA generator of `device`.

    Tensors, tuples, lists and numbers only, so that `torch.load(weights_only=True)` reads them. NumPy is left out
    where nothing has imported it. A few kB; does not wait for a GPU.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, place, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [str(name), keys.tolist(), int(place), int(has_gauss), float(gauss)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` returned; generators that either side does not have are left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def draw_for_iterators(loaders: Iterable[object]) -> None:
    """Draw what the iterators of these loaders draw from torch's generator when an epoch begins.

    A run that goes on makes them after its last checkpoint; a resumed run has made them before its states are put
    back, and does not make them again. Workers that stay draw nothing.
    """
    for loader in loaders:
        if isinstance(loader, DataLoader) and loader.generator is None and not loader.persistent_workers:
            torch.empty((), dtype=torch.int64).random_()
