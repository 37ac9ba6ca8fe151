"""Every rank sends something else to every other rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_lightning.comm.collectives import Pending
from ds_lightning.comm.ledger import Ledger
from ds_lightning.errors import TopologyError
from ds_lightning.topology import Topology


def exchange(
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    topology: Topology,
    ledger: Ledger,
    what: str,
    tag: int,
) -> Pending:
    """Send `outgoing[r]` to each rank r and fill `incoming[r]` with what comes from it. Collective.

    Pairwise messages on gloo (see [Note: point to point on gloo]), all-to-all on NCCL; what is empty is not sent.

    Args:
        outgoing: for each rank, contiguous; not to be touched until the exchange is over. A rank's own is copied.
        incoming: for each rank, contiguous, as large as what that rank sends.
        topology: ranks and groups.
        ledger: counts the bytes.
        what: name for messages.
        tag: distinguishes operations that are in flight together.

    Raises:
        TopologyError: when another rank is gone.
    """
    rank, size, group = topology.rank, topology.world_size, topology.data_group

    def describe(error: str) -> str:
        return (
            f"rank {rank}: the exchange of {what} did not complete; a missing rank is waited for up to "
            f"{topology.timeout.total_seconds():g} s. Another rank has failed, or does something else. {error}"
        )

    incoming[rank].copy_(outgoing[rank])
    if size == 1:
        return Pending([], (), describe)
    works: list[Any] = []
    try:
        if topology.device.type == "cpu":
            for step in range(1, size):
                peer = (rank + step) % size
                if outgoing[peer].numel():
                    works.append(dist.isend(outgoing[peer], group=group, group_dst=peer, tag=tag))
                if incoming[peer].numel():
                    works.append(dist.irecv(incoming[peer], group=group, group_src=peer, tag=tag))
        else:
            nothing = outgoing[rank].new_empty(0)
            sent = [nothing if peer == rank else each for peer, each in enumerate(outgoing)]
            received = [nothing if peer == rank else each for peer, each in enumerate(incoming)]
            works.append(dist.all_to_all(received, sent, group=group, async_op=True))
    except RuntimeError as error:
        raise TopologyError(describe(str(error))) from error
    ledger.record("exchange", sum(each.nbytes for peer, each in enumerate(outgoing) if peer != rank))
    return Pending(works, (*outgoing, *incoming), describe)
