"""How weights and gradients of units travel: plainly, quantized, inside nodes, or in two steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ds_lightning.comm.collectives import Chained, Collectives, Pending, PendingReduce
from ds_lightning.comm.feedback import ErrorFeedback, FeedbackOptions
from ds_lightning.comm.hierarchical import HierarchicalGather, ReplicatedReduce, all_reduce
from ds_lightning.comm.quantized import BLOCK, QUANTIZABLE, Gathers, QuantizedReduce, gather_quantized
from ds_lightning.errors import ConfigError
from ds_lightning.layout.flat import ALIGNMENT, Unit
from ds_lightning.topology import Topology
from ds_lightning.zero.buffers import ScratchPool, UnitBuffers
from ds_lightning.zero.secondary import SecondaryShards


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What the configuration says about how sharded units travel. Resident units always travel plainly.

    Attributes:
        quantized_weights: `zero_quantized_weights`.
        quantized_gradients: `zero_quantized_gradients`.
        quantized_frozen: `zero_quantized_nontrainable_weights`.
        hierarchical_gather: `mics_hierarchical_params_gather`.
        feedback: `zeropp_loco_param`; None carries no errors.
    """

    quantized_weights: bool = False
    quantized_gradients: bool = False
    quantized_frozen: bool = False
    hierarchical_gather: bool = False
    feedback: FeedbackOptions | None = None

    def alignment(self, topology: Topology) -> int:
        """Elements of which a shard must be a multiple."""
        blocks = BLOCK if self.quantized_weights or self.quantized_gradients or self.quantized_frozen else 1
        return math.lcm(ALIGNMENT * topology.teams.replicas.size, blocks)


