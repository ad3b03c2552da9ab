"""The clients' side, and runs of three clients in this process."""

import numpy as np
from flwr.client import NumPyClient

from federated_mean import FederatedMean
from federated_median import FederatedMedian
from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid


class MeanClient(NumPyClient):
    """Sends the mean of its samples."""

    def __init__(self, context):
        partition = int(context.node_config["partition-id"])
        self.X = np.full((partition + 1, 4), float(partition))

    def fit(self, parameters, config):
        """Return the mean, and the number of samples."""
        assert config["perdl.step"] == "mean"
        return [self.X.mean(axis=0)], len(self.X), {}


for Protocol in (FederatedMean, FederatedMedian):
    strategy = Protocol(fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(client_app(MeanClient), 3), num_rounds=1)
    (found,) = result.arrays.to_numpy_ndarrays()
    print(f"{Protocol.__name__}: {found.round(6)}")
