"""When the units of a backward that gathers are reduced: what all ranks know, whatever their gradients look like.

[Note: where backward gathers] There, which gradients a rank has, and when, must decide nothing that others wait for:
one that waits for a reduction comes to no gather, and one that waits for a gather does not come to the reductions at
the end of backward. But all ranks enter the same scopes. When they leave one for the last time its units are closed,
and their reductions start, complete or not, between the same two gathers on every rank. Gradients only decide when a
rank may free the values; if a closed scope is entered again after all, some ranks have its values still and others do
not, so all of them gather it.

A unit for which some rank had gradients after it was closed is hasty: a checkpoint around several blocks recomputes all
of them before the first one's backward. From then on it waits for the next scope that is closed. What lies in no scope
starts with the unit that was closed next after it was complete on rank 0, in its first backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Closings:
    """Which units are closed in this backward, and what starts with each. The same on all ranks.

    Attributes:
        left: units that were closed, and not entered since.
        anchors: units in no scope, and the unit with whose closing they start.
    """

    def __init__(self) -> None:
        self.left: set[int] = set()
        self.anchors: dict[int, int] = {}
        self._hasty: set[int] = set()
        self._waiting: list[int] = []
        self._loose: list[int] = []  # of this rank, complete since the last closing

    def found(self, index: int) -> None:
        """A unit in no scope is complete on this rank."""
        self._loose.append(index)

    def close(self, indices: Iterable[int], learnt: bool) -> Sequence[int]:
        """A scope was left for the last time.

        Args:
            indices: its units, also frozen ones.
            learnt: whether `anchors` are those of rank 0.

        Returns:
            The units to start, in order; frozen ones, and some that have started, among them.
        """
        indices = list(indices)
        if not indices:
            return ()
        self.left.update(indices)
        loose, self._loose = self._loose, []
        if not learnt:
            self.anchors.update(dict.fromkeys(loose, indices[-1]))
        waiting = [*self._waiting, *indices]
        if not self._hasty.isdisjoint(indices):
            self._waiting = waiting
            return ()
        self._waiting = []
        loose = [index for index, anchor in self.anchors.items() if anchor in waiting] if learnt else []
        return waiting + [index for index in loose if index not in self._hasty]

    def reopen(self, index: int) -> None:
        """A unit's scope is entered again."""
        self.left.discard(index)

    def again(self, indices: Iterable[int]) -> None:
        """These units were reduced twice in a backward."""
        self._hasty.update(indices)

    def remove(self, index: int) -> None:
        """Forget a unit."""
        self.left.discard(index)
        self._hasty.discard(index)
        self.anchors = {unit: anchor for unit, anchor in self.anchors.items() if index not in (unit, anchor)}

    def reset(self) -> None:
        """A backward is over."""
        self.left.clear()
        self._waiting = []
        self._loose = []
