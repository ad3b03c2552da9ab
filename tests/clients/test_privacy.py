"""What leaves a client under local differential privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import (
    from_gaussian_mechanism,
    from_randomized_response,
)
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chisquare, kstest, norm

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.clients.privacy import LocalPrivacy, noise_multiplier
from flwr_perdl.dictionary import dictionary_distance, normalize_atoms
from flwr_perdl.protocol.records import reply_to
from flwr_perdl.regression import Refinement, model_error
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FedX, PerMA, TooFewReplies
from perdl_experiments.mixed_regression_data import mixed_regression
from tests.grids import Tapped, grid_of

MakeFederation = Callable[..., Any]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_noise_is_what_the_definition_asks_for(epsilon: float, delta: float) -> None:
    """delta = the integral of (p - e^epsilon q)_+ of two normals a sensitivity apart."""
    sigma = noise_multiplier(epsilon, delta)

    def rest(x: float) -> float:
        p, q = norm.pdf(x, 1, sigma), norm.pdf(x, 0, sigma)
        return float(max(p - np.exp(epsilon) * q, 0))

    edge = epsilon * sigma**2 + 0.5  # where p is e^epsilon q
    found, _ = quad(rest, edge, edge + 40 * sigma, epsabs=delta * 1e-9, limit=500)
    assert found == pytest.approx(delta, rel=1e-5)
    # Four releases are one of twice the distance.
    assert noise_multiplier(epsilon, delta, 4) == pytest.approx(2 * sigma)


@pytest.mark.parametrize("n_labels", [1, 3])
def test_an_independent_accountant_finds_the_budget(n_labels: int) -> None:
    """Google's dp-accounting composes all replies of a run from their privacy losses."""
    epsilon, delta, n_rounds = 2.0, 1e-5, 4
    mod = LocalPrivacy(epsilon, delta, n_rounds, clip=1.0)
    interval = 1e-3
    whole = from_gaussian_mechanism(
        mod._multiplier(n_labels), value_discretization_interval=interval
    ).self_compose(n_rounds)
    if n_labels == 1:
        assert whole.get_delta_for_epsilon(epsilon) == pytest.approx(delta, rel=0.01)
        return
    # The label's share and the change's: simple composition, so that something is left over.
    assert whole.get_delta_for_epsilon(epsilon / 2) == pytest.approx(delta, rel=0.01)
    lies = n_labels * mod._odds(n_labels)
    label = from_randomized_response(lies, n_labels, value_discretization_interval=interval)
    assert label.get_epsilon_for_delta(0) <= epsilon / 2 / n_rounds + interval
    assert whole.compose(label.self_compose(n_rounds)).get_delta_for_epsilon(epsilon) < delta


LOCAL = {
    "perdl.option.local": "fedavg",
    "perdl.option.n_steps": 1,
    "perdl.option.step_size": 0.1,
}


def reply_of(mod: LocalPrivacy, given: np.ndarray, answer: np.ndarray, **more: Any) -> np.ndarray:
    """Return how a mod changes an answer."""
    grid = InProcessGrid(client_app(lambda context: None), 1)
    ((node, context),) = grid.contexts.items()
    config = {"perdl.step": "update", "server-round": 1, "perdl.seed": 0, **more}
    content = RecordDict({"arrays": ArrayRecord([given]), "config": ConfigRecord(config)})
    message = Message(content, node, "train")
    reply = mod(message, context, lambda message, context: reply_to(message, [answer], 9, {}))
    return reply.content["arrays"].to_numpy_ndarrays()[0]


def test_clipping_and_noise_have_their_sizes() -> None:
    atoms = normalize_atoms(np.random.default_rng(0).standard_normal((800, 5)))
    for epsilon in (2.0, 1e9):  # noise that hides the difference, and next to none
        mod = LocalPrivacy(epsilon, 1e-5, 3, clip=50.0)
        sigma = 2 * 50 * noise_multiplier(epsilon, 1e-5, 3)
        for length, left in ((1e6, 50.0), (20.0, 20.0)):
            move = np.full(atoms.shape, length / atoms.size**0.5)
            change = reply_of(mod, atoms, atoms + move, **{"perdl.sends": "atoms"}) - atoms
            noise = change - left / length * move
            assert kstest(noise.ravel() / sigma, "norm").pvalue > 1e-6
            assert noise.std() == pytest.approx(sigma, rel=5 / (2 * noise.size) ** 0.5)
            assert float(np.vdot(noise, move)) / length == pytest.approx(0, abs=5 * sigma)


