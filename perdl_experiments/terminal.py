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
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, or its blocks, with nothing in them but what can be shown."""
        rows = [list(map(printable_lines, row)) for row in self.rows]
        yield from Rows(
            list(map(printable_lines, self.columns)), rows, printable_lines(self.title)
        )._lines(options)

    def _lines(self, options: ConsoleOptions) -> RenderResult:
        wraps = [
            i == 0 or any(_is_text(row[i]) for row in self.rows) for i in range(len(self.columns))
        ]
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
            min(width, max(low, _NARROWEST)) if wrap else low
            for low, width, wrap in zip(least, widest, wraps, strict=True)
        ]
        room = options.max_width - sum(wanted) - _GAP * (len(wanted) - 1)
        if room < 0:
            yield from self._blocks()
            return
        widths = list(wanted)
        for i in sorted(range(len(widths)), key=lambda i: wraps[i]):  # heads of numbers first
            more = min(widest[i] - wanted[i], room)
            widths[i], room = wanted[i] + more, room - more
        if self.title:  # a table's own title wraps where the table ends
            yield Text(f"\n{self.title}", style="italic")
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for head, width, wrap in zip(self.columns, widths, wraps, strict=True):
            table.add_column(Text(head), justify="left" if wrap else "right", width=width)
        for row in self.rows:
            table.add_row(*map(Text, row))
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


def plain_logs() -> None:
    """Keep colors out of Flower's log where they are no use: in a pipe, or under ``NO_COLOR``."""
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        import_module("flwr.app")  # Flower's handler is there from then on
        for handler in logging.getLogger("flwr").handlers:
            if hasattr(handler, "colored"):  # Flower's own
                handler.colored = False
