"""Attacks on the clients' samples, by a server that sends what it likes.

A client with its defaults and 40 samples: no reply may have a row, or two rows whose difference is,
at a cosine above .95 with one of the samples because of that sample; or the request is refused.
"Because of": without the sample the same request has an answer at a cosine below .7, and fewer than
three samples are at a cosine above .9 with the row. Rows are also near samples that the server
guesses, and near directions that several samples share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from sklearn.datasets import load_digits

from flwr_perdl.clients import DictionaryClient, RegressionClient, client_app
from flwr_perdl.dictionary import GradientLearner, MODLearner, OrthogonalLearner, WarmStart
from flwr_perdl.regression import SQUARED, LogisticLoss
from flwr_perdl.simulations import InProcessGrid

N, D, ATOMS = 40, 16, 8
X = np.random.default_rng(0).standard_normal((N, D))
LABELS = np.where(X @ np.ones(D) > 0, 1.0, -1.0)
LEARNER = OrthogonalLearner(ATOMS)


def unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1))[lengths[:, 0] > 1e-9]


def shown(rows: np.ndarray, bound: float = 0.95) -> int:
    """Return how many samples are at a larger cosine with a row, or two rows' difference."""
    differences = [one - other for one, other in combinations(rows, 2)]
    guesses = unit(np.concatenate([rows, np.reshape(differences, (-1, D))]))
    return int((np.abs(guesses @ unit(X).T).max(axis=0, initial=0) > bound).sum())


def context() -> Context:
    return Context(1, 2, {"partition-id": 0}, RecordDict(), {})


def asks(step: str, round_: int = 1, run: str = "r", **more: Any) -> dict[str, Any]:
    own = {f"perdl.{key.replace('_', '-')}": value for key, value in more.items()}
    return {
        "perdl.step": step,
        "server-round": round_,
        "perdl.seed": 0,
        "perdl.run": run,
        "perdl.sends": "statistics",
        "perdl.orthogonal": 1,
        **own,
    }


def direction(rng: np.random.Generator) -> np.ndarray:
    return unit(rng.standard_normal((1, D)))


# Requests ----------------------------------------------------------------------------------------


def test_parallel_atoms_of_growing_length_are_refused() -> None:
    """They moved 39 of 40 samples over the threshold one at a time, in 120 requests."""
    rng, node = np.random.default_rng(1), context()
    lengths = np.geomspace(0.18, 0.4, ATOMS)[:, None]
    for attempt in range(20):
        client = DictionaryClient(X, LEARNER, node)
        with pytest.raises(ValueError, match=r"must have norm 1, got norm 0\.18 in row 0"):
            client.fit([lengths * direction(rng)], asks("update", run=str(attempt)))


@pytest.mark.parametrize("learner", [LEARNER, GradientLearner(ATOMS, coding="threshold")])
@pytest.mark.parametrize("apart", [1e-6, 1e-3, 0.02])
def test_almost_parallel_atoms_are_refused(learner: Any, apart: float) -> None:
    rng = np.random.default_rng(1)
    G = unit(direction(rng) + apart * unit(rng.standard_normal((ATOMS, D))))
    with pytest.raises(ValueError, match="global atoms must have cosines of at most"):
        DictionaryClient(X, learner, context()).fit([G], asks("update"))


@pytest.mark.parametrize("coding", [None, "pursuit", "threshold"])
def test_what_is_answered_shows_no_sample(coding: Any) -> None:
    rng = np.random.default_rng(1)
    learner = GradientLearner(ATOMS, coding=coding) if coding else LEARNER
    for _ in range(20):
        if coding:  # as near to each other as they may be
            G = unit(direction(rng) + 0.2 * unit(rng.standard_normal((ATOMS, D))))
        else:
            G = np.linalg.qr(rng.standard_normal((D, D)))[0][:ATOMS]
        (rows,), _, _ = DictionaryClient(X, learner, context()).fit([G], asks("update"))
        assert shown(rows[:, :D]) == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"local_steps": 10**9}, "perdl.local-steps must be between 1 and 10000"),
        ({"refine_steps": 10**9}, "perdl.refine-steps must be between 0 and 10000"),
        ({"orthogonal": 7}, "perdl.orthogonal must be between -1 and 1"),
        ({"sends": "codes"}, "perdl.sends must be one of"),
        ({"seed": -1}, "perdl.seed must be between"),
        ({"local_steps": "all"}, "perdl.local-steps must be an integer"),
    ],
)
def test_options_out_of_range_are_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DictionaryClient(X, LEARNER, context()).fit([np.eye(2, D)], asks("update", **more))


