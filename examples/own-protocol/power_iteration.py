"""Power iteration over all clients' rows; its server needs sums only, and may get no more."""

import numpy as np

from flwr_perdl.clients import StepResult, client_app, step
from flwr_perdl.random import spawn
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ProtocolStrategy, Request, SecureMean

N_FEATURES = 4
SPREAD = np.diag([3.0, 1.0, 0.5, 0.2])  # of the rows: the first column varies most


class PowerIteration(ProtocolStrategy):
    """The leading principal direction of all clients' rows."""

    protocol_name = "power-iteration"

    def __init__(self, secure, **options):
        super().__init__(**options)
        self.secure = SecureMean((N_FEATURES,), norm=100.0) if secure else None

    def protocol(self, initial, state):
        """Multiply by the clients' mean second moment, and bring the product to norm 1."""
        if state is None:
            state = {"v": spawn(self.options.seed).standard_normal(N_FEATURES)}
        while True:
            replies = yield Request("multiply", [state["v"]], state=state, secure=self.secure)
            product = np.mean([reply.arrays[0] for reply in replies.values()], axis=0)
            state = {"v": product / np.linalg.norm(product)}


class RowsClient:
    """Has rows."""

    def __init__(self, context):
        rng = np.random.default_rng(int(context.node_config["partition-id"]))
        self.X = rng.standard_normal((50, N_FEATURES)) @ SPREAD


@step("power-iteration", "multiply", client=RowsClient)
def multiply(local, request):
    """Send the client's second moment times the server's vector."""
    X, (v,) = local.client.X, request.arrays
    return StepResult([X.T @ (X @ v) / len(X)], len(X))


if __name__ == "__main__":
    app = client_app(RowsClient, protocols=[multiply])
    for secure in (False, True):
        strategy = PowerIteration(secure, fraction_evaluate=0.0, seed=1)
        result = strategy.start(InProcessGrid(app, 4), num_rounds=20)
        (v,) = result.arrays.to_numpy_ndarrays()
        print(f"secure={secure}: {np.abs(v).round(3)}")
