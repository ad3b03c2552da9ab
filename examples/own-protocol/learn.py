"""The clients' side, and a run of three clients in this process."""

import numpy as np
from flwr.client import NumPyClient

from federated_mean import FederatedMean
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


strategy = FederatedMean(fraction_evaluate=0.0)
result = strategy.start(InProcessGrid(client_app(MeanClient), 3), num_rounds=1)
(mean,) = result.arrays.to_numpy_ndarrays()
print(f"mean of all samples: {mean.round(6)}")
assert np.allclose(mean, (0 * 1 + 1 * 2 + 2 * 3) / 6)
