"""Two-column tables on the terminal: with rich where it is installed, plain text otherwise."""

from collections.abc import Iterable


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print rows of (name, value) under a title."""
    rows = list(rows)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max((len(name) for name, _ in rows), default=0)
        print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]))
        return
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    # Bare text: file names and numbers must not be read as markup, nor be coloured by guesses.
    Console(markup=False, highlight=False).print(table)
