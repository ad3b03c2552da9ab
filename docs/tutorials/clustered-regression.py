# %% [markdown]
# # Clustered regression: who follows which model
#
# Sixty shops have twelve days of sales each. How sales react to price and weather depends on the
# shop's kind, and nobody knows the kinds. One regression for all shops is wrong for each of them;
# a shop alone has too few days. In this tutorial the shops find the kinds together. No day is sent;
# what is sent is computed from as few as eight days.
#
# You need `pip install '.[experiments]'` in a clone ([installation](../install.md)), and less
# than a minute.

# %% [markdown]
# ## The data
#
# Three kinds of shops, drawn here so that we can compare with the truth. Columns are price,
# temperature and rain; each kind also has a level of its own.

# %%
import numpy as np

rng = np.random.default_rng(0)
effects = np.array([[-2.0, 0.5, 0.0, 3.0], [-0.5, 1.5, -1.0, 2.0], [-1.0, -0.5, 1.0, 4.0]])
kinds = rng.permutation(np.repeat([0, 1, 2], 20))
shop = np.repeat(np.arange(60), 12)
X = rng.standard_normal((len(shop), 3))
Z = np.column_stack([X, np.ones(len(shop))])
y = np.sum(Z * effects[kinds[shop]], axis=1) + 0.5 * rng.standard_normal(len(shop))
print(len(np.unique(shop)), "shops,", len(shop), "days in all")

# %% [markdown]
# ## One model for all, and one for each shop
#
# The last four days of each shop are held out. Without clusters there are two choices, and both
# predict badly: one least-squares model for all shops, or one for each from its eight days.

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
print(f"one model for all:   {error(Z[test] @ together):.2f}")
print(f"one model per shop:  {error(np.sum(Z[test] * apart[shop[test]], axis=1)):.2f}")
print("the noise itself:    0.50")

# %% [markdown]
# ## Find the kinds
#
# `MixedRegression` runs FedMD (federated moment descent, not model distillation) and FedX, with a
# client per shop, in this process. `k="auto"` finds the number of models.

# %%
from flwr_perdl.estimators import MixedRegression

model = MixedRegression(k="auto", seed=0).fit(X[train], y[train], groups=shop[train])
print("models:", len(model.coef_))
print(np.column_stack([model.coef_, model.intercept_]).round(1))
print(f"clustered models:    {error(model.predict(X[test], groups=shop[test])):.2f}")

# %% [markdown]
# Each row is a model, its intercept last, near one of the three that we drew (in another order). Is
# every shop where it belongs?

# %%
table = np.array(
    [
        [np.sum((model.labels_ == j) & (kinds == k)) for k in range(3)]
        for j in range(len(model.coef_))
    ]
)
print("rows: found clusters, columns: the true kinds")
print(table)

# %% [markdown]
# ## Is it clear who belongs where?
#
# `plot_clusters` draws each shop's error under every model. Where one point lies far below the
# others, the cluster is clear.

# %% Each shop has one error near 0.5, under its own model, and two that are several times as large
import matplotlib.pyplot as plt

from perdl_experiments.estimator_plots import plot_clusters

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
plot_clusters(model, X[train], y[train], shop[train], axes=axes)

# %% [markdown]
# ## A shop that was not there
#
# A new shop needs a few responses of its own, `y_own`, to find its model; the others are NaN.

# %%
new = rng.standard_normal((10, 3))
sales = new @ effects[1, :3] + effects[1, 3] + 0.5 * rng.standard_normal(10)
known = np.where(np.arange(10) < 3, sales, np.nan)
predicted = model.predict(new, y_own=known)
print(f"from three known days: {np.sqrt(np.mean((predicted[3:] - sales[3:]) ** 2)):.2f}")

# %% [markdown]
# ## Next
#
# - The strategy behind it, for Flower projects: [FedMD and FedX](../clustered-learning.md).
# - Models that are not linear: [clustered learning of any model](own-model.md).
# - How different must models be? [where it fails](../clustered-learning.md#where-it-fails).
