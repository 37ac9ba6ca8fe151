"""Inputs of checkpointed calls in host memory (`cpu_checkpointing`).

[Note: streams]
A call's inputs are copied out when the next call's come: the last ones never travel, because backward wants them first.
The copy runs on a stream of its own, behind what the compute stream has queued by then; the device memory is handed
back at once and reused only behind the copy (`record_stream`). On the way back the copy for call k - 1 starts when
call k is restored, so that it runs beside k's recomputation and backward. Host memory comes from torch's pool of pinned
blocks, which does not hand a block out again while a copy uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from ds_lightning.activation.inputs import Kept, WholeStore, changed_in_place


class _Traveller:
    """One tensor: on the device, then on the host. Shared by all calls that have it as an input."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source = ref(tensor)
        self.version = tensor._version
        self._device = tensor.device
        self._here: torch.Tensor | None = tensor.detach()
        self._host: torch.Tensor | None = None
        self._back: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.nbytes = tensor.numel() * tensor.element_size()

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is the one that was put away, unchanged."""
        return self.source() is tensor and tensor._version == self.version

    def leave(self, streams: _Streams) -> None:
        """To the host."""
        if self._here is None:
            return
        here, self._here = self._unchanged(self._here), None
        if self._device.type != "cuda":
            self._host = here
            return
        stream = streams.of(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host = torch.empty_like(here, device="cpu", pin_memory=True)
            self._host.copy_(here, non_blocking=True)
        here.record_stream(stream)

    def fetch(self, streams: _Streams) -> None:
        """Start the way back."""
        if self._here is not None or self._back is not None or self._device.type != "cuda":
            return
        assert self._host is not None
        stream = streams.of(self._device)
        back = torch.empty_like(self._host, device=self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            back.copy_(self._host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        back.record_stream(stream)
        self._back = (back, event)

    def arrive(self, streams: _Streams) -> torch.Tensor:
        """The value on its device; the copy on the host stays for another backward."""
        if self._here is not None:
            return self._unchanged(self._here)
        assert self._host is not None
        if self._device.type != "cuda":
            return self._unchanged(self._host)
        self.fetch(streams)
        assert self._back is not None
        (back, event), self._back = self._back, None
        torch.cuda.current_stream(self._device).wait_event(event)
        return back

    def _unchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor._version != self.version:
            raise changed_in_place()
        return tensor.detach()


class _Streams:
    """One stream for copies on each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Offloaded:
    """The inputs of one call."""

    def __init__(
        self,
        travellers: dict[int, _Traveller],
        rest: Kept,
        places: Sequence[int],
        streams: _Streams,
        before: _Offloaded | None,
    ) -> None:
        self._travellers = travellers
        self._rest = rest
        self._places = places
        self._streams = streams
        self._before: ReferenceType[_Offloaded] | None = ref(before) if before is not None else None
        self.nbytes = rest.nbytes + sum(traveller.nbytes for traveller in travellers.values())

    def leave(self) -> None:
        for traveller in self._travellers.values():
            traveller.leave(self._streams)

    def fetch(self) -> None:
        for traveller in self._travellers.values():
            traveller.fetch(self._streams)

    def restore(self) -> list[torch.Tensor]:
        found = {place: traveller.arrive(self._streams) for place, traveller in self._travellers.items()}
        found.update(zip(self._places, self._rest.restore(), strict=True))
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return [found[place] for place in sorted(found)]


class HostStore:
    """Floating-point inputs go to pinned host memory, all but those of the last call. See [Note: streams].

    A tensor that many calls share travels once. Others (integers, views with gaps) stay. On a CPU nothing moves.
    """

    def __init__(self) -> None:
        self._streams = _Streams()
        self._whole = WholeStore()
        self._last: ReferenceType[_Offloaded] | None = None
        self._known: WeakValueDictionary[int, _Traveller] = WeakValueDictionary()

    def keep(self, tensors: Sequence[torch.Tensor]) -> Kept:
        """See `InputStore`."""
        last = self._last() if self._last is not None else None
        if last is not None:
            last.leave()
        moving = [place for place, tensor in enumerate(tensors) if _moves(tensor)]
        staying = [place for place in range(len(tensors)) if place not in moving]
        kept = _Offloaded(
            {place: self._traveller(tensors[place]) for place in moving},
            self._whole.keep([tensors[place] for place in staying]),
            staying,
            self._streams,
            last,
        )
        self._last = ref(kept)
        return kept

    def _traveller(self, tensor: torch.Tensor) -> _Traveller:
        known = self._known.get(id(tensor))
        if known is None or not known.is_still(tensor):
            known = self._known[id(tensor)] = _Traveller(tensor)
        return known


def _moves(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
