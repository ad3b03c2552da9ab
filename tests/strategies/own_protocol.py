"""A protocol that is no part of the library, in one file: its client's steps and its strategy."""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_perdl.clients import Local, StepRequest, StepResult, step
from flwr_perdl.strategies import ProtocolStrategy, Request

OWN = "own-mean"


class OwnClient:
    """A client without ``fit``: samples alone."""

    def __init__(self, samples: np.ndarray) -> None:
        self.samples = samples


@step(OWN, "mean", client=OwnClient)
def mean(local: Local, request: StepRequest) -> StepResult:
    """Send the mean of the samples, a draw, and how often this client has been asked."""
    kept = local.kept.before(request.round) or {"times": np.zeros(())}
    times = kept["times"] + 1
    sent = request.arrays[0] / 2 + local.client.samples.mean(axis=0) + local.rng.normal() / times
    metrics = {"partition": local.partition, "times": float(times)}
    return StepResult([sent], len(local.client.samples), metrics, {"times": times})


class OwnMean(ProtocolStrategy):
    """The mean over clients."""

    protocol_name = OWN

    def protocol(self, initial: Any, state: Any) -> Any:
        """Ask and average."""
        state = {"mean": np.zeros(2)} if state is None else state
        while True:
            replies = yield Request("mean", [state["mean"]], state=state, check=one_vector)
            state = {"mean": np.mean([reply.arrays[0] for reply in replies.values()], axis=0)}


def one_vector(reply: Any) -> None:
    """Accept a vector of two numbers."""
    if [array.shape for array in reply.arrays] != [(2,)]:
        raise ValueError("one vector is asked for")