def test_a_cohort_is_asked_as_carefully_as_one_client() -> None:
    def make(context: Context) -> DictionaryClient:
        return DictionaryClient(X, LEARNER, context)

    grid = InProcessGrid(client_app(make), 3)
    for round_, G in ((1, np.eye(2, D)), (1, np.eye(3, D)), (2, 2 * np.eye(2, D))):
        content = RecordDict(
            {"arrays": ArrayRecord([G]), "config": ConfigRecord(asks("update", round_))}
        )
        asked = [Message(content, node, "train") for node in grid.get_node_ids()]
        refused = [reply.has_error() for reply in grid.send_and_receive(asked)]
        assert refused == [len(G) != 2 or round_ == 2] * 3


# Samples of every kind, and attackers that search ------------------------------------------------


def coordinates(rng: np.random.Generator) -> np.ndarray:
    """Return samples with few entries."""
    entries = rng.standard_normal((N, D)) * (rng.random((N, D)) < 0.15)
    return entries + np.eye(D)[rng.integers(D, size=N)] * ~entries.any(axis=1, keepdims=True)


def clustered(rng: np.random.Generator) -> np.ndarray:
    """Return samples around twelve points."""
    centers = 3 * rng.standard_normal((12, D))
    return centers[rng.integers(12, size=N)] + 0.5 * rng.standard_normal((N, D))


def one_entry(rng: np.random.Generator) -> np.ndarray:
    """Return multiples of one unit vector each, and noise."""
    entries = np.eye(D)[rng.integers(D, size=N)] * rng.standard_normal((N, 1))
    return entries + 0.05 * rng.standard_normal((N, D))


def long_and_short(rng: np.random.Generator) -> np.ndarray:
    """Return samples whose lengths have heavy tails."""
    return rng.standard_normal((N, D)) * np.abs(rng.standard_t(1.2, (N, 1)))


SAMPLES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "dense": lambda rng: rng.standard_normal((N, D)),
    "few entries": coordinates,
    "one entry": one_entry,
    "heavy-tailed": lambda rng: rng.standard_t(1.5, (N, D)),
    "long and short": long_and_short,
    "clustered": clustered,
    "images": lambda rng: load_digits().data[rng.choice(1797, N, replace=False)] / 16,
}
GENERAL = GradientLearner(ATOMS, coding="threshold")
ASKS: list[tuple[str, str, Any]] = [
    ("perma", "statistics", LEARNER),
    ("perma", "atoms", LEARNER),
    ("perma", "statistics", GENERAL),
    ("perma", "atoms", MODLearner(ATOMS)),
    ("averaging", "atoms", LEARNER),
    ("perpca", "atoms", LEARNER),
]


def answered(
    samples: np.ndarray, G: np.ndarray, ask: tuple[str, str, Any], steps: int = 1, **more: Any
) -> Any:
    """Return a client's answer to a request for atoms or sums, a row for each of ``G``."""
    protocol, sends, learner = ask

    def start(X: np.ndarray, learner: Any, *, rng: np.random.Generator) -> WarmStart:
        return WarmStart(G, 0.0, (0.0,))  # no local atoms: nothing is subtracted from the samples

    client = DictionaryClient(samples, learner, context(), protocol=protocol, start=start, **more)
    orthogonal = int(learner.orthogonal)
    options = {"sends": sends, "orthogonal": orthogonal, "step_length": 1e3, "local_steps": steps}
    request = asks(PROTOCOLS[protocol][-1], **options)
    (rows,), _, _ = client.fit([G], request)
    return rows[: len(G), -samples.shape[1] :]


