"""What is gathered next: the order of units, learnt from the previous step.

The order is advice. A step that runs other modules, or the same ones in another order, gathers what it needs when it
needs it and only loses the overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress


class GatherOrder:
    """Records the sequence of units that one kind of step needs and predicts the rest of it.

    Args:
        numel: elements of each unit, by index.
    """

    def __init__(self, numel: dict[int, int]) -> None:
        self._numel = numel
        self._known: list[int] = []
        self._recording: list[int] = []
        self._position = 0

    def restart(self) -> None:
        """A step begins: what was recorded becomes what is expected."""
        if self._recording:
            self._known = self._recording
        self._recording = []
        self._position = 0

    def forget(self) -> None:
        """The units have changed."""
        self._known, self._recording, self._position = [], [], 0

    def note(self, index: int) -> None:
        """Unit `index` is needed now."""
        self._recording.append(index)
        if self._position < len(self._known) and self._known[self._position] == index:
            self._position += 1
            return
        # The step left out something, or does something else first: look ahead for it.
        with suppress(ValueError):
            self._position = self._known.index(index, self._position) + 1

    def upcoming(self, budget: int) -> Sequence[int]:
        """The units expected next, as many as fit into `budget` elements."""
        chosen: list[int] = []
        for index in self._known[self._position :]:
            if index in chosen:
                continue
            budget -= self._numel[index]
            if budget < 0:
                break
            chosen.append(index)
        return chosen

    def reuse_distance(self, index: int) -> int | None:
        """Elements needed before unit `index` is needed again; None when that is not expected."""
        distance = 0
        for other in self._known[self._position :]:
            if other == index:
                return distance
            distance += self._numel[other]
        return None
