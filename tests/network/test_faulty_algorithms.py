"""What becomes of the algorithms when links, nodes and messages fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.network import Faults, InMemoryNetwork, Topology, metropolis_weights
from flwr_perdl.network.data_diffusion import DataDiffusion
from flwr_perdl.network.inference import exact_dual, infer
from flwr_perdl.network.objectives import HuberNMF, Objective, SparseSVD
from flwr_perdl.random import spawn
from tests.network.objectives import INFERENCE
from tests.network.programs import sleeping

N, BAD = 12, 4
TOPOLOGY = Topology.erdos_renyi(N, 0.4, seed=1)
WEIGHTS = metropolis_weights(TOPOLOGY)
OTHERS = np.arange(N) != BAD
OBJECTIVES = [SparseSVD(0.1, 0.3), HuberNMF(0.1, 0.3, 0.5)]
X = spawn(0).standard_normal((2, 10))
ATOMS = [normalize_atoms(spawn(1, k).standard_normal((2, 10))) for k in range(N)]

# Inference ---------------------------------------------------------------------------------------


def inferred(
    objective: Objective, method: str, faults: Faults | None = None, **asleep: Any
) -> tuple[Any, np.ndarray]:
    """Return what 300 rounds come to, and every agent's largest relative error of nu."""
    network = InMemoryNetwork(sleeping(WEIGHTS, **asleep), faults=faults)
    found = infer(objective, X, ATOMS, network, method=method, n_rounds=300)
    exact = exact_dual(objective, X, ATOMS).nu
    errors = np.linalg.norm(found.nu - exact, axis=2) / np.linalg.norm(exact, axis=1)
    return found, errors.max(axis=1)


@pytest.mark.parametrize("method", INFERENCE)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("drop", "sleep"), [(0.2, 0.0), (0.0, 0.1)])
def test_inference_survives_links_that_drop_and_nodes_that_sleep(
    drop: float, sleep: float, objective: Objective, method: str
) -> None:
    found, errors = inferred(objective, method, Faults(drop, seed=3), sleep=sleep, seed=1)
    assert np.isfinite(found.nu).all()
    assert errors.max() < (1e-5 if method == "admm" else 0.3)
    assert found.converged or method != "admm"
    # What the agents report is honest: within a factor of ten, or larger than the error.
    assert found.residual.max() > errors.max() / 10


@pytest.mark.parametrize("method", INFERENCE)
def test_without_one_agent_the_others_end_well(method: str) -> None:
    found, errors = inferred(OBJECTIVES[1], method, away={BAD: range(30, 999)})
    assert np.isfinite(found.nu).all()
    assert errors[OTHERS].max() < 1  # its atoms are gone: another problem; nu = 0 has 1
    agreed = found.nu[OTHERS]
    spread = np.ptp(agreed, axis=0).max() / np.abs(agreed).max()
    if method == "admm":
        assert spread < 1e-5
        assert found.residual[OTHERS].max() < 1e-5
    assert not found.converged  # the dead agent's own residual says so


# Learning over data ------------------------------------------------------------------------------

D = normalize_atoms(spawn(5).standard_normal((8, 6)))


def samples(node: int, n: int = 80) -> np.ndarray:
    codes = np.zeros((n, 8))
    rng = spawn(6, node)
    for row in codes:
        row[rng.choice(8, 2, replace=False)] = rng.uniform(-1, 1, 2)
    return codes @ D


def learned_with(drop: float, replacement: str | None, **asleep: Any) -> Any:
    learner = DataDiffusion(8, n_nonzero=2, replacement=replacement)
    network = InMemoryNetwork(sleeping(WEIGHTS, **asleep), faults=Faults(drop, seed=2))
    return learner.fit([samples(k) for k in range(N)], network, 40)


@pytest.mark.parametrize(
    ("drop", "replacement", "asleep"),
    [
        (0.2, None, {}),
        (0.2, "private", {"sleep": 0.2, "seed": 2}),
        (0.0, "private", {"away": {BAD: range(20, 999)}}),
        (0.2, "samples", {}),
    ],
)
def test_the_learner_over_data_ends_well(drop: float, replacement: str | None, asleep: Any) -> None:
    learned = learned_with(drop, replacement, **asleep)
    np.testing.assert_allclose(np.linalg.norm(learned.dictionaries, axis=2), 1)
    well = OTHERS if "away" in asleep else np.ones(N, dtype=bool)
    assert learned.error[well].max() < learned_with(0, replacement).error.max() + 0.05
