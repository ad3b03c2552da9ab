"""Outcomes of kind do not depend on the last bits: inputs moved by an ulp, agents renumbered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.network import DataDiffusion, HuberNMF, SparseSVD, Topology, infer

RNG = np.random.default_rng(3)
EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2)]
ATOMS = np.abs(RNG.standard_normal((5, 1, 8)))
ATOMS /= np.linalg.norm(ATOMS, axis=2, keepdims=True)
SAMPLES = np.abs(RNG.standard_normal((4, 8)))
PLANTED = RNG.standard_normal((6, 5))
PLANTED /= np.linalg.norm(PLANTED, axis=1, keepdims=True)
CODES = RNG.standard_normal((5, 80, 6)) * (RNG.random((5, 80, 6)).argsort(axis=2) < 2)
DATA = CODES @ PLANTED

orders = st.permutations(range(5))
seeds = st.integers(0, 2**32 - 1)


def ulp(X: np.ndarray, seed: int) -> np.ndarray:
    """Move every number by an ulp, up or down."""
    directions = np.random.default_rng(seed).choice([-np.inf, np.inf], X.shape)
    return np.nextafter(X, directions)


def renumbered(order: list[int]) -> Topology:
    """Return the graph in which node ``order[i]`` is number ``i``."""
    number = {node: i for i, node in enumerate(order)}
    return Topology.from_edges(5, [(number[k], number[j]) for k, j in EDGES])


@pytest.mark.parametrize("method", ["admm", "atc", "exact_diffusion"])
@pytest.mark.parametrize("objective", [SparseSVD(0.05, 0.1), HuberNMF(0.05, 0.1, 0.5)])
@settings(max_examples=3)
@given(order=orders, seed=seeds)
def test_inference_converges_or_not_whatever_the_last_bits(
    objective: SparseSVD, method: str, order: list[int], seed: int
) -> None:
    plain = infer(objective, SAMPLES, list(ATOMS), Topology.from_edges(5, EDGES), method=method)
    W = ulp(ATOMS[order], seed)
    moved = infer(objective, ulp(SAMPLES, seed), list(W), renumbered(order), method=method)
    assert moved.converged == plain.converged
    assert abs(moved.rounds - plain.rounds) <= 10  # one look at the residuals
    for i, k in enumerate(order):
        np.testing.assert_allclose(moved.codes[i], plain.codes[k], atol=0.01)


@settings(max_examples=4)
@given(order=orders, seed=seeds)
def test_planted_atoms_are_found_whatever_the_last_bits(order: list[int], seed: int) -> None:
    learned = DataDiffusion(6, n_nonzero=2).fit(
        list(ulp(DATA[order], seed)), renumbered(order), 60, seed=1
    )
    cosines = np.abs(learned.dictionaries @ PLANTED.T).max(axis=1)
    np.testing.assert_array_equal((cosines > 0.99).sum(axis=1), 6)
    assert learned.disagreement < 0.1
