"""Show a list of objects as a table with a row for each: on a terminal that is too narrow, long ids are shortened in
the middle, and the columns that matter least are left out."""

from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from whetstone.terminal.fitting import ANY_WIDTH, Fitting, measured, shared

SHORTEST_ID = 13
"""Characters that at least remain of an id."""


class Listing:
    """A table of objects. Print it with `crop=False`.

    - Where it fits, and with `wide`, and where the output is no terminal: it is whole, whatever its width.
    - Else the columns `ids` are shortened in the middle, and if that is not enough, the columns `optional` are left
      out, the first of them first, which a line below says.
    - If the other columns still do not have room for a line each, columns are wrapped between words, as many as then
      fit. On the narrowest terminals each object is a block with a line for each column, whole.
    """

    def __init__(
        self, table: Table, *, ids: Sequence[str] = (), optional: Sequence[str] = (), wide: bool = False
    ) -> None:
        self.table = table
        self._ids, self._optional, self._wide = ids, optional, wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._wide or not console.is_terminal:
            yield from _whole(self.table, console, options)
            return
        names = [str(column.header) for column in self.table.columns]
        optional = [name for name in self._optional if name in names]
        for fit in (self._in_single_lines, self._wrapped):
            for count in range(len(optional) + 1):
                left_out = optional[:count]
                fitted = fit(console, options, [name for name in names if name not in left_out])
                if fitted is None:
                    continue
                yield fitted
                if left_out:
                    yield Text(f"not shown: {', '.join(left_out)}; --wide shows all", style="dim")
                return
        yield Fitting(self.table)

    def _in_single_lines(
        self, console: Console, options: ConsoleOptions, names: Sequence[str]
    ) -> RenderableType | None:
        """Return a table of these columns with a line for each object; None if it does not fit."""
        table = _select(self.table, names)
        most, least = [], []
        for column in table.columns:
            header, cells = measured(console, options, column.header), [_text(console, one) for one in column.cells]
            widest = max((cell_len(line) for cell in cells for line in cell.plain.split("\n")), default=0)
            most.append(max(header.maximum, widest))
            shortest = min(widest, SHORTEST_ID) if column.header in self._ids else widest
            least.append(max(header.minimum, shortest))
        whole = measured(console, options, _select(table, names)).maximum
        room = options.max_width - (whole - sum(most))
        if sum(least) > room:
            return None
        return self._shortened(console, table, shared(least, most, room))

    def _wrapped(self, console: Console, options: ConsoleOptions, names: Sequence[str]) -> RenderableType | None:
        """Return these columns, wrapped between words; None if even that does not fit."""
        table = _select(self.table, names)
        widths = [SHORTEST_ID if column.header in self._ids else ANY_WIDTH for column in table.columns]
        fitting = Fitting(self._shortened(console, table, widths, fixed=False))
        return fitting if fitting.fits(console, options) else None

    def _shortened(self, console: Console, table: Table, widths: Sequence[int], *, fixed: bool = True) -> Table:
        """Shorten the ids to the widths; `fixed`: the columns get these widths."""
        for column, width in zip(table.columns, widths, strict=True):
            if column.header in self._ids:
                column._cells = [_shorten_lines(_text(console, one), width) for one in column.cells]
            if fixed:
                column.width, column.no_wrap, column.overflow = width, False, "fold"
        return table


def shorten(text: str, width: int) -> str:
    """Return a text of at most `width` cells; a longer one has an ellipsis in its middle. Ids differ at their ends."""
    if cell_len(text) <= width:
        return text
    head = before = (width - 1) // 2
    tail = after = width - 1 - before
    while cell_len(text[:head]) > before:
        head -= 1
    while cell_len(text[len(text) - tail :]) > after:
        tail -= 1
    return f"{text[:head]}…{text[len(text) - tail :]}"


def _shorten_lines(cell: Text, width: int) -> Text:
    return Text("\n".join(shorten(line, width) for line in cell.plain.split("\n")), style=cell.style)


def _whole(table: Table, console: Console, options: ConsoleOptions) -> RenderResult:
    for column in table.columns:
        column.no_wrap = True
    yield from console.render(table, options.update(max_width=ANY_WIDTH))


def _select(table: Table, names: Sequence[str]) -> Table:
    """Return a table with these columns, in which cells and widths can be changed."""
    chosen = [replace(column, _cells=[]) for column in table.columns if column.header in names]
    places = [place for place, column in enumerate(table.columns) if column.header in names]
    copy = Table(
        *chosen,
        title=table.title,
        title_justify=table.title_justify,
        show_header=table.show_header,
        show_edge=table.show_edge,
        box=table.box,
        padding=table.padding,
        pad_edge=table.pad_edge,
        header_style=table.header_style,
    )
    for row in zip(*(column.cells for column in table.columns), strict=True):
        copy.add_row(*(row[place] for place in places))
    return copy


def _text(console: Console, cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))
