"""The server's side: IFCA (Ghosh et al., NeurIPS 2020), as the paper lists it."""

import numpy as np

from flwr_perdl.strategies import ProtocolStrategy, Request


class IFCA(ProtocolStrategy):
    """k models; in each round every client trains the one with the lowest loss on its data."""

    def protocol(self, initial, state):
        """Send all models; average those that come back, cluster by cluster."""
        stacks = initial if state is None else [state[str(i)] for i in range(len(state))]
        while True:
            state = {str(i): stack for i, stack in enumerate(stacks)}
            replies = yield Request("train", stacks, state=state, metrics=("cluster",))
            stacks = [stack.copy() for stack in stacks]
            for j in range(len(stacks[0])):
                own = [reply for reply in replies.values() if reply.metrics["cluster"] == j]
                sizes = [reply.num_examples for reply in own]
                for i in range(len(stacks) if own else 0):
                    stacks[i][j] = np.average([r.arrays[i] for r in own], axis=0, weights=sizes)
