"""Runs under a promise of privacy: what leaves, what is spent, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

from flwr_perdl.clients import (
    DictionaryClient,
    LearnerClient,
    StepResult,
    client_app,
)
from flwr_perdl.dictionary import LassoLearner, OrthogonalLearner, dictionary_distance
from flwr_perdl.privacy import Noise, PublicBasis
from flwr_perdl.strategies import (
    PerMA,
    PersonalizedFedAvg,
    ServerSettings,
    TooFewReplies,
)
from tests.grids import Tapped, asks, context_of, promise, stage

CLIENTS, ATOMS, FEATURES, ROUNDS = 5, 4, 6, 2
RNG = np.random.default_rng(0)
TRUTH = np.linalg.qr(RNG.standard_normal((FEATURES, FEATURES)))[0][:ATOMS]
CODES = RNG.standard_normal((CLIENTS, 30, ATOMS)) * (RNG.random((CLIENTS, 30, ATOMS)) < 0.4)
SAMPLES = list(CODES @ TRUTH + 0.01 * RNG.standard_normal((CLIENTS, 30, FEATURES)))
#: Near the truth, and not orthonormal.
START = TRUTH + 0.2 * RNG.standard_normal(TRUTH.shape)


class Moving(NumPyClient):
    """A client whose model moves towards its own number."""

    def __init__(self, context: Context) -> None:
        self.i = int(context.node_config["partition-id"])

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + (self.i + 1 - array) / 4 for array in parameters], 10 * self.i + 1, {"i": 1}


def seeded(**options: Any) -> Noise:
    """Return a promise whose noise is the same in every run."""
    return Noise(**options, rng=lambda: np.random.default_rng(1))


def grid_of(
    parts: list[np.ndarray] = SAMPLES,
    learner: Any = None,
    app: dict[str, Any] | None = None,
    kind: type[Tapped] = Tapped,
    **options: Any,
) -> Tapped:
    """Return a grid of clients with these samples."""

    own = learner or LassoLearner(ATOMS, alpha=0.05)

    def make_client(context: Context) -> DictionaryClient:
        X = parts[int(context.node_config["partition-id"])]
        return DictionaryClient(X, own, context, min_support=0)

    return kind(client_app(make_client, **(app or {})), len(parts), **options)


def learn(
    privacy: Noise | None, grid: Tapped | None = None, rounds: int = ROUNDS, **options: Any
) -> tuple[np.ndarray, PerMA]:
    """Return what PerMA learns, and the strategy."""
    initial, n_global = options.pop("initial", START), options.pop("n_global", ATOMS)
    strategy = PerMA(n_global, privacy=privacy, **{"min_clients": 3, **options})
    given = None if initial is None else ArrayRecord([initial])
    result = strategy.start(grid or grid_of(), given, num_rounds=rounds)
    return result.arrays.to_numpy_ndarrays()[0], strategy


@pytest.mark.parametrize(
    ("level", "aggregation"),
    [("record", "statistics"), ("client", "statistics"), ("client", "mean")],
)
@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_hardly_any_noise_changes_hardly_anything(trust: str, level: str, aggregation: str) -> None:
    # Of a client's statistics the norm is 1 at most.
    clip = 1.0 if level == "client" and aggregation == "statistics" else 10.0
    noise = seeded(epsilon=1e4, trust=trust, level=level, clip=clip)
    found, strategy = learn(noise, grid_of(app={"privacy": noise}), aggregation=aggregation)
    plain, _ = learn(None, aggregation=aggregation, fraction_evaluate=0.0)
    assert dictionary_distance(found, TRUTH) < 1.2 * dictionary_distance(plain, TRUTH)
    assert dictionary_distance(START, TRUTH) > 0.2
    assert [report.step for report in strategy.history] == ["update"] * ROUNDS


def test_orthogonal_learners_and_more_noise_for_less_epsilon() -> None:
    start = np.linalg.qr(START.T)[0].T
    learner = OrthogonalLearner(ATOMS)
    errors = []
    for epsilon in (0.3, 3.0, 1e4):
        noise = seeded(epsilon=epsilon, trust="central")
        found, strategy = learn(noise, grid_of(learner=learner), initial=start)
        np.testing.assert_allclose(found @ found.T, np.eye(ATOMS), atol=1e-9)
        errors.append(dictionary_distance(found, TRUTH))
        last = strategy.history[-1].aggregate
        assert last["clip"] == noise.clip
        assert last["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    assert sorted(errors, reverse=True) == errors


def outside_the_sum(message: Message, *, arrays: bool) -> Any:
    """Return all bytes of a reply but those of the sum; of SecAgg+, with random keys, names."""
    if message.has_error():
        return message.metadata.message_type, message.error.reason
    records = dict(message.content)
    secagg: Any = records.pop(RECORD_KEY_CONFIGS, {})
    if not arrays:
        records.pop("arrays", None)
    return message.metadata.message_type, sorted(secagg), repr(records)


@pytest.mark.parametrize(("level", "aggregation"), [("record", "statistics"), ("client", "mean")])
@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_nothing_but_the_sum_depends_on_the_data(trust: str, level: str, aggregation: str) -> None:
    """All replies and the reports of runs on neighboring data."""
    noise = seeded(epsilon=2.0, trust=trust, level=level)
    fewer = np.delete(SAMPLES[0], np.linalg.norm(SAMPLES[0], axis=1).argmax(), axis=0)
    others = [fewer if level == "record" else 2 * SAMPLES[1] - 0.1, *SAMPLES[1:]]
    found = []
    for parts in (SAMPLES, others):
        grid = grid_of(parts, app={"privacy": noise})
        atoms, strategy = learn(noise, grid, aggregation=aggregation)
        sent = [outside_the_sum(r, arrays=trust == "distributed") for r in grid.replies]
        assert not grid.errors
        assert {kind for kind, *_ in sent} == {"query", "train"}
        found.append((sent, repr(strategy.history), strategy.client_names, atoms))
    (*one, atoms), (*other, moved) = found
    assert one == other
    assert not np.array_equal(atoms, moved)


def test_a_client_that_fails_adds_zero_and_says_nothing(warned: Any) -> None:
    class Failing(DictionaryClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            if self.partition == 0:
                raise SystemExit(f"sample {self.X[0, 0]}")
            return super().fit(parameters, config)

    def make_client(context: Context) -> DictionaryClient:
        i = int(context.node_config["partition-id"])
        return Failing(SAMPLES[i], LassoLearner(ATOMS), context)

    grid = Tapped(client_app(make_client), CLIENTS)
    _, strategy = learn(Noise(epsilon=8.0), grid, 1)
    assert [list(report.metrics) for report in strategy.history] == [[*range(CLIENTS)]]
    assert "sample" in warned.text
    assert "sample" not in repr(grid.replies) + repr(strategy.history)


# The budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_a_resumed_run_does_not_spend_twice(trust: str, tmp_path: Path) -> None:
    noise = seeded(epsilon=3.0, trust=trust)
    grid = grid_of(app={"privacy": noise})
    straight, _ = learn(noise, grid_of(app={"privacy": noise}), 4)

    def rest(rounds: int, stop: int | None = None) -> tuple[np.ndarray, PerMA]:
        settings = ServerSettings(resume=True)
        strategy = PerMA(
            ATOMS, privacy=noise, min_clients=3, checkpoint_dir=tmp_path, server=settings
        )
        ends: Any = None if stop is None else lambda round_, result: round_ == stop
        result = strategy.start(grid, ArrayRecord([START]), num_rounds=rounds, should_stop=ends)
        return result.arrays.to_numpy_ndarrays()[0], strategy

    _, strategy = rest(4, 2)
    assert 0 < strategy.history[-1].aggregate["epsilon"] < 3.0
    resumed, strategy = rest(4)
    np.testing.assert_array_equal(resumed, straight)
    assert strategy.history[-1].aggregate["epsilon"] == pytest.approx(3.0)
    asked = len(grid.replies)
    later, strategy = rest(6)  # the noise was for four sums: there is no fifth
    assert len(strategy.history) == 4
    np.testing.assert_array_equal(later, straight)
    assert not any(reply.metadata.message_type == "train" for reply in grid.replies[asked:])


@pytest.mark.parametrize(
    ("own", "asked", "named"),
    [
        ({"epsilon": 1.0}, {"epsilon": 2.0}, "epsilon"),
        ({"delta": 1e-7}, {}, "delta"),
        ({"level": "client"}, {}, "level"),
        ({}, {"trust": "central"}, "trust"),
        ({}, None, "privacy"),
    ],
)
def test_a_client_rejects_weaker_promises(
    own: dict[str, Any], asked: dict[str, Any] | None, named: str
) -> None:
    privacy = None if asked is None else Noise(**{"epsilon": 2.0, **asked})
    grid = grid_of(app={"privacy": Noise(**{"epsilon": 2.0, **own})})
    with pytest.raises(TooFewReplies, match=f"ValueError: {named}"):
        learn(privacy, grid, 1, fraction_evaluate=0.0)


def test_a_crash_costs_budget_and_gives_none_back(tmp_path: Path) -> None:
    """As the second sum has been opened, and before the round is saved."""
    noise, opened = Noise(epsilon=3.0), [0]

    class Crashing(Tapped):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            replies = super().send_and_receive(messages, timeout=timeout)
            if any(Key.SHARE_LIST in r.content.get(RECORD_KEY_CONFIGS, {}) for r in replies):
                opened[0] += 1
                if opened[0] == 2:
                    raise KeyboardInterrupt
            return replies

    def run() -> PerMA:
        grid, settings = grid_of(kind=Crashing), ServerSettings(resume=True)
        strategy = learn(noise, grid, 4, checkpoint_dir=tmp_path, server=settings)[1]
        return strategy

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [report.round for report in run().history] == [1, 2, 3]
    assert opened == [4]


def test_a_client_counts_what_it_spends() -> None:
    """Of a server that asks for more sums than it says, or says something else later."""
    app = client_app(Moving, privacy=Noise(epsilon=2.0, trust="central", level="client"))
    context = context_of(0)

    def ask(round_: int, **changed: Any) -> np.ndarray:
        said = promise(**{"rounds": 2, **changed})
        config = ConfigRecord({"perdl.promise": said, "server-round": round_})
        content = RecordDict({"arrays": ArrayRecord([np.zeros(2)]), "config": config})
        reply = app(asks(content), context)
        found: np.ndarray = reply.content.array_records["arrays"]["0"].numpy()
        return found

    np.testing.assert_allclose(ask(1), [0.25, 0.25])
    np.testing.assert_allclose(ask(1), [0.25, 0.25])  # as of a server that crashed
    for round_, changed, named in (
        (2, {"rounds": 3}, "perdl.promise"),
        (2, {"trust": "distributed"}, "trust"),
        (2, {"of": "all"}, "of in perdl.promise"),
        (2, {"size": 3}, "a reply"),
        (1, {}, "server-round"),
        (3, {}, "rounds"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            ask(round_, **changed)


@pytest.mark.parametrize("privacy", [None, seeded(epsilon=1e4, clip=3.0)])
@pytest.mark.parametrize(("gone", "there"), [((3, 4), (0, 1, 2)), ((2, 3, 4), (0, 1, 2, 3, 4))])
def test_a_sum_of_too_few_is_not_opened_but_repeated(
    privacy: Noise | None, gone: tuple[int, ...], there: tuple[int, ...]
) -> None:
    """Of those who answered, where they are enough, else of all."""
    unmasked: list[int] = []
    times = dict.fromkeys(gone, 0)

    def faults(partition: int, message: Message) -> str | None:
        if stage(message) == Stage.UNMASK:
            unmasked.append(partition)
        if partition in gone and stage(message) == Stage.COLLECT_MASKED_VECTORS:
            times[partition] += 1
            return "error" if times[partition] == 1 else None
        return None

    grid = grid_of(faults=faults, app={"privacy": privacy})
    found, strategy = learn(
        privacy,
        grid,
        1,
        secure={"reconstruction_threshold": 0.9},
        fraction_evaluate=0.0,
    )
    assert sorted(unmasked) == list(there)
    (report,) = strategy.history
    assert tuple(report.metrics) == there
    assert dictionary_distance(found, TRUTH) < dictionary_distance(START, TRUTH)


# Bad input ---------------------------------------------------------------------------------------


class OwnUpdate(LearnerClient):
    """A client of PerMA that knows nothing of records."""

    def __init__(self, context: Context) -> None:
        super().__init__(SAMPLES[0], LassoLearner(ATOMS), context)

    def update(self, request: Any, kept: Any) -> StepResult:
        return StepResult([np.zeros((ATOMS, ATOMS + FEATURES))], 1)


@pytest.mark.parametrize(
    ("noise", "options", "named"),
    [
        ({}, {"initial": None}, "initial_arrays"),
        ({}, {"aggregation": "mean"}, "level"),
        ({}, {"aggregation": "weighted"}, "aggregation"),
        ({}, {"robust": True}, "robust"),
        ({}, {"reuse_last_reply": 1}, "reuse_last_reply"),
        ({}, {"n_global": "auto"}, "n_global"),
        ({}, {"min_clients": 2}, "min_clients"),
        ({"trust": "central"}, {"secure": True}, "secure"),
        ({"basis": PublicBasis.dct((9,), 5)}, {}, "X"),
    ],
)
def test_what_a_promise_cannot_be_kept_with_is_rejected_before_round_one(
    noise: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    grid = grid_of()
    with pytest.raises(ValueError, match=f"^{named}"):
        learn(Noise(**{"epsilon": 1.0, **noise}), grid, 1, **options)
    assert not grid.replies


def test_flowers_own_start_does_not_say_for_how_many_rounds_the_budget_is() -> None:
    strategy, grid = PerMA(ATOMS, privacy=Noise(epsilon=1.0, trust="central")), grid_of()
    wrapper = DifferentialPrivacyClientSideFixedClipping(strategy, 1.0, 1.0, CLIENTS)
    with pytest.raises(ValueError, match=r"^privacy"):
        wrapper.start(grid, ArrayRecord([START]), num_rounds=2)
    assert not grid.replies


def test_a_client_that_bounds_no_record_is_named() -> None:
    grid = Tapped(client_app(OwnUpdate), CLIENTS)
    with pytest.raises(TooFewReplies, match="level"):
        learn(Noise(epsilon=1.0, trust="central"), grid, 1)


# A public basis ----------------------------------------------------------------------------------


def test_atoms_are_learned_in_the_basis_and_end_where_the_samples_are() -> None:
    basis = PublicBasis(TRUTH)
    noise = seeded(epsilon=1e4, clip=3.0, trust="central", basis=basis)
    grid = grid_of([basis.project(X) for X in SAMPLES])
    found, _ = learn(noise, grid)
    assert found.shape == TRUTH.shape
    np.testing.assert_allclose(found @ TRUTH.T @ TRUTH, found, atol=1e-9)
    plain, _ = learn(None, fraction_evaluate=0.0)
    assert dictionary_distance(found, TRUTH) < 1.2 * dictionary_distance(plain, TRUTH)


# Other strategies --------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_a_private_head_is_no_part_of_the_noised_sum(trust: str) -> None:
    """Only the shared array is clipped, noised and counted; a failed client keeps its old head."""

    class Fails(Moving):
        def fit(self, parameters: Any, config: Any) -> Any:
            if self.i == 0 and config["server-round"] == 2:
                raise RuntimeError("no memory")
            return super().fit(parameters, config)

    noise = seeded(epsilon=1e4, level="client", trust=trust, clip=2.0)
    grid = Tapped(client_app(Fails, privacy=noise, private=["b"], names=["b", "a"]), CLIENTS)
    strategy = PersonalizedFedAvg(["b"], privacy=noise, min_clients=3)
    start = ArrayRecord({"b": Array(np.zeros((2, 3))), "a": Array(np.zeros(3))})
    found = strategy.start(grid, start, num_rounds=2).arrays
    np.testing.assert_array_equal(found["b"].numpy(), 0)
    most, targets = 2.0 / np.sqrt(3), np.arange(CLIENTS) + 1
    first = np.minimum(targets / 4, most).mean()
    then = np.clip((targets - first) / 4, -most, most) * (targets > 1)  # client 0 adds zero
    np.testing.assert_allclose(found["a"].numpy(), first + then.mean(), atol=0.03)
    for i, target in enumerate(targets):
        own = target * (1 - 0.75 ** (1 if i == 0 else 2))
        np.testing.assert_allclose(strategy.result.model_of(i)["b"].numpy(), own)
    assert "'i'" not in repr(strategy.history)


@pytest.mark.parametrize("options", [{"fine_tune": 1}, {"robust": True}])
def test_what_noise_does_not_cover_is_refused_with_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}"):
        PersonalizedFedAvg("b", **options, privacy=Noise(epsilon=1.0, level="client"))
