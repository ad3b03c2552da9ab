"""Drawings of dual inference for the reports."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from flwr_perdl.core.checks import Matrix
from perdl_experiments.plots import _plain, panel_grid, share_legend, style


def decibels(groups: Mapping[str, Mapping[str, Matrix]], *, level: float, top: float) -> Figure:
    """Draw panels of signal-to-noise ratios below each other: medians over seeds, and their ranges.

    Parameters
    ----------
    groups : mapping of str to mapping of str to ndarray of shape (n_seeds, n_rounds)
        Title of the panel -> label -> ratios (dB) after every round.
    level : float
        Height of a dashed line, dB.
    top : float
        Upper end of the axis, dB.
    """
    figure, grid = panel_grid(len(groups), columns=1, height=2.9, sharex=True)
    for axes, (title, curves) in zip(grid, groups.items(), strict=True):
        _plain(axes)
        for index, (label, values) in enumerate(curves.items()):
            rounds = np.arange(1, values.shape[1] + 1)
            low, median, high = np.quantile(values, [0, 0.5, 1], axis=0)
            axes.fill_between(rounds, low, high, color=style(index)["color"], alpha=0.15, lw=0)
            axes.plot(rounds, median, label=label, **style(index))
        axes.axhline(level, ls="--", lw=1.2, color="black")
        axes.set(xscale="log", ylim=(-5, top), ylabel="signal-to-noise ratio (dB)")
        axes.set_title(title, fontsize=10, loc="left")
    grid[-1].set_xlabel("communication round")
    share_legend(figure, grid)
    return figure
