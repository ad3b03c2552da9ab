# %% [markdown]
# # Five hospitals: named tables
#
# Five hospitals have tables of breast tumors. One lacks ten of the thirty columns: with the
# factors that it shares with the others it explains 77 % of the energy of what it never measured;
# alone it cannot. You write hospitals by name and use scikit-learn's methods.
#
# You need `pip install '.[experiments]' pandas` in a clone ([installation](../install.md)), and
# less than a minute.

# %% [markdown]
# ## A table per hospital
#
# scikit-learn ships the table. We split it into hospitals of different sizes; most tumors in the
# south are malignant, most in the north benign. Columns have different units, so all hospitals
# divide by the same scales, as a study's protocol would fix them.

# %%
import pandas as pd
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer(as_frame=True)
table = (data.data - data.data.mean()) / data.data.std()
table = table.sample(frac=1, random_state=0)
malignant, benign = (table[data.target[table.index] == kind] for kind in (0, 1))

patients = {"north": (20, 180), "south": (120, 20), "east": (20, 20), "west": (12, 8)}
patients["center"] = (40, 129)
train, test = {}, {}
for name, (bad, good) in patients.items():
    rows = pd.concat([malignant[:bad], benign[:good]]).sample(frac=1, random_state=1)
    malignant, benign = malignant[bad:], benign[good:]
    test[name], train[name] = rows[: len(rows) // 3], rows[len(rows) // 3 :]
{name: rows.shape for name, rows in train.items()}

# %% [markdown]
# ## Fit a mapping, use names
#
# `fit` takes the mapping. Its keys are the names of the clients from now on, and a mapping gives
# a mapping back. Codes are data frames with the patients' index after `set_output`.

# %%
from flwr_perdl.estimators import PersonalizedDictionaryLearning

model = PersonalizedDictionaryLearning(n_atoms=12, n_global=9)
model.set_output(transform="pandas").fit(train)
print(model.site_names_)

codes = model.transform(test, client=list(test))  # a mapping again
codes["east"].iloc[:3, [0, 1, 2, -1]].round(2)

# %% [markdown]
# One hospital's table goes with its name; without `client`, the shared atoms alone are used, as
# for a hospital that took no part.

# %%
rebuilt = model.reconstruct(test["east"], client="east")
print(rebuilt.shape, model.atoms("east").shape, model.global_atoms_.shape)

# %% [markdown]
# A name that was not in `fit` is an error that says which there are:

# %%
try:
    model.score(test["east"], client="East")
except ValueError as error:
    print(error)

# %% [markdown]
# ## Scores per hospital
#
# `score` is the explained share of the samples' energy, here on patients who were held out. For
# comparison: each hospital alone, and all tables in one place, each with twelve atoms.


# %%
def twelve_atoms(tables):
    """Return a model of one table, none of whose atoms is withheld."""
    return PersonalizedDictionaryLearning(12, 12, min_support=0).fit([pd.concat(tables)])


together = twelve_atoms(list(train.values()))
scores = {
    name: {
        "alone": twelve_atoms([train[name]]).score(test[name], client=0),
        "shared atoms": model.score(test[name]),
        "shared and own": model.score(test[name], client=name),
        "one place": together.score(test[name], client=0),
    }
    for name in test
}
pd.DataFrame(scores).T.round(3)

# %% [markdown]
# These columns repeat each other, so that a few patients are enough for twelve good atoms, and a
# hospital gains little by the others. It gains where it lacks something:
#
# ## Missing values
#
# NaN is a missing value. Now the west has never measured the ten columns that begin with "worst",
# and the east misses one value in five. `reconstruct` fills both in. The figure is the explained
# share of the energy of what was missing.

# %%
import numpy as np

gaps = {name: rows.copy() for name, rows in train.items()}
never = [column for column in table if column.startswith("worst")]
gaps["west"][never] = np.nan
gaps["east"] = gaps["east"].mask(np.random.default_rng(0).random(gaps["east"].shape) < 0.2)


def filled_in(fitted, name, client):
    """Return the explained share of the energy of a hospital's missing values."""
    guess, hidden = fitted.reconstruct(gaps[name], client=client), gaps[name].isna().to_numpy()
    truth = train[name].to_numpy()[hidden]
    return 1 - np.sum((truth - guess[hidden]) ** 2) / np.sum(truth**2)


fitted = PersonalizedDictionaryLearning(12, 9).fit(gaps)
together = twelve_atoms(list(gaps.values()))
filled = {
    name: {
        "shared atoms": filled_in(fitted, name, None),
        "shared and own": filled_in(fitted, name, name),
        "one place": filled_in(together, name, 0),
    }
    for name in ("west", "east")
}
filled["east"]["alone"] = filled_in(twelve_atoms([gaps["east"]]), "east", 0)
pd.DataFrame(filled).T.round(2)

# %% [markdown]
# The west has no figure alone: `fit` rejects a column that no table has. Shared atoms alone fill
# in better than with own ones: those, learned from few incomplete rows, fit what is there and
# mislead about the rest.

# %% [markdown]
# ## Cross-validation by hospital
#
# How well do shared atoms serve a hospital that took no part? `cross_val_score` leaves out one
# after the other. scikit-learn takes entries of its `X` by number: give it
# `list(train.values())`. A mapping ends with a `KeyError`, also in `GridSearchCV`.

# %%
from sklearn.model_selection import LeaveOneOut, cross_val_score

left_out = cross_val_score(model, list(train.values()), cv=LeaveOneOut())
pd.Series(left_out, index=list(train)).round(3)

# %% [markdown]
# How many atoms should be shared? [The guide](../perma.md#how-many-atoms-how-many-shared) searches
# over patients whom each hospital holds out. A hospital that joins later:
# `model.add_site(new_table)`.
