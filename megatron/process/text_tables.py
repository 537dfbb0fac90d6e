"""Tables of plain text, and sections of them, which commands print and pages show."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """heads, rows: cells. ends_in_text: the last column is text, as the first is; others are numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    ends_in_text: bool = False


class Section(NamedTuple):
    """A part of what a command tells: lines and tables, in their order."""

    title: str
    items: Sequence[str | Table]


def table_lines(table: Table) -> Iterator[str]:
    """Yields the lines of a table: texts to the left, numbers to the right."""
    left = {0, len(table.heads) - 1} if table.ends_in_text else {0}
    widths = [max(len(row[i]) for row in (table.heads, *table.rows)) for i in range(len(table.heads))]
    for row in (table.heads, *table.rows):
        cells = [
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
