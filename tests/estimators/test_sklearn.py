"""scikit-learn's own checks, and what else its users expect of an estimator."""

from __future__ import annotations

import doctest
import pickle
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted

from flwr_perdl.estimators import (
    MixedRegression,
    NetworkDictionaryLearning,
    PersonalizedDictionaryLearning,
    PersonalizedRidge,
)
from flwr_perdl.network import Topology

# scikit-learn's checks hand over one table. Each estimator sees it as that of its only site.


class OneSite(PersonalizedDictionaryLearning):
    def __init__(self, n_atoms: int = 4, n_global: int = 2, rounds: int = 2) -> None:
        super().__init__(n_atoms, n_global, rounds=rounds)

    def fit(self, X: Any, y: Any = None) -> OneSite:
        return super().fit([X])

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).transform(X)

    def transform(self, X: Any, client: int | None = 0) -> Any:
        return super().transform(X, client)

    def get_feature_names_out(self, input_features: Any = None, *, client: Any = 0) -> Any:
        return super().get_feature_names_out(client=client)

    def score(self, X: Any, y: Any = None, *, client: int | None = 0) -> float:
        return super().score(X, client=client)


class OneNode(NetworkDictionaryLearning):
    def __init__(self, n_atoms: int = 4, n_nonzero: int = 2, rounds: int = 2) -> None:
        super().__init__(Topology.complete(1), n_atoms, n_nonzero=n_nonzero, rounds=rounds)

    def fit(self, X: Any, y: Any = None) -> OneNode:
        return super().fit([X])

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        return self.fit(X).transform(X)


def one_group(X: Any) -> Any:
    shape = X.shape if hasattr(X, "shape") else np.asarray(X).shape
    return np.zeros(shape[:1], dtype=int)


class OneGroup(MixedRegression):
    def __init__(self, k: int = 1, rounds: int = 12) -> None:
        super().__init__(k, rounds=rounds)

    def fit(self, X: Any, y: Any) -> OneGroup:
        return super().fit(X, y, one_group(X))

    def predict(self, X: Any, groups: Any = None, y_own: Any = None) -> Any:
        return super().predict(X, one_group(X))


class OneRidge(PersonalizedRidge):
    def __init__(self, level: str = "personal", features: int = 3) -> None:
        super().__init__(level, features=features)

    def fit(self, X: Any, y: Any) -> OneRidge:
        return super().fit(X, y, one_group(X))


#: The checks that do not hold, and why: docs/clustered-learning.md has them too.
EXCLUDED: dict[str, dict[str, str]] = {
    "OneSite": {},
    "OneNode": {},
    "OneGroup": {"check_supervised_y_2d": "y with two dimensions is refused, not flattened"},
    "OneRidge": {"check_supervised_y_2d": "y with two dimensions is refused, not flattened"},
}


