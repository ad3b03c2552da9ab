"""Drawings of mixed regressions for the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import COLORS, SMALL, _figure, _legend, _plain, panel_grid

#: Letters of a line's name before it wraps.
_LETTERS = 28
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)))


class Curves(NamedTuple):
    """A panel of curves.

    Attributes
    ----------
    title, x : str
        Above it, and what its axis shows.
    lines : mapping of str to ndarray of shape (n_seeds, n_points)
        Label -> curves; NaN where there is nothing yet.
    level : tuple of str and float, optional
        Label and height of a dashed line. Its axis counts from 1, with logarithms; that of a panel
        without it from 0, without.
    """

    title: str
    x: str
    lines: Mapping[str, Matrix]
    level: tuple[str, float] | None = None


def panels(drawn: Sequence[Curves], *, y: str) -> Figure:
    """Draw panels of curves below each other: every curve's median over seeds, and its range.

    Parameters
    ----------
    drawn : sequence of Curves
        From top to bottom.
    y : str
        What the upright axes show, with logarithms.
    """
    figure, grid = panel_grid(len(drawn), columns=1, height=3.9)
    for axes, (title, x, lines, level) in zip(grid, drawn, strict=True):
        _plain(axes)
        for index, (label, values) in enumerate(lines.items()):
            shown = ~np.isnan(values).any(axis=0)
            at = np.flatnonzero(shown) + (level is not None)
            low, median, high = np.quantile(values[:, shown], [0, 0.5, 1], axis=0)
            color, style = COLORS[index % len(COLORS)], STYLES[index % len(STYLES)]
            axes.fill_between(at, low, high, color=color, alpha=0.12, lw=0)
            marker, name = "o" * (level is None), fill(label, _LETTERS)
            axes.plot(at, median, color=color, ls=style, marker=marker, label=name)
        if level is not None:
            axes.axhline(level[1], ls="--", lw=1.2, color="black", label=level[0])
            axes.set(xscale="log", ylim=(level[1] / 2, None))
        axes.set(yscale="log", xlabel=x, ylabel=y)
        axes.set_title(title, fontsize=10, loc="left", pad=62)
        axes.legend(
            frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=SMALL
        )
    return figure


def dots(groups: Mapping[str, Matrix], names: Sequence[str], *, x: str) -> Figure:
    """Draw one row per name with a dot for each group.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n_names,)
        Label -> values.
    names : sequence of str
        What the rows are.
    x : str
        What the axis shows.
    """
    figure = _figure(7, 1.2 + 0.22 * len(names))
    axes = _plain(figure.add_subplot())
    for index, (label, values) in enumerate(groups.items()):
        rows = np.arange(len(names))
        axes.plot(values, rows, "o", ms=5, color=COLORS[index % len(COLORS)], label=label)
    axes.axvline(0, lw=0.8, color="black")
    axes.set_yticks(np.arange(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    _legend(axes)
    return figure


def bars(groups: Mapping[str, Sequence[float]], names: Sequence[str], *, y: str) -> Figure:
    """Draw bars side by side, a panel per group.

    Parameters
    ----------
    groups : mapping of str to sequence of float
        Title -> heights.
    names : sequence of str
        What the bars are.
    y : str
        What the axes count.
    """
    figure = _figure(7, 3)
    grid = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (title, heights) in zip(grid, groups.items(), strict=True):
        _plain(axes).bar(names, heights, color=COLORS[: len(names)])
        axes.set_title(title, fontsize=10, loc="left")
    grid[0].set_ylabel(y)
    return figure


def histograms(groups: Mapping[str, Matrix], *, x: str, bins: int = 40) -> Figure:
    """Draw histograms over each other.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n,)
        Label -> values.
    x : str
        What the axis shows.
    bins : int, default 40
        Bins over the range of all values.
    """
    figure = _figure(7, 3.4)
    axes = _plain(figure.add_subplot())
    edges = np.histogram_bin_edges(np.concatenate(list(groups.values())), bins)
    for index, (label, values) in enumerate(groups.items()):
        counts, _ = np.histogram(values, edges)
        axes.stairs(counts, edges, color=COLORS[index % len(COLORS)], lw=1.6, label=label)
    axes.set(xlabel=x, ylabel="count")
    _legend(axes)
    return figure
