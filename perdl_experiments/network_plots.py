"""Drawings of networks: who hears whom."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.diffusion import CombinationMatrix, Topology
from perdl_experiments.plots import COLORS, _figure

#: Up to this many nodes carry their number.
NUMBERED = 60


def networks(named: Mapping[str, CombinationMatrix]) -> Figure:
    """Draw topologies side by side: links as wide as their weights, nodes as large as their own.

    Parameters
    ----------
    named : mapping of str to CombinationMatrix
        Title -> combination weights over the topology to draw.

    Returns
    -------
    matplotlib.figure.Figure
        A panel for each; what the network is like is written below it.
    """
    figure = _figure(4 * len(named), 4.4)
    panels = figure.subplots(1, len(named), squeeze=False)[0]
    for axes, (title, weights) in zip(panels, named.items(), strict=True):
        _draw(axes, weights)
        axes.set_title(title)
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
