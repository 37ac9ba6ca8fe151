"""The engines of `ds_lightning._aio`: io_uring, Linux AIO and native threads."""

from typing import Any

from ds_lightning.errors import NativeOpError
from ds_lightning.ops import native
from ds_lightning.ops.aio.request import Failure, Options, Request


class NativeEngine:
    """Owns native threads, each with a queue of its own to the kernel.

    The threads of the kind "threads" carry out one blocking call after the other. They are as many as there are
    requests in flight: `intra_op_parallelism` times `queue_depth`, at most 16.

    Raises:
        NativeOpError: The kind does not run here; the message says why, in words.
    """

    def __init__(self, kind: str, options: Options) -> None:
        module = native.load("_aio", kind)
        try:
            self._engine = module.Engine(
                kind,
                options.block_size,
                options.queue_depth,
                options.intra_op_parallelism,
                options.single_submit,
                options.overlap_events,
            )
        except RuntimeError as error:
            raise NativeOpError(str(error)) from error

    def submit(self, request: Request) -> "NativeTicket":
        """Starts a request; memory and descriptors must live until its ticket is done."""
        return NativeTicket(
            self._engine.submit(
                request.is_write,
                request.address,
                request.nbytes,
                request.offset,
                request.fd,
                request.direct_fd,
                request.offset_alignment,
                request.memory_alignment,
            )
        )

    def is_own_thread(self) -> bool:
        """Whether the caller is one of its threads: never, for those run no Python."""
        return False

    def close(self) -> None:
        """Finishes what is under way and ends all threads; may be called again."""
        self._engine.close()


class NativeTicket:
    """One request under way."""

    def __init__(self, ticket: Any) -> None:
        self._ticket = ticket

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way any more."""
        return bool(self._ticket.done)

    def wait(self) -> Failure | None:
        """Blocks, without the interpreter's lock, until it is done; the failure at the lowest offset, or None."""
        failure = self._ticket.wait()
        return None if failure is None else Failure(*failure)
