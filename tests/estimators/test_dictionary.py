from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from flwr_perdl.clients import local_atoms
from flwr_perdl.dictionary import (
    MODLearner,
    OrthogonalLearner,
    dictionary_distance,
    normalize_atoms,
    sparse_code,
)
from flwr_perdl.estimators import PersonalizedDictionaryLearning
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import TooFewReplies

BASIS = np.linalg.qr(np.random.default_rng(1).standard_normal((12, 12)))[0]
SHARED, OWN = BASIS[:3], [BASIS[3 + 2 * i : 5 + 2 * i] for i in range(4)]


def planted(n_samples: int = 120) -> list[np.ndarray]:
    """Four sites: three atoms in common, two of its own each."""
    rng = np.random.default_rng(2)
    return [
        rng.choice([-1, 0, 1], (n_samples, 5), p=[0.15, 0.7, 0.15])
        * rng.uniform(1, 2, (n_samples, 5))
        @ np.vstack([SHARED, own])
        for own in OWN
    ]


def orthogonal(n_atoms: int = 5, n_global: Any = 3, **options: Any) -> Any:
    return PersonalizedDictionaryLearning(
        n_atoms, n_global, learner=OrthogonalLearner, rounds=5, **options
    )


@pytest.mark.parametrize("n_global", [3, "auto"])
def test_planted_atoms_are_found_shared_and_own(n_global: Any) -> None:
    sites = planted()
    kept = [site.copy() for site in sites]
    model = orthogonal(n_global=n_global).fit(sites)
    np.testing.assert_array_equal(sites, kept)
    assert dictionary_distance(SHARED, model.global_atoms_) < 1e-6
    assert len(model.local_atoms_) == 4
    for i, (own, site) in enumerate(zip(OWN, sites, strict=True)):
        assert dictionary_distance(own, model.local_atoms_[i]) < 1e-6
        codes = model.transform(site, client=i)
        assert codes.shape == (120, 5)
        np.testing.assert_allclose(model.inverse_transform(codes, client=i), site, atol=1e-6)
        np.testing.assert_allclose(model.reconstruct(site, client=i), site, atol=1e-6)
        assert model.score(site, client=i) > 1 - 1e-9
        # the shared part alone explains what the site's own atoms do not
        alone = 1 - np.sum((site @ own.T) ** 2) / np.sum(site**2)
        assert model.score(site) == pytest.approx(alone, abs=1e-6)
    assert model.transform(sites[0]).shape == (120, 3)
    assert model.n_iter_ == len(model.history_) == 5
    for i, codes in enumerate(orthogonal(n_global=n_global).fit_transform(sites)):
        np.testing.assert_array_equal(codes, model.transform(sites[i], i))


@pytest.mark.parametrize("seed", [3, 9])  # a short start misses own factors of these
def test_by_default_planted_factors_that_are_not_orthogonal_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    factors = normalize_atoms(rng.standard_normal((12, 20)))
    own = factors[2:].reshape(5, 2, 20)
    sites = []
    for mine in own:
        codes = rng.standard_normal((200, 4)) * (rng.random((200, 4)) < 0.3)
        noise = 0.01 * rng.standard_normal((200, 20))
        sites.append(codes @ np.vstack([factors[:2], mine]) + noise)
    model = PersonalizedDictionaryLearning(4, "agree").fit(sites)
    assert len(model.global_atoms_) == 2
    assert np.abs(factors[:2] @ model.global_atoms_.T).max(axis=1).min() > 0.98
    for mine, found in zip(own, model.local_atoms_, strict=True):
        assert np.abs(mine @ found.T).max(axis=1).min() > 0.98


def test_n_nonzero_is_the_number_of_atoms_per_sample() -> None:
    sites = planted(40)
    model = orthogonal(n_nonzero=2).fit(sites)
    assert set(np.count_nonzero(model.transform(sites[0], client=0), axis=1)) <= {0, 1, 2}
    np.testing.assert_array_equal(
        model.transform(sites[1], client=1),
        sparse_code(sites[1], model.atoms(client=1), n_nonzero=2),
    )


