"""Drawings for the reports that are no curves: images, matrices, spectra, maps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import (
    COLORS,
    SMALL,
    WIDTH,
    _draw,
    _figure,
    _name_row,
    _plain,
    _scaled,
    _sheet,
    _show,
    name_lines,
    panel_grid,
    share_legend,
)

#: Letters of all titles in a row of images, and of a bar's name before it wraps.
_LETTERS, _NAME = 46, 28
_OTHERS = "#5b6770"  # what is not ours
#: Images of more titles than this have a row each: their titles would not fit side by side.
_MOST_COLUMNS = 5


def side_by_side(columns: Mapping[str, Matrix]) -> Figure:
    """Draw images in [0, 1], a column per title; of many titles each has a row.

    Parameters
    ----------
    columns : mapping of str to ndarray of shape (n_images, height, width) or (…, 3)
        Title -> images, gray or in color; values outside [0, 1] are clipped.
    """
    n_images, height, width = next(iter(columns.values())).shape[:3]
    rows = len(columns) > _MOST_COLUMNS
    down, across = (len(columns), n_images) if rows else (n_images, len(columns))
    side = WIDTH / (across + rows)  # a row's title is about as wide as an image
    figure = _figure(WIDTH, down * (side * height / width + 0.1) + 0.5)
    grid = figure.subplots(down, across, squeeze=False)
    for line, (title, images) in zip(grid if rows else grid.T, columns.items(), strict=True):
        for axes, image in zip(line, images, strict=True):
            _show(axes, np.clip(image, 0, 1), "")
        if rows:
            _name_row(line[0], title)
        else:
            named = fill(title, _LETTERS // across)
            line[0].set_title(named, fontsize=SMALL, loc="left")
    return figure


def shared_and_own(shared: Matrix, own: Mapping[str, Matrix], shape: tuple[int, int]) -> Figure:
    """Draw shared atoms, and below them those of several clients side by side.

    Parameters
    ----------
    shared : ndarray of shape (n_global, height * width)
        Each atom to its own scale, zero in the middle gray.
    own : mapping of str to ndarray of shape (n_local, height * width)
        Title -> a client's atoms; without atoms only the shared ones are drawn.
    shape : tuple of int
        Height and width of an atom.
    """
    wide, across = 4 * len(own), 4
    top = _sheet(_scaled(shared), shape, wide)
    below = {title: _sheet(_scaled(D), shape, across) for title, D in own.items() if len(D)}
    heights = [len(top), *{len(sheet) for sheet in below.values()}]
    figure = _figure(WIDTH, WIDTH * sum(heights) / top.shape[1] + 0.4 * len(heights))
    grid = figure.add_gridspec(len(heights), max(len(below), 1), height_ratios=heights)
    _show(figure.add_subplot(grid[0, :]), top, "shared by all")
    for i, (title, sheet) in enumerate(below.items()):
        named = fill(title, _LETTERS // len(below))
        _show(figure.add_subplot(grid[1, i]), sheet, named)
    return figure


def chosen(
    at: Sequence[float], curves: Mapping[str, Matrix], choice: float, *, x: str, y: str
) -> Figure:
    """Draw curves over the values of an option, with a ring where one was chosen.

    Parameters
    ----------
    at : sequence of float
        The values.
    curves : mapping of str to ndarray of shape (n_seeds, n_values)
        Label -> what is drawn: the median, and the range shaded.
    choice : float
        The value that was chosen.
    x, y : str
        What the axes show.
    """
    figure = _figure(WIDTH, 3.4)
    axes, where = _plain(figure.add_subplot()), list(at).index(choice)
    for index, (label, values) in enumerate(curves.items()):
        _draw(axes, at, values, label, index, -np.inf, marker="o")
        height = float(np.median(values, axis=0)[where])
        axes.plot(choice, height, "o", ms=11, mfc="none", mec=COLORS[index], mew=1.5)
    axes.set(xlabel=x, ylabel=y)
    axes.set_xticks(at, [f"{value:g}" for value in at])
    name_lines(axes)
    return figure


def scatter(panels: Mapping[str, Matrix], groups: Sequence[str], *, axis: str) -> Figure:
    """Draw points in every pair of their coordinates, a column of pairs per panel (Fig. 8).

    Parameters
    ----------
    panels : mapping of str to ndarray of shape (n_points, n_coordinates)
        Title -> points; at least two coordinates.
    groups : sequence of str
        The group of each point: its color and marker.
    axis : str
        What a coordinate is called, before its number.
    """
    pairs = list(combinations(range(next(iter(panels.values())).shape[1]), 2))
    figure = _figure(max(WIDTH, len(panels) * WIDTH / 2), 2.7 * len(pairs) + 0.3)
    grid = figure.subplots(len(pairs), len(panels), squeeze=False)
    members = {name: np.asarray(groups) == name for name in dict.fromkeys(groups)}
    for column, (title, points) in zip(grid.T, panels.items(), strict=True):
        column[0].set_title(title, fontsize=SMALL, loc="left")
        for axes, (i, j) in zip(column, pairs, strict=True):
            _plain(axes).set(xlabel=f"{axis} {i + 1}", ylabel=f"{axis} {j + 1}")
            for index, (name, mine) in enumerate(members.items()):
                axes.scatter(
                    *points[mine][:, [i, j]].T,
                    s=22,
                    alpha=0.8,
                    color=COLORS[index % len(COLORS)],
                    marker="osD^vP*X"[index % 8],
                    label=name,
                )
    share_legend(figure, grid[0])
    return figure


def intervals(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    ours: Collection[str],
    x: str = "",
    higher_is_better: bool = False,
) -> Figure:
    """Draw a dot with an interval and its number for every name, in panels below each other.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of three float
        Title -> name -> the ends of the interval, and the number, as from `ranges`.
    ours : collection of str
        Names in blue.
    x : str, default ""
        What the numbers are.
    higher_is_better : bool, default False
        Or lower: the best number of a panel is bold.
    """
    named = {
        name: fill(name, _NAME, break_on_hyphens=False) for rows in panels.values() for name in rows
    }
    row = 0.24 + 0.12 * max(name.count("\n") for name in named.values())
    sizes = [row * len(rows) + 0.6 for rows in panels.values()]
    figure = _figure(WIDTH, sum(sizes))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=sizes)[:, 0]
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center"}
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        middles = [middle for *_, middle in rows.values()]
        best = max(middles) if higher_is_better else min(middles)
        for at, (name, (low, high, middle)) in enumerate(rows.items()):
            color = COLORS[0] if name in ours else _OTHERS
            axes.plot([low, high], [at, at], color=color, lw=1.8)
            axes.plot(middle, at, "o", color=color, ms=5)
            weight = "bold" if middle == best else "normal"
            axes.annotate(f"{middle:.4g}", (1.02, at), fontsize=SMALL, weight=weight, **place)
        _plain(axes).set_title(title, fontsize=SMALL, loc="left", weight="bold")
        axes.set_yticks(range(len(rows)), [named[name] for name in rows], fontsize=SMALL)
        axes.locator_params(axis="x", nbins=2)
        axes.invert_yaxis()
    grid[-1].set(xlabel=x)
    return figure


def ranges(
    values: Mapping[str, Matrix], middle: Callable[[Matrix], Any] = np.median
) -> dict[str, tuple[float, float, float]]:
    """Return each name's least and greatest value over seeds, and their median or mean."""
    return {
        name: (float(one.min()), float(one.max()), float(middle(one)))
        for name, one in values.items()
    }


