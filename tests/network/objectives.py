"""The four objectives, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flwr_perdl.network import Biclustering, HuberNMF, NonnegativeMF, Objective, SparseSVD

#: The methods of dual inference, and of model averaging.
INFERENCE = ("admm", "atc", "exact_diffusion")
AVERAGING = ("atc", "cta", "exact_diffusion", "gradient_tracking", "push_sum")


def four(gamma: float, delta: float, *, beta: float = 0.01, eta: float = 0.3) -> list[Objective]:
    return [
        SparseSVD(gamma, delta),
        Biclustering(gamma, delta, beta),
        NonnegativeMF(gamma, delta),
        HuberNMF(gamma, delta, eta),
    ]


def each_of(objectives: Sequence[Objective]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("objective", objectives, ids=lambda one: type(one).__name__)
