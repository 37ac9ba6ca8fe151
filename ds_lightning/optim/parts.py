"""What an optimizer that looks at whole tensors needs to know where it steps on slices of them.

[Note: tensors in parts] LAMB needs two norms of each parameter, Muon each whole matrix; the layout cuts parameters
wherever a shard ends. Both step on flat tensors as element-wise optimizers do, keep their states element by element,
and ask `Parts` which parameter lies where in them, for sums over all ranks and for whole parameters on one rank each.
Layout, memory and checkpoints are therefore those of every other optimizer. Outside of an engine every tensor is a
whole parameter, and nothing communicates.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that takes part in a step.

    Attributes:
        group: index of its group.
        shape: as the user knows it.
        dtype: in which it is updated.
        name: in the module; empty outside of an engine.
    """

    group: int
    shape: torch.Size
    dtype: torch.dtype
    name: str = ""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a part of a parameter lies in a tensor that is stepped on, both flattened.

    Attributes:
        parameter: place of the parameter in `Parts.parameters`.
        start: first element, in the tensor.
        stop: first element behind it.
        offset: the first element's place in the parameter.
        counted: whether it is this rank's to count and to send; where every rank holds everything, one of them has it.
    """

    parameter: int
    start: int
    stop: int
    offset: int
    counted: bool = True


Work = Callable[[Sequence[int], Tensor], Tensor]
"""Takes parameters of one group and shape, by number, and their values, `[k, numel]`; gives as many new ones back."""


class Parts(abc.ABC):
    """The parameters of one step and how to bring their parts together. All but `segments` is collective.

    Attributes:
        parameters: of all groups, those with a gradient on any rank; the same on all ranks, in the user's order.
        device: where whole parameters are worked on.
    """

    parameters: Sequence[Whole]
    device: torch.device

    @abc.abstractmethod
    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        """The parameters in a tensor that is stepped on, in order. Alignment between them belongs to none."""

    @abc.abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, `[..., len(parameters)]` in fp64 on the CPU: the same bits on every rank."""

    @abc.abstractmethod
    def on_wholes(
        self,
        values: Mapping[Tensor, Tensor],
        chosen: Sequence[int],
        costs: Sequence[float],
        dtype: torch.dtype,
        work: Work,
    ) -> None:
        """Apply `work` to whole parameters, each on one rank, and put the results in the place of the values.

        Args:
            values: by tensor that is stepped on, its flat values; at least where one of the chosen parameters lies.
            chosen: parameters, by number; the same on all ranks, as the next two are.
            costs: of `work`, for each of them.
            dtype: of all values.
            work: gives values of the dtype that it gets. It may write into what it gets.
        """


class WholeTensors(Parts):
    """Parts outside of an engine: every tensor is a parameter.

    Args:
        groups: the tensors with a gradient, by group.
    """

    def __init__(self, groups: Iterable[Sequence[Tensor]]) -> None:
        self.parameters: list[Whole] = []
        self._tensors: list[Tensor] = []
        self._segments: dict[Tensor, tuple[Segment, ...]] = {}
        for group, tensors in enumerate(groups):
            for tensor in tensors:
                self._segments[tensor] = (Segment(len(self.parameters), 0, tensor.numel(), 0),)
                self.parameters.append(Whole(group, tensor.shape, tensor.dtype))
                self._tensors.append(tensor)
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")

    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        """See `Parts`."""
        return self._segments[tensor]

    def total(self, values: Tensor) -> Tensor:
        """See `Parts`."""
        return values

    def on_wholes(
        self,
        values: Mapping[Tensor, Tensor],
        chosen: Sequence[int],
        costs: Sequence[float],
        dtype: torch.dtype,
        work: Work,
    ) -> None:
        """See `Parts`."""
        for number in chosen:
            flat = values[self._tensors[number]]
            if flat.numel():
                flat.copy_(work([number], flat[None])[0])


def balanced(costs: Sequence[float], ranks: int, loads: Sequence[float] = ()) -> list[int]:
    """Who works on what, so that the busiest rank has little more than its share.

    The longest job first, each to the rank that has least to do (Graham, SIAM J. Appl. Math. 17, 1969: at most 4/3 of
    the best).

    Args:
        costs: of each job.
        ranks: number of ranks.
        loads: what each of them has to do already.

    Returns:
        The rank for each job.
    """
    busy = list(loads) or [0.0] * ranks
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owners[job] = min(range(ranks), key=lambda rank: (busy[rank], rank))
        busy[owners[job]] += costs[job]
    return owners
