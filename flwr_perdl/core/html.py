"""What a notebook shows of results, histories, dictionaries and topologies: small HTML and SVG."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import shortest_path

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.repr import short

#: What is shown at most: rows of a table, atoms of a dictionary, nodes of a graph.
MOST_ROWS, MOST_ATOMS, MOST_NODES = 30, 48, 150
#: Atoms side by side, and their least width in pixels.
_COLUMNS, _ATOM = 16, 36
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


def atoms(groups: Mapping[str, Matrix], shape: tuple[int, int] | None = None) -> str:
    """Return dictionaries as small pictures; empty if they are no images.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n_atoms, n_features)
        Title -> atoms, each drawn to its own scale with zero in the middle gray.
    shape : tuple of int, optional
        Height and width of an image; by default a square, where ``n_features`` is one, from 3 x 3.
    """
    n_features = next(iter(groups.values())).shape[1]
    side = isqrt(n_features)
    height, width = shape or (side, side)
    if height * width != n_features or n_features < 9:
        return ""
    zoom, parts = max(1, _ATOM // width), []
    for title, D in groups.items():
        more = f", {len(D) - MOST_ATOMS} more" if len(D) > MOST_ATOMS else ""
        parts.append(f"<p>{escape(f'{title} ({len(D)} atoms)')}</p>")
        if len(D):
            sheet = _sheet(D[:MOST_ATOMS], height, width)
            parts.append(
                f"<img alt='{escape(title)}' width='{zoom * sheet.shape[1]}' "
                f"style='image-rendering:pixelated;max-width:100%' "
                f"src='data:image/png;base64,{b64encode(_png(sheet)).decode()}'>{more}"
            )
    return "".join(parts)


def _sheet(D: Matrix, height: int, width: int) -> NDArray[np.uint8]:
    """Return atoms side by side as pixels of gray and opacity, with clear lines between them."""
    columns = min(_COLUMNS, len(D))
    D = np.nan_to_num(D)
    peaks = np.take_along_axis(D, np.abs(D).argmax(axis=1, keepdims=True), axis=1)
    gray = 127.5 + 127.5 * D / np.where(peaks == 0, 1, peaks)
    tiles = np.zeros((ceil(len(D) / columns) * columns, height + 1, width + 1, 2), np.uint8)
    tiles[: len(D), :height, :width, 0] = gray.reshape(-1, height, width).round()
    tiles[: len(D), :height, :width, 1] = 255
    grid = tiles.reshape(-1, columns, *tiles.shape[1:]).swapaxes(1, 2)
    return grid.reshape(grid.shape[0] * (height + 1), columns * (width + 1), 2)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels of gray and opacity as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        length, checksum = struct.pack(">I", len(data)), struct.pack(">I", zlib.crc32(kind + data))
        return length + kind + data + checksum

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 4, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


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
