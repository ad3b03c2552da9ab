from __future__ import annotations

import numpy as np

from flwr_perdl.diffusion import Topology, metropolis_weights
from perdl_experiments.network_plots import networks, positions


def test_neighbours_are_drawn_close_to_each_other() -> None:
    topology = Topology.grid(4, 5)
    places = positions(topology)
    distance = np.linalg.norm(places[:, None] - places[None], axis=2)
    linked = topology.adjacency.toarray().astype(bool)
    assert distance[linked].max() < np.median(distance[~linked & ~np.eye(20, dtype=bool)])


def test_a_panel_for_each_network_with_its_facts() -> None:
    parts = Topology.from_edges(4, [(0, 1), (2, 3)])
    figure = networks(
        {
            "a ring": metropolis_weights(Topology.ring(70)),
            "two parts": metropolis_weights(parts),
            "alone": metropolis_weights(Topology.ring(1)),
        }
    )
    assert [axes.get_title() for axes in figure.axes] == ["a ring", "two parts", "alone"]
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert texts[0] == ["70 nodes, 70 edges, spectral gap 0.0027"]  # too many for numbers
    assert texts[1][:4] == ["0", "1", "2", "3"]
    assert texts[1][-1] == "4 nodes, 2 edges, spectral gap 0"
