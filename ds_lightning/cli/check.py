"""ds-lightning check FILE: what each key of a ds_config file means here."""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence

from ds_lightning.config import check_table, render
from ds_lightning.errors import ConfigError

USAGE = "usage: ds-lightning check FILE"


def run(arguments: Sequence[str]) -> int:
    """Print one row per key and return 1 when some are mistakes or not supported yet."""
    if len(arguments) != 1:
        raise ConfigError(f"check takes one file, got {len(arguments)} arguments.\n{USAGE}")
    if arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    rows = check_table(arguments[0])
    # Redirected output has no width of its own; long remarks should not be broken at 80 columns
    # there.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
    print(render(rows, width))
    counts = Counter(row.status for row in rows)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()) or "an empty configuration")
    return 1 if counts["error"] or counts["not supported yet"] else 0
