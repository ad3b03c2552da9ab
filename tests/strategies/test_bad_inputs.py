"""Bad and edge inputs of every strategy: a right result, or one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.clients import (
    DictionaryClient,
    RegressionClient,
    client_app,
)
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    FedMD,
    FedX,
    PerMA,
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
    "FedMD": FedMD,
    "FedX": FedX,
}

#: The clients that the strategies ask, if not `RegressionClient`.
KINDS = {"PerMA": DictionaryClient}


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


@pytest.mark.parametrize(
    "argument",
    ["grid", "num_rounds", "timeout", "train_config", "evaluate_fn", "should_stop"],
)
@given(value=NEVER)
@settings(max_examples=8)
def test_start_says_which_argument_is_wrong(argument: str, value: Any) -> None:
    given_: dict[str, Any] = {"grid": grid(), "num_rounds": 1, argument: value}
    with pytest.raises((ValueError, TypeError), match=f"{argument}"):
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


@pytest.mark.parametrize("name", STRATEGIES)
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


@pytest.mark.parametrize("name", STRATEGIES)
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