def near(rows: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Return the cosines of rows with a sample, 0 for withheld rows."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(sample)
    cosines: np.ndarray = np.abs(rows @ sample) / np.where(lengths > 1e-12, lengths, np.inf)
    return cosines


def without(
    samples: np.ndarray, i: int, G: np.ndarray, ask: tuple[str, str, Any], steps: int = 1
) -> np.ndarray:
    """Return the answer without a sample, the others coded with the threshold that they had."""
    protocol, sends, learner = ask
    learner = replace(learner, threshold=learner.level(samples))
    others = np.delete(samples, i, axis=0)
    return np.asarray(answered(others, G, (protocol, sends, learner), steps, min_support=0))


def betrayed(
    samples: np.ndarray, G: np.ndarray, ask: tuple[str, str, Any], steps: int = 1
) -> list[int]:
    """Return the samples that an answer shows, and does not show without them."""
    rows, found = answered(samples, G, ask, steps), []
    for i, sample in enumerate(samples):
        close = near(rows, sample) > 0.95
        if any((near(samples, row) > 0.9).sum() < 3 for row in rows[close]):
            others = without(samples, i, G, ask, steps)
            found += [i] if np.any(near(others, sample)[close] < 0.7) else []
    return found


def orthonormal(rows: np.ndarray) -> np.ndarray:
    return np.linalg.qr(rows.T)[0].T


@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: f"{ask[0]}-{ask[1]}-{ask[2].orthogonal}")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", SAMPLES)
def test_requests_drawn_at_random_show_no_sample(
    kind: str, steps: int, ask: tuple[str, str, Any]
) -> None:
    """Of samples with heavy tails they showed three in sixty requests: many small codes hid one."""
    rng = np.random.default_rng(5)
    samples = SAMPLES[kind](np.random.default_rng(0))
    for n_global in (1, 1, 2, 4, 8, 8):
        G = orthonormal(rng.standard_normal((n_global, samples.shape[1])))
        assert betrayed(samples, G, ask, steps) == []


@pytest.mark.parametrize("ask", ASKS[:2] + ASKS[4:], ids=lambda ask: f"{ask[0]}-{ask[1]}")
@pytest.mark.parametrize("kind", ["one entry", "heavy-tailed", "images"])
def test_a_server_that_knows_a_sample_and_searches_finds_no_request_that_shows_it(
    kind: str, ask: tuple[str, str, Any]
) -> None:
    """It keeps what brings a row nearer to the sample than the row is without the sample."""
    rng = np.random.default_rng(3)
    samples = SAMPLES[kind](np.random.default_rng(0))
    d = samples.shape[1]
    i = int(np.linalg.norm(samples, axis=1).argmax())

    def gain(G: np.ndarray) -> float:
        known = near(answered(samples, G, ask), samples[i])
        others = near(without(samples, i, G, ask), samples[i])
        return float((np.minimum(known, 0.955) - 0.2 * others)[known > 0].max(initial=-1))

    G = orthonormal(np.vstack([unit(samples[i : i + 1]), 0.3 * rng.standard_normal((3, d))]))
    best, step = gain(G), 0.5
    for _ in range(30):
        H = orthonormal(G + step * rng.standard_normal(G.shape) / d**0.5)
        if (found := gain(H)) > best:
            best, G = found, H
        else:
            step *= 0.9
        assert betrayed(samples, H, ask) == []


@pytest.mark.parametrize("kind", SAMPLES)
def test_replies_sent_back_as_the_next_request_show_no_sample(kind: str) -> None:
    samples, rng = SAMPLES[kind](np.random.default_rng(0)), np.random.default_rng(4)
    G = orthonormal(rng.standard_normal((4, samples.shape[1])))
    for _ in range(8):
        assert betrayed(samples, G, ASKS[0]) == []
        rows = answered(samples, G, ASKS[0])
        G = orthonormal(
            np.where(rows.any(axis=1, keepdims=True), rows, rng.standard_normal(G.shape))
        )


@pytest.mark.parametrize("learner", [LEARNER, GENERAL, MODLearner(ATOMS)])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_start_shows_no_sample(kind: str, learner: Any) -> None:
    """Iterations turned up to every third atom towards one of samples with few entries."""

    def started(samples: np.ndarray, **more: Any) -> np.ndarray:
        client = DictionaryClient(samples, learner, context(), **more)
        return np.asarray(client.fit([], asks("start"))[0][0])

    for seed in range(2):
        samples = SAMPLES[kind](np.random.default_rng(seed))
        rows = started(samples)
        for i, sample in enumerate(samples):
            close = rows[near(rows, sample) > 0.95]
            if any((near(samples, row) > 0.9).sum() < 3 for row in close):
                others = started(np.delete(samples, i, axis=0), min_support=0)
                assert near(others, sample).max() >= 0.7