def test_a_cluster_is_named_as_randomized_response_does() -> None:
    mod = LocalPrivacy(4.0, 1e-5, 2, clip=1.0)
    e = np.exp(4.0 / 2 / 2)
    expected = np.array([e, 1, 1]) / (e + 2)
    for rng in (None, np.random.default_rng(0)):
        drawn = np.bincount([mod._shift(3, rng) for _ in range(3000)], minlength=3)
        assert chisquare(drawn, 3000 * expected).pvalue > 1e-6
    exact = LocalPrivacy(1e6, 1e-5, 1, clip=1.0)
    found = reply_of(exact, np.eye(3, 1), np.array([[0.7, 2.0, 0.5]]), **LOCAL)
    np.testing.assert_allclose(found, [[0, 2, 0.5]], atol=0.1)


def test_whole_numbers_carry_the_noise() -> None:
    """A reply is on a fine grid: its last bits, after rounding, say nothing more."""
    mod = LocalPrivacy(1.0, 1e-5, 1, clip=1.0)
    answer = np.concatenate([np.zeros((1, 2)), np.full((1, 6), np.pi / 10)], axis=1)
    steps = reply_of(mod, np.zeros((1, 6)), answer, **LOCAL)[0, 2:] / mod._step(1)
    np.testing.assert_allclose(steps, np.rint(steps), atol=0, rtol=1e-15)
    assert np.abs(steps).max() > 2**36  # a grid so fine that it is not seen


def test_without_opendp_the_noise_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_perdl.clients.privacy.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install opendp"):
        LocalPrivacy(1.0, 1e-5, 1, clip=1.0)
    LocalPrivacy(1.0, 1e-5, 1, clip=1.0, rng=np.random.default_rng)


def learn(planted: Any, mod: Any, start: np.ndarray, rounds: int = 2, **options: Any) -> Any:
    """Run PerMA from given atoms with a mod; return the atoms, and the grid."""
    app = client_app(planted.make_client, train_mods=[mod])
    grid = Tapped(app, len(planted.planted.samples))
    settings = {"aggregation": "mean", **options}
    result = PerMA(3, **settings).start(grid, ArrayRecord([start]), num_rounds=rounds)
    return result.arrays.to_numpy_ndarrays()[0], grid


@pytest.fixture
def nearby(federation: MakeFederation) -> tuple[Any, np.ndarray]:
    """A federation, and atoms near its global ones."""
    planted = federation(20, noise=0.05)
    atoms = planted.planted.global_atoms
    return planted, atoms + 0.05 * np.random.default_rng(1).standard_normal(atoms.shape)


def test_with_a_large_budget_nothing_is_lost(nearby: tuple[Any, np.ndarray]) -> None:
    planted, start = nearby
    atoms, _ = learn(planted, LocalPrivacy(1e7, 1e-5, 2, clip=10.0), start)
    plain = PerMA(3, aggregation="mean").start(planted.grid(), ArrayRecord([start]), num_rounds=2)
    np.testing.assert_allclose(atoms, plain.arrays.to_numpy_ndarrays()[0], atol=1e-2)
    truth = planted.planted.global_atoms
    assert dictionary_distance(atoms, truth) < dictionary_distance(start, truth) / 2


def test_nothing_leaves_but_the_noisy_difference(nearby: tuple[Any, np.ndarray]) -> None:
    """Replies of clients with other data differ by no more than clipped differences do."""
    planted, start = nearby
    _, grid = learn(planted, LocalPrivacy(1.0, 1e-5, 1, clip=0.1), start, rounds=1)
    replies = [r for r in grid.replies if r.metadata.message_type != "query"]
    training = [r for r in replies if "arrays" in r.content]
    assert len(training) == 20
    assert len(replies) == 40  # and as many evaluations
    for reply in replies:
        assert dict(reply.content["metrics"]) == {"num-examples": 1}
        assert set(reply.content) <= {"arrays", "metrics"}
    sent = np.stack([r.content["arrays"].to_numpy_ndarrays()[0] for r in training])
    scale = 2 * 0.1 * noise_multiplier(1.0, 1e-5)
    assert (sent - start).std() == pytest.approx(scale, rel=0.15)