def test_one_seed_gives_the_same_atoms_and_a_data_frame_the_same_as_an_array() -> None:
    sites = planted(40)
    names = [f"gene {j}" for j in range(12)]
    tables = [pd.DataFrame(site, columns=names) for site in sites]
    first, second = orthogonal(seed=4).fit(sites), orthogonal(seed=4).fit(tables)
    np.testing.assert_array_equal(first.global_atoms_, second.global_atoms_)
    assert list(second.feature_names_in_) == names
    assert not hasattr(first, "feature_names_in_")
    other = pd.DataFrame(sites[1], columns=names[::-1])
    with pytest.raises(ValueError, match=r"X\[1\]"):
        second.fit([tables[0], other])
    with pytest.raises(ValueError, match="feature names"):
        second.transform(other)


def test_the_grid_is_the_callers_where_one_is_given(tmp_path: Path) -> None:
    def node_config(partition: int) -> dict[str, str]:
        return {"state-dir": str(tmp_path)}

    model = orthogonal(grid=partial(InProcessGrid, node_config=node_config)).fit(planted(40))
    np.testing.assert_array_equal(local_atoms(tmp_path / "client-2"), model.local_atoms_[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_global": 9}, "n_global"),
        ({"n_atoms": 0}, "n_atoms"),
        ({"alpha": 1.0}, "alpha"),
        ({"n_nonzero": 0}, "n_nonzero"),
        ({"min_support": 500}, "min_support=500"),
        ({"rounds": 1}, "rounds"),
        ({"aggregation": "sum"}, "aggregation"),
    ],
)
def test_a_wrong_parameter_is_named_when_fit_is_called(options: Any, said: str) -> None:
    model = orthogonal().set_params(**options)
    with pytest.raises(ValueError, match=said):
        model.fit(planted(40))
    with pytest.raises(NotFittedError):
        model.transform(planted(40)[0])


def test_a_site_that_fails_stops_the_fit_with_its_reason() -> None:
    sites = planted(40)

    class Failing(OrthogonalLearner):
        def update(self, X: Any, C: Any, D: Any) -> Any:
            if np.array_equal(X, sites[2]):
                raise RuntimeError("the disk is full")
            return super().update(X, C, D)

    model = PersonalizedDictionaryLearning(5, 3, learner=Failing, rounds=3)
    with pytest.raises(TooFewReplies):
        model.fit(sites)


def test_a_site_of_two_samples_has_atoms_of_its_own_and_sends_none() -> None:
    sites = [*planted(40), planted(40)[0][:2]]
    model = PersonalizedDictionaryLearning(5, 3, learner=partial(MODLearner, n_nonzero=1), rounds=3)
    with pytest.warns(UserWarning, match=r"X\[4\].*n_atoms"):
        assert [len(atoms) for atoms in model.fit(sites).local_atoms_] == [2] * 5
    assert not model.history_[-1].dropped


@pytest.mark.parametrize("learner", [None, OrthogonalLearner])
def test_a_site_that_joins_late_has_local_atoms_as_good_as_the_others(learner: Any) -> None:
    """Beside the same site in ``fit``, on samples that neither has seen."""
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.standard_normal((20, 20)))[0]

    def site(seed: int) -> np.ndarray:
        own = np.random.default_rng(seed)
        atoms = np.vstack(
            [basis[:3], np.linalg.qr(own.standard_normal((17, 17)))[0][:3] @ basis[3:]]
        )
        codes = own.standard_normal((200, 6)) * (own.random((200, 6)) < 0.3)
        return codes @ atoms + 0.02 * own.standard_normal((200, 20))

    tables = [site(seed) for seed in range(5)]
    seen, held_out = [table[:120] for table in tables], tables[4][120:]
    model = PersonalizedDictionaryLearning(6, n_global=3, learner=learner).fit(seen[:4])
    before = model.global_atoms_.copy()
    number = model.add_site(seen[4])
    assert (number, len(model.local_atoms_), model.local_atoms_[4].shape) == (4, 5, (3, 20))
    np.testing.assert_array_equal(model.global_atoms_, before)
    whole = PersonalizedDictionaryLearning(6, n_global=3, learner=learner).fit(seen)
    late, there = model.score(held_out, client=number), whole.score(held_out, client=4)
    assert late > there - 0.02
    assert late > model.score(held_out) + 0.2


