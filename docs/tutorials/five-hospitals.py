# %% [markdown]
# # Five hospitals: data frames, names and missing values
#
# Five hospitals have tables of breast tumors. One of them lacks ten of the thirty columns: the
# atoms that it shares with the others explain 77 % of the energy of what it never measured, which
# local training can't. You refer to hospitals by name and use scikit-learn's interface.
#
# You need `pip install '.[experiments]' pandas` in a clone ([installation](../install.md)), and
# less than a minute.

# %% [markdown]
# ## A table per hospital
#
# The data come with scikit-learn. We split them into hospitals of different sizes and with label
# skew: in the south most tumors are malignant, in the north most are benign. Columns have different
# units, so all hospitals use the same scales, as a study protocol would define them.

# %%
import pandas as pd
from sklearn.datasets import load_breast_cancer

data = load_breast_cancer(as_frame=True)
table = (data.data - data.data.mean()) / data.data.std()
table = table.sample(frac=1, random_state=0)
malignant, benign = (table[data.target[table.index] == label] for label in (0, 1))

patients = {"north": (20, 180), "south": (120, 20), "east": (20, 20), "west": (12, 8)}
patients["center"] = (40, 129)
train, test = {}, {}
for name, (bad, good) in patients.items():
    rows = pd.concat([malignant[:bad], benign[:good]]).sample(frac=1, random_state=1)
    malignant, benign = malignant[bad:], benign[good:]
    test[name], train[name] = rows[: len(rows) // 3], rows[len(rows) // 3 :]
{name: rows.shape for name, rows in train.items()}

# %% [markdown]
# ## Clients have names
#
# `fit` takes a mapping, whose keys name the clients. A mapping in gives a mapping back, and after
# `set_output` codes are data frames with the patients' index.

# %%
from flwr_perdl.estimators import PersonalizedDictionaryLearning

model = PersonalizedDictionaryLearning(n_atoms=12, n_global=9)
model.set_output(transform="pandas").fit(train)
print(model.site_names_)

codes = model.transform(test, client=list(test))  # a mapping again
codes["east"].iloc[:3, [0, 1, 2, -1]].round(2)

# %% [markdown]
# Pass one hospital's table with its name. Without `client`, only the shared atoms are used, as for
# a hospital that didn't take part.

# %%
rebuilt = model.reconstruct(test["east"], client="east")
print(rebuilt.shape, model.atoms("east").shape, model.global_atoms_.shape)

# %% [markdown]
# An unknown name is an error that lists the known ones:

# %%
try:
    model.score(test["east"], client="East")
except ValueError as error:
    print(error)

# %% [markdown]
# ## Scores per hospital
#
# `score` is the explained share of the samples' energy, here for held-out patients. We compare with
# local training and with pooled data, twelve atoms each.


# %%
def twelve_atoms(tables):
    """Return a model of one site, which withholds no atoms."""
    return PersonalizedDictionaryLearning(12, 12, min_support=0).fit([pd.concat(tables)])


together = twelve_atoms(list(train.values()))
scores = {
    name: {
        "local training": twelve_atoms([train[name]]).score(test[name], client=0),
        "shared atoms": model.score(test[name]),
        "shared and personal": model.score(test[name], client=name),
        "pooled": together.score(test[name], client=0),
    }
    for name in test
}
pd.DataFrame(scores).T.round(3)

# %% [markdown]
# The columns are highly correlated: a few patients suffice for twelve good atoms, and federating
# gains little. It pays where a hospital lacks something:
#
# ## Missing values
#
# NaN is a missing value. Now the west never measured the ten columns that begin with "worst", and
# the east lacks one value in five. `reconstruct` fills in both; the score is the explained share of
# the energy of the missing values.

# %%
import numpy as np

gaps = {name: rows.copy() for name, rows in train.items()}
never = [column for column in table if column.startswith("worst")]
gaps["west"][never] = np.nan
gaps["east"] = gaps["east"].mask(np.random.default_rng(0).random(gaps["east"].shape) < 0.2)


def filled_in(fitted, name, client):
    """Return the explained share of the missing values' energy."""
    guess, hidden = fitted.reconstruct(gaps[name], client=client), gaps[name].isna().to_numpy()
    truth = train[name].to_numpy()[hidden]
    return 1 - np.sum((truth - guess[hidden]) ** 2) / np.sum(truth**2)


fitted = PersonalizedDictionaryLearning(12, 9).fit(gaps)
together = twelve_atoms(list(gaps.values()))
filled = {
    name: {
        "shared atoms": filled_in(fitted, name, None),
        "shared and personal": filled_in(fitted, name, name),
        "pooled": filled_in(together, name, 0),
    }
    for name in ("west", "east")
}
filled["east"]["local training"] = filled_in(twelve_atoms([gaps["east"]]), "east", 0)
pd.DataFrame(filled).T.round(2)

# %% [markdown]
# The west has no score for local training: `fit` rejects a column that no table has. Shared atoms
# fill in better without the personal ones, which overfit: they are learned from few, incomplete
# rows.

# %% [markdown]
# ## Leave one hospital out
#
# How well do the shared atoms serve a hospital that didn't take part? `cross_val_score` leaves out
# one after the other. scikit-learn indexes `X` by number, so pass `list(train.values())`; a mapping
# raises a `KeyError`, in `GridSearchCV`, too.

# %%
from sklearn.model_selection import LeaveOneOut, cross_val_score

left_out = cross_val_score(model, list(train.values()), cv=LeaveOneOut())
pd.Series(left_out, index=list(train)).round(3)

# %% [markdown]
# ## Next
#
# - [How many atoms, and how many shared](../perma.md#how-many-atoms-how-many-shared).
# - A hospital that joins later: `model.add_site(new_table)`.
# - The same with the data at the hospitals: [in your project](../use-in-your-project.md).
