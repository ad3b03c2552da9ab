"""Drawings of learning over a network for the reports."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import (
    WIDTH,
    _figure,
    _plain,
    name_lines,
    panel_grid,
    share_legend,
    style,
)

#: Colors of spectra.
_COLORS = (
    "#0b6e99",
    "#d9730d",
    "#4d7c0f",
    "#9333ea",
    "#b91c1c",
    "#0f766e",
    "#a16207",
    "#db2777",
    "#6b7280",
    "#1e293b",
)


def recovery(curves: Mapping[str, Matrix], levels: Mapping[str, float]) -> Figure:
    """Draw counts over rounds: every method's median over seeds, and its range.

    Parameters
    ----------
    curves : mapping of str to ndarray of shape (n_seeds, n_rounds)
        Label -> counts; at most six lines stay apart.
    levels : mapping of str to float
        Label -> constant.
    """
    figure = _figure(WIDTH, 3.8)
    axes = _plain(figure.add_subplot())
    for index, (label, values) in enumerate(curves.items()):
        rounds = np.arange(1, values.shape[1] + 1)
        low, median, high = np.quantile(values, [0, 0.5, 1], axis=0)
        drawn = style(index)
        axes.fill_between(rounds, low, high, color=drawn["color"], alpha=0.1, lw=0)
        axes.plot(rounds, median, label=label, **drawn)
    for index, (label, level) in enumerate(levels.items(), len(curves)):
        axes.axhline(level, lw=1.2, label=label, **style(index))
    axes.set(xlabel="round", ylabel="atoms found at the worst node", ylim=(0, None))
    name_lines(axes)
    return figure


#: Lines that stay visible where they coincide: the first is wide, those above it ever thinner.
_LINES = ("-", "-", "--", ":", "-.")


def spectra(panels: Mapping[str, Mapping[str, Matrix]], *, x: str, y: str) -> Figure:
    """Draw spectra, a panel per material, each curve with its greatest value at one.

    The first curve of a panel is a wide gray band, on which all others stay visible.

    Parameters
    ----------
    panels : mapping of str to mapping of str to ndarray of shape (n_bands,) or (n, n_bands)
        Title -> label -> a spectrum, or several whose range is shown.
    x, y : str
        What the axes show.
    """
    figure, grid = panel_grid(len(panels), sharey=True)
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        _plain(axes).set(xlabel=x)
        axes.set_title(title, fontsize=10, loc="left")
        for index, (label, values) in enumerate(curves.items()):
            several = np.atleast_2d(values)
            peaks = several.max(axis=1, keepdims=True)
            low, median, high = np.quantile(several / np.where(peaks > 0, peaks, 1), [0, 0.5, 1], 0)
            color = _COLORS[index - 1] if index else "#c4c9d0"
            axes.fill_between(range(len(median)), low, high, color=color, alpha=0.2, lw=0)
            line = _LINES[index % len(_LINES)]
            axes.plot(median, line, color=color, lw=1.5 if index else 6, label=label)
    figure.supylabel(y, fontsize=10)
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
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xticks=[], yticks=[])
        for size, line in ((image.shape[0], axes.axhline), (image.shape[1], axes.axvline)):
            for part in np.array_split(np.arange(size), tiles)[1:]:
                line(part[0] - 0.5, color="white", lw=0.4)
    figure.colorbar(shown, ax=list(grid), shrink=0.8, label="share")
    return figure
