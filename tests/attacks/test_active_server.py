"""Noise against an active server, and a run's own result against an audit.

The server of benchmarks/active.py reads samples off replies and off secure sums alike, and none off
sums with noise. The audit is that of Steinke, Nasr and Jagielski, "Privacy Auditing with One (1)
Training Run", 2023: of many canary records each is in the data or not, by a coin; whoever sees the
result guesses which are, and guesses that are right more often than epsilon allows show that the
promise is broken.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from scipy.stats import binom

from benchmarks.active import SAMPLES, read
from flwr_perdl.clients import DictionaryClient, RidgeClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.privacy import Noise
from flwr_perdl.privacy.noise import noise_multiplier, spent
from flwr_perdl.regression.ridge import sums_size
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from tests.grids import asks, context_of, promise


@pytest.mark.parametrize("secure", [False, True])
def test_an_active_server_reads_samples_off_replies_and_off_secure_sums(secure: bool) -> None:
    assert read(8, secure=secure) > SAMPLES / 8


def test_it_reads_none_where_sums_have_noise_and_some_where_that_is_hardly_any() -> None:
    assert read(8, privacy=seeded(8.0)) == 0
    assert read(8, privacy=seeded(1e6)) > 0


def seeded(epsilon: float, **more: Any) -> Noise:
    """Return noise that is the same in every run of a test."""
    rng = np.random.default_rng(7)
    return Noise(epsilon=epsilon, rng=lambda: rng, **more)


# The audit of a run ------------------------------------------------------------------------------

CANARIES, GUESSES, ROUNDS, DELTA = 2000, 200, 3, 1e-7


def right_guesses(epsilon: float) -> int:
    """Return how many of 200 guesses about 2,000 canaries are right, after a run of three rounds.

    Every canary has a feature of its own, besides the one that all share and the atom begins with.
    In the atom at the end its entry is large if it is in the data.
    """
    there = np.random.default_rng(0).random(CANARIES) < 0.5
    X = np.hstack([np.full((CANARIES, 1), 1.0), 10 * np.eye(CANARIES)])[there]
    parts = np.array_split(X, 3)

    def make_client(context: Context) -> DictionaryClient:
        own = parts[int(context.node_config["partition-id"])]
        return DictionaryClient(own, OrthogonalLearner(1, n_nonzero=1), context)

    noise = seeded(epsilon, delta=DELTA, trust="central")
    strategy = PerMA(1, privacy=noise)
    start = ArrayRecord([np.eye(1, CANARIES + 1)])
    grid = InProcessGrid(client_app(make_client), 3)
    result = strategy.start(grid, start, num_rounds=ROUNDS, verbose="quiet")
    atom = result.arrays.to_numpy_ndarrays()[0][0]
    order = np.argsort(atom[1:] * np.sign(atom[0]))
    guessed_in, guessed_out = order[-GUESSES // 2 :], order[: GUESSES // 2]
    return int(there[guessed_in].sum() + (~there[guessed_out]).sum())


def broken(right: int, epsilon: float) -> bool:
    """Tell whether so many right guesses refute epsilon, at 95 % (Theorem 3.1, alpha at most 1)."""
    by_chance = binom.sf(right - 1, GUESSES, 1 / (1 + np.exp(-epsilon)))
    return bool(by_chance + 2 * CANARIES * DELTA < 0.05)


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_an_audit_of_a_run_keeps_below_its_epsilon_and_finds_noise_that_is_too_small(
    epsilon: float,
) -> None:
    multiplier = noise_multiplier(epsilon, DELTA, ROUNDS)
    assert not broken(right_guesses(epsilon), epsilon)
    assert broken(right_guesses(spent(multiplier / 4, DELTA, ROUNDS)), epsilon)


@pytest.mark.parametrize("of", ["sums", "rows"])
def test_a_record_moves_nothing_by_more_than_the_clip(of: str) -> None:
    """As changes of rows, those that no sample has are zero, and others an atom away from that."""
    noise = Noise(epsilon=2, trust="central")
    atoms, found = np.eye(2, 4), []
    for record in ([0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]):
        X = np.vstack([np.tile(np.eye(4)[3], (9, 1)), record])
        learner = OrthogonalLearner(2, n_nonzero=1)
        app = client_app(lambda c, X=X, a=learner: DictionaryClient(X, a, c), privacy=noise)
        said = promise(delta=noise.delta, level="record", clip=1e-3, size=8, of=of)
        config = {"perdl.step": "update", "perdl.run": "r", "perdl.seed": 0, "server-round": 1}
        config |= {"perdl.sends": "statistics", "perdl.promise": said}
        config["perdl.protocol"] = "perma"
        content = RecordDict({"arrays": ArrayRecord([atoms]), "config": ConfigRecord(config)})
        message = asks(content)
        if of == "rows":
            with pytest.raises(ValueError, match=r"perdl\.promise"):
                app(message, context_of())
            continue
        found.append(app(message, context_of()).content["arrays"]["0"].numpy())
    assert of == "rows" or 0 < np.linalg.norm(found[1] - found[0]) <= 1e-3 + 1e-9


@pytest.mark.parametrize("step", ["moments", "sums"])
@pytest.mark.parametrize("told", [True, False], ids=["bounds", "no bounds"])
def test_a_record_moves_sums_of_columns_and_of_features_by_the_clip_at_most(
    step: str, told: bool
) -> None:
    """One that is as far out as can be moves them by as much; whether the server says bounds."""
    d, clip = 3, 1e-3
    noise, sums = Noise(epsilon=2, trust="central", clip=clip), []
    for record in (None, [9.0, -9.0, 9.0], [0.1, 0.0, 0.0], [np.nan] * 3):
        X = np.vstack([np.ones((9, d)), *([] if record is None else [record])])
        y = np.array([1.0] * 9 + [1e6] * (record is not None))
        size = 3 * d if step == "moments" else sums_size(d + 1, 1)
        said = promise(delta=noise.delta, level="record", clip=clip, size=size, of="sums")
        config = {"perdl.step": step, "perdl.run": "r", "perdl.seed": 0, "server-round": 1}
        config |= {"perdl.protocol": "ridge", "perdl.promise": said, "perdl.folds": 1}
        config |= {"perdl.features": 0, "perdl.classes": 0}
        bounds, ones = np.array([[-1.0, 1.0]] * d), np.ones(d)
        given = [bounds] if step == "moments" else [0 * ones, ones, ones[:1], ones[:1]]
        given = given if told else given[:-1]
        content = RecordDict({"arrays": ArrayRecord(given), "config": ConfigRecord(config)})
        app = client_app(lambda c, X=X, y=y: RidgeClient(X, y, c), privacy=noise)
        sums.append(app(asks(content), context_of()).content["arrays"]["0"].numpy())
    moved = [np.linalg.norm(one - sums[0]) for one in sums[1:]]
    assert max(moved) <= clip + 1e-9
    assert moved[0] == pytest.approx(clip)
    assert moved[1] < 0.9 * clip


def test_noised_sums_are_in_no_folds_which_would_depend_on_the_number_of_samples() -> None:
    noise = Noise(epsilon=2, trust="central")
    said = promise(delta=noise.delta, level="record", size=3 * sums_size(2, 1), of="sums")
    config = {"perdl.step": "sums", "perdl.run": "r", "perdl.seed": 0, "server-round": 1}
    config |= {"perdl.protocol": "ridge", "perdl.promise": said, "perdl.folds": 3}
    config |= {"perdl.features": 0, "perdl.classes": 0}
    one = np.ones(1)
    content = RecordDict(
        {"arrays": ArrayRecord([0 * one, one, one, one]), "config": ConfigRecord(config)}
    )
    app = client_app(lambda c: RidgeClient(np.ones((9, 1)), np.ones(9), c), privacy=noise)
    assert not app(asks(content), context_of()).content["arrays"]["0"].numpy().any()
