"""FederatedRidge: levels, groups and own parts on federations that are planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from scipy.optimize import minimize
from sklearn.linear_model import Ridge

from flwr_perdl.clients import RidgeClient, adapt, client_app
from flwr_perdl.network import Schedule, Topology
from flwr_perdl.privacy import Noise
from flwr_perdl.privacy.noise import noise_multiplier
from flwr_perdl.regression import RidgeModel
from flwr_perdl.regression.ridge import (
    RandomFeatures,
    column_moments,
    fit_deviation,
    standardize,
)
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FederatedRidge, TooFewReplies
from tests.grids import Dying, Tapped, arrays_in, asks, context_of, failing

N, D = 8, 4
RNG = np.random.default_rng(3)
X = RNG.standard_normal((N, 60, D)) * [1, 2, 3, 4] + [0, 1, 2, 3]
NOISE = RNG.standard_normal((N, 60))
COMMON, OTHER = RNG.standard_normal((2, D))
OWN = RNG.standard_normal((N, D))
#: By the level that fits: of each client the coefficients, and the standard deviation of the noise.
PLANTED = {
    "shared": (np.tile(COMMON, (N, 1)), 1.0),
    "groups": (np.stack([[COMMON, OTHER][i % 2] for i in range(N)]), 1.0),
    "personal": (COMMON + 0.3 * OWN, 1.0),
}


def responses(level: str) -> np.ndarray:
    slopes, noise = PLANTED[level]
    return np.einsum("ind,id->in", X, slopes) + noise * NOISE


def start(
    *options: Any, y: np.ndarray, n: int = N, grid: Any = None, start: Any = None, **more: Any
) -> tuple[FederatedRidge, Any]:
    """Run a strategy on clients that train with 40 of their samples."""

    def make(context: Context) -> RidgeClient:
        i = int(context.node_config["partition-id"])
        held_out = X[i, 40:], y[i, 40:]
        return RidgeClient(X[i, :40], y[i, :40], context, held_out=held_out)

    given = {"kind": InProcessGrid} | (grid or {})
    guards = {k: given.pop(k) for k in ("secure", "privacy") if k in given}
    made = given.pop("kind")(client_app(make, **guards), n, **given)
    strategy = FederatedRidge(*options, **{"features": 0, **more})
    strategy.start(made, **(start or {}))
    return strategy, made


def pooled(n: int = N) -> RandomFeatures:
    total = sum(column_moments(X[i, :40]) for i in range(n))
    return RandomFeatures.draw(*standardize(total), 5, scale=2.0, seed=0)


def test_shared_and_personal_are_the_direct_solutions() -> None:
    y, features = responses("personal"), pooled()
    strategy, _ = start("personal", y=y, features=5, penalty=0.5)
    Z = [features(X[i, :40]) for i in range(N)]
    ridge = Ridge(0.5, fit_intercept=False).fit(np.vstack(Z), y[:, :40].ravel())
    shared = RidgeModel.of(strategy.result.shared)
    np.testing.assert_allclose(shared.coefficients[:, 0], ridge.coef_, rtol=1e-9)
    for i, own in enumerate(Z):
        rest = y[i, :40] - own @ ridge.coef_

        def left_out(tau: float, own: Any = own, rest: Any = rest) -> float:
            kept = ~np.eye(len(own), dtype=bool)
            fits = [Ridge(tau, fit_intercept=False).fit(own[k], rest[k]) for k in kept]
            pairs = zip(rest, fits, own, strict=True)
            return sum((r - fit.predict(z[None])[0]) ** 2 for r, fit, z in pairs)

        tau = min((0.1, 0.3, 1, 3, 10, 30), key=left_out)
        expected = ridge.coef_ + Ridge(tau, fit_intercept=False).fit(own, rest).coef_
        found = RidgeModel.of(strategy.result.model_of(i))
        np.testing.assert_allclose(found.coefficients[:, 0], expected, rtol=1e-9)
        mse = np.mean((found.predict(X[i, 40:]) - y[i, 40:]) ** 2)
        assert strategy.history[-1].metrics[i]["mse"] == pytest.approx(mse, rel=1e-5)
    assert [report.step for report in strategy.history] == ["moments", "sums", "solve"]


def test_the_shared_model_takes_two_exchanges_and_an_evaluation() -> None:
    y = responses("shared")
    strategy, _ = start("shared", y=y, features=5)
    assert [report.step for report in strategy.history] == ["moments", "sums", "evaluate"]
    shared = RidgeModel.of(strategy.result.shared)
    error = np.mean([(shared.predict(X[i, 40:]) - y[i, 40:]) ** 2 for i in range(N)])
    assert strategy.history[-1].aggregate["mse"] == pytest.approx(error, rel=1e-5)
    assert strategy.result.model_of(3) == strategy.result.shared
    skipped, _ = start("shared", y=y, features=5, columns=(pooled().means, pooled().deviations))
    assert skipped.history[0].step == "sums"
    np.testing.assert_allclose(
        RidgeModel.of(skipped.result.shared).coefficients, shared.coefficients, rtol=1e-9
    )


@pytest.mark.parametrize("level", PLANTED)
def test_auto_takes_the_level_that_fits_by_what_every_client_measured(level: str) -> None:
    y = responses(level)
    strategy, _ = start(y=y)
    result = strategy.result
    assert strategy.chosen_level == level
    assert [*strategy.errors] == [*range(N)]
    means = {name: np.mean([own[name] for own in strategy.errors.values()]) for name in PLANTED}
    assert means[level] <= 1.02 * min(means.values())
    error = np.mean(
        [(RidgeModel.of(result.model_of(i)).predict(X[i, 40:]) - y[i, 40:]) ** 2 for i in range(N)]
    )
    assert error < 2 * PLANTED[level][1] ** 2
    said = strategy.diagnosis
    assert said.choice == level
    assert said.confidence > 0.5
    assert said.table().splitlines()[4].endswith("local training")
    np.testing.assert_allclose(said.gains[level], said.values["shared"] - said.values[level])
    steps = [report.step for report in strategy.history]
    assert steps[:3] == ["moments", "sums", "errors"]
    assert steps[3:] == [["solve"], ["evaluate"]][level in ("shared", "groups")]


def test_no_federation_where_clients_are_better_alone() -> None:
    class Measured(Tapped):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = super().send_and_receive(messages, timeout=timeout)
            for reply in replies:
                if "local" in reply.content.get("metrics", ()):
                    reply.content["metrics"]["local"] = 0.1
            return replies

    y = responses("shared")
    strategy, _ = start(y=y, grid={"kind": Measured})
    assert strategy.chosen_level == "local"
    total = sum(column_moments(X[i, :40]) for i in range(N))
    Z = RandomFeatures.draw(*standardize(total), 0, scale=2.0, seed=0)(X[3, :40])
    alone = fit_deviation(Z, y[3, :40, None]).coefficients
    found = RidgeModel.of(strategy.result.model_of(3)).coefficients
    np.testing.assert_array_equal(found, alone)


def test_groups_are_found_their_number_too() -> None:
    y = responses("groups")
    for options in ({}, {"n_clusters": 2}):
        strategy, _ = start("groups", y=y, **options)
        result = strategy.result
        assert result.members == {i: i % 2 for i in range(N)}
        assert [report["cluster"] for report in strategy.history[-1].metrics.values()] == [0, 1] * 4
        for i in range(N):
            assert result.model_of(i) == result.models[i % 2]
    both, _ = start("groups-personal", y=y, random="intercept")
    changed = [
        (RidgeModel.of(both.result.model_of(i)).coefficients != result.coefficients)[:, 0].tolist()
        for i in range(N)
        for result in [RidgeModel.of(both.result.models[i % 2])]
    ]
    assert [True] + D * [False] in changed
    assert all(not any(own[1:]) for own in changed)


def test_classes_are_predicted() -> None:
    y = (responses("shared") > np.median(responses("shared"))).astype(int)
    y += responses("shared") > np.quantile(responses("shared"), 0.75)
    strategy, _ = start("personal", y=y, classes=3, features=50, seed=2)
    accuracy = strategy.history[-1].aggregate["accuracy"]
    models = [RidgeModel.of(strategy.result.model_of(i)) for i in range(N)]
    right = [(m.predict(X[i, 40:]) == y[i, 40:]).mean() for i, m in enumerate(models)]
    assert accuracy == pytest.approx(np.mean(right), rel=1e-5)
    assert accuracy > 0.75
    with pytest.raises(TooFewReplies, match="y must be integers"):
        start("personal", y=y, classes=2)


def test_a_client_without_sums_solves_its_part_and_so_does_a_new_one(tmp_path: Path) -> None:
    y = responses("personal")
    absent = {"faults": failing("silence", [2], [1, 2]), "state_dir": tmp_path}
    strategy, _ = start("personal", y=y, n=6, grid=absent)
    assert 2 in strategy.history[-1].metrics
    own = strategy.result.model_of(2)
    assert own == strategy.result.model_of(2, state_dir=tmp_path)
    client = Context(7, 7, {"partition-id": 2}, RecordDict(), {})
    app = client_app(lambda context: RidgeClient(X[2, :40], y[2, :40], context))
    assert adapt(app, strategy.result, client) != strategy.result.shared
    adapted = RidgeModel.of(adapt(app, strategy.result, client))
    np.testing.assert_array_equal(adapted.coefficients, RidgeModel.of(own).coefficients)
    none = RidgeModel.of(adapt(app, strategy.result, client, fits=0))
    np.testing.assert_array_equal(
        none.coefficients, RidgeModel.of(strategy.result.shared).coefficients
    )


def test_variances_by_column_are_those_of_the_greatest_likelihood() -> None:
    y = np.einsum("ind,id->in", X, COMMON + [0.5, 1.0, 0.7, 0.3] * OWN) + NOISE
    strategy, _ = start("personal", y=y, random="columns")
    found = {name: array.numpy() for name, array in strategy.result.shared.items()}
    plain = RandomFeatures.draw(pooled().means, pooled().deviations, 0, scale=2.0, seed=0)
    rows = [(plain(X[i, :40]), y[i, :40]) for i in range(N)]

    def dense(logs: np.ndarray) -> tuple[float, np.ndarray]:
        *variances, noise = np.exp(logs)
        spreads = [Z @ np.diag(variances) @ Z.T + noise * np.eye(40) for Z, _ in rows]
        roots = [np.linalg.cholesky(np.linalg.inv(V)) for V in spreads]
        white = [[L.T @ array for array in one] for L, one in zip(roots, rows, strict=True)]
        A, b = (np.concatenate(arrays) for arrays in zip(*white, strict=True))
        common = np.linalg.lstsq(A, b, rcond=None)[0]
        return sum(np.linalg.slogdet(V)[1] for V in spreads) + np.sum((b - A @ common) ** 2), common

    best = minimize(lambda logs: dense(logs)[0], np.zeros(D + 2)).x
    both = np.append(found["variances"], found["noise"])
    np.testing.assert_allclose(both, np.exp(best), rtol=0.002)
    np.testing.assert_allclose(found["coefficients"][:, 0], dense(best)[1], atol=1e-4)
    own = Context(7, 7, {"partition-id": 2}, RecordDict(), {})
    app = client_app(lambda context: RidgeClient(X[2, :40], y[2, :40], context))
    np.testing.assert_array_equal(
        RidgeModel.of(adapt(app, strategy.result, own)).coefficients,
        RidgeModel.of(strategy.result.model_of(2)).coefficients,
    )


def test_of_several_scales_the_best_is_taken() -> None:
    y = np.sin(2 * X[..., 0]) + 0.1 * NOISE
    found = {}
    for scale in (0.01, 2.0, (0.01, 2.0)):
        strategy, _ = start("shared", y=y, features=60, scale=scale)
        found[scale] = strategy.history[-1].aggregate["mse"]
    assert found[2.0] < found[0.01] / 2
    assert found[0.01, 2.0] == found[2.0]
    assert [report.step for report in strategy.history].count("sums") == 2


def test_samples_never_leave_and_sums_do_not_wait_in_memory() -> None:
    y = responses("personal")
    _, grid = start("personal", y=y, grid={"kind": Dying})
    shapes = [array.shape for _, array in arrays_in(grid.replies)]
    assert set(shapes) == {(3, D), (3, 21)}


def test_no_server_asks_for_more_than_a_client_can_hold() -> None:
    """Of 100,000 features the products take 75 GB."""
    context = context_of(1)
    given = ArrayRecord([np.zeros(3), np.ones(3), np.ones(1)])
    told = {"perdl.protocol": "ridge", "perdl.step": "sums", "perdl.classes": 0, "perdl.seed": 0}
    told |= {"server-round": 1, "perdl.run": "run", "perdl.features": 100_000}
    content = RecordDict({"arrays": given, "config": ConfigRecord(told)})
    with pytest.raises(ValueError, match=r"perdl\.features must be"):
        client_app(lambda c: RidgeClient(np.eye(3), np.ones(3), c))(asks(content), context)
    with pytest.raises(ValueError, match="y must have a row"):
        RidgeClient(np.eye(3), np.float64(1), context)


def test_too_few_samples_say_nothing() -> None:
    y = responses("shared")

    def make(context: Context) -> RidgeClient:
        i = int(context.node_config["partition-id"])
        return RidgeClient(X[i, : 1 + 4 * i], y[i, : 1 + 4 * i], context)

    strategy = FederatedRidge(features=0)
    strategy.start(InProcessGrid(client_app(make), N))
    assert [*strategy.history[1].dropped] == ["client 0"]
    # All of client 1's samples are in one fold: it cannot measure.
    assert [*strategy.errors] == [2, 3, 4, 5, 6, 7]


BOUNDS = [[-20.0, 20.0]] * (D + 1)


def test_secure_sums_give_the_same_models_and_show_no_single_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y, rng = responses("personal"), np.random.default_rng(0)
    monkeypatch.setattr(np.random, "rand", lambda *shape: rng.random(shape))  # of the rounding
    plain, _ = start("personal", y=y, features=5)
    sums, grid = start(
        *["personal"],
        **{"y": y, "features": 5, "secure": True, "bounds": BOUNDS, "min_clients": 3},
        grid={"kind": Dying, "secure": True},
    )
    for i in range(N):
        models = [RidgeModel.of(one.result.model_of(i)).coefficients for one in (plain, sums)]
        np.testing.assert_allclose(*models, atol=1e-3)
    assert not [*arrays_in(grid.replies)]
    steps = ["moments", "sums", "solve", "evaluate"]
    assert [report.step for report in sums.history] == steps
    assert sums.history[-1].aggregate["mse"] == pytest.approx(
        plain.history[-1].aggregate["mse"], rel=1e-3
    )


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_a_guarantee_holds_for_both_sums_and_nothing_else_leaves(trust: str) -> None:
    y, rng = responses("shared") / 10, np.random.default_rng(0)
    noise = Noise(epsilon=50.0, trust=trust, clip=7.0, rng=lambda: rng)
    strategy, _ = start(
        *["personal"],
        **{"y": y, "privacy": noise, "bounds": [[-8, 12]] * D + [[-3, 3]], "min_clients": N},
        grid={"kind": Dying, "privacy": noise},
    )
    assert [report.step for report in strategy.history] == ["moments", "sums", "solve"]
    said = {name for report in strategy.history for own in report.metrics.values() for name in own}
    assert said == {"num-examples", "clip", "sigma", "epsilon"}
    sigma = [report.metrics[0]["sigma"] for report in strategy.history[:2]]
    whole = 7 * noise_multiplier(50.0, 1e-5)
    assert sum(s**-2 for s in sigma) == pytest.approx(whole**-2, rel=0.05)
    assert sigma[0] == pytest.approx(sigma[1] * 15**0.5, rel=0.05)
    plain, _ = start("personal", y=y, features=0)
    errors = []
    for run in (plain, strategy):
        models = [RidgeModel.of(run.result.model_of(i)) for i in range(N)]
        errors.append(np.mean([(w.predict(X[i]) - y[i]) ** 2 for i, w in enumerate(models)]))
    assert errors[1] < 1.3 * errors[0]
    shared = RidgeModel.of(strategy.result.shared)
    assert np.mean((shared.predict(X.reshape(-1, D)) - y.ravel()) ** 2) < np.var(y) / 5


@pytest.mark.parametrize("robust", [False, True])
def test_a_liar_of_ten_counts_only_without_robust(robust: bool) -> None:
    y = responses("shared")
    honest, _ = start("shared", y=y)
    lied = y.copy()
    lied[3] = -50 * y[3]
    strategy, _ = start("shared", y=lied, robust=robust, fraction_evaluate=0)
    off = RidgeModel.of(strategy.result.shared).coefficients
    near = np.abs(off - RidgeModel.of(honest.result.shared).coefficients).max() < 0.2
    assert near == robust
    assert (3 in strategy.history[1].anomalies) == robust


#: What a client claims: more samples than it has; too large a feature; squares of a feature, or of
#: responses, that are too small for the products.
LIES = {
    "count": lambda sums: 2 * sums,
    "large": lambda sums: sums + 1e6 * np.eye(21)[5],
    "indefinite": lambda sums: sums - sums * np.eye(21)[5],
    "responses": lambda sums: sums - 0.99 * sums * np.eye(21)[20],
}


@pytest.mark.parametrize("level", ["personal", "groups"])
@pytest.mark.parametrize("lie", LIES)
def test_sums_of_no_samples_are_refused(level: str, lie: str) -> None:
    y = responses("shared")

    class Lying(Dying):
        def spoil(self, content: RecordDict) -> None:
            sums = LIES[lie](content["arrays"]["0"].numpy())
            content["arrays"] = ArrayRecord({"0": Array(sums)})

    strategy, _ = start(level, y=y, grid={"kind": Lying}, fraction_evaluate=0.0)
    assert [*strategy.history[1].dropped] == ["client 4"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "alone"}, "level"),
        ({"level": "shared", "classes": 1}, "classes"),
        ({"features": -1}, "features"),
        ({"features": 5_001}, "features"),
        ({"scale": 0}, "scale"),
        ({"scale": ()}, "scale"),
        ({"penalty": (1, -1)}, "penalty"),
        ({"random": "columns"}, "level"),
        ({"random": "rows"}, "random"),
        ({"level": "groups", "n_clusters": 0}, "n_clusters"),
        ({"max_clusters": 0}, "max_clusters"),
        ({"columns": np.ones(3)}, "columns"),
        ({"columns": (np.ones(3), np.zeros(3))}, "columns"),
        ({"level": "personal", "random": "columns", "features": 600}, "random"),
        ({"secure": True, "bounds": BOUNDS}, "level"),
        ({"level": "shared", "secure": True}, "bounds"),
        ({"level": "shared", "secure": True, "bounds": [[1, 1]]}, "bounds"),
        ({"level": "shared", "privacy": Noise(epsilon=1, level="client")}, "privacy"),
        ({"level": "groups", "robust": True}, "level"),
        ({"level": "personal", "random": "columns", "robust": True}, "random"),
        ({"topology": Topology.ring(N)}, "level"),
        ({"level": "shared", "topology": Topology.ring(N), "robust": True}, "topology"),
        ({"level": "shared", "topology": Topology.ring(N), "scale": (1, 2)}, "scale"),
        ({"level": "shared", "topology": Topology.from_edges(N, [(0, 1)])}, "topology"),
        ({"level": "shared", "sealed": True}, "topology"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        start(y=responses("shared"), **options)


@pytest.mark.parametrize("level", ["auto", "groups", "columns"])
def test_without_some_clients_is_a_run_on_the_sums_of_the_others(level: str) -> None:
    y, columns = responses("groups"), (np.zeros(D), np.arange(1.0, 1 + D))
    options = {"level": level, "features": 5} if level != "columns" else {}
    options = options or {"level": "personal", "random": "columns"}
    options = {"y": y, "columns": columns, **options}
    whole, _ = start(**options)
    absent = {"faults": failing("silence", [3, 6], [1])}
    fresh, _ = start(**options, grid=absent)
    found, expected = whole.without([3, 6]), fresh.result
    assert found.members == {k: j for k, j in expected.members.items() if k not in (3, 6)}
    for ours, others in zip(found.models, expected.models, strict=True):
        for name, array in ours.items():
            np.testing.assert_allclose(array.numpy(), others[name].numpy(), rtol=1e-9, atol=1e-12)
    assert found.model_of(2) == found.shared_of(2)
    with pytest.raises(ValueError, match="client must be one of the run"):
        found.model_of(3)


@pytest.mark.parametrize("left", [[], [8], [*range(N)]])
def test_only_those_who_sent_sums_can_be_left_out(left: list[int]) -> None:
    strategy, _ = start("groups", y=responses("groups"))
    with pytest.raises(ValueError, match="clients must be some that sent sums"):
        strategy.without(left)
    shared, _ = start("shared", y=responses("groups"))
    with pytest.raises(RuntimeError, match="start must be called first"):
        _ = shared.diagnosis
    with pytest.raises(ValueError, match="level must be one for which"):
        shared.without([3])


#: A fifth of a graph's links is down in each round, in both directions.
FAILING = Schedule(
    N,
    lambda t: [
        (i, (i + step) % N)
        for i in range(N)
        for step in (1, 3)
        if np.random.default_rng([t, i, step]).random() > 0.2
    ],
    window=5,
)


@pytest.mark.parametrize("network", [FAILING, Topology.exponential(N)])
@pytest.mark.parametrize("level", ["shared", "personal"])
def test_nodes_without_a_server_have_the_models_of_one(level: str, network: Any) -> None:
    y, features = responses("personal"), {"features": 5}
    expected, _ = start(level, y=y, **features)
    found, _ = start(level, y=y, **features, topology=network)
    assert found.result.models == []
    for i in range(N):
        models = [one.result.model_of(i) for one in (found, expected)]
        for name, array in models[1].items():
            own = models[0][name].numpy()
            np.testing.assert_allclose(own, array.numpy(), rtol=1e-10, atol=1e-11)
    for name, mean in (found.history[-1].aggregate).items():
        if name in ("mse", "loss"):
            assert mean == pytest.approx(expected.history[-1].aggregate[name], rel=1e-5)
