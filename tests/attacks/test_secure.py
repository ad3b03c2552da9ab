"""`PerMA(secure=True)`: what a curious server can find, what a liar can do, and what it costs."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from sklearn.datasets import load_digits

from flwr_perdl.clients import (
    DictionaryClient,
    RegressionClient,
    RidgeClient,
    StepResult,
    client_app,
    step,
)
from flwr_perdl.core.npy import view_file
from flwr_perdl.dictionary import (
    LassoLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
    reconstruct,
    sparse_code,
    warm_start,
)
from flwr_perdl.privacy import Noise
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings, TooFewReplies
from tests.grids import Tapped, Trains, asks, context_of, grid_of, partition_of, promise, stage

CLIENTS, GLOBAL, ATOMS = 4, 16, 24
ROUNDS = 4
#: The principal directions of all images, which have support at every client.
START = np.linalg.svd(load_digits().data / 16, full_matrices=False)[2][:GLOBAL]

Adapt = Callable[[int, np.ndarray], np.ndarray]


def digits(sizes: tuple[int, ...] = (120,) * CLIENTS) -> tuple[list[np.ndarray], np.ndarray]:
    """Return clients' images, mostly of one digit each, and held-out ones."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(X))
    X, y = X[order] / 16, y[order]
    images, labels = X[300:], y[300:]
    parts = []
    for digit, size in enumerate(sizes):
        own = rng.choice(np.flatnonzero(labels == digit), 9 * size // 10, replace=False)
        others = rng.choice(len(images), size - len(own), replace=False)
        parts.append(images[np.concatenate([own, others])])
    return parts, X[:300]


class Sending(DictionaryClient):
    """A client whose updates a test notes or changes before they are clipped and masked."""

    adapt: Adapt

    def fit(self, parameters: Any, config: Any) -> Any:
        sent, n, metrics = super().fit(parameters, config)
        return [self.adapt(self.partition, sent[0])] if parameters else sent, n, metrics


def make_grid(
    parts: list[np.ndarray],
    learner: Learner | None = None,
    adapt: Adapt | None = None,
    kind: type[InProcessGrid] = InProcessGrid,
    app: dict[str, Any] | None = None,
    min_support: int = 3,
    **options: Any,
) -> InProcessGrid:
    """Return a grid of clients with these samples."""
    start = partial(warm_start, n_iter=30, decay=0.87)
    own = OrthogonalLearner(ATOMS) if learner is None else learner

    def make_client(context: Context) -> DictionaryClient:
        made = DictionaryClient if adapt is None else Sending
        X = parts[partition_of(context)]
        client = made(X, own, context, start=start, min_support=min_support)
        client.__dict__["adapt"] = adapt
        return client

    return kind(client_app(make_client, **(app or {})), len(parts), **options)


def learn(grid: InProcessGrid, rounds: int = ROUNDS, **options: Any) -> tuple[np.ndarray, PerMA]:
    """Return what PerMA learns, and the strategy."""
    initial = options.pop("initial", None)
    given = None if initial is None else ArrayRecord([initial])
    strategy = PerMA(GLOBAL, fraction_evaluate=0.0, **options)
    return strategy.start(grid, given, num_rounds=rounds).arrays.to_numpy_ndarrays()[0], strategy


def error(atoms: np.ndarray, images: np.ndarray) -> float:
    """Return the error of images of all digits with ten of the atoms each."""
    return float(
        np.mean((images - reconstruct(sparse_code(images, atoms, n_nonzero=10), atoms)) ** 2)
    )


# Accuracy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "sizes", "aggregation"),
    [
        (OrthogonalLearner(ATOMS), (40, 60, 140, 140), "statistics"),
        (LassoLearner(ATOMS), (40, 60, 140, 140), "statistics"),
        (OrthogonalLearner(ATOMS), (40, 60, 140, 140), "weighted"),
    ],
)
def test_the_error_is_within_five_percent_of_the_default(
    learner: Learner, sizes: tuple[int, ...], aggregation: str
) -> None:
    parts, images = digits(sizes)
    plain, _ = learn(make_grid(parts, learner), aggregation=aggregation)
    secure, strategy = learn(make_grid(parts, learner), aggregation=aggregation, secure=True)
    print(f"{aggregation}, {sizes}: {error(secure, images):.5f}, {error(plain, images):.5f}")
    assert error(secure, images) < 1.05 * error(plain, images)
    assert [len(report.metrics) for report in strategy.history] == [CLIENTS] * ROUNDS
    assert [report.dropped for report in strategy.history] == [{}] * ROUNDS
    samples = [int(found["num-examples"]) for found in strategy.history[-1].metrics.values()]
    assert samples == list(sizes)


