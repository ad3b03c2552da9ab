"""The server's side: the mean of all clients' samples."""

import numpy as np

from flwr_perdl.strategies import ProtocolStrategy, Request


class FederatedMean(ProtocolStrategy):
    """The mean of all clients' samples.

    The server receives each client's mean and number of samples; a client receives the mean of all.
    """

    protocol_name = "federated-mean"

    def protocol(self, initial, state):
        """Ask for the clients' means, once per round."""
        if state is None:
            state = {"mean": np.zeros(4)}
        while True:
            replies = yield Request("mean", [state["mean"]], state=state, check=one_vector)
            weights = [reply.num_examples for reply in replies.values()]
            means = [reply.arrays[0] for reply in replies.values()]
            state = {"mean": np.average(means, axis=0, weights=weights)}


def one_vector(reply):
    """Accept a reply of one vector of length 4."""
    if [array.shape for array in reply.arrays] != [(4,)]:
        raise ValueError("one vector of length 4 is asked for")
