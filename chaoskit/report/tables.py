"""Tables for terminals of any width. Identifiers and numbers are never broken over two lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
_INDENT = 2
_TEXT_WIDTH_MIN = 24  # narrower columns of text are hard to read


class Column(NamedTuple):
    """A column of a :class:`DataTable`.

    Attributes:
        name: the header, and the name of the cell if a row is written as a block.
        is_text: cells are wrapped at words. Cells of other columns are never broken.
        is_number: cells are aligned to the right.
        is_heading: cells are part of the first line of a block.
    """

    name: str
    is_text: bool = False
    is_number: bool = False
    is_heading: bool = False


class DataTable:
    """A table that is written as blocks if the terminal is too narrow for it.

    A block is a row of the table over several lines: the headings, and below them the other cells
    with their names.
    """

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column. A cell may have several lines."""
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._column_widths(options.max_width)
        if widths is not None:
            yield self._table(widths)
            return
        for row in self._rows:
            yield from self._block(row, console, options.max_width)

    def _column_widths(self, width: int) -> list[int] | None:
        """Return the width of each column, or None if the table does not fit."""
        cells = [[Text(column.name), *column_cells] for column, column_cells in self._by_column()]
        natural = [max(_width(cell) for cell in column) for column in cells]
        least = [
            min(full, max(_TEXT_WIDTH_MIN, *(_longest_word(cell) for cell in column_cells)))
            if column.is_text
            else full
            for column, full, column_cells in zip(self._columns, natural, cells, strict=True)
        ]
        left = width - sum(least) - _GAP * (len(least) - 1)
        if left < 0:
            return None
        widths = []
        for full, narrow in zip(natural, least, strict=True):
            more = min(full - narrow, left)
            widths.append(narrow + more)
            left -= more
        return widths

    def _by_column(self) -> Iterator[tuple[Column, list[Text]]]:
        """Yield each column with its cells."""
        for number, column in enumerate(self._columns):
            yield column, [row[number] for row in self._rows]

    def _table(self, widths: Sequence[int]) -> Table:
        """Return a table with columns of these widths."""
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for column, width in zip(self._columns, widths, strict=True):
            header = Text(column.name)
            table.add_column(
                header,
                justify="right" if column.is_number else "left",
                overflow="fold",
                width=width,
            )
        for row in self._rows:
            table.add_row(*row)
        return table

    def _block(self, row: Sequence[Text], console: Console, width: int) -> Iterator[Text]:
        """Yield the lines of a row as a block."""
        cells = list(zip(self._columns, row, strict=True))
        headings = [
            line for column, cell in cells if column.is_heading for line in cell.split("\n")[:1]
        ]
        yield from _flow(headings, console, width, first_indent=0)
        for column, cell in cells:
            if column.is_heading:
                for line in cell.split("\n")[1:]:
                    yield from _flow([line], console, width, first_indent=_INDENT)
        values = [
            (column, cell) for column, cell in cells if not column.is_heading and cell.plain.strip()
        ]
        pairs = [_pair(column, cell) for column, cell in values]
        yield from _flow(
            [pair for pair in pairs if "\n" not in pair.plain], console, width, first_indent=_INDENT
        )
        for pair in pairs:
            if "\n" in pair.plain:
                for line in pair.split("\n"):
                    yield from _flow([line], console, width, first_indent=_INDENT)


def _pair(column: Column, cell: Text) -> Text:
    """Return a cell with the name of its column."""
    return Text.assemble((column.name, "dim"), " " if column.name else "", cell)


def _flow(
    texts: Sequence[Text], console: Console, width: int, *, first_indent: int
) -> Iterator[Text]:
    """Yield lines with the texts beside each other.

    A text that is wider than a line is broken at words.

    Args:
        first_indent: the number of spaces before the first line.
    """
    line = Text(" " * first_indent)
    is_empty = True
    for text in texts:
        free_columns = width - cell_len(line.plain) - (0 if is_empty else _GAP)
        if cell_len(text.plain) > free_columns and not is_empty:
            yield line
            line, is_empty = Text(" " * _INDENT), True
        line.append(" " * (0 if is_empty else _GAP))
        parts = text.wrap(
            console, width - (cell_len(line.plain) if is_empty else _INDENT), overflow="fold"
        )
        for part in parts[:-1]:
            yield line.append_text(_stripped(part))
            line = Text(" " * _INDENT)
        if parts:
            line.append_text(_stripped(parts[-1]))
        is_empty = False
    if not is_empty:
        yield line


def _stripped(text: Text) -> Text:
    """Return a copy of a text without trailing spaces."""
    copy = text.copy()
    copy.rstrip()
    return copy


def _width(cell: Text) -> int:
    """Return the width of the widest line of a cell."""
    return max((cell_len(line) for line in cell.plain.split("\n")), default=0)


def _longest_word(cell: Text) -> int:
    """Return the width of the longest word of a cell."""
    return max((cell_len(word) for word in cell.plain.split()), default=0)