def test_the_mean_is_that_of_a_run_in_the_clear() -> None:
    """In one round, where all send all atoms: a sum does not say how many have sent a row."""
    parts, _ = digits()
    options: dict[str, Any] = {"initial": START, "rounds": 1, "aggregation": "mean"}
    plain, _ = learn(make_grid(parts, min_support=0), **options)
    secure, _ = learn(make_grid(parts, min_support=0), secure=True, **options)
    np.testing.assert_allclose(secure, plain, atol=1e-5)


# The server --------------------------------------------------------------------------------------


def arrays_in_memory() -> Iterator[np.ndarray]:
    """Yield every array of this process, also those that are still a file's bytes."""
    places: list[Any] = [*gc.get_objects()]
    frame: Any = sys._getframe()
    while frame is not None:
        places.append(list(frame.f_locals.values()))
        frame = frame.f_back
    seen: set[int] = set()
    for place in places:
        for found in gc.get_referents(place):
            if id(found) in seen or not isinstance(found, np.ndarray | bytes):
                continue
            seen.add(id(found))
            if isinstance(found, bytes):
                try:
                    found = view_file(found)[0]
                except ValueError:
                    continue
            if found.dtype.kind in "fiu":
                yield found


class Watch:
    """Notes clients' statistics, as lists, and looks for arrays that are like them."""

    def __init__(self) -> None:
        self.statistics: dict[int, list[float]] = {}
        self.found: set[int] = set()
        self.seen = 0

    def note(self, partition: int, sent: np.ndarray) -> np.ndarray:
        self.statistics[partition] = sent.ravel().tolist()
        return sent

    def look(self) -> None:
        """Note whose statistics are in memory, up to units, offset and rounding.

        The clients compute in this process, too: what they have left goes first.
        """
        gc.collect()
        wanted = [np.subtract(own, np.mean(own)) for own in self.statistics.values()]
        size = len(wanted[0]) if wanted else -1
        for array in arrays_in_memory():
            if array.size != size or any(array is own for own in wanted):
                continue
            self.seen += 1
            flat = array.ravel().astype(float) - array.mean()
            for partition, own in zip(self.statistics, wanted, strict=True):
                if flat @ own > 0.9999 * np.linalg.norm(flat) * np.linalg.norm(own):
                    self.found.add(partition)


@pytest.fixture
def old_objects_set_aside() -> Iterator[None]:
    """What is here before a run is not gone through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("old_objects_set_aside")
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"secure": True}, True),
        ({}, False),
        ({"privacy": Noise(epsilon=100.0), "min_clients": 3}, True),
    ],
)
def test_the_servers_memory_holds_no_clients_statistics(
    options: dict[str, Any], hidden: bool
) -> None:
    """After every exchange of messages, and where the server computes with what it has."""
    watch = Watch()

    class Tap(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            watch.look()
            return replies

    class Watched(PerMA):
        def _aggregate(self, *asked: Any) -> Any:
            watch.look()
            return super()._aggregate(*asked)

    parts, _ = digits()
    grid = make_grid(parts, adapt=watch.note, kind=Tap)
    strategy = Watched(GLOBAL, fraction_evaluate=0.0, **options)
    strategy.start(grid, ArrayRecord([START]), num_rounds=1)
    assert set(watch.statistics) == set(range(CLIENTS))
    assert watch.seen > CLIENTS, "arrays of that size are there: masked ones, and the sum"
    assert watch.found == (set() if hidden else set(range(CLIENTS)))


def test_flowers_masks_come_from_seeds_of_32_bits() -> None:
    """Their 256 bits are folded, so that docs/security.md must warn of it until this fails."""
    one = b"\1" + bytes(31)
    other = bytes(28) + b"\1" + bytes(3)
    (mask,), (same,) = (pseudo_rand_gen(seed, 2**32, [(100,)]) for seed in (one, other))
    np.testing.assert_array_equal(mask, same)


class Lies(NamedTuple):
    """What a server changes of SecAgg+'s messages to three clients, of which 0 is its victim."""

    kind: str = "train"
    clients: tuple[int, ...] = (0, 1, 2)
    shares: int = 3
    threshold: int = 2
    sources: tuple[int, ...] = (1, 2)
    active: tuple[int, ...] = (0, 1, 2)
    dead: tuple[int, ...] = ()
    #: The range of a promise of noise for three clients; None: there is no promise.
    limit: int | None = None
    #: The norm that becomes the largest number under the masks, where there is a promise.
    norm: float = 2.0**21
    #: The range of the masks.
    modulus: int = 2**32


