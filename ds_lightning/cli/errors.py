"""Mistakes of a user end in a few words and exit code 2; faults of ours keep their traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_lightning.errors import DsLightningError


@dataclass
class Outcome:
    """Exit code of a command."""

    code: int = 0


@contextmanager
def user_errors() -> Iterator[Outcome]:
    """Turn a mistake of the user into a message on stderr and exit code 2.

    HYDRA_FULL_ERROR=1 shows the traceback instead.
    """
    outcome = Outcome()
    try:
        yield outcome
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"ds-lightning: {message}", file=sys.stderr)
        outcome.code = 2


def explain(error: BaseException) -> str | None:
    """Return the words for a mistake of the user, or None for anything else."""
    for cause in _chain(error):
        if isinstance(cause, DsLightningError):
            return str(cause)
    if _is_user_error(error) and not _is_fault_inside(error):
        causes = [str(cause).strip() for cause in _chain(error)]
        return "\n".join(dict.fromkeys(filter(None, causes)))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_user_error(error: BaseException) -> bool:
    # Looked up instead of imported: an error of a library that was never imported cannot have been
    # raised.
    families = [
        ("hydra.errors", "CompactHydraException"),
        ("omegaconf.errors", "OmegaConfBaseException"),
        ("lightning.fabric.utilities.exceptions", "MisconfigurationException"),
    ]
    known = [getattr(sys.modules[module], name) for module, name in families if module in sys.modules]
    return isinstance(error, tuple(known))


def _is_fault_inside(error: BaseException) -> bool:
    # Hydra wraps whatever a constructor raises. A missing class or a wrong argument is a matter of
    # the command line; anything else happened inside the class, and its author needs the traceback.
    cause = error.__cause__
    if type(error).__name__ != "InstantiationException" or not str(error).startswith("Error in call"):
        return False
    if isinstance(cause, TypeError) and "argument" in str(cause):
        return False
    return type(cause).__name__ != "MisconfigurationException"
