# %% [markdown]
# # Your own model: find clusters of clients
#
# Sixteen clients have handwritten digits, and each scans its pages in one of four orientations.
# A single linear classifier serves none of them well. `ClusteredFedAvg` trains four, and finds out
# which client needs which. The classifier is scikit-learn's `SGDClassifier`; for PyTorch see
# [clustered learning](../clustered-learning.md) and the app `examples/perdl-clustered`.
#
# You need `pip install '.[experiments]'` in a clone ([installation](../install.md)), and less
# than a minute.

# %% [markdown]
# ## The client
#
# An ordinary Flower client: `fit` trains from the weights it receives, `evaluate` returns a loss.
# It knows nothing of clusters.

# %%
import numpy as np
from flwr.client import NumPyClient
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

N_CLIENTS = 16
images, labels = load_digits(return_X_y=True)


def read_data(partition):
    """Return a client's images, rotated as it scans them, and their labels."""
    mine = np.random.default_rng(0).permutation(len(labels))[partition::N_CLIENTS]
    turned = np.rot90(images[mine].reshape(-1, 8, 8), k=partition % 4, axes=(1, 2))
    return turned.reshape(len(mine), -1) / 16, labels[mine]


class DigitsClient(NumPyClient):
    """Trains on 80 of its images and evaluates on the others."""

    def __init__(self, context):
        X, y = read_data(context.node_config["partition-id"])
        self.train, self.test = (X[:80], y[:80]), (X[80:], y[80:])
        self.model = SGDClassifier(
            loss="log_loss", alpha=1e-3, max_iter=5, tol=None, random_state=0
        )
        self.model.classes_ = np.arange(10)

    def fit(self, parameters, config):
        """Train five epochs from the weights received."""
        X, y = self.train
        coef, intercept = (array.copy() for array in parameters)
        self.model.fit(X, y, coef_init=coef, intercept_init=intercept)
        return [self.model.coef_, self.model.intercept_], len(y), {}

    def evaluate(self, parameters, config):
        """Return the loss, by which a client chooses its cluster."""
        X, y = self.test
        self.model.coef_, self.model.intercept_ = parameters
        loss = log_loss(y, self.model.predict_proba(X), labels=self.model.classes_)
        return loss, len(y), {"accuracy": self.model.score(X, y)}


# %% [markdown]
# ## FedAvg, and four clusters
#
# `ClusteredFedAvg(1)` is FedAvg. `InProcessGrid` simulates the clients in this process; the same
# strategy and client run on Ray and on SuperNodes.

# %%
from flwr.app import ArrayRecord

from flwr_perdl.clients import client_app
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ClusteredFedAvg

start = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
strategies = {k: ClusteredFedAvg(k, num_clients=N_CLIENTS, seed=1) for k in (1, 4)}
for k, strategy in strategies.items():
    grid = InProcessGrid(client_app(DigitsClient), N_CLIENTS)
    strategy.start(grid, start, num_rounds=8, verbose="quiet")
    print(f"{k} model(s): accuracy {strategy.history[-1].aggregate['accuracy']:.1f}")

# %% [markdown]
# ## Which client is in which cluster
#
# `strategy.result` has the models, and each client's cluster by partition. Clients 0, 4, 8, … scan
# in one orientation, 1, 5, 9, … in the next.

# %%
found = strategies[4].result
for cluster in range(4):
    print(
        f"cluster {cluster}:", [client for client, own in found.members.items() if own == cluster]
    )

# %% [markdown]
# ## Accuracy by round
#
# `strategy.history` has every client's metrics in every round.

# %% Accuracy by round: with four models it is far higher than with FedAvg's single one
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(4.2, 3), layout="constrained")
for (k, strategy), style in zip(strategies.items(), ("--", "-"), strict=True):
    rounds = [report for report in strategy.history if report.step == "evaluate"]
    accuracy = [report.aggregate["accuracy"] for report in rounds]
    axes.plot([report.round for report in rounds], accuracy, style)
    axes.annotate(f" {k} model{'s' * (k > 1)}", (rounds[-1].round, accuracy[-1]), va="center")
axes.set(xlabel="communication round", ylabel="accuracy", ylim=(0, 1))
axes.margins(x=0.36)

# %% [markdown]
# ## Next
#
# - An unknown number of clusters, robust aggregation, less communication:
#   [clustered learning](../clustered-learning.md).
# - The same change in Flower's quickstart: `examples/quickstart-clustered`.
# - Without a server: [learning with neighbors](learning-with-neighbors.md).
