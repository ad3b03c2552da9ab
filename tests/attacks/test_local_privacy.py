"""Attacks on `LocalPrivacy`, by a server that sends what it likes.

Whoever holds the server chooses requests, reads replies and errors, and may start runs. What a
client's data are must show in none of them beyond the budget.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_perdl.clients import DictionaryClient, LocalPrivacy, RegressionClient, client_app
from flwr_perdl.clients.privacy import noise_multiplier
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.protocol.records import reply_to
from flwr_perdl.simulations import InProcessGrid

ATOMS = np.eye(2, 4)
MODELS = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
FOR_ATOMS = {"perdl.step": "update", "perdl.sends": "atoms", "perdl.seed": 0, "server-round": 1}
FOR_MODELS = {
    "perdl.step": "update",
    "perdl.seed": 0,
    "server-round": 1,
    "perdl.option.local": "fedavg",
    "perdl.option.n_steps": 2,
    "perdl.option.step_size": 0.1,
}


class Panic(BaseException):
    """As extension modules raise it: no Exception."""


class Server:
    """One client in a process, and a server that asks it for what it likes.

    Parameters
    ----------
    answer : callable
        What the client does with arrays and config; returns arrays, or raises.
    mod : LocalPrivacy
        The client's mod.
    make : callable, optional
        Makes another client.
    """

    def __init__(self, answer: Callable[..., Any], mod: LocalPrivacy, make: Any = None) -> None:
        self.calls = 0

        def make_client(context: Context) -> Any:
            self.calls += 1
            return Client(answer)

        self.app = client_app(make or make_client, train_mods=[mod])
        self.start_a_run()

    def start_a_run(self) -> None:
        self.grid = InProcessGrid(self.app, 1, run_config={"state-dir": "the server's choice"})

    def ask(self, arrays: Any, config: dict[str, Any], kind: str = "train") -> Message:
        (node,) = self.grid.get_node_ids()
        content = RecordDict({"arrays": ArrayRecord([arrays]), "config": ConfigRecord(config)})
        (reply,) = self.grid.send_and_receive([Message(content, node, kind)])
        return reply


class Client(DictionaryClient):
    """A client that does as it is told."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def fit(self, parameters: Any, config: Any) -> Any:
        return [self.answer(parameters, config)], 17, {"mse": 0.25}


def sent(reply: Message) -> np.ndarray:
    """Return a reply's array, and check that it has what every reply has, and no more."""
    assert not reply.has_error()
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    (array,) = reply.content["arrays"].to_numpy_ndarrays()
    return array


def failing(error: BaseException) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        raise error

    return answer


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        failing(ValueError("S must be finite, got 12 NaN")),
        failing(MemoryError()),
        failing(SystemExit("3 samples are odd")),
        failing(Panic("a row of 4.25")),
        lambda G, _: np.full((2, 4), np.nan),
        lambda G, _: np.full((2, 4), 1e308),
        lambda G, _: np.zeros((3, 4)),
        lambda G, _: G[0].astype(np.float32),
        lambda G, _: np.array([["12 samples"]]),
        lambda G, _: None,
    ],
)
def test_a_failing_client_answers_like_any_other(answer: Callable[..., Any]) -> None:
    mod = LocalPrivacy(1.0, 1e-5, 1, clip=1.0)
    array = sent(Server(answer, mod).ask(ATOMS, FOR_ATOMS))
    assert (array.shape, array.dtype) == (ATOMS.shape, ATOMS.dtype)
    assert np.isfinite(array).all()


def test_why_it_failed_is_in_the_clients_own_log(warned: Any) -> None:
    mod = LocalPrivacy(1.0, 1e-5, 1, clip=1.0)
    sent(Server(failing(ValueError("12 NaN")), mod).ask(ATOMS, FOR_ATOMS))
    assert "This client failed, and its reply is noise alone: ValueError('12 NaN')" in warned.text


