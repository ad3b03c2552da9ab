"""What a notebook shows of results and histories: small tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from flwr_perdl.core.repr import short

#: Rows of a table that are shown at most.
MOST_ROWS = 30


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table; of many rows the first and the last."""
    half, shown = MOST_ROWS // 2, list(rows)
    if len(shown) > MOST_ROWS:
        shown[half:-half] = [[f"… {len(rows) - 2 * half} more", *[""] * (len(columns) - 1)]]
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text(value))}</td>" for value in row) + "</tr>"
        for row in shown
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(value: object) -> str:
    """Return a value as a cell of a table shows it."""
    return value if isinstance(value, str) else short(value)


def record(named: Any) -> str:
    """Return a named tuple as a table of its fields."""
    return section(type(named).__name__, table(["field", "value"], list(named._asdict().items())))


def section(title: str, *parts: str) -> str:
    """Return parts, which are HTML, below a title, which is text."""
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def metrics_table(rows: Iterable[tuple[Mapping[str, object], Mapping[str, float]]]) -> str:
    """Return a table whose rows are what they are about, then metrics, a column for each name."""
    listed = [{**about, **metrics} for about, metrics in rows]
    columns = list(dict.fromkeys(name for row in listed for name in row))
    return table(columns, [[row.get(name, "") for name in columns] for row in listed])
