"""Attacks on the clients' samples, by a server that sends what it likes.

A client with its defaults and 40 samples. A row of a reply shows a sample if it is at a cosine
above .95 with it because of it: without the sample the same request has an answer at a cosine below
.7. Requests that a protocol does not send are refused; of the rows that leave, at most one in a
thousand shows a sample (benchmarks/secure.py counts more of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from sklearn.datasets import load_digits

from flwr_perdl.clients import (
    DictionaryClient,
    RegressionClient,
    client_app,
)
from flwr_perdl.dictionary import (
    GradientLearner,
    LassoLearner,
    MODLearner,
    OrthogonalLearner,
    WarmStart,
)
from flwr_perdl.regression import LogisticLoss
from flwr_perdl.regression.losses import SQUARED
from flwr_perdl.simulations import InProcessGrid
from tests.grids import context_of

N, D, ATOMS = 40, 16, 8
X = np.random.default_rng(0).standard_normal((N, D))
LABELS = np.where(X @ np.ones(D) > 0, 1.0, -1.0)
LEARNER = OrthogonalLearner(ATOMS)


def unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1))[lengths[:, 0] > 1e-9]


def asks(step: str, round_: int = 1, run: str = "r", **more: Any) -> dict[str, Any]:
    own = {f"perdl.{key.replace('_', '-')}": value for key, value in more.items()}
    return {
        "perdl.protocol": "perma",
        "perdl.step": step,
        "server-round": round_,
        "perdl.seed": 0,
        "perdl.run": run,
        "perdl.sends": "statistics",
        **own,
    }


def direction(rng: np.random.Generator) -> np.ndarray:
    return unit(rng.standard_normal((1, D)))


# Requests ----------------------------------------------------------------------------------------


def test_parallel_atoms_of_growing_length_are_refused() -> None:
    """They moved 39 of 40 samples over the threshold one at a time, in 120 requests."""
    rng = np.random.default_rng(1)
    lengths = np.geomspace(0.18, 0.4, ATOMS)[:, None]
    with pytest.raises(ValueError, match=r"^global atoms"):
        DictionaryClient(X, LEARNER, context_of()).fit([lengths * direction(rng)], asks("update"))


@pytest.mark.parametrize("learner", [LEARNER, GradientLearner(ATOMS, coding="threshold")])
@pytest.mark.parametrize("apart", [1e-6, 1e-3, 0.02])
def test_almost_parallel_atoms_are_refused(learner: Any, apart: float) -> None:
    rng = np.random.default_rng(1)
    G = unit(direction(rng) + apart * unit(rng.standard_normal((ATOMS, D))))
    with pytest.raises(ValueError, match=r"^global atoms"):
        DictionaryClient(X, learner, context_of()).fit([G], asks("update"))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"local_steps": 10**9}, "perdl.local-steps"),
        ({"refine_steps": 10**9}, "perdl.refine-steps"),
        ({"sends": "codes"}, "perdl.sends"),
        ({"seed": -1}, "perdl.seed"),
        ({"local_steps": "all"}, "perdl.local-steps"),
    ],
)
def test_options_out_of_range_are_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DictionaryClient(X, LEARNER, context_of()).fit([np.eye(2, D)], asks("update", **more))


# Rows that show a sample --------------------------------------------------------------------------


def sparse(rng: np.random.Generator) -> np.ndarray:
    """Return samples with few entries."""
    entries = rng.standard_normal((N, D)) * (rng.random((N, D)) < 0.15)
    return entries + np.eye(D)[rng.integers(D, size=N)] * ~entries.any(axis=1, keepdims=True)


SAMPLES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "dense": lambda rng: rng.standard_normal((N, D)),
    "sparse": sparse,
    "heavy-tailed": lambda rng: rng.standard_t(2, (N, D)),
    "images": lambda rng: load_digits().data[rng.choice(1797, N, replace=False)] / 16,
}
#: Of 40 samples the rows of general learners show most.
ASKED = [
    ("statistics", OrthogonalLearner(ATOMS, n_nonzero=2)),
    ("statistics", MODLearner(ATOMS, n_nonzero=2)),
    ("statistics", LassoLearner(ATOMS)),
    ("atoms", MODLearner(ATOMS, n_nonzero=2)),
]


def answered(samples: np.ndarray, G: np.ndarray, ask: tuple[str, Any], **more: Any) -> np.ndarray:
    """Return a client's answer to a request for atoms or sums, a row for each of ``G``."""
    sends, learner = ask

    def start(X: np.ndarray, learner: Any, *, rng: np.random.Generator) -> WarmStart:
        return WarmStart(G, 0.0, (0.0,))  # no local atoms: nothing is subtracted from the samples

    client = DictionaryClient(samples, learner, context_of(), start=start, **more)
    request = asks("update", sends=sends)
    (rows,), _, _ = client.fit([G], request)
    return np.asarray(rows[: len(G), -samples.shape[1] :])


