"""Diagnosis: the right strategy for clients whose difference is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp.strategy import FedProx

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosis, Ditto, PersonalizedFedAvg

N = 10
NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


def linear(kind: str, seed: int) -> Callable[[Context], Any]:
    """Return a maker of clients with two linear layers, whose difference is of this kind."""
    rng = np.random.default_rng(seed)
    # A body of two orthonormal directions, and heads that are rotations: their mean is zero.
    body = np.linalg.qr(rng.standard_normal((12, 2)))[0]
    angles = 2 * np.pi * {"fedavg": 0, "head": 1, "clusters": 5}[kind] * np.arange(N) / N
    cosines, sines = np.cos(angles), np.sin(angles)
    heads = np.array([[cosines, sines], [-sines, cosines]]).transpose(2, 0, 1)
    X = rng.standard_normal((N, 60, 12))
    Y = X @ body @ heads + 0.3 * rng.standard_normal((N, 60, 2))

    class Client:
        def __init__(self, context: Context) -> None:
            self.own = int(context.node_config["partition-id"])

        def fit(self, model: list[np.ndarray], config: Any) -> Any:
            W, b, V, c = model
            X_own, Y_own = X[self.own, :12], Y[self.own, :12]
            for _ in range(20):
                hidden = X_own @ W + b
                error = (hidden @ V + c - Y_own) / len(X_own)
                back = error @ V.T
                V, c = V - 0.3 * hidden.T @ error, c - 0.3 * error.sum(axis=0)
                W, b = W - 0.3 * X_own.T @ back, b - 0.3 * back.sum(axis=0)
            return [W, b, V, c], len(X_own), {}

        def evaluate(self, model: list[np.ndarray], config: Any) -> Any:
            W, b, V, c = model
            error = (X[self.own, 12:] @ W + b) @ V + c - Y[self.own, 12:]
            return float(np.mean(error**2)), len(error), {"score": -float(np.mean(error**2))}

    return Client


def start() -> ArrayRecord:
    rng = np.random.default_rng(0)
    shapes = ((12, 2), (2,), (2, 2), (2,))
    arrays = [
        rng.standard_normal(shape) / 2 if len(shape) == 2 else np.zeros(shape) for shape in shapes
    ]
    return ArrayRecord({name: Array(a) for name, a in zip(NAMES, arrays, strict=True)})


@cache
def diagnosed(kind: str, seed: int, **options: Any) -> Diagnosis:
    diagnosis = Diagnosis(**options)
    grid = InProcessGrid(client_app(linear(kind, seed)), N)
    diagnosis.start(grid, start(), num_rounds=12, verbose="quiet")
    return diagnosis


@pytest.mark.parametrize(("kind", "seed"), [("fedavg", 0), ("head", 0), ("clusters", 1)])
def test_the_known_difference_is_found(kind: str, seed: int) -> None:
    found = diagnosed(kind, seed).result
    assert found.choice == kind
    best = min(values.mean() for values in found.values.values())
    assert found.values[found.choice].mean() <= 1.1 * best
    assert len(found.clients) == N
    mean, low, high = found.lead
    leads = found.values[found.over] - found.values[kind]
    assert low < mean < high
    assert leads.min() <= mean <= leads.max()
    assert found.sentence.startswith(f"{found.strategies[kind]}: ")
    assert len(found.sentence.split()) <= 32
    assert f"{found.confidence:.0%} of bootstrap resamples of clients" in found.sentence
    assert (" tie with " in found.sentence) == (low <= 0)
    assert f"strategy = {found.strategies[kind]}\n" in found.code
    if kind == "clusters":
        assert len({found.groups[p] for p in range(0, N, 2)}) == 1


def test_a_metric_to_maximize_leads_to_the_same_choice() -> None:
    by_score = diagnosed("head", 0, metric="score", higher_is_better=True).result
    assert by_score.choice == "head"  # as by the loss, above
    head, *rows = by_score.table().splitlines()[: 1 + len(by_score.values)]
    assert "median score" in head
    said = [row.partition("10  ")[2].partition(" (stopped early)") for row in rows]
    assert [strategy for strategy, _, _ in said] == list(by_score.strategies.values())
    marked = {
        (int(row.split()[0]), bool(mark)) for row, (_, mark, _) in zip(rows, said, strict=True)
    }
    assert marked == {(12, False), (4, True)}


def test_a_given_part_stays_private() -> None:
    found = diagnosed("head", 0, private=("head.*",)).result
    assert "body" not in found.values
    assert {"head", "head-fine-tuned"} <= found.values.keys()
    assert found.strategies["head"] == 'PersonalizedFedAvg(["head.*"])'


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"private": ("tail.*",)}, "private"),
        ({"metric": "accuracy"}, "metric"),
        ({"metric": "score"}, "higher_is_better"),
        ({"fraction_evaluate": 0.5}, "fraction_evaluate"),
        ({"checkpoint_dir": "here"}, "checkpoint_dir"),
        ({"fraction_train": 0.5}, "fraction_train"),
        ({"num_clinets": 3}, "num_clinets"),
        ({"rates": (-0.1,)}, "rates"),
    ],
)
def test_what_it_cannot_do_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        diagnosed("fedavg", 0, **options)


@dataclass
class Mean:
    """A client that learns a number twice, and between them counts how often it has trained."""

    own: float
    noise: Callable[[], float] = lambda: 0.0
    reports: Callable[[float], float] = lambda loss: loss
    n_fits: int = 0

    def fit(self, model: list[np.ndarray], config: Any) -> Any:
        first, n_fits, second = model
        self.n_fits += 1
        rate = config.get("speed", 0.2)
        moved = [mean + rate * (self.own - mean) for mean in (first, second)]
        return [moved[0], n_fits + 1, moved[1]], 1, {}

    def evaluate(self, model: list[np.ndarray], config: Any) -> Any:
        first, n_fits, second = model
        loss = float(np.mean((np.stack([first, second]) - self.own) ** 2)) + self.noise()
        n = float(n_fits.mean())
        return self.reports(loss), 1, {"rmse": loss, "fits_acc": n, "late_error": max(n - 5, 0)}


def diagnosed_means(clients: list[Mean], num_rounds: int = 8, **options: Any) -> Diagnosis:
    """Return the diagnosis of these clients, which start at the number 0."""
    diagnosis = Diagnosis(**options)
    app = client_app(lambda context: clients[int(context.node_config["partition-id"])])
    # The two numbers are never equal: a private array that is, bit for bit, is refused as tied.
    start = ArrayRecord([np.full((1, 1), number) for number in (0.0, 0.0, 1e-3)])
    diagnosis.start(InProcessGrid(app, len(clients)), start, num_rounds, verbose="quiet")
    return diagnosis


def kinds() -> list[Callable[[], Any]]:
    """Return clients of one group and of two, and the recommendation that is right."""
    return [lambda: [Mean(1.0) for _ in range(N)], lambda: [Mean(i % 2) for i in range(N)]]


@pytest.mark.parametrize("of", kinds(), ids=["one", "two"])
def test_no_single_client_decides_whatever_it_reports(of: Callable[[], list[Mean]]) -> None:
    honest = diagnosed_means(of()).result.choice
    assert honest == ("clusters" if any(client.own == 0 for client in of()) else "fedavg")
    rng = np.random.default_rng(0)
    for reports in (lambda _: 1e6, lambda _: 0.0, lambda _: float(10 * rng.standard_normal())):
        clients = of()
        clients[3].reports = reports
        assert diagnosed_means(clients).result.choice == honest


def test_less_of_an_error_is_better() -> None:
    found = diagnosed_means([Mean(i % 2) for i in range(N)], metric="rmse").result
    assert (found.choice, found.higher_is_better) == ("clusters", False)


def test_the_direction_follows_from_the_name_of_the_metric() -> None:
    for metric in ("eval_loss", "mse", "eval_rmse", "MAE", "perplexity", "val-nll"):
        assert Diagnosis(metric=metric).higher_is_better is False, metric
    for metric in ("accuracy", "eval_acc", "test.auc", "f1"):
        assert Diagnosis(metric=metric).higher_is_better is True, metric
    assert Diagnosis(metric="mse", higher_is_better=True).higher_is_better is True


def test_each_candidate_trains_a_model_as_often_as_it_says() -> None:
    clients, rounds = [Mean(i % 2) for i in range(6)], 12
    found = diagnosed_means(clients, rounds, metric="fits_acc").result
    assert {*found.values, *found.left_out} == {*Diagnosis.defaults}
    for name, values in found.values.items():
        # Ditto's own model is pulled towards a shared one, which is a training behind.
        assert np.allclose(values, found.rounds[name], atol=name == "ditto"), name
    assert [*found.rounds.values()].count(4) == 3  # of seven that begin, four go on
    assert found.rounds["fedavg"] == found.rounds["fine-tuned"] == rounds


@pytest.mark.parametrize("num_rounds", [3, 5, 12])
def test_no_client_trains_more_than_seven_times_as_often_as_with_one(num_rounds: int) -> None:
    for rates in ((), (0.1, 0.3))[: 1 + (num_rounds == 5)]:
        clients = [Mean(i % 2) for i in range(6)]
        diagnosed_means(clients, num_rounds, rates=rates)
        assert {one.n_fits for one in clients} == {clients[0].n_fits}
        assert clients[0].n_fits <= 7 * num_rounds * max(1, len(rates))


def test_candidates_of_ones_own_replace_or_join_the_defaults() -> None:
    def mine(initial: ArrayRecord, num_rounds: int, **options: Any) -> PersonalizedFedAvg:
        assert len(initial) == 3
        return PersonalizedFedAvg(["2"], alternate=True, **options)

    own = {"mine": mine, "mine, fine-tuned": Diagnosis.fine_tuned("mine")}
    found = diagnosed_means([Mean(i % 2) for i in range(N)], candidates=own).result
    assert list(found.values) == list(own)
    assert found.strategies["mine"] == 'PersonalizedFedAvg(["2"], alternate=True)'
    assert found.strategies["mine, fine-tuned"].endswith("alternate=True, fine_tune=4)")
    assert not found.gains["mine"].any()  # the first one is the reference
    own["none"] = lambda *_, **__: None
    joined = diagnosed_means([Mean(i % 2) for i in range(N)], candidates=Diagnosis.defaults | own)
    assert joined.result.left_out["none"] == "its function returned None"
    together = {**joined.result.values, **joined.result.left_out}
    assert together.keys() == {*Diagnosis.defaults, *own}
    assert joined.result.choice == "clusters"


@pytest.mark.parametrize(
    ("candidates", "named"),
    [
        ({}, "candidates"),
        ({"none": lambda *_, **__: None}, "candidates.*returned None"),
        ({"mine": 3}, r"mine.*must be a function \(initial_arrays"),
        ({"mine": Ditto}, r"mine.*must be a function \(initial_arrays"),
        ({"mine": lambda initial, num_rounds: Ditto()}, r"mine.*must be a function"),
        ({"mine": lambda *_, **__: FedProx(proximal_mu=1.0)}, "Protocol.*got flwr.*FedProx"),
        ({"mine": Diagnosis.fine_tuned("fedavg")}, "mine.*fedavg"),
        ({"mine": lambda *_, **more: Ditto(fine_tune=3, **more)}, "fine_tune"),
        (
            {"mine": lambda *_, **more: Ditto(**more), "more": Diagnosis.fine_tuned("mine")},
            r"must be of PersonalizedFedAvg or ClusteredFedAvg\(1\), got Ditto",
        ),
    ],
)
def test_a_candidate_that_cannot_be_is_named(candidates: Any, named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        diagnosed_means([Mean(0.0), Mean(1.0)], candidates=candidates)


def test_each_candidate_has_its_best_learning_rate() -> None:
    clients = [Mean(1.0) for _ in range(N)]
    found = diagnosed_means(clients, rates=(0.001, 0.5), rate_key="speed").result
    assert set(found.rates.values()) == {0.5}
    assert "train_config=ConfigRecord({'speed': 0.5})" in found.code
    first = diagnosed_means([Mean(1.0) for _ in range(N)], rates=(0.5,), rate_key="speed").result
    assert np.array_equal(found.values["fedavg"], first.values["fedavg"])


def test_of_few_clients_two_may_be_as_good() -> None:
    rngs = [np.random.default_rng(i) for i in range(4)]
    clients = [Mean(1.0, noise=lambda rng=rng: 0.1 * rng.standard_normal()) for rng in rngs]
    found = diagnosed_means(clients).result
    assert found.lead[1] < 0 < found.lead[2]
    assert found.sentence.startswith(f"Undecided between {found.strategies[found.choice]} and ")
    assert "worst client" in found.sentence
    assert len(found.sentence.split()) <= 32


def test_of_each_candidate_the_training_may_stop_early() -> None:
    found = diagnosed_means([Mean(i % 2) for i in range(6)], metric="late_error").result
    assert all(not values.any() for values in found.values.values())


def test_before_start_there_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="start"):
        _ = Diagnosis().result
