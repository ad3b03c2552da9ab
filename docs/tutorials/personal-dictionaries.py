# %% [markdown]
# # Personal dictionaries: shared and private atoms
#
# Six sites share images of 0 and 1; each also has one digit of its own. They learn 12 *atoms*
# jointly and 12 privately: small images whose sparse combinations rebuild the digits. All sites
# share the *global* atoms; *local* atoms stay at their site after the first round.
#
# You need `pip install '.[experiments]'` in a clone ([installation](../install.md)), and about a
# minute.

# %% [markdown]
# ## The data
#
# scikit-learn has 1,797 digits of 8 x 8 pixels. Each site gets 60 images of zeros and ones and 100
# of its own digit. We subtract each image's mean, so that atoms describe shape, not brightness.

# %%
import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = images / 16 - images.mean(axis=1, keepdims=True) / 16

common = images[labels < 2]
own = {digit: images[labels == digit] for digit in range(4, 10)}
sites = [
    np.vstack([common[60 * i : 60 * (i + 1)], own[digit][:100]]) for i, digit in enumerate(own)
]
print(len(sites), "sites,", sites[0].shape[0], "images each,", sites[0].shape[1], "pixels")

# %% [markdown]
# ## Train
#
# `fit` runs a federation in this process: a Flower client per site, and the strategy
# [PerMA](../perma.md).

# %%
from flwr_perdl.estimators import PersonalizedDictionaryLearning

model = PersonalizedDictionaryLearning(n_atoms=24, n_global=12, n_nonzero=5).fit(sites)
print("global atoms:", model.global_atoms_.shape)
print("local atoms of each site:", [atoms.shape[0] for atoms in model.local_atoms_])

# %% [markdown]
# ## Look at the atoms
#
# The ten global atoms in the first row look like zeros and ones, which all sites have. Each further
# row has ten local atoms of a site, and most look like its own digit. Signs have no meaning: a
# digit may be red on blue or blue on red.

# %% Seven rows of ten atoms: the global ones, then the local ones of each of the six sites
import matplotlib.pyplot as plt

rows = [model.global_atoms_, *model.local_atoms_]
names = ["global", *(f"local, {digit}" for digit in own)]
figure, axes = plt.subplots(len(rows), 10, figsize=(8, 6), layout="constrained")
for row, atoms, name in zip(axes, rows, names, strict=True):
    for place, atom in zip(row, atoms, strict=False):
        place.imshow(atom.reshape(8, 8), cmap="RdBu_r", vmin=-0.5, vmax=0.5)
    for place in row:
        place.set(xticks=[], yticks=[])
    row[0].set_ylabel(name, rotation=0, ha="right", va="center")

# %% [markdown]
# ## Reconstruct held-out images
#
# Each site reconstructs further images of its own digit from five atoms per image, first with the
# 12 global atoms only, then also with its 12 local ones.

# %% Two bars per site: the error with global atoms only, and a lower one with local atoms
new = {digit: own[digit][100:] for digit in own}


def error(digit, client):
    """Return the mean squared error of the images of a digit."""
    return np.mean((model.reconstruct(new[digit], client=client) - new[digit]) ** 2)


shared = [error(digit, None) for digit in new]
personal = [error(digit, i) for i, digit in enumerate(new)]
places = np.arange(len(new))
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.bar(places - 0.2, shared, 0.4, label="global atoms only", color="#0072b2")
axes.bar(places + 0.2, personal, 0.4, label="global and local atoms", color="#e69f00", hatch="//")
axes.set(xlabel="the site's own digit", ylabel="mean squared error", xticks=places)
axes.set_xticklabels(list(new))
axes.legend()
print(f"Local atoms lower the mean error by {1 - np.mean(personal) / np.mean(shared):.0%}.")

# %% [markdown]
# ## Which site uses which atom
#
# `plot_sharing` shows how much of a site's codes (sparse coefficients) falls on each global atom;
# the last column has all local atoms together.

# %% A row per site: the shares of the global atoms in its codes, and of its local atoms together
from perdl_experiments.estimator_plots import plot_sharing

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
plot_sharing(model, sites, axes=axes)

# %% [markdown]
# ## What a site sends
#
# In the first round, the server sees each site's dictionary. In all later rounds, a site sends only
# sums for the global atoms: no image, no code, no local atom
# ([who learns what](../security.md#perma)).

# %%
floats = [report.floats_up for report in model.history_ if report.step == "update"]
print(f"sent per site and round: {8 * floats[0] / 1e6:.3f} MB")

# %% [markdown]
# ## Next
#
# - Do private atoms pay for your data, and
#   [how many atoms to share](../perma.md#how-many-atoms-how-many-shared)?
# - Names, data frames and missing values: [five hospitals](five-hospitals.md).
# - With the data at the sites: [in your Flower project](../use-in-your-project.md).
