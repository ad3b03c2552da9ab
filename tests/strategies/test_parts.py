"""Parts of strategies: alone, in pairs, and a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context

from flwr_perdl.clients import client_app
from flwr_perdl.network import TopK, Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    Part,
    PersonalizedFedAvg,
    TooFewReplies,
)
from tests.strategies.own_part import Clip
from tests.strategies.protocols import CASES, NOISE, Case

START = {"body": np.zeros(2), "head": np.zeros(3)}
#: Each part alone, by the options that ask for it.
PARTS: dict[str, dict[str, Any]] = {
    "private": {"private": ["head"]},
    "transport": {"transport": "float16"},
    "compression": {"compression": TopK(0.5)},
    "privacy": {"privacy": NOISE, "min_clients": 3},
    "secure": {"secure": True, "min_clients": 3},
    "parts": {"parts": [Clip(5.0)]},
}
LIBRARY = [name for name in CASES if "parts" not in name and name != "own"]


class Moves:
    """A client whose training adds its number to all entries."""

    def __init__(self, context: Context) -> None:
        self.i = int(context.node_config["partition-id"])

    def fit(self, parameters: Any, config: Any) -> Any:
        return [array + self.i for array in parameters], 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(sum(np.sum((array - self.i) ** 2) for array in parameters)), 1, {}


def run(strategy: Any, app: Any = None, n: int = 4, rounds: int = 1) -> Any:
    app = client_app(Moves, parts=[Clip]) if app is None else app
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    return strategy.start(InProcessGrid(app, n), start, num_rounds=rounds).arrays


def refusal(case: Case, options: dict[str, Any]) -> str | None:
    """Return why a strategy refuses options, None if it takes them."""
    try:
        case.strategy(fraction_evaluate=0.0, **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(("one", "other"), list(combinations(PARTS, 2)))
@pytest.mark.parametrize("name", LIBRARY)
def test_every_pair_of_parts_runs_or_is_refused_by_its_reason(
    name: str, one: str, other: str
) -> None:
    case = CASES[name]
    options = {**PARTS[one], **PARTS[other]}
    for part in {one, other} & {"secure", "privacy"}:
        options |= getattr(case, part) or {}
    keeps = {"private": options["private"]} if "private" in options else {}
    if name == "personal":
        options.pop("private", None)  # its case has it
    why = refusal(case, options)
    if why is not None:
        assert one in why or other in why
        return
    strategy, _ = case.start(case.grid(parts=[Clip], **keeps), case.cut + 2, **options)
    assert not any(report.dropped for report in strategy.history)


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: ClusteredFedAvg(1, **o),
        lambda **o: Ditto(0.1, **o),
        lambda **o: PersonalizedFedAvg(["head"], **o),
        lambda **o: PersonalizedFedAvg(share="*", **o),
    ],
)
def test_a_part_of_ones_own_changes_what_clients_send(make: Any) -> None:
    found = run(make(parts=[Clip(1.0)]))
    np.testing.assert_allclose(found["body"].numpy(), 0.75 / np.sqrt(2))


def test_a_part_of_ones_own_acts_on_neighbors_messages() -> None:
    nodes: dict[int, Any] = {}

    class Keeps(Moves):
        def evaluate(self, parameters: Any, config: Any) -> Any:
            nodes[self.i] = [array.copy() for array in parameters]
            return 0.0, 1, {}

    app = client_app(Keeps, parts=[Clip])
    run(DiffusionAveraging(Topology.ring(4), parts=[Clip(1e-9)]), app, rounds=2)
    assert set(nodes) == {0, 1, 2, 3}
    clipped = nodes[3][0]
    run(DiffusionAveraging(Topology.ring(4)), app, rounds=2)
    assert (nodes[3][0] > clipped).all()  # its neighbors' models count for nothing there


def test_a_client_without_the_part_says_so() -> None:
    with pytest.raises(TooFewReplies, match="client_app"):
        run(PersonalizedFedAvg(["head"], parts=[Clip()]), client_app(Moves))


def test_parts_are_checked() -> None:
    @dataclass(frozen=True, eq=False)
    class Unnamed(Part):
        pass

    wrong: list[Any] = [[object()], [Unnamed()], [Clip(), Clip()], Clip()]
    for parts in wrong:
        with pytest.raises((TypeError, ValueError), match="parts"):
            PersonalizedFedAvg(["head"], parts=parts)
    with pytest.raises(ValueError, match="parts"):
        client_app(Moves, parts=[Moves])


def test_what_a_part_keeps_at_a_client_is_there_in_the_next_round() -> None:
    sent: list[float] = []

    @dataclass(frozen=True, eq=False)
    class Counts(Part):
        name = "counts"

        def send(self, arrays: Any, start: Any, kept: Any) -> Any:
            kept["n"] = kept.get("n", np.zeros(1)) + 1
            sent.append(float(kept["n"][0]))
            return arrays

    run(Ditto(0.1, parts=[Counts()]), client_app(Moves, parts=[Counts]), n=2, rounds=3)
    assert sent == [1, 1, 2, 2, 3, 3]
