"""Show tables without cutting a word: as columns if they fit the screen, else as one block per row."""

from dataclasses import replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

LONGEST_WHOLE = 20
"""Longest word, in characters, that is never broken: states, reasons. A longer id or path continues on the next line. A
column with a `min_width` may break words that are longer than it; words of a header are never broken."""
ANY_WIDTH = 10_000


class Fitting:
    """A table that is never truncated. If the longest words of its columns do not fit side by side, each row becomes a
    block with a name and a value per line."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Return whether it is shown as columns."""
        _, least, _, room = self._widths(console, options)
        return sum(least) <= room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        cells, least, most, room = self._widths(console, options)
        if sum(least) > room:
            yield self._stacked(cells)
            return
        for column, width in zip(table.columns, shared(least, most, room), strict=True):
            column.width, column.no_wrap, column.overflow = width, False, "fold"
        yield table

    def _widths(
        self, console: Console, options: ConsoleOptions
    ) -> tuple[list[list[RenderableType]], list[int], list[int], int]:
        """Return the cells by column, their least and their greatest widths, and the room that columns have."""
        table = self.table
        cells = [[_cell(console, one) for one in (column.header, *column.cells)] for column in table.columns]
        sizes = [[measured(console, options, one) for one in of] for of in cells]
        most = [max(size.maximum for size in of) for of in sizes]
        least = [
            max(sizes_of[0].minimum, *(min(size.minimum, column.min_width or LONGEST_WHOLE) for size in sizes_of))
            for column, sizes_of in zip(table.columns, sizes, strict=True)
        ]
        whole = measured(console, options, self._plain()).maximum
        return cells, least, most, options.max_width - (whole - sum(most))

    def _plain(self) -> Table:
        """Return the table without title and caption; its width is that of the columns and the space between them."""
        table = self.table
        plain = Table(
            *[replace(column, width=None, min_width=None, max_width=None, _cells=[]) for column in table.columns],
            box=table.box,
            padding=table.padding,
            pad_edge=table.pad_edge,
            show_edge=table.show_edge,
            show_header=table.show_header,
            collapse_padding=table.collapse_padding,
        )
        for row in zip(*(column.cells for column in table.columns), strict=True):
            plain.add_row(*row)
        return plain

    def _stacked(self, cells: list[list[RenderableType]]) -> Table:
        columns = (Column(no_wrap=True, style="bold"), Column(overflow="fold"))
        stacked = Table(
            *columns, show_header=False, title=self.table.title, caption=self.table.caption, title_justify="left"
        )
        names, *rows = zip(*cells, strict=True)
        for row in rows:
            for name, value in zip(names, row, strict=True):
                stacked.add_row(name, value)
            stacked.add_section()
        return stacked


def _cell(console: Console, cell: RenderableType) -> RenderableType:
    return console.render_str(cell) if isinstance(cell, str) else cell


def measured(console: Console, options: ConsoleOptions, one: RenderableType) -> Measurement:
    """Return its least and its greatest width where nothing bounds it."""
    return Measurement.get(console, options.update(max_width=ANY_WIDTH), one)


def shared(least: list[int], most: list[int], room: int) -> list[int]:
    """Return each column's width: its minimum, plus what it can use of the remaining room; least demand first."""
    widths, left = list(least), room - sum(least)
    hungry = sorted(range(len(most)), key=lambda place: most[place] - least[place])
    for done, place in enumerate(hungry):
        more = min(most[place] - least[place], left // (len(hungry) - done))
        widths[place] += max(0, more)
        left -= max(0, more)
    return widths
