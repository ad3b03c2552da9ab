"""Malformed calls of all public callables: the first of those that `make fuzz-calls` draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_perdl.clients import PrivateState, RegressionClient
from flwr_perdl.dictionary import GradientLearner, refine_local, warm_start
from flwr_perdl.estimators import to_frame
from flwr_perdl.export import save
from flwr_perdl.network import (
    Averaging,
    CombinationMatrix,
    DataDiffusion,
    ModelDiffusion,
    Schedule,
    Topology,
)
from flwr_perdl.random import spawn
from flwr_perdl.regression import TwoPhase
from flwr_perdl.strategies import FedX, Learned, ServerSettings, await_nodes
from tests.fuzz import calls
from tests.grids import context_of


@pytest.mark.parametrize("name", calls.callables())
def test_a_valid_call_succeeds(name: str) -> None:
    _, called = calls.callables()[name]
    calls.call(called, calls.valid(name, called))  # compiled here, where no time is measured
    assert calls.finding(called, calls.valid(name, called), "no error names this") is None


def test_malformed_calls_are_right_or_name_the_argument() -> None:
    drawn = islice(calls.draws(seed=0), 3000)
    assert [call for call in drawn if call[-1] is not None] == []


HUGE, RAGGED = 10**30, [[1.0], [1.0, 2.0]]
LEARNED = Learned(ArrayRecord(), names={1: "a"})
ATOMS, RNG, LEARNER = np.eye(3, 4), np.random.default_rng(0), GradientLearner(3)
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        name: ("n_nodes", partial(getattr(Topology, name), HUGE, *more))
        for name, more in {
            "ring": (),
            "exponential": (),
            "star": (),
            "complete": (),
            "small_world": (2, 0.5),
            "k_regular": (2,),
            "erdos_renyi": (0.5,),
        }.items()
    },
    "complete, many links": ("n_nodes", lambda: Topology.complete(100_000)),
    "grid": ("rows", lambda: Topology.grid(HUGE, 2)),
    "gossip": ("n_nodes", lambda: Schedule.random_pairs(HUGE)),
    "refine_local": ("n_iter", lambda: refine_local(ATOMS, ATOMS, 1, LEARNER, n_iter=HUGE)),
    "iterations": ("n_iter", lambda: warm_start(ATOMS, LEARNER, rng=RNG, n_iter=HUGE)),
    "restarts": ("restarts", lambda: warm_start(ATOMS, LEARNER, rng=RNG, restarts=HUGE)),
    "paper": ("n_clusters", lambda: TwoPhase.paper(HUGE)),
    "edges": ("edges", lambda: Topology.from_edges(3, 5)),
    "an edge": ("edges", lambda: Topology.from_edges(3, [((0,), (1, 2))])),
    "directed": ("directed", lambda: Topology.from_edges(3, [(0, 1)], directed="x")),
    "topology": ("adjacency", lambda: Topology(RAGGED)),
    "weights": ("weights", lambda: CombinationMatrix(RAGGED, Topology.ring(2))),
    "members": ("joins", lambda: Schedule.members(Topology.ring(3), joins=())),
    "state, run": ("run", lambda: PrivateState(context_of(), 5)),
    "state, round": ("round_", lambda: PrivateState(context_of(), "run").before(None)),
    "await_nodes": ("grid", lambda: await_nodes("x", FedX(1).options)),
    "features": (
        "features",
        lambda: RegressionClient(ATOMS, ATOMS[0], context_of(), features=float),
    ),
    "objective": ("objective", lambda: ModelDiffusion("x")),
    "nonnegative": ("nonnegative", lambda: DataDiffusion(3, nonnegative="x")),
    "values": ("values", lambda: Averaging("x")),
    "to_frame": ("history", lambda: to_frame(5)),
    "to_frame, a report": ("history", lambda: to_frame([{}])),
    "settings": ("given", lambda: ServerSettings.of(5)),
    "seed": ("seed", lambda: spawn(None)),
    "partition": ("partition", lambda: spawn(0, "a")),
    "round": ("round_", lambda: spawn(0, 0, -1)),
    "own model": ("client", lambda: LEARNED.model_of([])),
    "own model, True": ("client", lambda: LEARNED.model_of(True)),
    "own model, where": ("state_dir", lambda: LEARNED.model_of(1, 5)),
    "saved, none": ("source", lambda: save("x.npz", {"a": None})),
    "saved, ragged": ("source", lambda: save("x.npz", {"a": RAGGED})),
    "saved, no name": ("source", lambda: save("x.npz", {1: ATOMS})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_work_is_done_for_is_refused_by_name(name: str) -> None:
    argument, called = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=rf"^{argument}\b"):
        called()


def test_an_object_of_no_kind_is_not_taken() -> None:
    def takes(anything: Any) -> None:
        pass

    assert calls.finding(takes, {"anything": object()}, "anything") == "taken"