def test_tables_with_missing_entries_are_learned_from_and_filled_in() -> None:
    """Hidden entries of new samples are rebuilt as well as with a model of whole tables."""
    whole, errors = np.stack(planted(600)), []
    hidden = np.random.default_rng(9).random(whole.shape) < 0.3
    tables = np.where(hidden, np.nan, whole)
    for seen in (whole, tables):
        model = PersonalizedDictionaryLearning(5, 3, rounds=8).fit(list(seen[:, :400]))
        filled = [model.reconstruct(table, i) for i, table in enumerate(tables[:, 400:])]
        errors.append(np.mean((filled - whole[:, 400:])[hidden[:, 400:]] ** 2))
    assert errors[1] < 1.08 * errors[0]
    assert dictionary_distance(SHARED, model.global_atoms_) < 0.05
    new = tables[3, 400:450]
    rest, seen = model.reconstruct(new, 3) - new, ~np.isnan(new)
    explained = 1 - np.sum(rest[seen] ** 2) / np.sum(new[seen] ** 2)
    assert model.score(new, client=3) == pytest.approx(explained)
    assert np.isfinite(model.transform(new, model.add_site(new))).all()
    frame = pd.DataFrame(new).convert_dtypes()  # its missing entries are pandas' NA
    np.testing.assert_array_equal(model.transform(frame, 3), model.transform(new, 3))


@pytest.mark.parametrize(
    ("columns", "options", "name"),
    [
        ((0, 1), {"aggregation": "mean"}, "aggregation"),
        ((0, 1), {"learner": OrthogonalLearner}, r"X\[0\]"),
        ((0, 12), {}, r"X\[0\]"),
    ],
)
def test_missing_entries_that_nothing_can_be_made_of_are_named(
    columns: tuple[int, int], options: dict[str, Any], name: str
) -> None:
    sites = planted(20)
    sites[0][:, slice(*columns)] = np.nan
    with pytest.raises(ValueError, match=f"^{name}"):
        PersonalizedDictionaryLearning(5, 3, rounds=2, **options).fit(sites)


def test_a_column_may_be_missing_at_one_site_but_not_at_all() -> None:
    sites = planted(60)
    column = sites[0][:, 2].copy()
    sites[0][:, 2] = np.nan
    model = PersonalizedDictionaryLearning(5, 3, rounds=3).fit(sites)
    filled = model.reconstruct(sites[0], 0)[:, 2]
    assert np.sum((filled - column) ** 2) < 0.7 * np.sum(column**2)
    for site in sites:
        site[:, 2] = np.nan
    with pytest.raises(ValueError, match=r"^X"):
        PersonalizedDictionaryLearning(5, 3, rounds=2).fit(sites)


@pytest.mark.parametrize("without", ["north", "south"])
def test_the_table_that_lacks_a_column_is_named_and_may_have_it_of_nan(without: str) -> None:
    columns = list("abcdefghijkl")
    tables = {
        name: pd.DataFrame(X, columns=columns)
        for name, X in zip(["north", "east", "south", "west"], planted(), strict=True)
    }
    lacking = {**tables, without: tables[without].drop(columns="c")}
    with pytest.raises(ValueError, match=rf"X\['{without}'\].*'c'"):
        PersonalizedDictionaryLearning(5, 3, rounds=2).fit(lacking)
    filled = {**tables, without: lacking[without].reindex(columns=columns)}
    assert PersonalizedDictionaryLearning(5, 3, rounds=2).fit(filled).n_features_in_ == 12


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.filterwarnings("ignore:n_global")
def test_sites_with_few_days_of_the_same_weather_share_all_atoms(seed: int) -> None:
    """A site's own update of shared atoms fits its few samples: by it, sharing would lose."""
    rng, hour = np.random.default_rng(seed), 2 * np.pi * np.arange(16) / 16
    sites = []
    for _ in range(6):
        rough = 0.05 * np.cumsum(rng.standard_normal((24, 16)), axis=1)
        level, swing, late = rng.normal([0, 1, 0], [1, 0.3, 0.5], (24, 3)).T[..., None]
        sites.append(level + swing * np.cos(hour + late) + rough)
    model = PersonalizedDictionaryLearning(12, n_nonzero=4, seed=seed).fit(sites)
    assert model.global_atoms_.shape == (12, 16)


