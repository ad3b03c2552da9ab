"""Another aggregation rule: a function of the replies between one `yield` and the next."""

import numpy as np

from federated_mean import FederatedMean, one_vector
from flwr_perdl.strategies import Request


class FederatedMedian(FederatedMean):
    """The median of the clients' means, per coordinate; none may be longer than 10."""

    def protocol(self, initial, state):
        """Ask for the clients' means, once per round."""
        state = state or {"mean": np.zeros(4)}
        while True:
            replies = yield Request("mean", [state["mean"]], state=state, check=short_vector)
            means = np.stack([reply.arrays[0] for reply in replies.values()])
            state = {"mean": np.median(means, axis=0)}


def short_vector(reply):
    """Accept a reply of one vector of length 4 and norm 10 at most."""
    one_vector(reply)
    if np.linalg.norm(reply.arrays[0]) > 10:
        raise ValueError("a norm of at most 10 is asked for")
