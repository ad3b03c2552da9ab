import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flwr_perdl.simulations import imbalanced_partition, natural_partition
from perdl_experiments.data import load_images, planted_clients


@pytest.mark.parametrize(
    ("X", "first"),
    [
        (np.full((4, 3, 3), 51, dtype=np.uint8), 0.2),
        (np.full((4, 9), 0.25, dtype=np.float32), 0.25),
        (np.arange(36.0).reshape(4, 9) - 35, 0.0),
        (np.linspace(-3e38, 3e38, 36, dtype=np.float32).reshape(4, 9), 0.0),
        (1.5e308 * np.linspace(-1, 1, 36).reshape(4, 9), 0.0),
    ],
)
def test_values_are_brought_to_the_unit_range(tmp_path, X, first):
    path = tmp_path / "images.npz"
    np.savez(path, X=X, y=np.arange(4))
    images = load_images(str(path))
    assert images.X.shape == (4, 9)
    assert images.X[0, 0] == pytest.approx(first)
    assert images.X.min() >= 0
    assert images.X.max() == (1 if X.min() < X.max() else images.X[0, 0])
    assert images.X.dtype == (np.float32 if X.dtype == np.float32 else np.float64)


GOOD = {"X": np.zeros((4, 3, 3)), "y": np.arange(4)}


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 60), min_size=1, max_size=5),
    n_clients=st.integers(1, 8),
    n_samples=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_partition_properties(sizes, n_clients, n_samples, seed):
    y = np.repeat(np.arange(len(sizes)), sizes)
    assume(0.9 * len(y) >= n_clients and min(sizes) > -(-n_clients // len(sizes)))
    parts = imbalanced_partition(y, n_clients, n_samples, np.random.default_rng(seed))
    everything = np.concatenate([*parts.clients, parts.test])
    assert len(np.unique(everything)) == len(everything)  # no image twice
    assert set(y[parts.test]) == set(y)
    for indices, label in zip(parts.clients, parts.labels, strict=True):
        assert 1 <= len(indices) <= n_samples
        assert np.sum(y[indices] == label) >= 0.9 * len(indices) - 0.5


def test_partition_gives_less_where_there_is_less():
    y = np.repeat(np.arange(10), 100)
    parts = imbalanced_partition(y, 10, 500, np.random.default_rng(0))
    assert [len(indices) for indices in parts.clients] == [90] * 10
    assert len(parts.test) == 100
    with pytest.raises(ValueError, match=r"^n_clients"):
        imbalanced_partition(np.arange(10), 20, 100, np.random.default_rng(0))


def test_natural_clients_keep_their_own_images():
    owners = np.repeat([7, 3, 5, 9], [40, 12, 40, 2])
    parts = natural_partition(owners, 3, 20, np.random.default_rng(0))
    assert parts.labels == [5, 7, 3]
    assert [len(own) for own in parts.clients] == [20, 20, 11]
    for name, own in zip(parts.labels, parts.clients, strict=True):
        assert set(owners[own]) == {name}
    used = np.concatenate([*parts.clients, parts.test])
    assert len(set(used)) == len(used)
    assert sorted(owners[parts.test]) == [3, 5, 5, 5, 5, 7, 7, 7, 7]
    with pytest.raises(ValueError, match=r"^owners"):
        natural_partition(owners, 5, 20, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"^owners"):
        natural_partition(np.array([0, 0, 1]), 2, 20, np.random.default_rng(0))


def test_planted_data():
    planted = planted_clients(
        np.random.default_rng(0), [5, 6, 7], [40, 50, 60], 3, n_features=7, noise=0.0
    )
    assert [X.shape for X in planted.samples] == [(40, 7), (50, 7), (60, 7)]
    for X, local in zip(planted.samples, planted.local_atoms, strict=True):
        D = np.vstack([planted.global_atoms, local])
        np.testing.assert_allclose(D @ D.T, np.eye(len(D)), atol=1e-12)
        codes = X @ D.T
        np.testing.assert_allclose(codes @ D, X, atol=1e-12)
        used = np.abs(codes[np.abs(codes) > 1e-9])
        assert used.min() >= 0.3 - 1e-9
        assert 0.1 < len(used) / codes.size < 0.35


def test_a_file_is_read_again_once_it_has_changed(tmp_path, monkeypatch):
    np.savez(tmp_path / "images.npz", **GOOD)
    monkeypatch.chdir(tmp_path)
    first = load_images("images.npz")
    assert load_images("images.npz") is first
    np.savez("images.npz", X=np.ones((4, 3, 3)), y=GOOD["y"])
    assert load_images("images.npz").X.min() == 1
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^data"):
        load_images("images.npz")