def test_a_chosen_number_that_is_all_atoms_is_told_once() -> None:
    """Noisy samples of one dictionary at all sites: together these learn it better."""
    rng = np.random.default_rng(0)
    codes = rng.choice([-1, 0, 1], (4, 40, 4), p=[0.2, 0.6, 0.2])
    sites = list(codes @ BASIS[:4] + 0.3 * rng.standard_normal((4, 40, 12)))
    with pytest.warns(UserWarning, match=r"^n_global") as caught:
        model = orthogonal(4, "auto").fit(sites)
    assert [len(own) for own in model.local_atoms_] == [0] * 4
    assert [warning.filename for warning in caught] == [__file__]
    orthogonal(4, 4).fit(sites)  # asked for: nothing to tell


@pytest.mark.parametrize(
    ("change", "n_atoms", "names"),
    [
        (lambda X: X, 5, []),
        (lambda X: X[:3], 5, ["X[0]"]),
        (lambda X: np.vstack([X, np.zeros((31, 12))]), 5, ["X[0]"]),
        (lambda X: X, 20, ["X[0]"]),
    ],
    ids=["well", "few", "zeros", "atoms"],
)
def test_what_is_odd_is_named_once(
    change: Any, n_atoms: int, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sites = [change(planted(30)[0]), *planted(30)[1:]]
    model = PersonalizedDictionaryLearning(n_atoms, 3, rounds=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(sites)
    assert [str(w.message)[:4] for w in caught] == names
    assert not caplog.records


def test_a_fit_goes_on_from_the_atoms_with_warm_start() -> None:
    sites = planted()
    model = orthogonal(warm_start=True).fit(sites)
    first, own = model.global_atoms_, model.local_atoms_[1]
    model.set_params(rounds=2, seed=5).fit(sites)
    np.testing.assert_allclose(model.global_atoms_, first, atol=1e-6)
    np.testing.assert_allclose(model.local_atoms_[1], own, atol=1e-6)  # places and signs too
    assert model.n_iter_ == 2
    with pytest.raises(ValueError, match=r"^X"):
        model.fit(sites[:3])
    with pytest.raises(ValueError, match=r"^X"):
        model.fit([site[:, :5] for site in sites])


def test_a_site_leaves_and_another_one_joins() -> None:
    sites = planted()
    model = orthogonal(warm_start=True).fit(sites[:3])
    assert model.add_site(sites[3]) == 3
    model.remove_site(1)
    model.fit([site[:50] for site in (sites[0], *sites[2:])])
    assert len(model.local_atoms_) == 3
    assert dictionary_distance(OWN[3], model.local_atoms_[2]) < 1e-6
    with pytest.raises(ValueError, match=r"^client"):
        model.remove_site(3)


def test_where_samples_are_too_few_to_choose_all_atoms_that_may_be_sent_are_shared() -> None:
    X = np.random.default_rng(0).standard_normal((6, 9, 40))
    fitted = []
    for n_global in ("auto", 24):
        with pytest.warns(UserWarning, match="n_atoms"):
            fitted.append(PersonalizedDictionaryLearning(24, n_global, n_nonzero=4).fit(list(X)))
    chosen, given = (len(model.global_atoms_) for model in fitted)
    assert chosen == given < 24
