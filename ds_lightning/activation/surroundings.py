"""What a computation depends on beside its arguments: random generators and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from ds_lightning.activation.random_states import RandomStates, RandomStateTracker


class Surroundings:
    """Random states and autocast as they are now.

    Args:
        devices: where the computation runs.
        tracker: named random generators.
    """

    def __init__(self, devices: Iterable[torch.device], tracker: RandomStateTracker | None = None) -> None:
        self._devices = tuple(devices)
        self._tracker = tracker
        self._random = RandomStates(self._devices, tracker)
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As it was inside; behind it, random generators go on as if nothing had been drawn."""
        now = RandomStates(self._devices, self._tracker)
        self._random.put_back()
        try:
            with ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    if enabled or torch.is_autocast_enabled(kind):
                        stack.enter_context(
                            torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                        )
                yield
        finally:
            now.put_back()
