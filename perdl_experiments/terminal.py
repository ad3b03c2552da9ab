"""What a terminal shows: consoles without stray control codes, and tables of any width."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from perdl_experiments.words import plural

#: Width of what goes to a file or a pipe, unless ``COLUMNS`` says another one.
_WIDTH = 110
#: The narrowest column of text whose cells may wrap, in characters.
_NARROWEST = 20
#: Between two columns.
_GAP = 2


def console() -> Console:
    """Return where to print: what is printed has no markup, and names may look like it.

    Under ``NO_COLOR`` it has no control codes either, not even those of a progress bar.
    """
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    if os.environ.get("NO_COLOR"):
        plain = partial(plain, force_terminal=False)
    known = plain().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return plain() if known else plain(width=_WIDTH)


def printable_lines(text: str) -> str:
    """Return a text from a file with a space for every character that a terminal would obey.

    Somebody else may have written the file: escape sequences and the like are not printable.
    """
    return "".join(one if one.isprintable() or one == "\n" else " " for one in text)


class Rows(NamedTuple):
    """A table that prints itself; where it is too wide, a block of lines per row.

    No number is broken over two lines: columns of text wrap at spaces, all others do not.

    Attributes
    ----------
    columns : sequence of str
        Heads; the first column names the rows.
    rows : sequence of sequence of str
        The cells.
    title : str, optional
        Above the table.
    best : sequence of pairs of int, optional
        Row and column of the cells to print in bold.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    best: Sequence[Sequence[int]] = ()

    def brief(self, console: Console, lines: int) -> Rows:
        """Return the first columns and rows that fit the console and so many lines below the title.

        Where all do not fit, rows come before columns.
        """
        width, least = len(self.columns), min(2, len(self.columns))
        fitting = [n for n in range(least, width + 1) if self._first(n)._widths(console.width)]
        shown = [self._lowered(n, console, lines) for n in fitting or [least]]
        best = max(shown, key=lambda one: (len(one.rows), len(one.columns)))
        more = {"row": len(self.rows) - len(best.rows), "column": width - len(best.columns)}
        missing = " and ".join(plural(count, f"more {it}") for it, count in more.items() if count)
        return best._replace(title=f"{self.title} ({missing} in the report)") if missing else best

    def _first(self, n_columns: int) -> Rows:
        rows = [row[:n_columns] for row in self.rows]
        return self._replace(columns=self.columns[:n_columns], rows=rows)

    def _lowered(self, n_columns: int, console: Console, lines: int) -> Rows:
        """Return the first columns, and as many rows as there is room for, at least one."""
        shown = self._first(n_columns)
        while len(shown.rows) > 1 and shown._height(console) > lines:
            shown = shown._replace(rows=shown.rows[:-1])
        return shown

    def _height(self, console: Console) -> int:
        """Return the number of lines without the title and the empty line at the end."""
        return len(console.render_lines(self._replace(title=""), pad=False)) - 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its blocks, with nothing in them but what can be shown."""
        rows = [list(map(printable_lines, row)) for row in self.rows]
        yield from self._replace(
            columns=list(map(printable_lines, self.columns)),
            rows=rows,
            title=printable_lines(self.title),
        )._lines(options.max_width)

    def _wraps(self) -> list[bool]:
        """Return which columns are text, which may wrap."""
        return [
            i == 0 or any(_is_text(row[i]) for row in self.rows) for i in range(len(self.columns))
        ]

    def _widths(self, width: int) -> list[int] | None:
        """Return the columns' widths; None if there is no room for them."""
        wraps = self._wraps()
        cells = [*self.rows, self.columns]
        least = [
            max(
                _longest_word(self.columns[i]),
                *(_longest_word(row[i]) if wraps[i] else cell_len(row[i]) for row in self.rows),
                0,
            )
            for i in range(len(self.columns))
        ]
        widest = [max(cell_len(row[i]) for row in cells) for i in range(len(self.columns))]
        wanted = [
            min(most, max(low, _NARROWEST)) if wrap else low
            for low, most, wrap in zip(least, widest, wraps, strict=True)
        ]
        room = width - sum(wanted) - _GAP * len(wanted)  # below 14 Rich pads both edges, too
        if room < 0:
            return None
        widths = list(wanted)
        for i in sorted(range(len(widths)), key=lambda i: wraps[i]):  # heads of numbers first
            more = min(widest[i] - wanted[i], room)
            widths[i], room = wanted[i] + more, room - more
        return widths

    def _lines(self, width: int) -> RenderResult:
        widths = self._widths(width)
        if widths is None:
            yield from self._blocks()
            return
        if self.title:  # a table's own title wraps where the table ends
            yield Text(f"\n{self.title}", style="italic")
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for head, wide, wrap in zip(self.columns, widths, self._wraps(), strict=True):
            table.add_column(Text(head), justify="left" if wrap else "right", width=wide)
        bold = {tuple(cell) for cell in self.best}
        for i, row in enumerate(self.rows):
            style = ["bold" if (i, j) in bold else "" for j in range(len(row))]
            table.add_row(*map(Text, row, style))
        yield table
        yield Text("")

    def _blocks(self) -> RenderResult:
        if self.title:
            yield Text(f"\n{self.title}\n", style="italic")
        for first, *others in self.rows:
            yield Text(first, style="bold")
            for head, cell in zip(self.columns[1:], others, strict=True):
                yield Padding(Text(f"{head}: {cell}" if head else cell), (0, 0, 0, 2))


def _is_text(cell: str) -> bool:
    """Whether a cell is words, which may wrap, and no number."""
    return len(cell.split()) > 3


def _longest_word(cell: str) -> int:
    return max((cell_len(word) for word in cell.split()), default=0)


def is_plain() -> bool:
    """Return whether standard error gets text alone: in a pipe, or under ``NO_COLOR``."""
    return bool(os.environ.get("NO_COLOR")) or not sys.stderr.isatty()


def plain_logs() -> None:
    """Keep colors out of Flower's log where they are no use."""
    if is_plain():
        import_module("flwr.app")  # Flower's handler is there from then on
        for handler in logging.getLogger("flwr").handlers:
            if hasattr(handler, "colored"):  # Flower's own
                handler.colored = False
