"""Which clients of a table follow the same linear model: python learn.py TABLE OUT.npz."""

import sys

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import RegressionClient, client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FedX


def read(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return X, y and each row's client, of a .csv file or of an .npz file with these arrays."""
    if path.endswith(".npz"):
        with np.load(path) as data:
            return data["X"], data["y"], data["client"]
    table = np.loadtxt(path, delimiter=",", skiprows=1)  # client, y, features
    return table[:, 2:], table[:, 1], table[:, 0].astype(int)


def make_client(context: Context) -> RegressionClient:
    """Return the client of one node, with its own rows."""
    mine = client == names[context.node_config["partition-id"]]
    return RegressionClient(X[mine], y[mine], context)


path, out = sys.argv[1:]
X, y, client = read(path)
names = np.unique(client)

strategy = FedX(seed=1)  # finds the number of models; FedX(2) is told
result = strategy.start(InProcessGrid(client_app(make_client), len(names)), num_rounds=20)
(models,) = result.arrays.to_numpy_ndarrays()
clusters = np.array([one["cluster"] for one in strategy.history[-1].metrics.values()])

for k, model in enumerate(models):
    terms = " + ".join(f"{slope:.1f} x{j}" for j, slope in enumerate(model))
    print(f"{np.sum(clusters == k)} clients follow y = {terms}, such as {names[clusters == k][:3]}")
np.savez(out, models=models, clients=names, clusters=clusters)
