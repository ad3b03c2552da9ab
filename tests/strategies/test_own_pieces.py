"""A Flower user's own pieces: template clients, apps without a query, mods, few clients, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.client import NumPyClient

from flwr_perdl.clients import DictionaryClient, DiffusionClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.network import Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    NeighborRelay,
    PerMA,
    ServerSettings,
    TooFewReplies,
)
from tests.network.programs import Consensus

X = np.random.default_rng(0).standard_normal((30, 4))

RESUME = ServerSettings(resume=True)


def dictionary(context: Any) -> DictionaryClient:
    return DictionaryClient(X, OrthogonalLearner(4), context)


class Template(NumPyClient):
    """As Flower's templates have it: nothing says who it is."""

    def __init__(self, reply: Any = None) -> None:
        self.reply = np.eye(2) if reply is None else reply

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return [self.reply], 1, {}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        return 0.0, 1, {}


def grid(n: int = 3, factory: Any = dictionary, mods: Any = (), **options: Any) -> InProcessGrid:
    return InProcessGrid(client_app(factory, train_mods=mods), n, **options)


def test_what_a_client_says_of_itself_goes_before_its_context() -> None:
    class Named(Template):
        def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
            return {"name": "north"}

    strategy = PerMA(2, min_clients=1)
    with pytest.raises(TooFewReplies, match=r"client 0 \(north\)"):
        strategy.start(grid(1, lambda context: Named()), num_rounds=2)


def test_a_mod_that_sends_another_message_is_named() -> None:
    def other(message: Message, context: Any, call_next: Any) -> Message:
        return Message(call_next(message, context).content, dst_node_id=1, message_type="train")

    with pytest.raises(TooFewReplies, match="mod"):
        PerMA(2).start(grid(mods=[other]), num_rounds=1)


RESUMED: dict[str, tuple[Any, Any]] = {
    "PerMA": (lambda **options: PerMA(2, **options), dictionary),
    "NeighborRelay": (
        lambda **options: NeighborRelay(Topology.ring(3), 3, **options),
        lambda context: DiffusionClient(Consensus(np.zeros((3, 1))), context),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("kept", [False, True])
def test_clients_that_lost_their_state_between_two_starts_are_warned_of(
    tmp_path: Path, warned: Any, name: str, kept: bool
) -> None:
    make, factory = RESUMED[name]
    own = {"node_config": lambda partition: {"state-dir": str(tmp_path / "s")}} if kept else {}
    whole = make()
    whole.start(grid(factory=factory), num_rounds=4)
    make(checkpoint_dir=tmp_path / "c").start(grid(factory=factory, **own), num_rounds=3)
    assert "was lost" not in warned.text
    again = make(checkpoint_dir=tmp_path / "c", server=RESUME)
    again.start(grid(factory=factory, **own), num_rounds=4)
    assert ("client 0, client 1, client 2 was lost" in warned.text) is not kept


@pytest.mark.parametrize(
    ("sites", "called"),
    [
        (["north", "south", "west"], ["north", "south", "west"]),
        (["north", "", "north"], ["0 (north)", "1", "2 (north)"]),
        (["1", "", "0 (north)"], ["0 (1)", "1", "2 (0 (north))"]),
    ],
)
def test_names_of_the_clients_are_by_partition(
    sites: list[str], called: list[str], tmp_path: Path
) -> None:
    """Also of a client that a resumed run has not seen."""
    here = grid(node_config=lambda partition: {"name": sites[partition]})
    strategy = PerMA(2, fraction_evaluate=0.0, checkpoint_dir=tmp_path)
    strategy.start(here, num_rounds=1)
    assert strategy.client_names == dict(enumerate(called))
    assert PerMA(2).client_names == {}
    resumed = PerMA(2, fraction_evaluate=0.0, checkpoint_dir=tmp_path, server=RESUME)
    resumed.start(grid(2), num_rounds=2)
    assert resumed.client_names[2] == called[2]