def test_a_withheld_atom_is_not_shown_by_its_zeros(federation: MakeFederation) -> None:
    planted = federation(3, n_samples=20, min_support=1000)  # withholds everything
    start = planted.planted.global_atoms
    _, grid = learn(planted, LocalPrivacy(1e9, 1e-5, 1, clip=1.0), start, rounds=1)
    sent = [
        r.content["arrays"].to_numpy_ndarrays()[0] for r in grid.replies if "arrays" in r.content
    ]
    np.testing.assert_allclose(sent, [start] * 3, atol=1e-3)


@pytest.mark.parametrize("aggregation", ["mean", "statistics"])
def test_what_cannot_be_private_is_refused(
    federation: MakeFederation, warned: Any, aggregation: str
) -> None:
    planted = federation(3)
    app = client_app(planted.make_client, train_mods=[LocalPrivacy(1.0, 1e-5, 5, clip=1.0)])
    start = None if aggregation == "mean" else ArrayRecord([planted.planted.global_atoms])
    with pytest.raises(TooFewReplies, match="0 good replies"):
        PerMA(3, aggregation=aggregation).start(InProcessGrid(app, 3), start, num_rounds=2)
    assert ("'start'" if aggregation == "mean" else "'update' of statistics") in warned.text


def test_the_budget_is_for_so_many_rounds(nearby: tuple[Any, np.ndarray]) -> None:
    planted, start = nearby
    with pytest.raises(TooFewReplies, match="Round 3 has 0 good replies"):
        learn(planted, LocalPrivacy(1.0, 1e-5, 2, clip=0.1), start, rounds=3)


@pytest.mark.slow
def test_fedx_refines_given_models_privately() -> None:
    data = mixed_regression(np.array([50] * 150), np.full(3, 1 / 3), np.random.default_rng(0), d=5)
    start = data.theta + 0.2 * np.random.default_rng(1).standard_normal(data.theta.shape)

    def make_client(context: Context, i: int) -> RegressionClient:
        return RegressionClient(data.X[i], data.y[i], context)

    def refined(epsilon: float) -> float:
        mod = LocalPrivacy(
            epsilon, 1e-5, 5, clip=0.3, rng=lambda: np.random.default_rng(rng.integers(2**60))
        )
        strategy = FedX(
            3, phase_2=Refinement(n_steps=5, step_size=0.1, momentum=False, check_every=0)
        )
        result = strategy.start(
            grid_of(make_client, 150, mods=[mod]), ArrayRecord([start]), num_rounds=5
        )
        assert strategy.history[-1].aggregate == {"clients": 150, "dropped": 0}
        return model_error(result.arrays.to_numpy_ndarrays()[0], data.theta)

    rng = np.random.default_rng(2)
    errors = {epsilon: refined(epsilon) for epsilon in (30.0, 1e6)}
    assert errors[1e6] < errors[30.0] < model_error(start, data.theta)


def test_flowers_own_mod_does_not_fit_the_first_round(federation: MakeFederation) -> None:
    """Why there is one of ours: a first reply has other names, and metrics leave as they are."""
    planted = federation(3)
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5)
    app = client_app(planted.make_client, train_mods=[mod])
    strategy = PerMA(3, aggregation="mean")
    with pytest.raises(TooFewReplies, match="Round 1 has 0 good replies"):
        strategy.start(InProcessGrid(app, 3), num_rounds=2)
    strategy.start(InProcessGrid(app, 3), ArrayRecord([planted.planted.global_atoms]), num_rounds=1)
    assert strategy.history[0].metrics[0]["num-examples"] == 200
    assert "mse" in strategy.history[0].metrics[0]


@given(
    st.floats(1e-3, 1e3),
    st.floats(1e-12, 0.5),
    st.integers(1, 50),
    st.integers(2, 9),
)
@settings(max_examples=25)
def test_a_label_costs_no_more_than_its_share(
    epsilon: float, delta: float, n_rounds: int, n_labels: int
) -> None:
    mod = LocalPrivacy(epsilon, delta, n_rounds, clip=1.0)
    spent = np.log((1 - (n_labels - 1) * mod._odds(n_labels)) / mod._odds(n_labels))
    assert spent <= epsilon / 2 / n_rounds * (1 + 1e-12) + 1e-12