@pytest.mark.parametrize("sends", ["statistics", "atoms"])
def test_an_atom_that_one_sample_dominates_is_withheld(sends: str) -> None:
    """Thirty-nine short samples use it as well; by the codes alone, most stand behind it."""
    samples = np.zeros((N, D))
    samples[:, 0] = 1
    samples[np.arange(N), 1 + np.arange(N) % (D - 1)] = 1
    samples[0, :2] = 2, 50
    for most, withheld in ((N, True), (1, False)):
        some = samples if most == N else np.delete(samples, 0, axis=0)
        rows = answered(some, np.eye(1, D), ("perma", sends, OrthogonalLearner(1, threshold=0.5)))
        assert rows.any() == (not withheld)


# How many requests -------------------------------------------------------------------------------


def test_fresh_runs_come_to_an_end() -> None:
    node, G = context(), np.eye(2, D)
    for run in range(8):
        DictionaryClient(X, LEARNER, node).fit([G], asks("update", run=str(run)))
    with pytest.raises(ValueError, match="this client takes part in 8 runs"):
        DictionaryClient(X, LEARNER, node).fit([G], asks("update", run="8"))
    DictionaryClient(X, LEARNER, node).fit([G], asks("update", 2, run="3"))


@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_rounds_only_increase_and_the_last_one_may_be_asked_again(kind: str) -> None:
    node = context()

    def ask(G: np.ndarray, round_: int) -> Any:
        client = DictionaryClient(X, LEARNER, node, max_requests=3)
        return getattr(client, kind)([G], asks("update", round_))

    ask(np.eye(2, D), 1)
    once, again = (ask(np.eye(2, D), 4) for _ in range(2))
    np.testing.assert_equal(once, again)
    for G, round_ in ((np.eye(3, D), 4), (np.eye(2, D), 1), (np.eye(2, D), 3)):
        with pytest.raises(ValueError, match="server-round must be more than the last one, 4"):
            ask(G, round_)
    ask(np.eye(3, D), 5)
    with pytest.raises(ValueError, match="this client answers 3 requests"):
        ask(np.eye(2, D), 6)


# Whole dictionaries ------------------------------------------------------------------------------


def test_a_whole_dictionary_leaves_once() -> None:
    node = context()

    def ask(step: str, round_: int, **more: Any) -> np.ndarray:
        return DictionaryClient(X, LEARNER, node).fit([], asks(step, round_, **more))[0][0]

    np.testing.assert_array_equal(ask("start", 1), ask("start", 1))
    with pytest.raises(ValueError, match="or the same request again"):
        ask("start", 1, seed=1)
    for seed in (0, 1):
        with pytest.raises(ValueError, match="in a run's first request only"):
            ask("start", 2, seed=seed)