class Transport:
    """Chooses how the values of each unit travel. Owns the second shards of hpZ and the errors of LoCo.

    Attributes:
        feedback: errors of quantized gradients; None where none are carried.

    Args:
        collectives: over the ranks that share the shards.
        pool: scratch memory.
        options: from the configuration.
    """

    def __init__(self, collectives: Collectives, pool: ScratchPool, options: TransportOptions | None = None) -> None:
        self._collectives = collectives
        self._pool = pool
        self._options = options or TransportOptions()
        topology, ledger = collectives.topology, collectives.ledger
        teams = topology.teams
        self._gathers: Gathers = collectives
        self._steps = [collectives]
        if teams.inside is not None and teams.across is not None:
            inside, across = (Collectives.create(topology, ledger, team) for team in (teams.inside, teams.across))
            self._steps = [inside, across]
            if self._options.hierarchical_gather:
                self._gathers = HierarchicalGather(collectives, across, inside, pool)
        self._replicas = Collectives.create(topology, ledger, teams.replicas)
        self.feedback = None if self._options.feedback is None else ErrorFeedback(self._options.feedback, BLOCK)
        self._secondary: SecondaryShards | None = None
        if teams.secondary is not None:
            self._secondary = SecondaryShards(Collectives.create(topology, ledger, teams.secondary))

    def check(self, unit: Unit) -> None:
        """Refuse a unit that cannot travel as it is wanted.

        Raises:
            ConfigError: for fp64 that is to be quantized.
        """
        options = self._options
        quantized = options.quantized_weights or (
            options.quantized_gradients if unit.trainable else options.quantized_frozen
        )
        if quantized and unit.dtype == torch.float64 and not unit.resident:
            raise ConfigError(
                f"{unit.slots[0].name} is fp64, which is not quantized: train in another precision, or set "
                "zero_quantized_weights, zero_quantized_gradients and zero_quantized_nontrainable_weights to false."
            )

    def packs(self, unit: Unit) -> bool:
        """Whether a unit of stage 3 is kept as int8."""
        frozen = not unit.trainable and not unit.resident
        return self._options.quantized_frozen and frozen and unit.master_dtype in QUANTIZABLE

    # Weights ----------------------------------------------------------------------------------------------------------

    def exact(self, buffers: UnitBuffers) -> bool:
        """Whether gathers give the values that their owners have."""
        wanted = self._options.quantized_weights and buffers.quantized is None and self._collectives.team.size > 1
        return not wanted or buffers.unit.dtype not in QUANTIZABLE

    def gather(self, buffers: UnitBuffers, tag: int, piece: int, exact: bool = False, again: bool = False) -> Pending:
        """Fill the `full` of a sharded unit, which must have its memory. Collective.

        Args:
            buffers: of the unit.
            tag: of messages.
            piece: elements per message.
            exact: the values that owners have, whatever computes.
            again: it has been gathered here, and nothing has changed since.
        """
        unit = buffers.unit
        plainly = exact or self.exact(buffers)
        kept = self._secondary if plainly == self.exact(buffers) else None
        if kept is not None and unit.index in kept:
            return kept.gather(buffers, tag, piece)
        packed = buffers.quantized
        if packed is not None:
            own = packed.payload, packed.scales
            pending = gather_quantized(self._gathers, buffers.full, unit.name, tag, piece, self._pool, own)
            return pending if kept is None else Chained([pending], lambda: kept.keep(buffers))
        if not (again and plainly):
            buffers.place_own()
        if plainly:
            pending = self._gathers.all_gather(buffers.full, unit.name, tag, piece)
        else:
            pending = gather_quantized(self._gathers, buffers.full, unit.name, tag, piece, self._pool)
        return pending if kept is None else Chained([pending], lambda: kept.keep(buffers))

    def publish(self, buffers: UnitBuffers, tag: int, piece: int) -> Pending:
        """Fill the `full` of a unit that is not sharded; this rank's chunk is in place. Collective."""
        return self._collectives.all_gather(buffers.full, buffers.unit.name, tag, piece)

    def near(self, index: int) -> bool:
        """Whether the next gather of a unit needs no rank outside the node, nor what this rank has on a disk."""
        return self._secondary is not None and index in self._secondary

    def outdate(self, indices: Iterable[int]) -> None:
        """The values of these units change, on all ranks."""
        if self._secondary is not None:
            self._secondary.outdate(indices)

    def drop(self, index: int) -> None:
        """A unit is gone."""
        if self._secondary is not None:
            self._secondary.drop(index)
        if self.feedback is not None:
            self.feedback.drop(index)

    @property
    def state_nbytes(self) -> int:
        """Bytes of second shards and carried errors on this rank."""
        return sum(owner.nbytes for owner in (self._secondary, self.feedback) if owner is not None)

    # Gradients --------------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """How many copies of the model there are (MiCS)."""
        return self._replicas.team.size

    def reduce_scatter(
        self,
        buffers: UnitBuffers,
        full: torch.Tensor,
        tag: int,
        piece: int,
        take: Callable[[int], torch.Tensor],
        later: bool = False,
    ) -> PendingReduce:
        """Sum a unit's gradients over all ranks, each rank receiving its chunk. Collective.

        Args:
            buffers: of the unit.
            full: `[unit.numel]`, not to be touched until the result is finished.
            tag: of messages.
            piece: elements per message.
            take: gives a scratch tensor of so many elements, of `full`'s dtype.
            later: more gradients come before a step, so copies of the model need not be summed yet.
        """
        name = buffers.unit.name
        team = self._collectives.team
        if self._options.quantized_gradients and buffers.sharded and full.dtype in QUANTIZABLE and team.size > 1:
            return QuantizedReduce(self._steps, full, name, tag, self._pool, self.feedback, buffers.unit.index)
        pending = self._collectives.reduce_scatter(full, name, tag, piece, take)
        if self.copies == 1:
            return pending
        if later:
            pending.partial = True
            return pending
        wide = torch.float64 if full.dtype == torch.float64 else torch.float32
        numel = full.numel() // team.size
        return ReplicatedReduce(pending, numel, wide, team.size, self._replicas, name, tag, piece, self._pool)

    def sum_copies(self, buffers: UnitBuffers, values: torch.Tensor, tag: int, piece: int) -> None:
        """Replace a chunk of gradients by the sum over copies of the model. Collective; waits."""
        all_reduce(self._replicas, values, buffers.unit.name, tag, piece, self._pool)
