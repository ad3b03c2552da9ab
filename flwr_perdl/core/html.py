"""What a notebook shows of results, histories and topologies: small HTML and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import shortest_path

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.repr import short

#: What is shown at most: rows of a table, nodes of a graph.
MOST_ROWS, MOST_NODES = 30, 150
#: Steps that place a graph's nodes, and the side of its drawing.
_STEPS, _SIDE = 60, 260


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
    return titled(type(named).__name__, table(["field", "value"], list(named._asdict().items())))


def titled(title: str, *parts: str) -> str:
    """Return parts, which are HTML, below a title, which is text."""
    return f"<div><p><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def metrics_table(rows: Iterable[tuple[Mapping[str, object], Mapping[str, float]]]) -> str:
    """Return a table whose rows are what they are about, then metrics, a column for each name."""
    listed = [{**about, **metrics} for about, metrics in rows]
    columns = list(dict.fromkeys(name for row in listed for name in row))
    return table(columns, [[row.get(name, "") for name in columns] for row in listed])


def graph(weights: Any, caption: str) -> str:
    """Return a drawing of a graph, with links as wide as their weights; of a large one the caption.

    Parameters
    ----------
    weights : sparse array of shape (n_nodes, n_nodes)
        A link where an entry off the diagonal is not zero.
    caption : str
        Below the drawing.
    """
    below = f"<figcaption>{escape(caption)}</figcaption>"
    if (n := weights.shape[0]) > MOST_NODES:
        return f"<figure>{below}</figure>"
    links = np.maximum(dense := weights.toarray(), dense.T)
    np.fill_diagonal(links, 0)
    places = _places(links > 0)
    radius = max(2.5, 8 - n / 10)
    low, high = places.min(axis=0), places.max(axis=0)
    room = (_SIDE - 2 * radius - 2) / max(float((high - low).max()), 1e-9)
    at = ((places - (low + high) / 2) * room + _SIDE / 2).round(1)
    k, j = np.nonzero(np.triu(links))
    widths = (0.6 + 1.4 * links[k, j] / links.max(initial=1e-12)).round(1)
    drawn = "".join(
        f"<path d='M{x:g} {y:g}L{u:g} {v:g}' stroke-width='{w:g}'/>"
        for (x, y), (u, v), w in zip(at[k], at[j], widths, strict=True)
    )
    nodes = "".join(
        f"<circle cx='{x:g}' cy='{y:g}' r='{radius:g}'><title>{node}</title></circle>"
        for node, (x, y) in enumerate(at)
    )
    return (
        f"<figure><svg role='img' aria-label='{escape(caption)}' width='{_SIDE}' "
        f"viewBox='0 0 {_SIDE} {_SIDE}'><g stroke='currentColor' stroke-opacity='.45'>{drawn}</g>"
        f"<g fill='#2a7fb8'>{nodes}</g></svg>{below}</figure>"
    )


def _places(linked: NDArray[np.bool_]) -> Matrix:
    """Return where to draw nodes: as far apart as there are links between them (by stress)."""
    n = len(linked)
    if n == 1:
        return np.zeros((1, 2))
    hops = shortest_path(linked, unweighted=True)
    hops[np.isinf(hops)] = hops[np.isfinite(hops)].max() + 1
    centered = hops**2 - (hops**2).mean(axis=0)
    values, vectors = np.linalg.eigh(-(centered - centered.mean(axis=1, keepdims=True)) / 2)
    angles = 2 * np.pi * np.arange(n) / n
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    places: Matrix = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0)) + 0.01 * circle
    stiff = 1 / np.maximum(hops, 1) ** 2
    np.fill_diagonal(stiff, 0)
    inverse = np.linalg.pinv(np.diag(stiff.sum(axis=1)) - stiff)
    for _ in range(_STEPS):
        gaps = np.linalg.norm(places[:, None] - places, axis=2)
        pull = stiff * hops / np.maximum(gaps, 1e-9)
        places = inverse @ (pull.sum(axis=1, keepdims=True) * places - pull @ places)
    return places
