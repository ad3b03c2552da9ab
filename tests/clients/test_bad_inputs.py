"""Bad and edge inputs of clients, of the grid and of splits: a right result, or one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.clients import (
    DictionaryClient,
    DiffusionClient,
    LocalPrivacy,
    RegressionClient,
    client_app,
)
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.regression import LogisticLoss
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.simulations.partition import imbalanced_partition, natural_partition
from tests.grids import context_of

X = np.random.default_rng(0).standard_normal((30, 4))
Y = X @ np.ones(4)
LABELS = np.arange(90) % 3
LEARNER = OrthogonalLearner(4)


#: By what is made: its arguments that are right, and those that every wrong value is put into.
MADE: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "dictionary": (
        DictionaryClient,
        {"X": X, "learner": LEARNER, "context": context_of()},
        ["X", "learner", "context", "evaluation", "start", "min_support", "state_dir"],
    ),
    "regression": (
        RegressionClient,
        {"X": X, "y": Y, "context": context_of()},
        ["X", "y", "context", "features", "loss", "evaluation"],
    ),
    "diffusion": (
        DiffusionClient,
        {"program": None, "context": context_of()},
        ["program", "shows", "sealed", "max_delay", "on_end", "state_dir"],
    ),
    "privacy": (
        LocalPrivacy,
        {"epsilon": 1.0, "delta": 1e-5, "n_rounds": 2, "clip": 1.0},
        ["epsilon", "delta", "n_rounds", "clip", "rng"],
    ),
    "app": (client_app, {"make_client": len}, ["make_client", "train_mods", "evaluate_mods"]),
    "grid": (
        InProcessGrid,
        {"app": client_app(len), "num_nodes": 2},
        ["app", "num_nodes", "run_config", "node_config", "faults"],
    ),
    "imbalanced": (
        imbalanced_partition,
        {"y": LABELS, "n_clients": 3, "n_samples": 5, "rng": np.random.default_rng(0)},
        ["y", "n_clients", "n_samples", "rng", "share"],
    ),
    "natural": (
        natural_partition,
        {"owners": LABELS, "n_clients": 3, "n_samples": 5, "rng": np.random.default_rng(0)},
        ["owners", "n_clients", "n_samples", "rng"],
    ),
}
CASES = [(name, argument) for name, (*_, arguments) in MADE.items() for argument in arguments]


class Idle:
    """A program that does nothing."""

    start = message = combine = adapt = observe = staticmethod(lambda *args: None)


@pytest.mark.parametrize(("name", "argument"), CASES)
@given(value=st.sampled_from([object(), -1, -0.5, np.nan, 3j, b"3", True, 1.5, np.zeros((0, 4))]))
@settings(max_examples=9)
def test_what_cannot_be_is_refused_by_its_name(name: str, argument: str, value: Any) -> None:
    make, right, _ = MADE[name]
    fine = {"sealed": bool, "epsilon": float, "clip": float}.get(argument)
    if fine is not None and type(value) is fine and value > 0:
        return
    given_ = {**right, argument: value}
    if name == "diffusion" and argument != "program":
        given_["program"] = Idle()
    with pytest.raises((ValueError, TypeError)) as error:
        make(**given_)
    said = str(error.value)
    assert argument in said
    assert "\n" not in said
    assert said.endswith((".", ")"))


@given(
    n_images=st.integers(1, 40),
    labels=st.integers(1, 5),
    n_clients=st.integers(1, 45),
    n_samples=st.integers(1, 10**12),
    share=st.sampled_from([1e-320, 0.1, 0.9, 1.0]),
)
@settings(max_examples=30)
def test_a_split_gives_no_image_twice_or_says_why_it_cannot(
    n_images: int, labels: int, n_clients: int, n_samples: int, share: float
) -> None:
    y = np.arange(n_images) % labels
    for split in (
        lambda rng: imbalanced_partition(y, n_clients, n_samples, rng, share=share),
        lambda rng: natural_partition(y, n_clients, n_samples, rng),
    ):
        try:
            found = split(np.random.default_rng(0))
        except ValueError:
            continue
        used = np.concatenate([*found.clients, found.test])
        assert len(found.clients) == n_clients
        assert len(set(used.tolist())) == len(used)


@pytest.mark.parametrize("partition", ["3", 3])
def test_a_partition_id_may_be_a_text(partition: Any) -> None:
    assert DictionaryClient(X, LEARNER, context_of(partition)).partition == 3


@given(partition=st.sampled_from(["", "x", "-1", "3.0", "³", -1, 2**63, 3.0, True, b"3", np.nan]))
@settings(max_examples=11)
def test_any_other_partition_id_is_one_sentence(partition: Any) -> None:
    with pytest.raises(ValueError, match="partition-id must"):
        DictionaryClient(X, LEARNER, context_of(partition))


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "perdl.step": st.sampled_from(["start", "update", "average", "components", "describe", ""]),
        "server-round": st.sampled_from([0, 1, -1]),
        "perdl.seed": st.sampled_from([0, 2**62]),
        "perdl.local-steps": st.integers(1, 2),
        "perdl.n-nonzero": st.sampled_from(["", "1", "0", "x", "5,,"]),
        "perdl.unknown": st.just(1),
    },
)
ARRAYS = st.lists(
    st.sampled_from(
        [np.eye(4)[:2], np.zeros((0, 4)), np.full((2, 4), np.nan), np.eye(3), np.zeros(0), X[:9]]
    ),
    max_size=2,
)


@pytest.mark.parametrize("kind", ["dictionary", "regression", "logistic"])
@given(config=REQUESTS, arrays=ARRAYS)
@settings(max_examples=25)
def test_a_request_is_answered_with_finite_numbers_or_one_sentence(
    kind: str, config: dict[str, Any], arrays: list[Any]
) -> None:
    client: Any = {
        "dictionary": lambda: DictionaryClient(X, LEARNER, context_of()),
        "regression": lambda: RegressionClient(X, Y, context_of()),
        "logistic": lambda: RegressionClient(X, np.sign(Y), context_of(), loss=LogisticLoss()),
    }[kind]()
    for call in (client.fit, client.evaluate):
        try:
            found, n_examples, metrics = call(arrays, config)
        except ValueError:
            continue
        assert n_examples > 0
        assert np.isfinite(list(metrics.values())).all()
        for array in found if isinstance(found, list) else [np.array(found)]:
            assert np.isfinite(array).all()
