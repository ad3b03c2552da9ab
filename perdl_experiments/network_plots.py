"""Drawings of networks: who hears whom, and how their nodes learn."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import Matrix
from flwr_perdl.diffusion import CombinationMatrix, Topology
from perdl_experiments.plots import COLORS, _figure, _plain, panel_grid

#: Up to this many nodes carry their number.
NUMBERED = 60


def networks(named: Mapping[str, CombinationMatrix]) -> Figure:
    """Draw topologies: links as wide as their weights, nodes as large as their own.

    Parameters
    ----------
    named : mapping of str to CombinationMatrix
        Title -> combination weights over the topology to draw.

    Returns
    -------
    matplotlib.figure.Figure
        A panel for each; what the network is like is written below it.
    """
    figure, panels = panel_grid(len(named), height=3.3)
    for axes, (title, weights) in zip(panels, named.items(), strict=True):
        _draw(axes, weights)
        axes.set_title(title)
    return figure


def learning_curves(named: Mapping[str, Matrix], *, y: str, level: float | None = None) -> Figure:
    """Draw the curves of every node over the rounds, a panel for each network.

    Parameters
    ----------
    named : mapping of str to ndarray of shape (n_rounds, n_nodes)
        Title -> a curve per node, NaN where a node has reported nothing, such as
        ``Averaged.curves["evaluate-accuracy"]``.
    y : str
        What the curves show.
    level : float, optional
        Height of a dashed line, such as FedAvg's accuracy.
    """
    figure, panels = panel_grid(len(named), sharex=True, sharey=True)
    for axes, (title, curves) in zip(panels, named.items(), strict=True):
        _plain(axes)
        told = np.flatnonzero(np.isfinite(curves).any(axis=1))  # not every round is evaluated
        rounds, rows = told + 1, curves[told]
        axes.plot(rounds, rows, color=COLORS[0], lw=0.6, alpha=0.4)
        for bound in (np.nanmin(rows, axis=1), np.nanmax(rows, axis=1)):
            axes.plot(rounds, bound, color=COLORS[0], lw=1.8)
        if level is not None:
            axes.axhline(level, ls="--", lw=1.2, color="black")
        axes.set_title(title, fontsize=10, loc="left")
    figure.supxlabel("communication round", fontsize=10)
    figure.supylabel(y, fontsize=10)
    return figure


def rounds_against_gaps(named: Mapping[str, Mapping[str, tuple[float, float]]]) -> Figure:
    """Draw how many rounds networks take against their spectral gaps, each with its name.

    Parameters
    ----------
    named : mapping of str to mapping of str to pair of float
        What a color stands for -> name of the network -> spectral gap and rounds; one without a
        gap (NaN), such as FedAvg, is a dashed line.
    """
    figure = _figure(7, 4.4)
    axes = _plain(figure.add_subplot())
    for color, (label, networks) in zip(COLORS, named.items(), strict=False):
        for name, (gap, rounds) in networks.items():
            if np.isnan(gap):
                axes.axhline(rounds, ls="--", lw=1.2, color=color, label=f"{label}: {name}")
                continue
            axes.plot(gap, rounds, "o", color=color)
            axes.annotate(
                name,
                (gap, rounds),
                xytext=(3, 5),
                textcoords="offset points",
                fontsize=8,
                rotation=40,
                color=color,
            )
        axes.plot([], [], "o", color=color, label=label)
    axes.set(xscale="log", xlabel="spectral gap", ylabel="rounds to FedAvg's accuracy")
    axes.margins(0.15)
    most = max((rounds for one in named.values() for _, rounds in one.values()), default=1.0)
    axes.set_ylim(0, 1.3 * most)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _draw(axes: Axes, weights: CombinationMatrix) -> None:
    topology = weights.topology
    places = positions(topology)
    axes.set_axis_off()
    axes.set_aspect("equal")
    links = sparse.coo_array(weights.matrix - sparse.diags_array(weights.matrix.diagonal()))
    k, j = links.coords
    width = 0.4 + 2.1 * links.data / links.data.max(initial=1e-12)
    segments = list(np.stack([places[k], places[j]], axis=1))
    axes.add_collection(LineCollection(segments, linewidths=width, colors=COLORS[4], alpha=0.5))
    size = 12 if topology.n_nodes > NUMBERED else 110
    axes.scatter(
        places[:, 0],
        places[:, 1],
        s=size * (0.6 + weights.matrix.diagonal()),
        color=COLORS[0],
        zorder=2,
    )
    if topology.n_nodes <= NUMBERED:
        for node, (x, y) in enumerate(places):
            axes.text(x, y, str(node), color="white", ha="center", va="center", fontsize=6)
    axes.text(
        0.5,
        -0.02,
        f"{topology.n_nodes} nodes, {topology.n_edges} edges, "
        f"spectral gap {weights.spectral_gap:.2g}",
        transform=axes.transAxes,
        ha="center",
        va="top",
        color=COLORS[4],
    )
    axes.margins(0.08)


def positions(topology: Topology) -> NDArray[np.float64]:
    """Return where to draw the nodes, shape (n_nodes, 2): neighbors close to each other."""
    graph = nx.from_scipy_sparse_array(topology.adjacency)
    layout = nx.kamada_kawai_layout(graph) if topology.is_connected else nx.circular_layout(graph)
    return np.stack([layout[node] for node in range(topology.n_nodes)])
