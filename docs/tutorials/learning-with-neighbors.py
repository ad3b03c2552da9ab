# %% [markdown]
# # Learning with neighbors: a classifier without a server
#
# Sixteen hospitals train a classifier together. None of them may send its model to a server, but
# each exchanges models with a few others. Each has images of only two of ten handwritten digits
# (label skew); in the end, every model recognizes all ten.
#
# You need `pip install '.[experiments]'` in a clone ([installation](../install.md)), and less
# than a minute.

# %% [markdown]
# ## The client
#
# An ordinary Flower client: softmax regression in NumPy. (The same in PyTorch:
# [learning without a server](../decentralized-learning.md).) Node k has the digits k and k + 1, or
# 9 and 0.

# %%
import numpy as np
from flwr.client import NumPyClient
from sklearn.datasets import load_digits

N_NODES = 16
X, y = load_digits(return_X_y=True)
X = X / 16
order = np.random.default_rng(0).permutation(len(y))
train, test = order[:1400], order[1400:]


def read_data(node):
    """Return a node's samples, of two digits only."""
    mine = train[np.isin(y[train], [node % 10, (node + 1) % 10])]
    return X[mine[node // 10 :: 2]], y[mine[node // 10 :: 2]]


class Softmax(NumPyClient):
    """Softmax regression."""

    def __init__(self, node):
        self.X, self.y = read_data(node)

    def fit(self, parameters, config):
        """Take five gradient steps."""
        W, b = parameters
        for _ in range(5):
            scores = self.X @ W + b
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = (p / p.sum(axis=1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
            W, b = W - 0.3 * self.X.T @ error, b - 0.3 * error.sum(axis=0)
        return [W, b], len(self.y), {}

    def evaluate(self, parameters, config):
        """Return the accuracy on held-out images of all digits."""
        W, b = parameters
        accuracy = float(np.mean((X[test] @ W + b).argmax(axis=1) == y[test]))
        return 1 - accuracy, len(test), {"accuracy": accuracy}


# %% [markdown]
# ## Choose a graph
#
# In a ring every node has two neighbors; in an exponential graph node k is linked to the nodes
# 1, 2, 4, … places away. The larger the spectral gap, the faster information spreads.

# %%
from flwr_perdl.network import Topology, diffusion_averaging, metropolis_weights

networks = {"ring": Topology.ring(N_NODES), "exponential": Topology.exponential(N_NODES)}
for name, topology in networks.items():
    links = topology.adjacency.sum() / N_NODES
    gap = metropolis_weights(topology).spectral_gap
    print(f"{name}: {links:.0f} neighbors each, spectral gap {gap:.2f}")

# %% [markdown]
# ## Train
#
# In each round every node trains its model, sends it to its neighbors, and averages it with theirs.
# `diffusion_averaging` runs all nodes in this process; in a Flower app the strategy
# [DiffusionAveraging](../decentralized-learning.md) does the same, encrypted if you like.

# %%
initial = [np.zeros((64, 10)), np.zeros(10)]
learned = {
    name: diffusion_averaging(
        Softmax, topology, 300, initial=initial, metrics=["accuracy"], evaluate_every=5
    )
    for name, topology in networks.items()
}
local = initial
for _ in range(300):
    local = Softmax(3).fit(local, {})[0]
print(f"local training, node 3: accuracy {Softmax(3).evaluate(local, {})[2]['accuracy']:.2f}")
for name, done in learned.items():
    last = done.curves["evaluate-accuracy"][-1]
    print(f"{name}: accuracy {last.min():.2f} at the worst node, {last.max():.2f} at the best")

# %% [markdown]
# ## The worst node by round
#
# `curves` has a row per round and a column per node.

# %% Accuracy of the worst node by round: at first the exponential graph is ahead of the ring
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
rounds = np.arange(5, 301, 5)
for (name, done), style in zip(learned.items(), ("-", "--"), strict=True):
    worst = done.curves["evaluate-accuracy"][rounds - 1].min(axis=1)
    axes.plot(rounds, worst, style, label=name)
axes.set(xlabel="communication round", ylabel="accuracy, worst node", ylim=(0, 1))
axes.legend(loc="lower right")

# %% [markdown]
# ## Next
#
# - In a Flower app, with other methods, changing graphs and lost messages:
#   [learning without a server](../decentralized-learning.md).
# - Which graph? [What each costs](../decentralized-learning.md#choose-a-graph).
# - Nodes that form groups: [groups without a server](../groups-without-a-server.md).
# - A dictionary instead of a classifier: [dictionaries over networks](../model-diffusion.md).
