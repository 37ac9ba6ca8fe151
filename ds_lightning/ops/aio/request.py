"""What an engine is asked and what it answers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Options:
    """How requests are cut and queued; the names are those of the `aio` block."""

    block_size: int
    """Bytes per request to the kernel."""
    queue_depth: int
    """Requests in flight per thread."""
    single_submit: bool
    """Whether each request is a system call of its own."""
    overlap_events: bool
    """Whether the queue is refilled while requests are under way; otherwise it is emptied first."""
    intra_op_parallelism: int
    """Threads that share one transfer."""


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of memory and the same bytes of a file."""

    is_write: bool
    address: int
    nbytes: int
    offset: int
    """In the file."""
    fd: int
    """Takes any offset, length and address."""
    direct_fd: int
    """Opened past the page cache; -1 where there is none."""
    offset_alignment: int
    """What offsets and lengths through `direct_fd` must be multiples of."""
    memory_alignment: int
    """What addresses through `direct_fd` must be multiples of."""


class Failure(NamedTuple):
    """Why not all bytes were moved."""

    errno: int
    """Of the system; 0 when a read met the end of the file."""
    offset: int
    """Where in the file."""


class Ticket(Protocol):
    """One request under way."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way any more."""

    def wait(self) -> Failure | None:
        """Blocks until it is done; the failure at the lowest offset, or None. May be called again."""


class Engine(Protocol):
    """Carries out requests in the background. All methods may be called by several threads."""

    def submit(self, request: Request) -> Ticket:
        """Starts a request; memory and descriptors must live until its ticket is done."""

    def is_own_thread(self) -> bool:
        """Whether the caller is one of its threads."""

    def close(self) -> None:
        """Finishes what is under way and ends all threads; may be called again."""
