"""Tables as commands print them: nothing in them is ever cut, however narrow the terminal is."""

from rich.console import Console
from rich.table import Table

UNBOUNDED = 10_000
"""Columns: more than any table of ours has."""


def new_table(*columns: str, num_words: int = 1) -> Table:
    """An empty table whose first `num_words` columns are words, and the others figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_words else "right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """As wide as it needs to be. A narrower terminal folds its lines: a name stays whole, to be
    copied, and a figure stays what it is."""
    width = Console(width=UNBOUNDED).measure(table).maximum
    Console(width=width, soft_wrap=True, highlight=False).print(table)
