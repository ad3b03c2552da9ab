"""Clustered mixed regression through Flower's messages: the batched path's results, and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message

from flwr_perdl.clients import RegressionClient
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import (
    LogisticLoss,
    Refinement,
    TwoPhase,
    model_error,
)
from flwr_perdl.regression.phases import MomentDescent
from flwr_perdl.strategies import ProtocolStrategy
from flwr_perdl.strategies.mixed_regression import FedMD, FedX, OneShotClustering
from perdl_experiments.batched_regression import Clients, simulate
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression
from tests.grids import Tapped, arrays_in, grid_of

D = 8
PHASE_1 = 4  # describe, two products, anchors


def planted(seed: int = 0, n_clients: int = 24) -> Mixed:
    """Clients of 8 to 40 points in three clusters."""
    rng = np.random.default_rng(seed)
    return mixed_regression(rng.integers(8, 41, n_clients), np.full(3, 1 / 3), rng, d=D)


#: As the batched path has clients: they withhold nothing.
FREE = partial(RegressionClient, min_support=0)


def grid(data: Mixed, make: Callable[..., RegressionClient] = RegressionClient, **options: Any):
    """Return an in-process grid of these clients."""

    return grid_of(lambda c, i: make(data.X[i], data.y[i], c), len(data.X), **options)


def learn(
    data: Mixed, strategy: ProtocolStrategy, rounds: int, initial: Any = None, **options: Any
) -> np.ndarray:
    """Run the strategy in process and return the models."""
    start = None if initial is None else ArrayRecord([initial])
    result = strategy.start(grid(data, **options), start, num_rounds=rounds)
    return result.arrays.to_numpy_ndarrays()[0]


def asked(message: Message) -> tuple[str, int]:
    """Return the step and the round of a request, ("", 0) of an evaluation or a query."""
    if message.metadata.message_type != "train":
        return "", 0
    config = message.content["config"]
    return config["perdl.step"], config["server-round"]


QUIET: dict[str, Any] = {"fraction_evaluate": 0.0}
PAPER: dict[str, Any] = {
    "phase_1": replace(TwoPhase.paper(3).phase_1, n_products=2, n_iterations=2),
    "phase_2": TwoPhase.paper(3).phase_2,
}
NEAR = np.random.default_rng(1).standard_normal((3, D)) / 4


def refined(**options: Any) -> dict[str, Any]:
    """Return the argument that gives Phase 2 these options."""
    return {"phase_2": Refinement(**options)}


#: Arguments of `FedX`, and the models it starts from.
CASES: dict[str, tuple[int | str, dict[str, Any], Any]] = {
    "both phases": (3, {}, None),
    "k unknown": ("auto", refined(check_every=5), None),
    "s = 1": (3, refined(n_steps=1), None),
    "fedprox": (3, refined(local="fedprox"), None),
    "clip": (3, {"robust": "clip"}, None),
    "filtered": (3, {"robust": "filtered"}, None),
    "the paper's": (3, PAPER, None),
    "two iterations": (3, {"phase_1": MomentDescent(n_iterations=2)}, None),
    "models are added": ("auto", refined(check_every=5), NEAR[:2]),
    "given models": (3, refined(check_every=0), NEAR),
    "given models and step": (3, refined(check_every=0, step_size=0.02), NEAR),
    "one model: FedProx": (1, refined(momentum=False, local="fedprox"), np.zeros((1, D))),
}


@pytest.mark.parametrize("name", CASES)
def test_fedx_is_the_batched_path(name: str) -> None:
    n_clusters, options, initial = CASES[name]
    data = planted()
    found = learn(data, FedX(n_clusters, seed=5, **options, **QUIET), 14, initial, make=FREE)
    settings = TwoPhase(n_clusters, **options)
    batched = simulate(Clients(data.X, data.y), settings, 14, centers=initial, seed=5)
    np.testing.assert_allclose(found, batched.state.centers, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, refined(check_every=0, momentum=False, step_size=0.05)])
def test_a_random_start_is_the_batched_path_from_the_same_models(options: dict[str, Any]) -> None:
    data, settings = planted(), TwoPhase(3, **options)
    start = spawn(7, SERVER, 1).standard_normal((3, D)) / np.sqrt(D)
    found = learn(data, FedX(3, start="random", seed=7, **options, **QUIET), 12, make=FREE)
    skipped = int(bool(options))  # round one only finds the dimension
    batched = simulate(Clients(data.X, data.y), settings, 12 - skipped, centers=start, seed=7)
    np.testing.assert_allclose(found, batched.state.centers, rtol=0, atol=1e-10)


def test_fedmd_is_phase_1_and_ends_by_itself() -> None:
    data = planted()
    strategy = FedMD(3, **QUIET)
    found = learn(data, strategy, 20, make=FREE)
    assert [r.step for r in strategy.history] == ["describe", "moment", "moment", "anchors"]
    batched = simulate(Clients(data.X, data.y), TwoPhase(3), PHASE_1).state.centers
    np.testing.assert_allclose(found, batched, rtol=0, atol=1e-10)
    refined = learn(data, FedX(3, **QUIET), 20, found)
    assert model_error(refined, data.theta) < 0.1 < model_error(found, data.theta)


def test_one_shot_clustering_is_the_batched_path() -> None:
    data = planted()
    strategy = OneShotClustering(3, **QUIET)
    found = learn(data, strategy, 12, make=FREE)
    assert [r.step for r in strategy.history[:3]] == ["describe", "anchors", "update"]
    batched = simulate(Clients(data.X, data.y), TwoPhase(3, start="one-shot"), 12).state.centers
    np.testing.assert_allclose(found, batched, rtol=0, atol=1e-10)


def test_from_the_true_models_it_is_the_oracle() -> None:
    data = planted()
    found = learn(data, FedX(3, **refined(check_every=0), **QUIET), 30, data.theta)
    for j, theta in enumerate(found):
        X, y = (
            np.concatenate([own[i] for i in np.flatnonzero(data.labels == j)]) for own in data[:2]
        )
        np.testing.assert_allclose(theta, np.linalg.lstsq(X, y, rcond=None)[0], atol=1e-10)


def test_evaluations_say_who_is_in_which_cluster() -> None:
    data = planted()
    strategy = FedX(3)
    models = learn(data, strategy, 25)
    report = strategy.history[-1]
    assert report.step == "evaluate"
    found = np.array([report.metrics[i]["cluster"] for i in range(len(data.X))], dtype=int)
    nearest = [int(np.linalg.norm(models - theta, axis=1).argmin()) for theta in data.theta]
    np.testing.assert_array_equal(found, np.array(nearest)[data.labels])
    assert report.aggregate["mse"] == pytest.approx(2 * report.aggregate["loss"])
    assert report.aggregate["mse"] < 1.1 * 0.2**2


def test_floats_are_counted_as_the_docstring_says() -> None:
    data = planted()
    strategy = FedX(3, **QUIET)
    learn(data, strategy, 6)
    width = min(2 * 3 + 4, D)
    floats = [(report.floats_down, report.floats_up) for report in strategy.history]
    moment = (width * D + D, width * D)
    assert floats[0] == (0, D + 1)
    assert floats[1:3] == [moment, moment]
    assert D + 3 * D <= floats[3][0] <= D + width * D
    assert floats[3][1] == D + 1
    assert floats[4:] == [(3 * D, D + 2)] * 2


#: Strategies without given models, and the rounds after which there are some.
LEAST: list[tuple[Callable[..., ProtocolStrategy], int]] = [
    (partial(FedX, 2), PHASE_1),
    (FedX, PHASE_1),
    (partial(FedMD, 2), PHASE_1),
    (partial(FedX, 2, phase_1=MomentDescent(n_products=3)), 5),
    (partial(FedX, 2, phase_1=MomentDescent(n_iterations=2)), 7),
    (partial(FedX, 3, **PAPER), 7),
    (partial(FedX, 2, robust=True), PHASE_1),
    (partial(FedX, 2, start="random"), 1),
    (partial(OneShotClustering, 2), 2),
]


@pytest.mark.parametrize(("make", "least"), LEAST)
def test_fewer_rounds_than_it_takes_to_find_models_are_refused(
    make: Callable[..., ProtocolStrategy], least: int
) -> None:
    strategy, nodes = make(**QUIET), grid(planted(), kind=Tapped)
    with pytest.raises(ValueError, match=r"^num_rounds"):
        strategy.start(nodes, num_rounds=least - 1)
    assert not nodes.asked
    (models,) = strategy.start(nodes, num_rounds=least).arrays.to_numpy_ndarrays()
    assert len(models) >= 2
    assert np.isfinite(models).all()


# Faults -------------------------------------------------------------------------------------


def test_a_client_with_another_number_of_features_is_dropped_with_its_own(warned: Any) -> None:
    data = planted()
    data.X[3] = np.hstack([data.X[3], data.X[3][:, :1]])
    strategy = FedX(3, **QUIET)
    models = learn(data, strategy, 20)
    first, second = strategy.history[:2]
    assert first.aggregate["dropped"] == 1
    assert first.aggregate["clients"] == len(data.X) - 1 == len(first.metrics)
    assert first.anomalies == {3: {"left out": 1.0}}
    assert list(first.dropped) == list(second.dropped) == ["client 3"]
    assert "client 3" in warned.text
    assert model_error(models, data.theta) < 0.12


def test_a_client_that_lies_about_its_cluster_is_left_out() -> None:
    class Liar(RegressionClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            (sent,), n, metrics = super().fit(parameters, config)
            if self.partition == 0 and config["perdl.step"] == "update":
                sent[0, 1] = 3
            return [sent] * (1 + (self.partition == 1)), n, metrics

    strategy = FedX(3, **QUIET)
    learn(planted(), strategy, 6, make=Liar)
    assert list(strategy.history[-1].dropped) == ["client 0", "client 1"]


def test_another_loss_goes_through_phase_2() -> None:
    data = planted()
    signs = data._replace(y=[np.where(b > 0, 1.0, -1.0) for b in data.y])

    def make(X: Any, y: Any, context: Context) -> RegressionClient:
        return RegressionClient(X, y, context, loss=LogisticLoss(), min_support=0)

    options = refined(check_every=0, n_steps=2)
    found = learn(signs, FedX(3, **options, **QUIET), 6, NEAR, make=make)
    clients = Clients(signs.X, signs.y, LogisticLoss())
    batched = simulate(clients, TwoPhase(3, **options), 6, centers=NEAR).state.centers
    np.testing.assert_allclose(found, batched, rtol=0, atol=1e-10)


# Privacy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, PAPER])
def test_no_message_carries_a_sample(options: dict[str, Any]) -> None:
    data = planted()
    nodes = grid(data, kind=Tapped)
    FedX(3, **options).start(nodes, num_rounds=14)
    rows = np.vstack([np.column_stack([A, b]) for A, b in zip(data.X, data.y, strict=True)])
    values = set(np.round(rows, 12).ravel().tolist())
    sent = [array for _, array in arrays_in(nodes.replies)]
    assert all(values.isdisjoint(np.round(array, 12).ravel().tolist()) for array in sent)
    assert sum(array.size for array in sent) > 14 * len(data.X) * D


def test_only_an_anchor_receives_an_estimate_of_its_own() -> None:
    data, given = planted(), {}

    def spy(partition: int, message: Message) -> str | None:
        step, round_ = asked(message)
        if step == "anchors":
            arrays = message.content["arrays"].to_numpy_ndarrays()
            given.setdefault(round_, {})[partition] = arrays[0] if arrays else None
        return None

    phase_1 = replace(PAPER["phase_1"], n_anchors=5)
    learn(data, FedX(3, **{**PAPER, "phase_1": phase_1}, **QUIET), 12, faults=spy)
    for estimates in given.values():
        assert sum(estimate is not None for estimate in estimates.values()) == 5
        assert {e.shape for e in estimates.values() if e is not None} == {(1, D)}


# Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Refinement(local="fedprox", n_steps=3), "n_steps"),
        (lambda: Refinement(step_size=0.1, work=3.0), "work"),
        (lambda: OneShotClustering(3, **refined(check_every=5)), "check_every"),
        (lambda: FedMD(3, max_clusters=5), "max_clusters"),
        (lambda: FedX(3, start="random", **PAPER), "phase_1"),
        (lambda: FedMD(3, robust="median"), "robust"),
    ],
)
def test_an_option_that_does_nothing_is_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        make()


@pytest.mark.parametrize("strategy", [FedMD(3), OneShotClustering(3)])
def test_models_to_start_from_are_refused_where_they_are_not_used(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"^initial_arrays"):
        learn(planted(), strategy, 2, NEAR)


@pytest.mark.parametrize(("n_clusters", "n_models"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("options", [{}, {"start": "random"}, refined(check_every=0)])
def test_another_number_of_initial_models_is_refused(
    n_clusters: int, n_models: int, options: dict[str, Any]
) -> None:
    nodes, given = grid(planted(), kind=Tapped), ArrayRecord([NEAR[:n_models]])
    with pytest.raises(ValueError, match=r"^initial_arrays"):
        FedX(n_clusters, **options).start(nodes, given, num_rounds=9)
    assert not nodes.asked


def test_with_k_unknown_any_number_of_initial_models_is_taken() -> None:
    assert learn(planted(), FedX(**QUIET), 3, NEAR).shape == NEAR.shape


MANY: list[Callable[..., ProtocolStrategy]] = [
    partial(FedX, 9),
    partial(FedMD, 9),
    partial(FedX, 9, start="random"),
    partial(OneShotClustering, 9),
]


@pytest.mark.parametrize("make", MANY)
def test_more_clusters_than_clients_are_refused(make: Callable[..., ProtocolStrategy]) -> None:
    nodes = grid(planted(n_clients=6), kind=Tapped)
    with pytest.raises(ValueError, match=r"^n_clusters"):
        make(num_clients=6).start(nodes, num_rounds=9)
    assert not nodes.asked
    with pytest.raises(ValueError, match=r"^n_clusters"):
        make().start(nodes, num_rounds=9)
    assert {step for step, *_ in nodes.exchanges()} == {"describe", "query"}


@pytest.mark.parametrize("options", [{"fraction_train": 0.5}, {"min_clients": 3}])
def test_who_is_not_drawn_or_does_not_answer_is_a_client_too(options: dict[str, Any]) -> None:
    data = planted(n_clients=6)

    def faults(partition: int, message: Message) -> str | None:
        absent = asked(message)[1] == 1 and "min_clients" in options and partition < 3
        return "silence" if absent else None

    models = learn(data, FedX(4, **options, **QUIET), 8, faults=faults)
    assert np.isfinite(models).all()
    with pytest.raises(ValueError, match=r"^n_clusters"):
        learn(data, FedX(7, **options, **QUIET), 8, faults=faults)


def test_given_models_may_be_more_than_the_clients() -> None:
    data = planted(n_clients=2)
    assert learn(data, FedX(3, **QUIET, num_clients=2), 3, NEAR).shape == (3, D)


def test_one_shot_clustering_goes_on_with_fewer_clients_than_models() -> None:
    def faults(partition: int, message: Message) -> str | None:
        return "silence" if partition > 1 and asked(message)[1] == 5 else None

    assert learn(planted(), OneShotClustering(3, **QUIET), 7, faults=faults).shape == (3, D)
