"""The conditions of P0's theorems against hand computations."""

from __future__ import annotations

import numpy as np
import pytest

from flwr_perdl.dictionary import assumptions

D = np.array([[1.0, 0.0], [0.6, 0.8]])
C = np.array([[1.0, 0.0], [-3.0, 0.0], [0.0, 2.0], [2.0, 2.0]])


@pytest.mark.parametrize("length", [1.0, 5.0])
def test_every_number_by_hand(length):
    # Atom 0 has codes 1, -3, 2: root mean square sqrt(14/3), mean 0; atom 1 has 2, 2.
    found = assumptions(D * [[length], [1]], C / [length, 1])
    assert found.incoherence == pytest.approx(0.6 * np.sqrt(2))
    assert found.spectral_norm == pytest.approx(np.sqrt(1.6))  # the Gram matrix: 1 and .6
    assert found.n_nonzero == 2
    assert found.unique_below == pytest.approx((1 + 1 / 0.6) / 2)
    assert found.bounds == pytest.approx(np.array([1, 3]) / np.sqrt(14 / 3))
    assert found.bias == pytest.approx(1)
    assert found.usage == pytest.approx((0.8, 1.2))  # 2/4 and 3/4 of the samples, mean 5/8
    assert found.pairs == pytest.approx(0.25 / (0.5 * 0.75))
    assert found.identifiability is None
    assert found.start_error == pytest.approx(np.sqrt(0.8) / 4)


def test_the_ideal_case():
    signs = np.array([[s, t] for s in (1.0, -1.0, 0.0) for t in (1.0, -1.0, 0.0)])
    found = assumptions(np.eye(2, 3), signs)
    assert found[:7] == (0, 1, 2, np.inf, (1, 1), 0, (1, 1))
    assert found.pairs == pytest.approx(1)
    assert found.start_error == pytest.approx(np.sqrt(2) / 4)


def test_local_atoms_that_all_clients_have_are_not_identifiable():
    e = np.eye(3)
    apart = assumptions(D=e[:1], C=e[:, :1], local=[e[:2], e[2:]])
    assert apart.identifiability == pytest.approx((np.sqrt(2) / 2, np.sqrt(2)))
    # The best v lies half way between two atoms, at 2 sin(angle / 4) of each.
    near = np.array([[0.0, np.cos(0.2), np.sin(0.2)]])
    found = assumptions(e[:1], e[:, :1], [e[:2], near])
    assert found.identifiability is not None
    low, high = found.identifiability
    assert low <= 2 * np.sin(0.2 / 4) <= high == pytest.approx(2 * np.sin(0.1))
    assert found.start_error == pytest.approx(low / 4)
    assert assumptions(e[:1], e[:, :1], [e[:2], -e[1:]]).identifiability == (0, 0)


def test_nothing_used_is_no_nan():
    found = assumptions(np.eye(2), np.zeros((3, 2)))
    assert found[2:8] == (0, np.inf, (0, 0), 0, (0, 0), 0)
