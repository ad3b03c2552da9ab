"""Small distributed algorithms whose results are known, for the tests of networks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.diffusion import Inbox


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: NDArray[np.float64]


class Consensus:
    """Every node replaces its row by the weighted mean of its neighbourhood's."""

    def __init__(self, data: NDArray[np.float64]) -> None:
        self.data = data

    def start(self, nodes: NDArray[np.intp]) -> Held:
        return Held(nodes, np.stack([self.data[k] for k in nodes]))

    def adapt(self, state: Held, round_: int) -> Held:
        return state

    def message(self, state: Held) -> tuple[NDArray[np.float64], ...]:
        return (state.value,)

    def combine(self, state: Held, inbox: Inbox) -> Held:
        return state._replace(value=inbox.mean())

    def observe(self, state: Held) -> dict[str, NDArray[np.float64]]:
        return {"value": state.value}
