"""Digits that clients hold turned by 0, 90, 180 or 270 degrees: scikit-learn's SGDClassifier."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg

N_CLIENTS = 16
IMAGES, LABELS = load_digits(return_X_y=True)


class DigitsClient(NumPyClient):
    """A client of scikit-learn, as it would be for FedAvg."""

    def __init__(self, context: Context) -> None:
        partition = int(context.node_config["partition-id"])
        mine = np.random.default_rng(0).permutation(len(LABELS))[partition::N_CLIENTS]
        turned = np.rot90(IMAGES[mine].reshape(-1, 8, 8), k=partition % 4, axes=(1, 2))
        X, y = turned.reshape(len(mine), -1) / 16, LABELS[mine]
        self.train, self.test = (X[:80], y[:80]), (X[80:], y[80:])
        self.model = SGDClassifier(loss="log_loss", alpha=1e-3, random_state=0)
        self.model.classes_ = np.arange(10)

    def fit(self, parameters, config):
        """Train five epochs from the weights that came."""
        X, y = self.train
        coef, intercept = (array.copy() for array in parameters)
        self.model.set_params(max_iter=5, tol=None)
        self.model.fit(X, y, coef_init=coef, intercept_init=intercept)
        return [self.model.coef_, self.model.intercept_], len(y), {}

    def evaluate(self, parameters, config):
        """Return the loss, by which the client chooses its cluster, and the accuracy."""
        X, y = self.test
        self.model.coef_, self.model.intercept_ = parameters
        loss = log_loss(y, self.model.predict_proba(X), labels=self.model.classes_)
        return loss, len(y), {"accuracy": self.model.score(X, y)}


def learn(k: int) -> None:
    """Learn k models, and print how well they do on the clients' test images."""
    strategy = ClusteredFedAvg(k, start="one-shot", num_clients=N_CLIENTS, seed=1)
    grid = InProcessGrid(client_app(DigitsClient), N_CLIENTS)
    result = strategy.start(grid, ArrayRecord([np.zeros((10, 64)), np.zeros(10)]), num_rounds=5)
    accuracy = result.evaluate_metrics_clientapp[5]["accuracy"]
    print(f"{k} models: accuracy {accuracy:.1f}, clusters {list(strategy.result.members.values())}")


learn(1)  # FedAvg
learn(4)