PROMISE = {"epsilon": 1.0, "trust": "distributed", "clients": 3, "size": 3, "of": "sums"}


def play(lies: Lies, **options: Any) -> None:
    """Ask the four steps of the clients by hand."""

    app = client_app(lambda context: Trains(lambda _: np.arange(3) / 4), **options)
    contexts = [context_of(k) for k in range(3)]

    def ask(client: int, step: str, kind: str = "train", **config: Any) -> Any:
        summand: dict[str, Any] = {"perdl.max-weight": 1, "perdl.norm": 1.0}
        if lies.limit is not None:
            said = promise(**PROMISE, limit=lies.limit)
            summand |= {"perdl.promise": said, "perdl.norm": lies.norm, "server-round": 1}
        records = {"arrays": ArrayRecord([START]), "config": ConfigRecord(summand)}
        content = RecordDict(
            {**records, RECORD_KEY_CONFIGS: ConfigRecord({"stage": step, **config})}
        )
        reply = app(asks(content, client, kind), contexts[client]).content
        assert not any(len(record) for record in reply.array_records.values())
        return reply.config_records[RECORD_KEY_CONFIGS]

    setup = {Key.SAMPLE_NUMBER: 3, Key.SHARE_NUMBER: lies.shares, Key.THRESHOLD: lies.threshold}
    setup |= {Key.TARGET_RANGE: 2**22, Key.MOD_RANGE: lies.modulus}
    setup |= {Key.CLIPPING_RANGE: 1.0, Key.MAX_WEIGHT: 1.0}
    made = {k: ask(k, Stage.SETUP, lies.kind, **setup) for k in lies.clients}
    keys = {str(k): [own[Key.PUBLIC_KEY_1], own[Key.PUBLIC_KEY_2]] for k, own in made.items()}
    shared = {k: ask(k, Stage.SHARE_KEYS, **keys) for k in lies.clients}
    letters = [
        shared[k][Key.CIPHERTEXT_LIST][list(shared[k][Key.DESTINATION_LIST]).index(0)]
        for k in lies.sources
    ]
    given = {Key.CIPHERTEXT_LIST: letters, Key.SOURCE_LIST: list(lies.sources)}
    assert ask(0, Stage.COLLECT_MASKED_VECTORS, **given)[Key.MASKED_PARAMETERS]
    nodes = {Key.ACTIVE_NODE_ID_LIST: list(lies.active), Key.DEAD_NODE_ID_LIST: list(lies.dead)}
    assert ask(0, Stage.UNMASK, **nodes)[Key.SHARE_LIST]


def test_masks_below_two_are_none() -> None:
    """So that a client must choose their range: with this one its parity would be in the clear."""
    (mask,) = pseudo_rand_gen(bytes(range(32)), 2, [(100,)])
    assert not mask.any()


def test_a_client_takes_the_steps_of_a_round_of_three() -> None:
    play(Lies(), secure=True)
    play(Lies(active=(0, 1), dead=(2,)), secure=True, min_clients=2)
    play(Lies(kind="train.default"), secure=True)  # masked as well