@pytest.mark.filterwarnings("ignore:Estimator .* does not inherit from:UserWarning")
@pytest.mark.filterwarnings("ignore:.* lower n_atoms:UserWarning")  # tables of two columns
@pytest.mark.parametrize("kind", [OneSite, OneNode, OneGroup, OneRidge])
def test_scikit_learns_checks(kind: type[Any]) -> None:
    excluded = EXCLUDED[kind.__name__]
    results = check_estimator(kind(), expected_failed_checks=excluded, on_fail=None, on_skip=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert {r["check_name"] for r in results if r["status"] == "xfail"} == set(excluded)
    assert sum(r["status"] == "passed" for r in results) > 30


@pytest.mark.parametrize(
    ("theirs", "said"), [(None, "estimators"), (ModuleType("old"), "1.6")], ids=["none", "old"]
)
def test_without_scikit_learn_the_import_says_what_to_install(
    theirs: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("flwr_perdl.estimators")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.utils.validation", theirs)
    with pytest.raises(ImportError, match=said):
        import_module("flwr_perdl.estimators")


ALL = [
    PersonalizedDictionaryLearning(4, n_global=2, rounds=2, n_nonzero=1),
    NetworkDictionaryLearning(Topology.ring(2), n_atoms=4, rounds=2),
    MixedRegression(k=1, rounds=10),
    PersonalizedRidge("personal", features=3),
]


def fitted(estimator: Any) -> Any:
    X = np.random.default_rng(0).standard_normal((2, 20, 5))
    if hasattr(estimator, "predict"):
        groups = np.repeat(["north", "south"], 20)
        return estimator.fit(np.vstack(X), np.vstack(X).sum(axis=1), groups)
    return estimator.fit(list(X))


@pytest.mark.parametrize("estimator", ALL, ids=lambda one: type(one).__name__)
def test_a_clone_has_the_parameters_and_a_pickle_all(estimator: Any) -> None:
    model = fitted(clone(estimator).set_params(seed=3))
    assert repr(model.get_params()) == repr({**estimator.get_params(), "seed": 3})
    copy = pickle.loads(pickle.dumps(model))
    assert repr(copy) == repr(model)
    learned = [name for name in vars(model) if name.endswith("_")]
    assert learned
    for name in learned:
        np.testing.assert_equal(getattr(copy, name), getattr(model, name))
    again = clone(model)
    assert repr(again) == repr(model)
    assert not hasattr(again, learned[0])


@pytest.mark.parametrize("estimator", ALL, ids=lambda one: type(one).__name__)
def test_before_fit_the_error_is_scikit_learns(estimator: Any) -> None:
    ask = estimator.predict if hasattr(estimator, "predict") else estimator.transform
    for call in (lambda: check_is_fitted(estimator), lambda: ask(np.zeros((1, 5)))):
        with pytest.raises(NotFittedError, match=type(estimator).__name__):
            call()


def test_data_frames_come_out_where_they_are_asked_for() -> None:
    tables = [
        pandas.DataFrame(table, columns=list("abcde"), index=range(100, 130))
        for table in np.random.default_rng(0).standard_normal((2, 30, 5))
    ]
    model = PersonalizedDictionaryLearning(3, 2, rounds=2).fit(tables)
    arrays = model.transform(tables[0], client=0)
    frame = model.set_output(transform="pandas").transform(tables[0], client=0)
    assert list(frame.columns) == ["global0", "global1", "local0"]
    assert list(frame.index) == list(range(100, 130))
    np.testing.assert_array_equal(frame.to_numpy(), arrays)
    np.testing.assert_array_equal(
        model.inverse_transform(frame, client=0), model.reconstruct(tables[0], client=0)
    )
    assert list(clone(model).fit(tables).transform(tables[1]).columns) == ["global0", "global1"]
    with pytest.raises(ValueError, match="list"):
        model.set_output(transform="list").transform(tables[0])


def test_polars_frames_come_out_where_they_are_asked_for() -> None:
    polars = pytest.importorskip("polars")
    X = np.random.default_rng(0).standard_normal((2, 30, 5))
    model = PersonalizedDictionaryLearning(3, 2, rounds=2).fit(list(X))
    arrays = model.transform(X[0], client=0)
    frame = model.set_output(transform="polars").transform(X[0], client=0)
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == ["global0", "global1", "local0"]
    np.testing.assert_array_equal(frame.to_numpy(), arrays)


SITES = list(np.random.default_rng(5).standard_normal((4, 20, 5)))
SITE_ESTIMATORS = [
    (PersonalizedDictionaryLearning(4, 2, rounds=2), "client"),
    (NetworkDictionaryLearning(Topology.ring(4), n_atoms=4, rounds=2), "node"),
]


@pytest.mark.parametrize(("estimator", "whose"), SITE_ESTIMATORS)
def test_lists_and_mappings_of_sites_are_as_their_tables_one_by_one(
    estimator: Any, whose: str
) -> None:
    names = ["north", "east", "south", "west"]
    model = clone(estimator).fit(dict(zip(names, SITES, strict=True)))
    assert model.site_names_ == names
    two = {"west": SITES[3][:7], "north": SITES[0]}
    for own, places in (({}, [None, None]), ({whose: list(two)}, [3, 0])):
        each = [model.transform(X, i) for X, i in zip(two.values(), places, strict=True)]
        codes = model.transform(two, **own)
        assert list(codes) == list(two)
        back = model.inverse_transform(codes, **own)
        for name, i, one in zip(two, places, each, strict=True):
            np.testing.assert_array_equal(codes[name], one)
            np.testing.assert_array_equal(back[name], model.inverse_transform(one, i))
        for one, found in zip(each, model.transform(list(two.values()), **own), strict=True):
            np.testing.assert_array_equal(found, one)
        X = np.vstack(list(two.values()))
        rest = np.sum((X - np.vstack(list(back.values()))) ** 2)
        assert model.score(two, **own) == pytest.approx(1 - rest / np.sum(X**2))
        assert model.score(list(two.values()), **own) == model.score(two, **own)
    for codes, X, i in zip(model.fit_transform(SITES), SITES, range(4), strict=True):
        np.testing.assert_array_equal(codes, model.transform(X, i))
    assert not hasattr(model, "site_names_")
    np.testing.assert_array_equal(model.transform(np.array(SITES))[2], model.transform(SITES[2]))
    for wrong, said in (
        ({whose: [0]}, whose),
        ({whose: 0}, whose),
        ({whose: ["north"] * 4}, whose),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{said}"):
            model.transform(SITES, **wrong)
    for sites in ({}, {1: SITES[0]}):
        with pytest.raises((TypeError, ValueError), match=r"^X"):
            model.fit(sites)


@pytest.mark.parametrize("one", [PersonalizedDictionaryLearning, MixedRegression])
def test_a_search_over_sites_or_groups_finds_what_is_planted(one: Any) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(one.score, globs={})
    assert example.examples[-1].source.startswith("search.best_params_")
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


def test_cross_validation_scores_sites_that_were_not_in_fit_by_the_global_atoms() -> None:
    model = PersonalizedDictionaryLearning(4, 3, rounds=2)
    scores = cross_val_score(model, SITES, cv=2)
    assert scores[0] == clone(model).fit(SITES[2:]).score(np.vstack(SITES[:2]))


@pytest.mark.parametrize("estimator", ALL, ids=lambda one: type(one).__name__)
def test_random_state_is_the_seed_by_scikit_learns_name(estimator: Any) -> None:
    by_name, by_seed = (
        fitted(clone(estimator).set_params(**{name: 3})) for name in ("random_state", "seed")
    )
    for name, value in vars(by_seed).items():
        if name.endswith("atoms_") or name.endswith("components_") or name == "coef_":
            np.testing.assert_array_equal(getattr(by_name, name), value)
    for wrong in ({"seed": 1, "random_state": 2}, {"random_state": "a"}):
        with pytest.raises(ValueError, match=r"^(seed|random_state) "):
            fitted(clone(estimator).set_params(**wrong))


def test_the_names_of_columns_are_those_of_a_site() -> None:
    model = PersonalizedDictionaryLearning(3, 2, rounds=2).fit({"a": SITES[0], "b": SITES[1]})
    assert model.get_feature_names_out().tolist() == ["global0", "global1"]
    names = ["global0", "global1", "local0"]
    assert model.get_feature_names_out(client="b").tolist() == names
    with pytest.raises(ValueError, match=r"^client"):
        model.atoms("c")
