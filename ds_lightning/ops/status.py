"""What native code this installation has, for `ds-lightning doctor` and for bug reports."""

from dataclasses import dataclass

from ds_lightning.errors import DsLightningError
from ds_lightning.ops import native


@dataclass(frozen=True, slots=True)
class Status:
    """One native module: is it there, what does it do, and if not, why and what to do."""

    name: str
    purpose: str
    available: bool
    detail: str
    fix: str = ""


_PURPOSES = {
    "_native": "CPU kernels; without them the slower Python references run",
    "_aio": "asynchronous file I/O; without it Python threads read and write",
    "_cuda": "CUDA kernels; without them torch's own operations run on the GPU",
}


def status() -> list[Status]:
    """One entry per native module, in a fixed order; never raises."""
    return [_status_of(name, purpose) for name, purpose in _PURPOSES.items()]


def _engine_of_files() -> str:
    """Which engine runs: by starting it, since only that tells what a container forbids."""
    from ds_lightning.ops.aio import AsyncIO  # only who asks for a status pays for it

    try:
        with AsyncIO() as io:
            return f"engine: {io.engine}" + (f"; {io.why}" if io.why else "")
    except (DsLightningError, ValueError) as error:
        return f"no engine: {error}"


def _status_of(name: str, purpose: str) -> Status:
    found = native.find(name)
    if found.module is None:
        return Status(name, purpose, False, f"{found.why_not}; searched {found.where}", found.fix)
    detail = found.where
    if name == "_native":
        detail += f" (instruction sets: {', '.join(found.module.instruction_sets())})"
    if name == "_cuda":
        detail += f" (devices: {found.module.device_count()})"
    if name == "_aio":
        detail += f" ({_engine_of_files()})"
    return Status(name, purpose, True, detail)
