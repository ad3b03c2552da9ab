"""Drawings for the reports; no global state, no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flwr_perdl.checks import Matrix

COLORS = ("#0b6e99", "#d9730d", "#4d7c0f", "#9333ea", "#6b7280")
_MARKERS = "os^Dv*"
#: Points nearer than this share of both axes have one name between them.
_ROOM = 0.05


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return axes


def atoms(groups: Mapping[str, Matrix], shape: tuple[int, int], *, columns: int = 12) -> Figure:
    """Draw groups of atoms as small pictures, each to its own scale with zero in the middle gray.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n_atoms, height * width)
        Title -> atoms.
    shape : tuple of int
        Height and width of an atom.
    columns : int
        Atoms side by side.
    """
    sheets = {title: _sheet(_scaled(D), shape, columns) for title, D in groups.items()}
    heights = [sheet.shape[0] for sheet in sheets.values()]
    width = next(iter(sheets.values())).shape[1]
    figure = _figure(7, 7 * sum(heights) / width + 0.4 * len(heights))
    rows = figure.subplots(len(sheets), 1, squeeze=False, height_ratios=heights)
    for axes, (title, sheet) in zip(rows[:, 0], sheets.items(), strict=True):
        _show(axes, sheet, title)
    return figure


def images(rows: Mapping[str, Matrix], shape: tuple[int, int]) -> Figure:
    """Draw rows of images in [0, 1], the row's title on its left (Fig. 3).

    Parameters
    ----------
    rows : mapping of str to ndarray of shape (n_images, height * width)
        Title -> images.
    shape : tuple of int
        Height and width of an image.
    """
    count = len(next(iter(rows.values())))
    figure = _figure(8, 6.2 * len(rows) / count * shape[0] / shape[1])
    grid = figure.subplots(len(rows), 1, squeeze=False)
    for axes, (title, values) in zip(grid[:, 0], rows.items(), strict=True):
        _show(axes, _sheet(np.clip(values, 0, 1), shape, count), "")
        axes.set_ylabel(title, rotation=0, ha="right", va="center", labelpad=8)
    return figure


def lines(
    curves: Mapping[str, Sequence[float]],
    *,
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    log: bool = False,
    start: int = 1,
) -> Figure:
    """Draw curves over 1, 2, … (or from ``start``), and constant levels as dashes.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        Label -> values.
    x, y : str
        What the axes show.
    levels : mapping of str to float, optional
        Label -> constant.
    log : bool
        Logarithmic y axis, values floored at 1e-16.
    start : int
        Where x starts.
    """
    figure = _figure(7, 3.8)
    axes = _plain(figure.add_subplot())
    for index, (label, values) in enumerate(curves.items()):
        steps = np.arange(start, start + len(values))
        shown = np.maximum(values, 1e-16) if log else np.asarray(values)
        axes.plot(steps, shown, "o-", ms=3.5, color=COLORS[index % len(COLORS)], label=label)
    for index, (label, level) in enumerate((levels or {}).items()):
        axes.axhline(level, ls="--", lw=1.2, color=COLORS[-1 - index % len(COLORS)], label=label)
    if log:
        axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


def labeled_lines(curves: Mapping[str, Sequence[float]], *, x: str, y: str) -> Figure:
    """Draw curves over 1, 2, …, each with its label at its end.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        Label -> values.
    x, y : str
        What the axes show.
    """
    figure = _figure(8, 4.6)
    axes = _plain(figure.add_subplot())
    ends = {label: float(values[-1]) for label, values in curves.items()}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    at = _apart(list(ends.values()), (high - low) / 20)
    for index, (label, values) in enumerate(curves.items()):
        color = (*COLORS, "#b91c1c")[index % 6]
        style = "-" if index < 6 else "--"
        axes.plot(np.arange(1, 1 + len(values)), values, style, lw=1.5, color=color)
        axes.annotate(
            label,
            (len(values), ends[label]),
            xytext=(1.04, at[index]),
            textcoords=axes.get_yaxis_transform(),
            color=color,
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "relpos": (0, 0.5)},
        )
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _apart(heights: Sequence[float], gap: float) -> Matrix:
    """Return heights, moved until any two are at least ``gap`` apart, in their order."""
    moved = np.array(heights)
    order = np.argsort(moved, kind="stable")
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + gap)
    moved -= np.mean(moved - heights)  # as far up as down
    return moved


def strips(groups: Mapping[str, Sequence[float]], *, x: str) -> Figure:
    """Draw every value of a group as a dot in the group's row.

    Parameters
    ----------
    groups : mapping of str to sequence of float
        Label -> values.
    x : str
        What the axis shows.
    """
    figure = _figure(7, 0.34 * len(groups) + 0.9)
    axes = _plain(figure.add_subplot())
    for row, values in enumerate(groups.values()):
        axes.plot(values, np.full(len(values), row), "o", ms=5, alpha=0.6, color=COLORS[0])
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlabel(x)
    return figure


class Panel(NamedTuple):
    """One of several drawings side by side.

    Attributes
    ----------
    x, y : str
        What the axes show.
    at : sequence of float
        Positions.
    lines : mapping of str to sequence of float
        Label -> a value per position.
    ranges : mapping of str to ndarray of shape (2, n_positions), optional
        Label -> least and greatest values, shaded.
    log : bool, default False
        Whether positions are logarithmic; values are unless ``linear``.
    linear : bool, default False
        Whether values are drawn as they are, from 0.
    levels : mapping of str to float, optional
        Label -> constant, dashed.
    """

    x: str
    y: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    ranges: Mapping[str, Matrix] = MappingProxyType({})
    log: bool = False
    linear: bool = False
    levels: Mapping[str, float] = MappingProxyType({})


def panels(drawings: Sequence[Panel], *, columns: int) -> Figure:
    """Draw lines in several panels with one legend; logarithmic ones are floored at 1e-16 (Fig. 5).

    Parameters
    ----------
    drawings : sequence of Panel
        Row by row.
    columns : int
        Panels side by side.
    """
    rows = ceil(len(drawings) / columns)
    figure = _figure(3.4 * columns, 2.9 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, drawings, strict=False):
        floor = -np.inf if panel.linear else 1e-16
        for index, (label, values) in enumerate(panel.lines.items()):
            color = (*COLORS, "#b91c1c")[index % 6]
            _plain(axes).plot(
                panel.at,
                np.maximum(values, floor),
                marker=_MARKERS[index % len(_MARKERS)],
                ms=4,
                lw=1.3,
                color=color,
                label=label,
            )
            if label in panel.ranges:
                low, high = np.maximum(panel.ranges[label], floor)
                axes.fill_between(panel.at, low, high, color=color, alpha=0.15, lw=0)
        for index, (label, level) in enumerate(panel.levels.items()):
            axes.axhline(level, ls="--", lw=1.2, color=COLORS[-1 - index], label=label)
        scales = {"xscale": "log" if panel.log else "linear"}
        scales["yscale"] = "linear" if panel.linear else "log"
        axes.set(xlabel=panel.x, ylabel=panel.y, **scales)
        axes.set_xticks(panel.at, [f"{position:g}" for position in panel.at])
        axes.set_xticks([], minor=True)
    for axes in grid[len(drawings) :]:
        axes.axis("off")
    figure.legend(
        *grid[0].get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=6
    )
    return figure


def trails(curves: Mapping[str, Matrix], names: Sequence[str], *, x: str, y: str) -> Figure:
    """Draw curves in the plane, their points with names where there is room.

    Parameters
    ----------
    curves : mapping of str to ndarray of shape (n_points, 2)
        Label -> positions.
    names : sequence of str
        Of the points, the same for every curve.
    x, y : str
        What the axes show.
    """
    figure = _figure(7, 4.6)
    axes = _plain(figure.add_subplot())
    room = _ROOM * np.ptp(np.vstack(list(curves.values())), axis=0)
    named: list[Matrix] = []
    for index, (label, points) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        axes.plot(*points.T, "o-", ms=4, lw=1.2, color=color, label=label)
        for name, point in zip(names, points, strict=True):
            if any((np.abs(point - other) < room).all() for other in named):
                continue
            named.append(point)
            axes.annotate(
                name,
                point,
                xytext=(5, 5 - 14 * (index % 2)),
                textcoords="offset points",
                color=color,
                fontsize=8,
            )
    axes.set(xlabel=x, ylabel=y)
    _legend(axes)
    return figure


def roc_curves(
    panels: Mapping[str, Mapping[str, tuple[Matrix, Matrix, str]]], *, x: str, y: str
) -> Figure:
    """Draw ROC curves, at most three panels side by side (Fig. 7 of P1).

    Parameters
    ----------
    panels : mapping of str to mapping
        Title -> label -> false and true positives, and the line's style.
    x, y : str
        What the axes show.
    """
    columns = min(3, len(panels))
    rows = ceil(len(panels) / columns)
    figure = _figure(3.2 * columns + 0.6, 3.0 * rows + 0.6)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        _plain(axes)
        for color, (label, (false, true, style)) in zip(COLORS, curves.items(), strict=False):
            axes.plot(false, true, style, color=color, label=label)
        axes.plot([0, 1], [0, 1], ls=":", lw=1, color="black")
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)
    return figure


def boxes(groups: Mapping[str, Sequence[Sequence[float]]], *, x: str, y: str) -> Figure:
    """Draw side by side, per position, the spread of each group on a logarithmic axis (Fig. 2).

    Parameters
    ----------
    groups : mapping of str to sequence of sequence of float
        Label -> for every position its values; floored at 1e-16.
    x, y : str
        What the axes show.
    """
    count = len(next(iter(groups.values())))
    figure = _figure(min(max(7.0, 0.45 * count), 14.0), 3.8)
    axes = _plain(figure.add_subplot())
    width = 0.7 / len(groups)
    for index, (label, values) in enumerate(groups.items()):
        color = COLORS[index % len(COLORS)]
        center = np.arange(count) + (index - (len(groups) - 1) / 2) * width
        shown = [np.maximum(np.asarray(sample), 1e-16) for sample in values]
        low, median, high = np.transpose([np.quantile(one, [0.0, 0.5, 1.0]) for one in shown])
        axes.vlines(center, low, high, color=color, alpha=0.35, lw=4, capstyle="projecting")
        axes.plot(center, median, "o", ms=4, color=color)
        axes.plot([], [], "o", color=color, label=label)
    axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


def _legend(axes: Axes) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)


def _scaled(D: Matrix) -> Matrix:
    """Return atoms with their greatest entry positive and all entries in [0, 1], 0 at one half."""
    peak = np.take_along_axis(D, np.abs(D).argmax(axis=1, keepdims=True), axis=1)
    return 0.5 + 0.5 * D / np.where(peak == 0, 1, peak)


def _sheet(values: Matrix, shape: tuple[int, int], columns: int) -> Matrix:
    """Return small pictures side by side, a margin of one pixel around each."""
    height, width = shape
    count = ceil(len(values) / columns) * columns
    tiles = np.full((count, height + 1, width + 1), np.nan)
    tiles[: len(values), :height, :width] = values.reshape(-1, height, width)
    grid = tiles.reshape(-1, columns, height + 1, width + 1).swapaxes(1, 2)
    return grid.reshape(-1, columns * (width + 1))


def _show(axes: Axes, sheet: Matrix, title: str) -> None:
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
