"""Who called what: counts of collectives and of the bytes that this rank sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """Totals of one operation.

    Attributes:
        calls: how often.
        bytes_sent: by this rank.
        bytes_across: those of them that left this node.
    """

    calls: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0


@dataclass(slots=True)
class Ledger:
    """Owns the counters of one engine; nobody else writes them."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def record(self, operation: str, bytes_sent: int, bytes_across: int = 0) -> None:
        """Count one call of `operation`.

        Args:
            operation: its name.
            bytes_sent: from this rank.
            bytes_across: of these, to ranks on other nodes.
        """
        entry = self.entries.setdefault(operation, Entry())
        entry.calls += 1
        entry.bytes_sent += bytes_sent
        entry.bytes_across += bytes_across

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank in all operations."""
        return sum(entry.bytes_sent for entry in self.entries.values())

    @property
    def bytes_across(self) -> int:
        """Bytes sent by this rank to other nodes in all operations."""
        return sum(entry.bytes_across for entry in self.entries.values())

    @property
    def calls(self) -> int:
        """Operations of all kinds."""
        return sum(entry.calls for entry in self.entries.values())

    def clear(self) -> None:
        """Start anew."""
        self.entries.clear()
