"""The exceptions of this package: one class per kind of mistake, all of them for users.

Every message says what was asked, what was found and one way out. Broken invariants of our own are `assert`s instead.
"""


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


class ReleasedParameterError(DsLightningError, RuntimeError):
    """The values of a sharded parameter were touched where they are not gathered."""


class RecomputationError(DsLightningError, RuntimeError):
    """A checkpointed forward cannot be computed again, or gives something else than at first."""