@pytest.mark.parametrize(
    ("arrays", "config"),
    [
        (np.array([[1.7e308, 0, 0, 0], [0.0, 1, 0, 0]]), FOR_ATOMS),  # sums overflow, or not
        (np.array([[np.nan, 0, 0, 0]]), FOR_ATOMS),
        (np.array([[2.0, 0, 0, 0]]), FOR_ATOMS),
        (ATOMS, {**FOR_ATOMS, "perdl.local-steps": "all"}),
        (1e300 * MODELS, FOR_MODELS),
        (np.inf * np.ones((1, 3)), FOR_MODELS),
        (MODELS, {**FOR_MODELS, "perdl.option.step_size": np.inf}),
    ],
)
def test_a_hostile_request_is_refused_before_the_client_is_called(
    arrays: np.ndarray, config: dict[str, Any]
) -> None:
    """So that what the error says cannot depend on the data; it costs nothing of the budget."""
    server = Server(lambda *_: ATOMS, LocalPrivacy(1.0, 1e-5, 1, clip=1.0))
    assert server.ask(arrays, config).has_error()
    assert server.calls == 0
    sent(server.ask(ATOMS, FOR_ATOMS))


def test_a_data_set_that_cannot_be_read_does_not_show() -> None:
    """The query and evaluations build a client, too; the mod needs to be named once."""

    def make_client(context: Context) -> DictionaryClient:
        X = np.array([[np.nan, 1.0], [2.0, 3.0]])  # "X must be finite, got 1 NaN"
        return DictionaryClient(X, OrthogonalLearner(2), context)

    server = Server(lambda *_: ATOMS, LocalPrivacy(1.0, 1e-5, 1, clip=1.0), make_client)
    sent(server.ask(ATOMS, FOR_ATOMS))
    evaluated = server.ask(ATOMS, FOR_ATOMS, kind="evaluate")
    assert evaluated.content["metrics"] == MetricRecord({"num-examples": 1})
    assert server.ask(ATOMS, {}, kind="query").content["config"] == {"partition-id": 0}


# The budget --------------------------------------------------------------------------------------


def test_requests_end_with_the_budget_also_where_the_client_fails() -> None:
    server = Server(failing(ValueError("12 NaN")), LocalPrivacy(1.0, 1e-5, 3, clip=1.0))
    for i in range(3):
        sent(server.ask(ATOMS, {**FOR_ATOMS, "server-round": i + 1, "perdl.run": f"fresh {i}"}))
    for i in range(3, 6):
        fresh = {"server-round": i + 1, "perdl.run": f"fresh {i}", "perdl.seed": i}
        reply = server.ask(ATOMS, {**FOR_ATOMS, **fresh})
        assert "n_rounds must be more to go on: the budget is for 3." in reply.error.reason
    assert server.calls == 3


def test_rounds_only_increase() -> None:
    server = Server(lambda G, _: G[0], LocalPrivacy(1.0, 1e-5, 9, clip=1.0))
    sent(server.ask(ATOMS, {**FOR_ATOMS, "server-round": 4}))
    for round_ in (4, 3, 0, -1):
        reply = server.ask(ATOMS, {**FOR_ATOMS, "server-round": round_})
        assert "server-round must be" in reply.error.reason
    assert server.calls == 1


def test_a_client_that_replaces_its_state_still_spends() -> None:
    mod = LocalPrivacy(1.0, 1e-5, 1, clip=1.0)

    def forgetful(context: Context) -> Any:
        context.state = RecordDict()
        return Client(lambda G, _: G[0])

    server = Server(lambda *_: ATOMS, mod, forgetful)
    sent(server.ask(ATOMS, FOR_ATOMS))
    assert server.ask(ATOMS, {**FOR_ATOMS, "server-round": 2}).has_error()


def test_with_a_ledger_another_run_begins_no_budget_of_its_own(tmp_path: Path) -> None:
    server = Server(lambda G, _: G[0], LocalPrivacy(1.0, 1e-5, 2, clip=1.0, ledger=tmp_path / "l"))
    for _ in range(2):
        sent(server.ask(ATOMS, FOR_ATOMS))
        server.start_a_run()  # also what a restarted SuperNode knows: nothing
    reply = server.ask(ATOMS, FOR_ATOMS)
    assert "the budget is for 2" in reply.error.reason
    (file,) = (tmp_path / "l").iterdir()
    assert file.read_text() == "ss"
    assert file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    sent(server.ask(ATOMS, FOR_ATOMS))


