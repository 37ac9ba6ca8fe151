"""Numbers as people read them."""

from __future__ import annotations

_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def _scaled(value: float, unit: str, scales: tuple[tuple[float, str], ...] = _SCALES) -> str:
    factor, prefix = next(((f, p) for f, p in scales if abs(value) >= f), (1.0, ""))
    return f"{round(value / factor, 2):g} {prefix}{unit}".rstrip()


def number_text(value: float) -> str:
    """A count, such as parameters: 1.5 B, 61.71 K."""
    return _scaled(value, "", tuple((f, "B" if p == "G" else p) for f, p in _SCALES))


def flops_text(value: float) -> str:
    """A number of operations: 866.08 MFLOPs."""
    return _scaled(value, "FLOPs")


def macs_text(value: float) -> str:
    """A number of multiply-accumulates: 426.52 MMACs."""
    return _scaled(value, "MACs")


def rate_text(value: float) -> str:
    """Operations per second: 1.2 TFLOPS."""
    return _scaled(value, "FLOPS")


def seconds_text(value: float) -> str:
    """A time: 12.5 ms."""
    return _scaled(value, "s")


def percent_text(part: float, whole: float) -> str:
    """A share: 12.5%."""
    return f"{100 * part / whole if whole else 0:.2f}%"