@pytest.mark.parametrize(
    ("lies", "named"),
    [
        (Lies(clients=(0,), shares=1, threshold=1, sources=(), active=(0,)), "min_clients"),
        (Lies(clients=(0, 1), sources=(1,), active=(0, 1)), "min_clients"),
        (Lies(threshold=1), "threshold"),
        (Lies(sources=(1,)), "min_clients"),
        (Lies(sources=(1, 1, 2)), "srcs"),
        (Lies(active=(0, 1)), "min_clients"),
        (Lies(active=(0, 1, 1)), "active_nids"),
        (Lies(dead=(0,)), "clients"),
        (Lies(modulus=2), "mod_range"),
        (Lies(limit=2**20), "target_range"),
        (Lies(limit=2**21, norm=1.0), "target_range"),
    ],
)
def test_a_server_cannot_have_one_update_unmasked(lies: Lies, named: str) -> None:
    """Before: the first of these gave it the update."""
    with pytest.raises(ValueError, match=named):
        play(lies, secure=True)


def test_a_sum_is_opened_of_as_many_as_its_noise_is_for() -> None:
    play(Lies(limit=2**21), secure=True, min_clients=2)
    with pytest.raises(ValueError, match="min_clients=3"):
        play(Lies(active=(0, 1), dead=(2,), limit=2**21), secure=True, min_clients=2)


def test_clients_take_part_in_sums_over_at_least_min_clients() -> None:
    two = digits()[0][:2]
    with pytest.raises(TooFewReplies, match="min_clients=3"):
        learn(make_grid(two), secure=True, initial=START)
    learn(make_grid(two, app={"min_clients": 2}), 1, secure=True, initial=START)
    with pytest.raises(ValueError, match=r"^min_clients"):
        client_app(lambda context: None, min_clients=1)
    with pytest.raises(ValueError, match="min_clients"):
        client_app(client_app(lambda context: None), min_clients=4)


# A run in the clear ------------------------------------------------------------------------------


