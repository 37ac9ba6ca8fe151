"""What is gathered next: the order of units, learnt from the previous step.

The order is advice. A step that runs other modules, or the same ones in another order, gathers what it needs when it
needs it and only loses the overlap.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress


class GatherOrder:
    """Records the sequence of units that one kind of step needs and predicts the rest of it.

    Args:
        numel: elements of each unit, by index.
    """

    _END = -1  # of a backward

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
        # The step left out something, or does something else first: look ahead for it, in this pass.
        with suppress(ValueError):
            self._position += self._ahead().index(index) + 1

    def backward_is_over(self) -> None:
        """What comes next belongs to another forward, or to a second backward over the same graph."""
        if self._recording:
            self._recording.append(self._END)
        with suppress(ValueError):
            self._position = self._known.index(self._END, self._position) + 1

    def _ahead(self) -> list[int]:
        """What is expected until the end of the next backward."""
        end = len(self._known)
        with suppress(ValueError):
            end = self._known.index(self._END, self._position)
        return self._known[self._position : end]

    def upcoming(self, budget: int, besides: Set[int] = frozenset()) -> Sequence[int]:
        """The units expected next, as many as fit into `budget` elements, without some."""
        chosen: list[int] = []
        for index in self._ahead():
            if index in chosen or index in besides:
                continue
            budget -= self._numel[index]
            if budget < 0:
                break
            chosen.append(index)
        return chosen

    def expected(self) -> Set[int]:
        """The units that are needed again before the end of the next backward."""
        return set(self._ahead())

    def reuse_distance(self, index: int) -> int | None:
        """Elements needed before `index` is needed again; None when that is not before the end of a backward."""
        distance = 0
        for other in self._ahead():
            if other == index:
                return distance
            distance += self._numel[other]
        return None
