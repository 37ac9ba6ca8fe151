"""The exceptions of this package: one class per kind of mistake, all of them for users.

Every message says what was asked, what was found and one way out. Broken invariants of our own are `assert`s instead.
"""

import os


class DsLightningError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(DsLightningError, ValueError):
    """The configuration asks for something impossible, contradictory, unknown or not supported yet."""


class TopologyError(DsLightningError, RuntimeError):
    """Ranks, process groups or their collectives do not fit together: wrong sizes, a missing rank, a timeout."""


class CheckpointError(DsLightningError, RuntimeError):
    """A checkpoint cannot be written, found or read, or it belongs to another model."""


class NativeOpError(DsLightningError, RuntimeError):
    """A native kernel was asked for that this installation does not have."""


class FileIOError(DsLightningError, OSError):
    """A file cannot be opened, read or written in full.

    Attributes:
        errno: Of the system; None where the system sees no fault, as in a file that is too short.
        path: The file.
        offset: Where in the file it happened, in bytes; None where the file as a whole is meant.
        wanted: The bytes that were asked for; None where that means nothing.
        found: The bytes that were there: of the file, or free on the disk.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int | None = None,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        found: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = code
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.found = found


class ReleasedParameterError(DsLightningError, RuntimeError):
    """The values of a sharded parameter were touched where they are not gathered."""


class RecomputationError(DsLightningError, RuntimeError):
    """A checkpointed forward cannot be computed again, or gives something else than at first."""
