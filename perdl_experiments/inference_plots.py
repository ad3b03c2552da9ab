"""Drawings of dual inference for the reports."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from flwr_perdl.checks import Matrix
from perdl_experiments.plots import COLORS, _figure, _plain


def decibels(groups: Mapping[str, Mapping[str, Matrix]], *, level: float, top: float) -> Figure:
    """Draw panels of signal-to-noise ratios side by side: medians over seeds, and their ranges.

    Parameters
    ----------
    groups : mapping of str to mapping of str to ndarray of shape (n_seeds, n_rounds)
        Title of the panel -> label -> ratios (dB) after every round.
    level : float
        Height of a dashed line, dB.
    top : float
        Upper end of the axis, dB.
    """
    figure = _figure(11, 4.2)
    grid = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(grid, groups.items(), strict=True):
        _plain(axes)
        for index, (label, values) in enumerate(curves.items()):
            rounds = np.arange(1, values.shape[1] + 1)
            low, median, high = np.quantile(values, [0, 0.5, 1], axis=0)
            color = COLORS[index % len(COLORS)]
            axes.fill_between(rounds, low, high, color=color, alpha=0.15, lw=0)
            axes.plot(rounds, median, color=color, label=label)
        axes.axhline(level, ls="--", lw=1.2, color="black")
        axes.set(xscale="log", xlabel="communication round", ylim=(-5, top))
        axes.set_title(title, fontsize=10, loc="left")
    grid[0].set_ylabel("signal-to-noise ratio (dB)")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=len(labels))
    return figure
