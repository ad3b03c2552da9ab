"""`Request.combine`: what replies come to, by hand arithmetic, and in a protocol of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flwr_perdl.core.aggregate import aggregate
from flwr_perdl.protocol.records import Reply
from flwr_perdl.strategies import Combine, Protocol, ProtocolStrategy, Replies, Request
from tests.grids import Trains, grid_of


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


def test_the_driver_checks_combines_and_releases() -> None:
    """Of five clients the last sends another shape."""
    sizes = (2, 2, 2, 2, 3)
    strategy = Median(fraction_evaluate=0.0)
    grid = grid_of(lambda _, i: Trains(lambda array: np.full(sizes[i], i**2.0)), 5)
    result = strategy.start(grid, num_rounds=1)
    assert result.arrays.to_numpy_ndarrays()[0].tolist() == [2.5, 2.5]  # of 0, 1, 4 and 9
    (report,) = strategy.history
    assert "shapes" in report.dropped["client 4"]
    assert report.floats_up == 2
    assert strategy.seen == [0] * 4
