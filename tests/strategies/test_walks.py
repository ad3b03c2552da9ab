"""How far it is through the code: every function on the way of a reply, and of a message."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import flwr_perdl
from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.diffusion import Topology
from flwr_perdl.network import FlowerNetwork
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from tests.network.programs import Consensus

HOME = str(Path(flwr_perdl.__file__).parent)

#: From a client's reply to the new global atoms.
REPLY = """
strategies/_strategy.py        ProtocolStrategy.aggregate_train
strategies/_strategy.py        _read
_records.py                    read_reply
_npy.py                        view_file
strategies/_conversation.py    Conversation.conclude
strategies/perma.py            PerMA._check
strategies/perma.py            check_shape
strategies/perma.py            PerMA.protocol
dictionary/aggregation.py      aggregate_statistics
dictionary/polar.py            polar_factors
"""


#: From a node's reply to its neighbor's request, and from there to what the neighbor hears.
MESSAGE = """
strategies/_strategy.py        ProtocolStrategy.aggregate_train
strategies/_strategy.py        _read
_records.py                    read_reply
_npy.py                        view_file
strategies/_conversation.py    Conversation.conclude
strategies/neighbor_relay.py   NeighborRelay.protocol
strategies/neighbor_relay.py   _Held.take
strategies/neighbor_relay.py   _Held.deliveries
_network/messages.py           Delivery.to_arrays
"""
HEARD = """
clients/diffusion.py           DiffusionClient.fit
_network/messages.py           Delivery.from_arrays
_network/messages.py           inbox_of
"""


def calls(run: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return the calls between this library's functions in a run: who calls, and who is called."""
    found: set[tuple[str, str]] = set()

    def name(frame: FrameType) -> str:
        code = frame.f_code
        own = re.sub(r"\.<locals>\.<\w*(comp|expr)>", "", code.co_qualname)
        return f"{Path(code.co_filename).relative_to(HOME).as_posix()} {own}"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(HOME):
                caller = caller.f_back
            found.add(("" if caller is None else name(caller), name(frame)))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def stops(walk: str, found: set[tuple[str, str]]) -> list[str]:
    """Return the stops of a walk, each of which one before it calls; no function is between."""
    way = [" ".join(line.split()) for line in walk.strip().splitlines()]
    for at, stop in enumerate(way[1:], 1):
        assert any((before, stop) in found for before in way[:at]), f"{stop} is not called"
    return way


def files(way: list[str]) -> set[str]:
    return {stop.split()[0] for stop in way}


def test_a_reply_takes_ten_calls_to_the_new_global_atoms(federation: Callable[..., Any]) -> None:
    way = stops(REPLY, calls(lambda: federation().learn(PerMA(3), rounds=2)))
    assert (len(way), len(files(way))) == (10, 7)


def test_a_message_takes_nine_calls_to_its_request_and_three_to_the_inbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # only this thread's calls are seen
    program = Consensus(np.eye(3))
    app = client_app(lambda context: DiffusionClient(program, context))
    network = FlowerNetwork(InProcessGrid(app, 3), Topology.ring(3))
    found = calls(lambda: network.run(None, 2))
    sent, heard = stops(MESSAGE, found), stops(HEARD, found)
    assert (len(sent), len(heard), len(files([*sent, *heard]))) == (9, 3, 7)