def heat_map(
    values: Matrix,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    ours: Sequence[bool] = (),
    higher_is_better: bool = True,
) -> Figure:
    """Draw a table as colors with its numbers, the best of each row framed.

    A table with more columns than rows is drawn with its rows side by side, so that it fits a small
    screen.

    Parameters
    ----------
    values : ndarray of shape (n_rows, n_columns)
        Colors go from each row's worst to its best; NaN is left out.
    rows, columns : sequence of str
        What they are.
    ours : sequence of bool, optional
        Which columns have a blue name.
    higher_is_better : bool, default True
        Or lower.
    """
    better = values if higher_is_better else -values
    low, high = np.nanmin(better, axis=1, keepdims=True), np.nanmax(better, axis=1, keepdims=True)
    shades = (better - low) / np.where(high > low, high - low, 1)
    best = shades == 1
    turn = len(columns) > len(rows)
    if turn:
        values, shades, best, rows, columns = values.T, shades.T, best.T, columns, rows
    named = [fill(name, _NAME, break_on_hyphens=False) for name in rows]
    row = max(0.32, 0.24 + 0.12 * max(name.count("\n") for name in named))
    figure = _figure(max(WIDTH, 0.6 * len(columns) + 1.8), row * len(rows) + 1.4)
    axes = figure.add_subplot()
    axes.pcolormesh(shades, cmap="Blues", vmin=0, vmax=1.3)
    for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True):
        value = values[i, j]
        look: dict[str, Any] = {"color": "white" if shades[i, j] > 0.85 else "black"}
        look["fontsize"] = 8  # five digits in a cell
        look |= {"weight": "bold"} if best[i, j] else {}
        axes.text(j + 0.5, i + 0.5, f"{value:.3f}", ha="center", va="center", **look)
        if best[i, j]:
            axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor="#d1495b", lw=2.2))
    axes.invert_yaxis()
    turned: dict[str, Any] = {"rotation": 35, "ha": "left", "rotation_mode": "anchor"}
    axes.set_xticks(np.arange(len(columns)) + 0.4, columns, **turned)
    axes.set_yticks(np.arange(len(rows)) + 0.5, named)
    axes.tick_params(length=0, labelsize=SMALL, labeltop=True, labelbottom=False)
    labels = axes.get_yticklabels() if turn else axes.get_xticklabels()
    for label, mine in zip(labels, ours, strict=False):
        label.set_color(COLORS[0] if mine else "black")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def spectra(panels: Mapping[str, Mapping[str, Matrix]], *, truth: str, x: str, y: str) -> Figure:
    """Draw spectra, a panel per material, each curve with its greatest value at one.

    The truth is a wide gray band, on which all others stay visible; the next curve lies on top.

    Parameters
    ----------
    panels : mapping of str to mapping of str to ndarray of shape (n_bands,) or (n, n_bands)
        Title -> label -> a spectrum, or several whose range is shown.
    truth : str
        The label of the band, the first if it is there.
    x, y : str
        What the axes show.
    """
    figure, grid = panel_grid(len(panels), sharey=True)
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        _plain(axes).set(xlabel=x)
        axes.set_title(title, fontsize=SMALL, loc="left")
        for index, (label, values) in enumerate(curves.items(), -(truth in curves)):
            peaks = np.max(values, axis=-1, keepdims=True)
            look: dict[str, Any] = {"zorder": 3 - 0.1 * index, "lw": 2.4 if index == 0 else 1.2}
            look = {"color": "#c4c9d0", "lw": 7, "ls": "-"} if label == truth else look
            scaled = values / np.where(peaks > 0, peaks, 1)
            _draw(axes, range(values.shape[-1]), scaled, label, index, -np.inf, **look)
    figure.supylabel(y, fontsize=SMALL)
    share_legend(figure, grid)
    return figure


def maps(panels: Mapping[str, Matrix], tiles: int, n_rows: int = 1) -> Figure:
    """Draw shares in [0, 1] as images, with the borders of the tiles.

    Parameters
    ----------
    panels : mapping of str to ndarray of shape (height, width)
        Title -> image, row by row.
    tiles : int
        Tiles along each side.
    n_rows : int, default 1
        Rows of panels, all equally long.
    """
    n_columns = len(panels) // n_rows
    figure = _figure(WIDTH, n_rows * ((WIDTH - 0.6) / n_columns + 0.3))
    grid = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for axes, (title, image) in zip(grid, panels.items(), strict=True):
        shown = axes.imshow(image, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        named = fill(title, (_LETTERS - 8) // n_columns)
        axes.set_title(named, fontsize=SMALL, loc="left")
        axes.set(xticks=[], yticks=[])
        for size, line in ((image.shape[0], axes.axhline), (image.shape[1], axes.axvline)):
            for part in np.array_split(np.arange(size), tiles)[1:]:
                line(part[0] - 0.5, color="white", lw=0.4)
    figure.colorbar(shown, ax=list(grid), shrink=0.8, label="share")
    return figure
