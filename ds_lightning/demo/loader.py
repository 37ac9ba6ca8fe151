"""A DataLoader that goes on in the middle of an epoch instead of starting it again."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader


class ResumableLoader(DataLoader[Any]):
    """Counts the batches it gave; Lightning keeps the count in its checkpoints.

    The order of an epoch is a function of the sampler's seed and epoch, so skipping the counted
    batches continues the interrupted run exactly. Skipped batches are read and dropped, which the
    demo's cheap windows allow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._given, self._skip = self._skip, 0
        for batch in islice(super().__iter__(), self._given, None):
            self._given += 1
            yield batch
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches given in the current epoch."""
        return {"batches": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next epoch start after the batches counted in `state`."""
        self._skip = state["batches"]
