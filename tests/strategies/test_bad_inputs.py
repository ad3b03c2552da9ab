"""Bad and edge inputs of every strategy: a right result, or one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.clients import (
    DictionaryAveragingClient,
    DictionaryClient,
    PerPCAClient,
    RegressionClient,
    client_app,
)
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.diffusion import Topology
from flwr_perdl.regression import MomentDescent, Refinement
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    DictionaryAveraging,
    FedMD,
    FedX,
    NeighborRelay,
    OneShotClustering,
    PerMA,
    PerPCA,
    ServerOptions,
    ServerSettings,
    TooFewReplies,
)

X = np.random.default_rng(0).standard_normal((30, 4))
Y = X @ np.ones(4)

#: Of the wrong type, or outside of every range.
NEVER = st.sampled_from(
    [object(), b"3", "no", -1, -0.5, np.nan, -np.inf, (), [], {}, np.zeros(0), np.zeros(3), 3j]
)

STRATEGIES: dict[str, Callable[..., Any]] = {
    "PerMA": PerMA,
    "DictionaryAveraging": DictionaryAveraging,
    "PerPCA": lambda n_global=1, **options: PerPCA(n_global, **options),
    "FedMD": FedMD,
    "FedX": FedX,
    "MomentDescent": MomentDescent,
    "Refinement": Refinement,
    "ServerSettings": ServerSettings,
    "OneShotClustering": lambda n_clusters=1, **options: OneShotClustering(n_clusters, **options),
    "NeighborRelay": lambda topology=None, n_rounds=1, **options: NeighborRelay(
        Topology.ring(3) if topology is None else topology, n_rounds, **options
    ),
}
OWN = {
    "PerMA": ["n_global", "matching", "aggregation", "local_steps", "refine_steps", "remember"],
    "DictionaryAveraging": ["start_from", "weighted", "local_steps", "replace_unused"],
    "PerPCA": ["n_global", "step"],
    "FedMD": ["n_clusters", "max_clusters", "phase_1", "robust"],
    "FedX": ["n_clusters", "start", "phase_1", "phase_2"],
    "OneShotClustering": ["n_clusters", "robust", "phase_2"],
    "MomentDescent": [field.name for field in fields(MomentDescent)],
    "Refinement": [field.name for field in fields(Refinement)],
    "ServerSettings": [field.name for field in fields(ServerSettings) if field.name != "events"],
    "NeighborRelay": ["topology", "n_rounds", "weights", "faults", "sealed"],
}
ALL = [(name, option) for name, own in OWN.items() for option in own]
ALL += [("PerMA", option) for option in ServerOptions.__annotations__ if option != "checkpoint_dir"]

#: The clients that the strategies ask.
KINDS = {
    "PerMA": DictionaryClient,
    "DictionaryAveraging": DictionaryAveragingClient,
    "PerPCA": PerPCAClient,
}


def grid(n: int = 3, rows: int = 30, kind: Any = DictionaryClient) -> InProcessGrid:
    def make(context: Any) -> Any:
        if kind is RegressionClient:
            return RegressionClient(X[:rows], Y[:rows], context)
        return kind(X[:rows], OrthogonalLearner(4), context)

    return InProcessGrid(client_app(make), n)


def sentence(error: BaseException) -> str:
    text = str(error)
    assert text.strip().endswith((".", ")")), text
    assert "\n" not in text
    return text


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize(("name", "option"), ALL)
@given(value=NEVER)
@settings(max_examples=6)
def test_no_option_takes_a_value_that_cannot_be(name: str, option: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        STRATEGIES[name](**{option: value})
    assert option in sentence(error.value)


def test_secure_rounds_need_shared_atoms() -> None:
    def make(context: Any) -> DictionaryClient:
        rng = np.random.default_rng(context.node_config["partition-id"])
        basis = np.linalg.qr(rng.standard_normal((8, 8)))[0][:3]
        codes = rng.choice([-1.0, 0.0, 1.0], (60, 3), p=[0.2, 0.6, 0.2])
        return DictionaryClient(codes @ basis, OrthogonalLearner(3), context)

    with pytest.raises(ValueError, match="n_global must"):
        PerMA("auto", secure=True).start(InProcessGrid(client_app(make), 3), num_rounds=2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FedX(k=3), "It takes n_clusters, start, phase_1, phase_2"),
        (lambda: FedX(n_cluster=3), "did you mean 'n_clusters'"),
        (lambda: PerMA(global_n=3), "It takes n_global, matching, aggregation"),
        (lambda: FedX(3, min_available_nodes=4), "'min_available_nodes': give num_clients."),
    ],
)
def test_an_unknown_option_is_told_the_class_own_ones(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(TypeError) as error:
        make()
    assert named in sentence(error.value)


@pytest.mark.parametrize(
    "argument",
    ["grid", "num_rounds", "timeout", "train_config", "evaluate_fn", "should_stop"],
)
@given(value=NEVER)
@settings(max_examples=8)
def test_start_says_which_argument_is_wrong(argument: str, value: Any) -> None:
    given_: dict[str, Any] = {"grid": grid(), "num_rounds": 1, argument: value}
    with pytest.raises((ValueError, TypeError), match=f"{argument} must be"):
        PerMA(2).start(**given_)


def initial() -> st.SearchStrategy[np.ndarray[Any, Any]]:
    shapes = st.sampled_from([(0, 4), (4,), (2, 4), (1, 4), (9, 4), (2, 9), (2, 2, 2), (0,), ()])
    values = st.sampled_from([0.0, 1.0, np.nan, np.inf, 1e300, 1e-300])
    dtypes = st.sampled_from([np.float64, np.float32, np.int64])
    return st.builds(_filled, shapes, values, dtypes)


def _filled(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        whole = np.full(shape, value if dtype != np.int64 else 1, dtype=dtype)
    return whole


@pytest.mark.parametrize("name", ["PerMA", "DictionaryAveraging", "PerPCA", "FedX", "FedMD"])
@given(arrays=st.lists(initial(), min_size=1, max_size=2))
@settings(max_examples=8)
def test_initial_arrays_lead_to_finite_models_or_one_sentence(name: str, arrays: Any) -> None:
    kind = KINDS.get(name, RegressionClient)
    try:
        result = STRATEGIES[name]().start(grid(kind=kind), ArrayRecord(arrays), num_rounds=2)
    except (ValueError, TypeError, TooFewReplies) as error:
        sentence(error)
    else:
        assert all(np.isfinite(array).all() for array in result.arrays.to_numpy_ndarrays())


@pytest.mark.parametrize("name", ["PerMA", "DictionaryAveraging", "PerPCA", "FedX", "FedMD"])
@given(n=st.integers(1, 3), rows=st.integers(1, 4), least=st.integers(1, 4))
@settings(max_examples=8)
def test_one_client_and_one_sample_are_served_or_refused(
    name: str, n: int, rows: int, least: int
) -> None:
    kind = KINDS.get(name, RegressionClient)
    strategy = STRATEGIES[name](min_clients=least)
    try:
        result = strategy.start(grid(n, rows, kind), num_rounds=5)
    except (ValueError, TooFewReplies) as error:
        sentence(error)
    else:
        assert all(np.isfinite(array).all() for array in result.arrays.to_numpy_ndarrays())
        assert all(np.isfinite(list(r.aggregate.values())).all() for r in strategy.history)
