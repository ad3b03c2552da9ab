"""The library's own algorithms give the same numbers in memory and on Flower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from flwr_perdl.clients import DiffusionClient
from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.network import (
    InMemoryNetwork,
    Topology,
    metropolis_weights,
)
from flwr_perdl.network.data_diffusion import DataDiffusion
from flwr_perdl.network.inference import DUAL_METHODS
from flwr_perdl.network.model_diffusion import ModelDiffusion
from flwr_perdl.network.objectives import HuberNMF, SparseSVD
from flwr_perdl.random import spawn
from tests.grids import grid_of, relayed
from tests.network.programs import assert_same, sleeping

FEATURES = 6
SMALL = Topology.erdos_renyi(5, 0.6, seed=1)
ASLEEP: dict[str, Any] = {"sleep": 0.2, "away": {1: range(9, 99)}, "seed": 2}


def atoms(k: int, n: int = 2) -> np.ndarray:
    return np.abs(normalize_atoms(spawn(1, k).standard_normal((n, FEATURES))))


def stream(n_samples: int = 5) -> np.ndarray:
    return np.abs(spawn(4).standard_normal((n_samples, FEATURES)))


# A program for the nodes that are hosted at one place, and how many rounds to run it.
Maker = Callable[[Topology, list[int]], Any]


def inference(method: str, objective: Any) -> Maker:
    def make(topology: Topology, hosted: list[int]) -> Any:
        # Nodes 0 and 3 see the samples; the others have the number of samples only.
        own = {k: atoms(k) for k in hosted}
        seen = {0, 3} & set(hosted)
        X = stream() if seen else np.zeros((5, FEATURES))
        return DUAL_METHODS[method](objective, topology, own, X, (0, 3))

    return make


def data_diffusion(**options: Any) -> Maker:
    def make(topology: Topology, hosted: list[int]) -> Any:
        data = {}
        for k in hosted:
            codes = spawn(2, k).standard_normal((40, 8)) * (spawn(3, k).random((40, 8)) < 0.3)
            data[k] = codes @ normalize_atoms(spawn(5).standard_normal((8, FEATURES)))
        learner = DataDiffusion(8, n_nonzero=2, **options)
        return learner.program(data, agreement=topology.diameter)

    return make


def model_diffusion(objective: Any) -> Maker:
    def make(topology: Topology, hosted: list[int]) -> Any:
        learner = ModelDiffusion(
            objective, n_atoms_per_agent=2, n_iterations=6, batch_size=2, informed=(0, 3)
        )
        streams = {k: stream() for k in hosted if k in (0, 3)}
        return learner.program(streams, topology, shape=stream().shape, show=True)

    return make


PROGRAMS: dict[str, Maker] = {
    "admm": inference("admm", SparseSVD(0.1, 0.2)),
    "admm-huber": inference("admm", HuberNMF(0.1, 0.2, 0.3)),
    "atc-huber": inference("atc", HuberNMF(0.1, 0.2, 0.3)),
    "exact_diffusion": inference("exact_diffusion", SparseSVD(0.1, 0.2)),
    "data-mod": data_diffusion(),
    "data-gradient": data_diffusion(update="gradient", replacement=None),
    "model": model_diffusion(SparseSVD(0.1, 0.2)),
    "model-huber": model_diffusion(HuberNMF(0.1, 0.2, 0.3)),
}
BOTH = ["admm", "data-mod", "model"]  # inference and both learners
ROUNDS = 18


@pytest.mark.parametrize("name", [*PROGRAMS, *(f"{name} without faults" for name in BOTH)])
def test_flower_in_process(name: str) -> None:
    name, _, without = name.partition(" ")
    network = SMALL if without else sleeping(metropolis_weights(SMALL), **ASLEEP)

    def make_client(context: Context, node: int) -> DiffusionClient:
        return DiffusionClient(PROGRAMS[name](SMALL, [node]), context, shows="state")

    run = relayed(grid_of(make_client, SMALL.n_nodes), network, ROUNDS, sealed=not without)
    together = PROGRAMS[name](SMALL, list(range(SMALL.n_nodes)))
    assert_same(run, InMemoryNetwork(network).run(together, ROUNDS), rtol=1e-12)
