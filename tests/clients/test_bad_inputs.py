"""Bad and edge inputs of clients, of the grid and of splits: a right result, or one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.clients import (
    DictionaryClient,
    ProtocolClient,
    RegressionClient,
)
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.regression import LogisticLoss
from tests.grids import context_of

X = np.random.default_rng(0).standard_normal((30, 4))
Y = X @ np.ones(4)
LEARNER = OrthogonalLearner(4)


@pytest.mark.parametrize("partition", ["3", 3])
def test_a_partition_id_may_be_a_text(partition: Any) -> None:
    assert DictionaryClient(X, LEARNER, context_of(partition)).partition == 3


@given(partition=st.sampled_from(["", "x", "-1", "3.0", "³", -1, 2**63, 3.0, True, b"3", np.nan]))
@settings(max_examples=11)
def test_any_other_partition_id_is_one_sentence(partition: Any) -> None:
    with pytest.raises(ValueError, match=r"^partition-id"):
        DictionaryClient(X, LEARNER, context_of(partition))


@pytest.mark.parametrize("option", ["max_runs", "max_requests"])
@pytest.mark.parametrize("value", [object(), 0, 1.5])
def test_how_often_a_client_answers_is_a_number(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{option}"):
        ProtocolClient(context_of(), **{option: value})


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "perdl.protocol": st.sampled_from(["perma", "mixed_regression", "ditto", "app", ".."]),
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
