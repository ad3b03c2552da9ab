# %% [markdown]
# # Clustered regression: find the groups of clients
#
# Sixty shops have twelve days of sales each. How sales respond to price and weather depends on the
# type of shop, and the types are unknown. A single regression serves no shop well, and eight
# training days per shop are too few for local training. Here the shops find the groups together,
# without sharing their data: clients send statistics of their eight days.
#
# You need `pip install '.[experiments]'` in a clone ([installation](../install.md)), and less
# than a minute.

# %% [markdown]
# ## The data
#
# Three groups of shops, synthetic so that we know the truth. The columns are price, temperature
# and rain; each group also has its own intercept.

# %%
import numpy as np

rng = np.random.default_rng(0)
effects = np.array([[-2.0, 0.5, 0.0, 3.0], [-0.5, 1.5, -1.0, 2.0], [-1.0, -0.5, 1.0, 4.0]])
types = rng.permutation(np.repeat([0, 1, 2], 20))
shop = np.repeat(np.arange(60), 12)
X = rng.standard_normal((len(shop), 3))
Z = np.column_stack([X, np.ones(len(shop))])
y = np.sum(Z * effects[types[shop]], axis=1) + 0.5 * rng.standard_normal(len(shop))
print(len(np.unique(shop)), "shops,", len(shop), "days in all")

# %% [markdown]
# ## Two baselines: one global model, and local training
#
# We hold out the last four days of each shop. Without clusters there are two choices, and both
# predict poorly: one least-squares model for all shops, or one per shop.

# %%
day = np.tile(np.arange(12), 60)
train, test = day < 8, day >= 8


def error(predictions):
    """Return the root mean squared error on the held-out days."""
    return np.sqrt(np.mean((predictions - y[test]) ** 2))


together = np.linalg.lstsq(Z[train], y[train], rcond=None)[0]
apart = np.array(
    [
        np.linalg.lstsq(Z[train & (shop == s)], y[train & (shop == s)], rcond=None)[0]
        for s in range(60)
    ]
)
print(f"one global model:    {error(Z[test] @ together):.2f}")
print(f"local training:      {error(np.sum(Z[test] * apart[shop[test]], axis=1)):.2f}")
print("noise level:         0.50")

# %% [markdown]
# ## Find the groups
#
# `MixedRegression` runs the two phases of
# [Su et al., 2022](https://arxiv.org/abs/2206.07279): FedMD (federated moment descent, not model
# distillation), then FedX, with a client per shop, in this process. `k="auto"` finds the number of
# groups.

# %%
from flwr_perdl.estimators import MixedRegression

model = MixedRegression(k="auto", seed=0).fit(X[train], y[train], groups=shop[train])
print("models:", len(model.coef_))
print(np.column_stack([model.coef_, model.intercept_]).round(1))
print(f"clustered models:    {error(model.predict(X[test], groups=shop[test])):.2f}")

# %% [markdown]
# Each row is a model, with the intercept last, and close to one of the true ones (in another
# order). Is every shop in the right cluster?

# %%
table = np.array(
    [
        [np.sum((model.labels_ == j) & (types == k)) for k in range(3)]
        for j in range(len(model.coef_))
    ]
)
print("rows: clusters found, columns: true groups")
print(table)

# %% [markdown]
# ## How clear are the clusters?
#
# `plot_clusters` shows each shop's error under every model. A shop's cluster is clear if one point
# lies far below the others.

# %% Each shop has an error near 0.5 under its own cluster's model, and larger ones under the others
import matplotlib.pyplot as plt

from perdl_experiments.estimator_plots import plot_clusters

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
plot_clusters(model, X[train], y[train], shop[train], axes=axes)

# %% [markdown]
# ## A new shop
#
# To find its cluster, a new shop needs a few known responses, `y_own`; the others are NaN.

# %%
new = rng.standard_normal((10, 3))
sales = new @ effects[1, :3] + effects[1, 3] + 0.5 * rng.standard_normal(10)
known = np.where(np.arange(10) < 3, sales, np.nan)
predicted = model.predict(new, y_own=known)
print(f"from three known days: {np.sqrt(np.mean((predicted[3:] - sales[3:]) ** 2)):.2f}")

# %% [markdown]
# ## Next
#
# - In a Flower project: the strategies [FedMD and FedX](../clustered-learning.md), and their
#   limitations.
# - For any other model: [clustered federated learning](own-model.md).
