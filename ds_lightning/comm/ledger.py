"""Who called what: counts of collectives and of the bytes that this rank sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """Totals of one operation."""

    calls: int = 0
    bytes_sent: int = 0


@dataclass(slots=True)
class Ledger:
    """Owns the counters of one engine; nobody else writes them."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def record(self, operation: str, bytes_sent: int) -> None:
        """Count one call of `operation` that sends `bytes_sent` bytes from this rank."""
        entry = self.entries.setdefault(operation, Entry())
        entry.calls += 1
        entry.bytes_sent += bytes_sent

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank in all operations."""
        return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def calls(self) -> int:
        """Operations of all kinds."""
        return sum(entry.calls for entry in self.entries.values())

    def clear(self) -> None:
        """Start anew."""
        self.entries.clear()
