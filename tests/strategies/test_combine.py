"""`Request.combine`: what replies come to, by hand arithmetic, and in a protocol of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from scipy.spatial.distance import cdist

from flwr_perdl.clients import client_app
from flwr_perdl.core.aggregate import aggregate
from flwr_perdl.core.models import changes_of
from flwr_perdl.protocol.records import Reply
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Combine, Protocol, ProtocolStrategy, Replies, Request


def replies(*rows: Any) -> Replies:
    """Return replies with arrays, numbers of examples and metrics."""
    return Replies({i: Reply(arrays, n, metrics) for i, (arrays, n, metrics) in enumerate(rows)})


def test_a_mean_is_weighted_by_examples_array_by_array() -> None:
    given = replies(([np.ones(2), np.zeros((1, 1))], 1, {}), ([np.full(2, 5.0), np.eye(1)], 3, {}))
    vector, matrix = Combine(start=[np.zeros(2), np.zeros((1, 1))])(given)
    assert vector.tolist() == [4.0, 4.0]
    assert matrix.tolist() == [[0.75]]


def test_each_group_has_its_own_and_one_without_replies_stays() -> None:
    start = [[np.array([x])] for x in (1.0, 2.0, 3.0)]
    rows = [([np.array([x])], 1, {"kind": kind}) for x, kind in ((4.0, 0), (6.0, 0), (9.0, 2))]
    found = Combine(start=start, group="kind")(replies(*rows))
    assert [array.tolist() for (array,) in found] == [[5.0], [2.0], [9.0]]
    assert [array.tolist() for (array,) in start] == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("rule", ["filtered", "clip", "trimmed", "median", "geometric-median"])
def test_robust_rules_withstand_a_liar_and_name_it(rule: str) -> None:
    values = [*np.linspace(0.9, 1.1, 9).tolist(), 1e6]
    given = replies(*(([np.full(3, x)], 1, {}) for x in values))
    (found,) = Combine(start=[np.zeros(3)], rule=rule)(given)
    assert np.abs(found - 1).max() < 0.5
    assert 9 in given.noted


@pytest.mark.parametrize("rule", ["mean", "filtered", "clip", "trimmed", "median"])
def test_arrays_of_several_blocks_come_to_what_their_rows_do(rule: str) -> None:
    rng = np.random.default_rng(0)
    start = [rng.standard_normal((2, 100_000)), np.ones(3)]
    start[0][0, 5] = np.nan  # stays
    n = [1, 2, 3, 2, 1, 2, 3, 2, 1, 2, 3, 2]
    models = [[start[0] + 1e-3 * rng.standard_normal(start[0].shape), start[1] + i] for i in n]
    models[4][0] += 0.1
    rows = np.array(
        [np.concatenate([(a - b).ravel() for a, b in zip(m, start, strict=True)]) for m in models]
    )
    rows[:, 5] = 0
    found = Combine(start=start, rule=rule)(
        replies(*((m, i, {}) for m, i in zip(models, n, strict=True)))
    )
    change = np.concatenate([(a - b).ravel() for a, b in zip(found, start, strict=True)])
    wanted = aggregate(rule, rows, np.array(n, float)).value
    assert np.isnan(found[0][0, 5])
    np.testing.assert_allclose(np.delete(change, 5), np.delete(wanted, 5), atol=1e-8)


def test_rows_have_the_distances_of_the_changes_whatever_one_sends() -> None:
    rng = np.random.default_rng(0)
    models = [[rng.standard_normal(50)] for _ in range(6)]
    models[2][0] *= 1e9
    models[3][0] *= 0
    rows = changes_of([(np.zeros(50), None)], models)
    flat = np.array([array for (array,) in models])
    assert rows.shape == (6, 6)
    honest = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(
        cdist(rows, rows)[honest][:, honest], cdist(flat, flat)[honest][:, honest], atol=1e-7
    )
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(flat, axis=1))


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (Reply([np.ones(3)], 1, {"kind": 0}), "shapes"),
        (Reply([np.ones(2)], 1, {}), "kind"),
        (Reply([np.ones(2)], 1, {"kind": 2}), "kind"),
        (Reply([np.ones(2)], 1, {"kind": 0.5}), "kind"),
    ],
)
def test_a_reply_that_does_not_fit_is_told_what_does_not(reply: Reply, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Combine(start=[[np.zeros(2)], [np.zeros(2)]], group="kind").check(reply)


def test_a_group_is_named() -> None:
    with pytest.raises(ValueError, match=r"^group"):
        Combine(start=[[np.zeros(1)]], group="")


def test_a_large_model_may_come_back() -> None:
    model = [np.broadcast_to(np.float32(0), (7, 2**24))]  # without its memory
    for request in (Request("x", expect=model), Request("x", combine=Combine(start=model))):
        assert 4 * 7 * 2**24 < request.max_bytes < 2**30
    assert Request("x", max_values=10).max_bytes < Request("x").max_bytes


class Median(ProtocolStrategy):
    seen: list[int]

    def protocol(self, initial: list[Any], state: Any) -> Protocol:
        model = np.zeros(2)
        while True:
            how = Combine(start=[model], rule="median")
            state = {"model": model}
            answers = yield Request("median", [model], state=state, combine=how)
            self.seen = [len(reply.arrays) for reply in answers.values()]
            (model,) = answers.combined


class Client(NumPyClient):
    """Of five the last sends another shape."""

    def __init__(self, context: Context) -> None:
        self.i = int(context.node_config["partition-id"])

    def fit(self, parameters: Any, config: Any) -> Any:
        return [np.full(3 if self.i == 4 else 2, float(self.i**2))], 1, {}


def test_the_driver_checks_combines_and_releases() -> None:
    strategy = Median(fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(client_app(Client), 5), num_rounds=1)
    assert result.arrays.to_numpy_ndarrays()[0].tolist() == [2.5, 2.5]  # of 0, 1, 4 and 9
    (report,) = strategy.history
    assert "shapes" in report.dropped["client 4"]
    assert report.floats_up == 2
    assert strategy.seen == [0] * 4