def near(rows: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Return the cosines of rows with a sample, 0 for withheld rows."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(sample)
    cosines: np.ndarray = np.abs(rows @ sample) / np.where(lengths > 1e-12, lengths, np.inf)
    return cosines


def count(ask: tuple[str, Any], kind: str, min_support: int) -> tuple[int, int]:
    """Return how many rows left the client, and how many of them show a sample."""
    samples, rng = SAMPLES[kind](np.random.default_rng(0)), np.random.default_rng(5)
    left = shows = 0
    for attempt in range(30):
        G = rng.standard_normal((ATOMS, samples.shape[1]))
        if attempt % 2 and not ask[1].orthogonal:  # near samples, where any unit atoms are taken
            G = unit(samples[rng.choice(N, ATOMS, replace=False)]) + 0.1 * G
        G = np.linalg.qr(G.T)[0].T if ask[1].orthogonal else unit(G)
        rows = answered(samples, G, ask, min_support=min_support)
        left += int(rows.any(axis=1).sum())
        for i, sample in enumerate(samples):
            close = near(rows, sample) > 0.95
            if close.any():
                others = answered(np.delete(samples, i, axis=0), G, ask, min_support=0)
                shows += int((near(others, sample)[close] < 0.7).sum())
    return left, shows


@pytest.mark.slow
def test_hardly_a_row_that_leaves_a_client_shows_a_sample() -> None:
    found = {
        least: np.sum([count(ask, kind, least) for ask in ASKED for kind in SAMPLES], axis=0)
        for least in (0, 3)
    }
    assert found[0][1] > 0.01 * found[0][0]  # nothing withheld
    assert found[3][1] <= 0.001 * found[3][0]
    assert found[3][0] > 0.5 * found[0][0]


@pytest.mark.parametrize("sends", ["statistics", "atoms"])
def test_an_atom_that_one_sample_makes_up_is_withheld(sends: str) -> None:
    """Thirty-nine short samples use it as well; by the codes alone, most stand behind it."""
    samples = np.zeros((N, D))
    samples[:, 0] = 1
    samples[np.arange(N), 1 + np.arange(N) % (D - 1)] = 1
    samples[0, :2] = 2, 50
    ask = sends, OrthogonalLearner(1, threshold=0.5)
    for some, withheld in ((samples, True), (samples[1:], False), (samples[1:3], True)):
        assert answered(some, np.eye(1, D), ask).any() == (not withheld)


def test_a_start_sends_atoms_that_samples_use() -> None:
    client = DictionaryClient(X[:4], MODLearner(ATOMS, n_nonzero=1), context_of())
    (rows,), _, metrics = client.fit([], asks("start"))
    assert len(rows) < metrics["n_atoms"] == ATOMS  # four samples have four atoms in all


# How many requests -------------------------------------------------------------------------------


def test_fresh_runs_come_to_an_end() -> None:
    node, G = context_of(), np.eye(2, D)
    for run in range(8):
        DictionaryClient(X, LEARNER, node).fit([G], asks("update", run=str(run)))
    with pytest.raises(ValueError, match=r"^max_runs"):
        DictionaryClient(X, LEARNER, node).fit([G], asks("update", run="8"))
    DictionaryClient(X, LEARNER, node).fit([G], asks("update", 2, run="3"))


@pytest.mark.parametrize("client", [DictionaryClient, RegressionClient])
@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_rounds_only_increase_and_are_answered_so_often_alone(kind: str, client: Any) -> None:
    """And the last one may be asked again, by the same request."""
    node, step = context_of(), "update" if kind == "fit" else "evaluate"

    def ask(G: np.ndarray, round_: int, run: str = "r") -> Any:
        own, config = (LABELS, for_models(step))
        if client is DictionaryClient:
            own, config = (LEARNER, asks(step))
        made = client(X, own, node, max_requests=4, max_runs=2)
        return getattr(made, kind)([G], {**config, "server-round": round_, "perdl.run": run})

    ask(np.eye(2, D), 1)
    once, again = (ask(np.eye(2, D), 4) for _ in range(2))
    np.testing.assert_equal(once, again)
    for G, round_ in ((np.eye(3, D), 4), (np.eye(2, D), 1), (np.eye(2, D), 3)):
        with pytest.raises(ValueError, match=r"^server-round"):
            ask(G, round_)
    ask(np.eye(2, D), 1, "another")
    with pytest.raises(ValueError, match=r"^max_runs"):
        ask(np.eye(2, D), 1, "a third")
    ask(np.eye(3, D), 5)
    with pytest.raises(ValueError, match=r"^max_requests"):
        ask(np.eye(2, D), 6)


def test_a_choice_is_among_numbers_of_atoms() -> None:
    """Else one request would have as many answers as a server likes."""
    client = DictionaryClient(X, LEARNER, context_of())
    assert len(client.fit([np.eye(2, D), np.eye(3, D)], asks("choose"))[0]) == 2
    with pytest.raises(ValueError, match=r"^parameters"):
        client.fit([np.eye(2, D), np.eye(2, D)[::-1].copy()], asks("choose", 2))


# Whole dictionaries ------------------------------------------------------------------------------


def test_a_whole_dictionary_leaves_once() -> None:
    node = context_of()

    def ask(step: str, round_: int, **more: Any) -> np.ndarray:
        return DictionaryClient(X, LEARNER, node).fit([], asks(step, round_, **more))[0][0]

    np.testing.assert_array_equal(ask("start", 1), ask("start", 1))
    with pytest.raises(ValueError, match=r"^server-round"):
        ask("start", 1, seed=1)
    for seed in (0, 1):
        with pytest.raises(ValueError, match=r"^step"):
            ask("start", 2, seed=seed)


@pytest.mark.parametrize("step", ["average", "describe"])
def test_a_client_serves_one_protocol(step: str) -> None:
    with pytest.raises(ValueError, match=r"^step"):
        DictionaryClient(X, LEARNER, context_of()).fit([np.eye(2, D)], asks(step))


# Evaluations -------------------------------------------------------------------------------------


def test_nothing_is_measured_of_fewer_than_min_support_samples() -> None:
    """Twelve evaluations gave the sample of a client that has one, to 1.8e-15."""

    def few(context: Context) -> DictionaryClient:
        return DictionaryClient(X[:2], LEARNER, context)

    def one(context: Context) -> DictionaryClient:
        return DictionaryClient(X, LEARNER, context, evaluation={"": X[:1], "more": X})

    def pair(context: Context) -> RegressionClient:
        return RegressionClient(X[:2], LABELS[:2], context)

    for make, names in (
        (few, {"perdl.state-lost"}),
        (one, {"perdl.state-lost", "mse_global_more", "mse_full_more"}),
    ):
        metrics = evaluated(make, np.eye(2, D))
        assert set(metrics) == {"num-examples", *names}
    assert set(evaluated(pair, np.eye(2, D), protocol="mixed_regression")) == {"num-examples"}
    _, _, metrics = few(context_of()).fit([np.eye(2, D)], asks("update"))
    assert "mse" not in metrics


def evaluated(make: Callable[[Context], Any], G: np.ndarray, **more: Any) -> dict[str, Any]:
    """Return the metrics of an evaluation's reply."""
    grid = InProcessGrid(client_app(make), 1)
    (node,) = grid.get_node_ids()
    config = ConfigRecord(asks("evaluate", **more))
    content = RecordDict({"arrays": ArrayRecord([G]), "config": config})
    (reply,) = grid.send_and_receive([Message(content, node, "evaluate")])
    return dict(reply.content["metrics"])


def test_metrics_have_six_digits() -> None:
    client = DictionaryClient(X, LEARNER, context_of())
    _, _, trained = client.fit([np.eye(2, D)], asks("update"))
    loss, _, measured = client.evaluate([np.eye(2, D)], asks("evaluate", n_nonzero="1,2"))
    regression = RegressionClient(X, LABELS, context_of()).evaluate(
        [np.eye(2, D)], asks("evaluate", protocol="mixed_regression")
    )
    for value in (trained["mse"], loss, *measured.values(), regression[0]):
        assert float(f"{value:.6g}") == value


# Models ------------------------------------------------------------------------------------------

OPTIONS = {"local": "fedavg", "n_steps": 1, "step_size": 1.0}


def for_models(step: str, **options: Any) -> dict[str, Any]:
    given = {f"perdl.option.{key}": value for key, value in {**OPTIONS, **options}.items()}
    config = {"perdl.protocol": "mixed_regression", "perdl.step": step}
    return {**config, "server-round": 1, "perdl.seed": 0, **given}


@pytest.mark.parametrize(
    ("size", "loss", "largest"), [(1e6, LogisticLoss(), 5), (1e10, SQUARED, 1e9)]
)
def test_large_models_are_refused(size: float, loss: Any, largest: float) -> None:
    """A logistic loss' gradient at a large model sums over what is on the wrong side of a plane."""
    client = RegressionClient(X, LABELS, context_of(), loss=loss)
    with pytest.raises(ValueError, match="array 0"):
        client.fit([size * direction(np.random.default_rng(1))], for_models("update"))
    within = 0.99 * largest * direction(np.random.default_rng(1))
    client.fit([within], {**for_models("update"), "server-round": 2})


def test_a_pair_of_points_is_not_sent() -> None:
    """Its columns are the first point, its rows the second."""
    request = (
        [np.zeros((1, D)), np.eye(D)[None], np.zeros((0, D))],
        for_models("moment", estimate="pair", transpose=0, variance=0.0),
    )
    with pytest.raises(ValueError, match=r"^min_support"):
        RegressionClient(X, LABELS, context_of()).fit(*request)
    (reply,), _, _ = RegressionClient(X, LABELS, context_of(), min_support=0).fit(*request)
    assert max(near(reply[0].T, point).max() for point in X) > 0.99


@pytest.mark.parametrize("step", ["describe", "moment", "anchors", "update"])
def test_a_client_with_few_points_does_not_train(step: str) -> None:
    with pytest.raises(ValueError, match=r"^min_support"):
        RegressionClient(X[:2], LABELS[:2], context_of()).fit([], for_models(step))