def shown(digits_sent: int | None) -> int:
    """Return how many samples differences between rounds show in an honest run."""
    parts, _ = digits((40,) * CLIENTS)
    sent: dict[int, list[np.ndarray]] = {}

    class Noting(DictionaryClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            fitted = super().fit(parameters, config)
            if parameters:
                sent.setdefault(self.partition, []).append(fitted[0][0])
            return fitted

    def make_client(context: Context, i: int) -> DictionaryClient:
        return Noting(parts[i], OrthogonalLearner(ATOMS), context, digits=digits_sent)

    learn(grid_of(make_client, CLIENTS), 15)
    count = 0
    for partition, updates in sent.items():
        rows = np.vstack(np.diff(updates, axis=0))
        rows = rows[np.linalg.norm(rows, axis=1) > 1e-12]
        X = parts[partition]
        products = rows @ X.T / np.linalg.norm(rows, axis=1)[:, None]
        count += int((np.abs(products / np.linalg.norm(X, axis=1)).max(axis=0) > 0.99).sum())
    return count


def test_few_digits_hide_samples_from_differences_between_rounds() -> None:
    usual, few = shown(None), shown(2)
    print(f"of {40 * CLIENTS} samples, differences show {usual}, with digits=2 {few}")
    assert usual >= 10
    assert few <= usual / 5


def test_an_update_is_rounded_to_its_largest_entrys_digits() -> None:
    parts, _ = digits()

    def run(digits_sent: int | None) -> np.ndarray:
        own = {"perdl.protocol": "perma", "perdl.step": "update", "perdl.sends": "statistics"}
        config = {**own, "server-round": 1, "perdl.seed": 0, "perdl.run": "r"}
        learner, given = OrthogonalLearner(ATOMS), {"digits": digits_sent}
        ones = [DictionaryClient(parts[k], learner, context_of(k), **given) for k in range(2)]
        return np.stack([one.fit([START], config)[0][0] for one in ones])

    exact, coarse = run(None), run(2)
    for one, other in zip(exact, coarse, strict=True):
        unit = np.abs(one).max() / 100
        np.testing.assert_allclose(other, unit * np.round(one / unit), rtol=1e-12)
    with pytest.raises(ValueError, match=r"^digits"):
        run(0)


# Liars -------------------------------------------------------------------------------------------


def test_a_client_with_huge_statistics_counts_by_its_samples() -> None:
    """A client's share of the mean is a vector of norm 1, weighted by its samples."""
    parts, _ = digits()
    means: list[np.ndarray] = []

    class Noting(PerMA):
        def _aggregate(self, replies: Any, i: int, *others: Any) -> Any:
            means.append(next(iter(replies.values())).arrays[i])  # every reply holds the mean
            return super()._aggregate(replies, i, *others)

    for factor in (1.0, 1000.0, 1e200):
        grid = make_grid(parts, adapt=lambda who, sent, f=factor: sent * f if who == 0 else sent)
        strategy = Noting(GLOBAL, secure=True, fraction_evaluate=0.0)
        strategy.start(grid, ArrayRecord([START]), num_rounds=1)
    honest, *lied = means
    for mean in lied:
        moved = float(np.linalg.norm(mean - honest))
        assert 0.1 / CLIENTS < moved < 1 / CLIENTS  # the honest statistics point the same way
    np.testing.assert_allclose(lied[0], lied[1], atol=1e-5)


def test_data_in_another_unit_change_nothing() -> None:
    """Of a client whose numbers are 1,024 times as large, as where the unit was forgotten."""
    parts, images = digits()
    learner = MODLearner(ATOMS, n_nonzero=4)
    usual, _ = learn(make_grid(parts, learner), secure=True)
    odd, _ = learn(make_grid([1024 * parts[0], *parts[1:]], learner), secure=True)
    assert error(odd, images) < 1.02 * error(usual, images)


def test_a_client_that_says_it_has_many_samples_counts_as_three() -> None:
    """As where the server sees the statistics: for at most three times the median."""
    grid = make_grid(digits((40, 60, 120, 140))[0], kind=Tapped)
    learn(grid, 2, secure=True)
    configs = [question.get("config", {}) for _, question, _ in grid.exchanges()]
    weights = {config["perdl.max-weight"] for config in configs if "perdl.max-weight" in config}
    assert weights == {3 * 90}


# Clients that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", Stage.all())
@pytest.mark.parametrize("fault", ["error", "silence"])
def test_one_client_of_four_may_fail_at_any_step(step: str, fault: str) -> None:
    parts, _ = digits()
    options: dict[str, Any] = {"initial": START, "rounds": 1}

    def faults(partition: int, message: Message) -> str | None:
        return fault if partition == 3 and stage(message) == step else None

    found, strategy = learn(make_grid(parts, faults=faults), secure=True, **options)
    there = parts if step == Stage.UNMASK else parts[:3]  # its masked reply had come
    expected, _ = learn(make_grid(there), secure=True, **options)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    (report,) = strategy.history
    assert list(report.metrics) == list(range(len(there)))
    why = "error 2: RuntimeError: a fault was injected" if fault == "error" else "no reply in time"
    for reason in report.dropped.values():
        assert reason.startswith(why)


def test_two_of_four_that_fail_stop_the_run_after_the_last_good_round(tmp_path: Path) -> None:
    parts, _ = digits()
    broken = [True]

    def faults(partition: int, message: Message) -> str | None:
        late = stage(message) == Stage.COLLECT_MASKED_VECTORS
        config = message.content.get("config", {})
        third = late and config["server-round"] == 3
        return "error" if broken[0] and partition >= 2 and third else None

    server = ServerSettings(resume=True)
    options: dict[str, Any] = {"secure": True, "checkpoint_dir": tmp_path, "server": server}
    grid = make_grid(parts, faults=faults)
    with pytest.raises(TooFewReplies):
        learn(grid, 3, **options)
    broken.clear()
    broken.append(False)
    resumed, strategy = learn(grid, 3, **options)
    straight, _ = learn(make_grid(parts), 3, secure=True)
    np.testing.assert_allclose(resumed, straight, atol=1e-2)
    assert [report.round for report in strategy.history] == [1, 2, 3]


def test_the_threshold_is_an_option() -> None:
    """With the shares of all, a sum without one is not opened but asked for again."""
    parts, _ = digits()
    asked: list[int] = []

    def faults(partition: int, message: Message) -> str | None:
        late = stage(message) == Stage.COLLECT_MASKED_VECTORS
        asked.extend([partition] * late)
        return "error" if partition == 3 and late else None

    options: dict[str, Any] = {"secure": {"reconstruction_threshold": 1.0}, "initial": START}
    _, strategy = learn(make_grid(parts, faults=faults), 1, **options)
    assert sorted(asked) == [0, 0, 1, 1, 2, 2, 3]
    assert [*strategy.history[0].metrics] == [0, 1, 2]
    assert strategy.history[0].anomalies == {3: {"failed": 1.0}}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, "no 'masked_params' of SecAgg"),
        ({"masked_params": [b""]}, "an array is no .npy file"),
        ({"masked_params": None}, "wrong shape"),
    ],
)
def test_a_masked_reply_that_is_none_is_left_out(wrong: dict[str, Any], reason: str) -> None:
    parts, _ = digits()

    class Breaking(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                record = reply.content.get(RECORD_KEY_CONFIGS, {})
                if "masked_params" in record and reply.metadata.src_node_id == 1003:
                    fields = {k: [] if v is None else v for k, v in wrong.items()}
                    reply.content[RECORD_KEY_CONFIGS] = ConfigRecord(fields)
            return replies

    _, strategy = learn(make_grid(parts, kind=Breaking), 2, secure=True)
    report = strategy.history[-1]
    assert list(report.metrics) == [0, 1, 2]
    assert report.anomalies[3] == {"refused": 1.0}
    assert re.match(reason, report.dropped["client 3"])


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"aggregation": "geometric-median"}, "secure"),
        ({"aggregation": "trimmed"}, "secure"),
        ({"robust": True}, "secure"),
        ({"reuse_last_reply": 1}, "secure"),
        ({"secure": {"reconstruction_threshold": 0.5}}, "reconstruction_threshold"),
    ],
)
def test_what_a_sum_cannot_give_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PerMA(GLOBAL, **{"secure": True, **options})
    with pytest.raises(ValueError, match=r"^n_global"):  # errors of single clients
        PerMA("auto", secure=True)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("own", [True, False], ids=["a protocol of its own", "fit"])
