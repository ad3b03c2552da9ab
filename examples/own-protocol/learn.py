"""The clients' side, and runs of three clients in this process."""

import numpy as np

from federated_mean import FederatedMean
from federated_median import FederatedMedian
from flwr_perdl.clients import StepResult, client_app, step
from flwr_perdl.simulations import InProcessGrid


class MeanClient:
    """Has samples."""

    def __init__(self, context):
        partition = int(context.node_config["partition-id"])
        self.X = np.full((partition + 1, 4), float(partition))


@step("federated-mean", "mean", client=MeanClient)
def mean(local, request):
    """Send the mean of the client's samples, and their number."""
    X = local.client.X
    return StepResult([X.mean(axis=0)], len(X))


app = client_app(MeanClient, protocols=[mean])
for Protocol in (FederatedMean, FederatedMedian):
    strategy = Protocol(fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(app, 3), num_rounds=1)
    (found,) = result.arrays.to_numpy_ndarrays()
    print(f"{Protocol.__name__}: {found.round(6)}")
