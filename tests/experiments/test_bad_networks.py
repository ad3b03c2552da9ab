"""The programs of the experiments between nodes serve an input or reject it in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.diffusion import HuberNMF, Topology, infer, metropolis_weights
from perdl_experiments.biclustering import choose_threshold, profiles, ssvd
from perdl_experiments.novelty import averaging_rounds, novelty_scores
from perdl_experiments.unmixing import (
    abundances,
    match_spectra,
    spectral_angles,
    tile_pixels,
    tile_topology,
    unmix,
    vca,
)
from tests.hostile import check_drawn

RNG = np.random.default_rng(0)
RING = Topology.ring(4)
OBJECTIVE = HuberNMF(0.05, 0.1, 0.5)
X = np.abs(RNG.standard_normal((6, 5)))
STACK = np.abs(RNG.random((4, 2, 5)))
STACK /= np.linalg.norm(STACK, axis=2, keepdims=True)
NU = infer(OBJECTIVE, X, list(STACK), RING).nu
PIXELS = [np.abs(RNG.standard_normal((12, 5))) for _ in range(4)]
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "novelty_scores": (
        lambda **given: novelty_scores(OBJECTIVE, topology=RING, **given),
        {"X": X, "nu": NU, "dictionaries": STACK, "step": 0.1},
    ),
    "averaging_rounds": (
        lambda step: averaging_rounds(metropolis_weights(RING), step),
        {"step": 0.1},
    ),
    "ssvd": (ssvd, {"X": X, "n_layers": 2, "tol": 1e-6, "max_iter": 20}),
    "choose_threshold": (choose_threshold, {"products": X[0], "residual": 1.0, "size": 30}),
    "profiles": (profiles, {"atoms": STACK[0], "strengths": np.ones(2)}),
    "vca": (
        lambda X, n_endmembers: vca(X, n_endmembers, rng=np.random.default_rng(0))[:2],
        {"X": X, "n_endmembers": 2},
    ),
    "abundances": (abundances, {"X": X, "spectra": STACK[0]}),
    "spectral_angles": (spectral_angles, {"A": X, "B": STACK[0]}),
    "match_spectra": (match_spectra, {"truth": STACK[0], "estimate": X}),
    "tile_pixels": (lambda tiles: tile_pixels((4, 5), tiles), {"tiles": 2}),
    "tile_topology": (
        lambda **given: tile_topology(**given).degrees.astype(float),
        {"means": X[:4], "tiles": 2, "n_spectral": 1},
    ),
    "unmix": (
        lambda **given: unmix(network=RING, **given),
        {"data": PIXELS, "n_endmembers": 2, "n_rounds": 2},
    ),
}
VARIANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "novelty_scores": {"score": ("normalised", "raw")},
    "ssvd": {"thresholds": ("sure", "bic", (0.1, 0.1))},
    "unmix": {"start": ("pooled", "own")},
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12, derandomize=True)
@given(data=st.data())
def test_bad_input_is_served_or_rejected_in_a_sentence(name: str, data: st.DataObject) -> None:
    check_drawn(data, *CALLS[name], VARIANTS.get(name, {}))
