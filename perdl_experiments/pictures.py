"""Drawings of matrices for the reports: images side by side, and a matrix's rank-one layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import (
    COLORS,
    SMALL,
    WIDTH,
    _figure,
    _plain,
    _show,
    panel_grid,
    share_legend,
)

#: Letters of all titles in a row of `side_by_side`.
_LETTERS = 80


def side_by_side(columns: Mapping[str, Matrix]) -> Figure:
    """Draw images in [0, 1], a column per title.

    Parameters
    ----------
    columns : mapping of str to ndarray of shape (n_images, height, width) or (…, 3)
        Title -> images, gray or in color; values outside [0, 1] are clipped.
    """
    n_images, height, width = next(iter(columns.values())).shape[:3]
    size = WIDTH / len(columns)
    figure = _figure(WIDTH, n_images * (size * height / width + 0.1) + 0.5)
    grid = figure.subplots(n_images, len(columns), squeeze=False)
    for column, (title, images) in zip(grid.T, columns.items(), strict=True):
        for row, (axes, image) in enumerate(zip(column, images, strict=True)):
            _show(axes, np.clip(image, 0, 1), "")
            if not row:
                named = fill(title, _LETTERS // len(columns))
                axes.set_title(named, fontsize=SMALL - 1, loc="left")
    return figure


def layers(panels: Mapping[str, Matrix], groups: Sequence[str], *, x: str) -> Figure:
    """Draw matrices of one shape as colors, blue below zero and red above, to one scale.

    Parameters
    ----------
    panels : mapping of str to ndarray of shape (n_rows, n_columns)
        Title -> matrix, its rows sorted by group.
    groups : sequence of str
        The group of each row, equal ones side by side.
    x : str
        What the columns are.
    """
    reach = float(np.quantile(np.abs(next(iter(panels.values()))), 0.99)) or 1.0
    figure, grid = panel_grid(len(panels), height=3.6, sharey=True)
    names, starts, counts = np.unique(groups, return_index=True, return_counts=True)
    for axes, (title, matrix) in zip(grid, panels.items(), strict=True):
        axes.imshow(
            matrix, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest"
        )
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(x)
        axes.set_yticks(starts + (counts - 1) / 2, names)
        for start in starts[starts > 0]:
            axes.axhline(start - 0.5, color="black", lw=0.8)
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
        column[0].set_title(title, fontsize=10, loc="left")
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


def heat_map(
    values: Matrix, rows: Sequence[str], columns: Sequence[str], *, higher_is_better: bool = True
) -> Figure:
    """Draw a table as colors with its numbers, the best of each row framed.

    Parameters
    ----------
    values : ndarray of shape (n_rows, n_columns)
        Colors go from each row's worst to its best.
    rows, columns : sequence of str
        What they are.
    higher_is_better : bool, default True
        Or lower.
    """
    better = values if higher_is_better else -values
    figure = _figure(max(WIDTH, 0.85 * len(columns) + 2), 0.6 * len(rows) + 1.4)
    axes = figure.add_subplot()
    low, high = better.min(axis=1, keepdims=True), better.max(axis=1, keepdims=True)
    shades = (better - low) / np.where(high > low, high - low, 1)
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            color = "white" if shades[i, j] > 0.85 else "black"
            axes.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=9, color=color)
        corner = (better[i].argmax() - 0.48, i - 0.46)
        axes.add_patch(Rectangle(corner, 0.96, 0.92, fill=False, edgecolor="#d1495b", lw=2.2))
    axes.set_xticks(range(len(columns)), [fill(name, 15) for name in columns], fontsize=SMALL)
    axes.set_yticks(range(len(rows)), [fill(name, 18) for name in rows], fontsize=SMALL)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