PROTOCOLS = {"perma": ("start", "update"), "averaging": ("average",), "perpca": ("components",)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_serves_one_protocol(protocol: str) -> None:
    for step in sum(PROTOCOLS.values(), ()):
        given = [np.eye(2, D)] if step == "update" else []
        client = DictionaryClient(X, LEARNER, context(), protocol=protocol)
        if step in PROTOCOLS[protocol]:
            client.fit(given, asks(step))
            continue
        with pytest.raises(ValueError, match="step must be one of"):
            client.fit(given, asks(step))
        with pytest.raises(ValueError, match=r"perdl\.after must be one of"):
            client.evaluate([np.eye(2, D)], asks("evaluate", after=step))


# Evaluations -------------------------------------------------------------------------------------


def test_nothing_is_measured_of_fewer_than_min_support_samples() -> None:
    """Twelve evaluations gave the sample of a client that has one, to 1.8e-15."""

    def few(context: Context) -> DictionaryClient:
        return DictionaryClient(X[:2], LEARNER, context)

    def one(context: Context) -> DictionaryClient:
        return DictionaryClient(X, LEARNER, context, evaluation={"": X[:1], "more": X})

    def pair(context: Context) -> RegressionClient:
        return RegressionClient(X[:2], LABELS[:2], context)

    for make, names in ((few, {"anew"}), (one, {"anew", "mse_global_more", "mse_full_more"})):
        metrics = evaluated(make, np.eye(2, D))
        assert set(metrics) == {"num-examples", *names}
    assert set(evaluated(pair, np.eye(2, D))) == {"num-examples"}
    _, _, metrics = few(context()).fit([np.eye(2, D)], asks("update"))
    assert "mse" not in metrics


def evaluated(make: Callable[[Context], Any], G: np.ndarray) -> dict[str, Any]:
    """Return the metrics of an evaluation's reply."""
    grid = InProcessGrid(client_app(make), 1)
    (node,) = grid.get_node_ids()
    config = ConfigRecord(asks("evaluate"))
    content = RecordDict({"arrays": ArrayRecord([G]), "config": config})
    (reply,) = grid.send_and_receive([Message(content, node, "evaluate")])
    return dict(reply.content["metrics"])


def test_metrics_have_six_digits() -> None:
    client = DictionaryClient(X, LEARNER, context())
    _, _, trained = client.fit([np.eye(2, D)], asks("update"))
    loss, _, measured = client.evaluate([np.eye(2, D)], asks("evaluate", n_nonzero="1,2"))
    regression = RegressionClient(X, LABELS, context()).evaluate([np.eye(2, D)], {})
    for value in (trained["mse"], loss, *measured.values(), regression[0]):
        assert float(f"{value:.6g}") == value


# Models ------------------------------------------------------------------------------------------

OPTIONS = {"local": "fedavg", "n_steps": 1, "step_size": 1.0, "soft": 1, "temperature": 1e9}


def for_models(step: str, **options: Any) -> dict[str, Any]:
    given = {f"perdl.option.{key}": value for key, value in {**OPTIONS, **options}.items()}
    return {"perdl.step": step, **given}


def logistic(size: float, **options: Any) -> np.ndarray:
    """Return which samples show where models of this norm are half spaces."""
    rng, found = np.random.default_rng(1), []
    w = unit(np.ones((1, D)))
    client = RegressionClient(X, LABELS, context(), loss=LogisticLoss(), **options)
    for _ in range(10):
        across = direction(rng)
        turned = unit(w + np.linspace(0.1, 1.0, 40)[:, None] * across)
        (reply,), _, _ = client.fit([size * turned], for_models("update"))
        found.append(shown(reply[:, 2:]))
    return np.array(found)


def test_large_models_of_a_logistic_loss_are_refused() -> None:
    """The gradient at a large model is a sum over the samples on the wrong side of a plane."""
    assert logistic(1e6, max_norm=1e9).max() > 3
    with pytest.raises(ValueError, match=r"array 0 must have norms of at most 5, got 1e\+06"):
        logistic(1e6)


def test_models_of_the_largest_norm_show_no_sample() -> None:
    assert logistic(4.999).max() == 0


def responses(points: np.ndarray, loss: Any) -> np.ndarray:
    """Return responses; one of a squared loss is far from all others."""
    sums = points.sum(axis=1)
    if loss is not SQUARED:
        return np.where(sums > 0, 1.0, -1.0)
    return sums + 1000 * (np.arange(N) == 7)


def told(client: RegressionClient, parameters: list[np.ndarray], config: Any) -> np.ndarray:
    """Return the rows of a client's answer that are sums over its points."""
    reply = client.fit(parameters, config)[0][0]
    if config["perdl.step"] == "moment":
        return np.concatenate([head.T for head in reply])
    if config["perdl.step"] == "update":
        return np.asarray(reply[:, 2:])
    return np.asarray(reply[None, 1:])


def exposed(X: np.ndarray, y: np.ndarray, loss: Any, *request: Any) -> list[int]:
    """Return which points an answer shows, and does not show without them."""
    rows, found = told(RegressionClient(X, y, context(), loss=loss), *request), []
    for i, point in enumerate(X):
        close = near(rows, point) > 0.95
        if any((near(X, row) > 0.9).sum() < 3 for row in rows[close]):
            others = np.delete(X, i, axis=0), np.delete(y, i)
            without = RegressionClient(*others, context(), loss=loss, min_support=0)
            found += [i] if np.any(near(told(without, *request), point)[close] < 0.7) else []
    return found


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("loss", [SQUARED, LogisticLoss()], ids=["squared", "logistic"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_no_update_shows_a_point(kind: str, loss: Any, steps: int) -> None:
    """Models along and against points that the server knows; one point may be longest by far."""
    points, rng = SAMPLES[kind](np.random.default_rng(0)), np.random.default_rng(1)
    config = for_models("update", n_steps=steps, step_size=0.01)
    for i in (7, int(np.linalg.norm(points, axis=1).argmax()), 20):
        noise = unit(rng.standard_normal((16, points.shape[1])))
        towards = np.where(np.arange(16)[:, None] % 2, 1, -1) * unit(points[i : i + 1])
        models = 4.999 * unit(towards + np.linspace(0, 1, 16)[:, None] * noise)
        assert exposed(points, responses(points, loss), loss, [models], config) == []


@pytest.mark.parametrize("kind", SAMPLES)
def test_updates_sent_back_as_the_next_model_show_no_point(kind: str) -> None:
    """The power iteration finds the longest of points that are nearly orthogonal."""
    points, rng = SAMPLES[kind](np.random.default_rng(0)), np.random.default_rng(4)
    model, config = rng.standard_normal((1, points.shape[1])), for_models("update")
    for _ in range(10):
        assert exposed(points, np.zeros(N), SQUARED, [model], config) == []
        (reply,), _, _ = RegressionClient(points, np.zeros(N), context()).fit([model], config)
        change = reply[:, 2:]
        model = 10 * unit(change) if change.any() else rng.standard_normal(model.shape)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("step", ["describe", "moment", "anchors"])
def test_no_step_of_the_search_shows_a_point(step: str, kind: str) -> None:
    points, rng = SAMPLES[kind](np.random.default_rng(0)), np.random.default_rng(2)
    d = points.shape[1]
    basis = orthonormal(np.vstack([unit(points[7:8]), rng.standard_normal((3, d))])).T[None]
    options = {"estimate": "u-statistic", "transpose": 0, "variance": 0.0, "min_points": 3}
    config = for_models(step, **options, anchor_step="least-squares")
    arrays = {"describe": [], "moment": [np.zeros((1, 1, d)), basis, np.zeros((0, d))]}
    anchors = [np.zeros((1, d)), basis, np.zeros((0, d))]
    asked = arrays.get(step, anchors), config
    assert exposed(points, responses(points, SQUARED), SQUARED, *asked) == []


def test_a_gram_matrix_leaves_only_where_the_client_says_so() -> None:
    request = [np.zeros((1, D))], for_models("update", local="exact", soft=0)
    with pytest.raises(ValueError, match="allow_exact must be True"):
        RegressionClient(X, LABELS, context()).fit(*request)
    (reply,), _, _ = RegressionClient(X, LABELS, context(), allow_exact=True).fit(*request)
    assert reply.shape == (1, D * D + D + 2)


def test_a_pair_of_points_is_not_sent() -> None:
    """Its columns are the first point, its rows the second."""
    request = (
        [np.zeros((1, 1, D)), np.eye(D)[None], np.zeros((0, D))],
        for_models("moment", estimate="pair", transpose=0, variance=0.0),
    )
    with pytest.raises(ValueError, match="which sums over 1 of its 40 points"):
        RegressionClient(X, LABELS, context()).fit(*request)
    (reply,), _, _ = RegressionClient(X, LABELS, context(), min_support=0).fit(*request)
    assert shown(reply[0]) > 0


@pytest.mark.parametrize("step", ["describe", "moment", "anchors", "update"])
def test_a_client_with_few_points_does_not_train(step: str) -> None:
    with pytest.raises(ValueError, match="min_support must be at most"):
        RegressionClient(X[:2], LABELS[:2], context()).fit([], for_models(step))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"step_size": np.inf}, "step_size must be in"),
        ({"n_steps": 10**9}, "n_steps must be between 1 and 10000"),
        ({"temperature": -1.0}, "temperature must be in"),
        ({"local": "all"}, "local must be one of"),
        ({"soft": 2}, "soft must be True or False"),
    ],
)
def test_regression_options_out_of_range_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RegressionClient(X, LABELS, context()).fit(
            [np.zeros((1, D))], for_models("update", **options)
        )