def test_a_client_that_insists_sends_no_update_for_no_arrays(secure: bool, own: bool) -> None:
    class Vector(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [np.arange(3)], 1, {}

    @step("own", "tell", client=Vector)
    def tell(local: Any, request: Any) -> StepResult:
        return StepResult(*local.client.fit([], {}))

    named = {"perdl.protocol": "own", "perdl.step": "tell", "server-round": 1, "perdl.seed": 0}
    app = client_app(lambda context: Vector(), secure=secure, protocols=[tell])
    config = ConfigRecord(named if own else {})
    message = asks(RecordDict({"arrays": ArrayRecord([]), "config": config}))
    if not secure:
        assert app(message, context_of(0)).content["arrays"]
        return
    with pytest.raises(ValueError, match="secure=True"):
        app(message, context_of(0))


@pytest.mark.parametrize(
    ("client", "protocol", "first"),
    [
        (RidgeClient, "ridge", "moments"),
        (RegressionClient, "mixed_regression", "describe"),
    ],
)
def test_what_begins_with_sums_has_no_start_in_the_clear(
    client: Any, protocol: str, first: str
) -> None:
    told = {"perdl.protocol": protocol, "perdl.step": first, "perdl.seed": 0, "server-round": 1}
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(told)})
    for secure in (False, True):
        app = client_app(lambda c: client(np.eye(4), np.ones(4), c), secure=secure)
        if not secure:  # the control
            assert app(asks(content), context_of(1)).content["arrays"]
            continue
        with pytest.raises(ValueError, match="secure=True"):
            app(asks(content), context_of(1))


def test_learners_of_two_kinds_are_not_summed() -> None:
    parts, _ = digits()
    with pytest.raises(TooFewReplies):
        learn(make_grid(parts, MODLearner(ATOMS)), initial=START, secure=True)