@pytest.mark.parametrize("what", ["link", "dangling link", "bytes", "text"])
def test_a_ledger_that_is_none_is_named_and_left_as_it_is(tmp_path: Path, what: str) -> None:
    file, other = tmp_path / "0.spent", tmp_path / "other"
    content = {"link": b"s", "bytes": b"\xff", "text": b"s s"}.get(what)
    if content is not None:
        (other if what == "link" else file).write_bytes(content)
    if "link" in what:
        file.symlink_to(other)
    server = Server(lambda G, _: G[0], LocalPrivacy(1.0, 1e-5, 9, clip=1.0, ledger=tmp_path))
    reason = server.ask(ATOMS, FOR_ATOMS).error.reason
    assert "ValueError" in reason
    assert str(file) in reason
    assert (file.read_bytes() if file.exists() else None) == content
    assert server.calls == 0


def test_a_full_disk_says_which_file_it_was_too_full_for(tmp_path: Path) -> None:
    server = Server(lambda G, _: G[0], LocalPrivacy(1.0, 1e-5, 9, clip=1.0, ledger=tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        reply = server.ask(ATOMS, FOR_ATOMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "0.spent") in reply.error.reason


def test_replies_with_and_without_a_choice_cannot_be_mixed(tmp_path: Path) -> None:
    """With one model all of epsilon is the noise's: a mixture would cost more than either."""
    zeros = np.zeros((1, 5))
    for ledger in (None, tmp_path):
        server = Server(lambda *_: zeros, LocalPrivacy(1.0, 1e-5, 9, clip=1.0, ledger=ledger))
        sent(server.ask(MODELS[:1], FOR_MODELS))
        if ledger is not None:
            server.start_a_run()
        reply = server.ask(MODELS, {**FOR_MODELS, "server-round": 2})
        assert "one row for models in every request of a budget" in reply.error.reason
        sent(server.ask(MODELS[1:], {**FOR_MODELS, "server-round": 2}))


# What goes in, and what comes out ----------------------------------------------------------------


@pytest.mark.parametrize(("arrays", "config"), [(ATOMS, FOR_ATOMS), (MODELS, FOR_MODELS)])
def test_a_servers_own_keys_do_not_reach_the_client(
    arrays: np.ndarray, config: dict[str, Any]
) -> None:
    seen: list[dict[str, Any]] = []
    server = Server(lambda _, given: seen.append(given), LocalPrivacy(1.0, 1e-5, 1, clip=1.0))
    sent(server.ask(arrays, {**config, "perdl.debug": 1, "perdl.option.n": 1, "lists": [1, 2]}))
    extra = {"perdl.run", "perdl.local-steps", "perdl.refine-steps"}
    assert set(config) <= set(seen[0]) <= set(config) | extra


def test_the_reply_is_made_from_the_request() -> None:
    """The data's precision does not show in the reply's."""

    def make_client(context: Context) -> RegressionClient:
        rng = np.random.default_rng(0)
        X = rng.standard_normal((9, 3)).astype(np.float32)
        return RegressionClient(X, X[:, 0], context)

    server = Server(lambda *_: ATOMS, LocalPrivacy(1e6, 1e-5, 1, clip=1.0), make_client)
    array = sent(server.ask(MODELS, FOR_MODELS))
    assert (array.shape, array.dtype) == ((1, 5), np.float64)
    assert array[0, 0] == 0
    np.testing.assert_allclose(array[0, 1:], [0, 0, 0, 0], atol=0.1)


# Two samples of replies --------------------------------------------------------------------------

DRAWS = 10_000
EPSILON, DELTA = 1.0, 0.05


def replies(
    answer: np.ndarray | Exception, arrays: np.ndarray, config: dict[str, Any], seed: int
) -> np.ndarray:
    """Return many replies of a client to a request, each from a new budget; errors as NaN."""
    rng = np.random.default_rng(seed)  # OpenDP's sampler: tests/clients/test_privacy.py
    mod = LocalPrivacy(EPSILON, DELTA, 1, clip=1.0, rng=lambda: rng)
    server = Server(failing(ValueError()), mod)
    ((node, context),) = server.grid.contexts.items()
    content = RecordDict({"arrays": ArrayRecord([arrays]), "config": ConfigRecord(config)})
    message = Message(content, node, "train")

    def client(message: Message, context: Context) -> Message:
        if isinstance(answer, Exception):
            raise answer
        return reply_to(message, [answer], 17, {"mse": 0.25})

    found = np.full((DRAWS, 5), np.nan)
    for draw in found:
        message.content, context.state = content, RecordDict()
        try:
            reply = mod(message, context, client)
        except ValueError:
            continue
        values = reply.content["arrays"].to_numpy_ndarrays()[0].ravel()
        draw[:] = np.pad(values, (0, 5 - values.size))
    return found


def check_events(with_it: np.ndarray, without: np.ndarray) -> None:
    """Check P(E | D) <= e^epsilon P(E | D') + delta both ways, up to four standard deviations.

    Parameters
    ----------
    with_it, without : ndarray of shape (n_events, DRAWS)
        Which events happened in which draw, with and without the sample.
    """
    p, q = np.mean(with_it, axis=1), np.mean(without, axis=1)
    e = np.exp(EPSILON)
    for one, other in ((p, q), (q, p)):
        variance = one * (1 - one) + e**2 * other * (1 - other)
        excess = one - e * other - DELTA
        assert (excess <= 4 * np.sqrt(variance / DRAWS)).all(), excess.max()


def events(drawn: np.ndarray, *features: np.ndarray) -> np.ndarray:
    """Return whether there was an error, and whether each feature is above each of many bounds."""
    above = [feature > bound for feature in features for bound in np.linspace(-12, 12, 49)]
    happened = np.array([np.isnan(drawn).any(axis=1), *above])
    return np.concatenate([happened, ~happened])


@pytest.fixture
def quiet() -> Iterator[None]:
    """Leave out thousands of warnings."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_replies_with_and_without_a_sample_that_makes_the_client_fail_are_alike() -> None:
    far = np.array([[101.0, 0], [0, 1]])
    answers = (ValueError("12 NaN"), far)
    found = [replies(a, np.eye(2), FOR_ATOMS, seed) for seed, a in enumerate(answers)]
    check_events(*(events(drawn, drawn[:, 0], drawn[:, 1]) for drawn in found))
    # No more noise than the budget asks for, and the difference is in it.
    failed, went = (drawn[:, 0] for drawn in found)
    sigma = 2 * noise_multiplier(EPSILON, DELTA)
    assert failed.std() == pytest.approx(sigma, rel=5 / (2 * DRAWS) ** 0.5)
    assert went.mean() - failed.mean() == pytest.approx(1, abs=5 * sigma * (2 / DRAWS) ** 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_replies_with_and_without_a_sample_that_makes_nan_are_alike() -> None:
    """FedX: NaN used to pass clip and noise, and one reply told whether one sample is there."""
    nan, far = np.array([[np.nan, 0, np.nan, 0, 0], [0.5, 1, 100, 0, 0]])[:, None]
    found = []
    for seed, answer in enumerate((nan, far)):
        drawn = replies(answer, MODELS, FOR_MODELS, seed)
        label, change = drawn[:, 1], drawn[:, 2]
        found.append(events(drawn, label, change, np.where(label == 1, change, -99)))
    check_events(*found)
    shares = [np.mean(happened[1 + 24]) for happened in found]  # label > 0
    honest = 1 / (1 + np.exp(-EPSILON / 2))
    np.testing.assert_allclose(shares, [1 - honest, honest], atol=5 * 0.5 / DRAWS**0.5)
