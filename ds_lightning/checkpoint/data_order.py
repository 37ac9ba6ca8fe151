"""The order of an epoch's samples over all ranks, and a sampler that goes on in the middle of one.

[Note: samples, not batches]
`DistributedSampler` gives rank r of W the places r, r+W, r+2W, ... of one order that all ranks know. The first k
batches of all ranks together are therefore a prefix of that order, and its length is all that another number of ranks
or another batch size needs to know to go on after it.
"""

from __future__ import annotations

import copy
import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DistributedSampler


def order_of_all_ranks(sampler: DistributedSampler[Any], epoch: int, **changes: Any) -> list[Any]:
    """The samples of an epoch over all ranks, each of them once: nothing is padded or left out.

    Args:
        sampler: any rank's.
        epoch: the epoch.
        changes: attributes of the sampler to replace, as `seed` and `shuffle`.
    """
    alone = copy.copy(sampler)
    size = len(sampler.dataset)  # type: ignore[arg-type]
    alone.num_replicas, alone.rank, alone.drop_last = 1, 0, False
    alone.num_samples = alone.total_size = size
    for name, value in changes.items():
        setattr(alone, name, value)
    alone.set_epoch(epoch)
    return list(alone)


def remainder(order: list[Any], consumed: int, replicas: int, rank: int, drop_last: bool) -> list[Any]:
    """What is left for one rank after `consumed` samples of `order`; equally much for every rank.

    A number that does not divide is made up as `DistributedSampler` does: with samples from the beginning of the order,
    or with `drop_last` by leaving out the last ones; fewer than `replicas` of them in either case.
    """
    left = len(order) - consumed
    if left <= 0:
        return []
    if drop_last:
        part = order[consumed : consumed + left // replicas * replicas]
    else:
        missing = -left % replicas
        part = order[consumed:] + (order * math.ceil(missing / len(order)))[:missing]
    return part[rank::replicas]


def batches_of(samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches that one rank makes of so many samples."""
    return samples // batch_size if drop_last else math.ceil(samples / batch_size)


def fingerprint(indices: Iterable[Any]) -> str:
    """Tells whether two orders are the same."""
    indices = list(indices)
    if all(type(index) is int for index in indices):
        return hashlib.sha256(array("q", indices).tobytes()).hexdigest()
    return hashlib.sha256(repr(indices).encode()).hexdigest()


class ResumedSampler(DistributedSampler[Any]):
    """Gives the rest of one epoch, and whole epochs from then on.

    Its length is always that of a whole epoch, because loops compare it with a count of batches that includes those
    before the interruption.

    Args:
        original: the sampler to go on as.
        rest: this rank's samples that are left of the first epoch; None begins with a whole one.
        first_epoch: the epoch, as given to `set_epoch`, in which `rest` is given.
        shift: how far the numbers given to `set_epoch` are ahead of the epochs of the order. Lightning counts an epoch
            that `max_steps` has cut short as a whole one, and goes on in the middle of the next.
    """

    def __init__(self, original: DistributedSampler[Any], rest: list[Any] | None, first_epoch: int, shift: int) -> None:
        super().__init__(
            original.dataset, original.num_replicas, original.rank, original.shuffle, original.seed, original.drop_last
        )
        self.original = copy.copy(original)
        self.first_epoch = first_epoch
        self.shift = shift
        self._rest = rest
        self.set_epoch(first_epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._rest is not None and self.epoch == self.first_epoch:
            return self._give_rest(self._rest)
        self._rest = None
        return iter(self.original)

    def _give_rest(self, rest: list[Any]) -> Iterator[Any]:
        yield from rest
        self._rest = None  # a loader that is shorter than others begins again within the epoch, with all of its samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in the caller's numbers."""
        super().set_epoch(epoch)
        self.original.set_epoch(epoch - self.shift)
