"""Bi-clustering of gene expressions: Section IV-C, Algorithms 3 and 4, Fig. 8.

P1 = Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. A sample is
one gene's expression over all subjects. Algorithm 3 finds sparse rank-one layers of the whole
matrix; Algorithm 4 sees every gene once, with one agent per atom. The atoms tell the subjects
apart: k-means clusters them, without labels, and the adjusted Rand index compares with labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_array, check_count, check_real
from flwr_perdl._random import DATA, SERVER, spawn
from flwr_perdl.diffusion.biclustering import profiles, ssvd
from flwr_perdl.diffusion.model_diffusion import ModelDiffusion
from flwr_perdl.diffusion.objectives import Biclustering
from flwr_perdl.diffusion.topology import Topology
from perdl_experiments.baselines import sklearn_seed
from perdl_experiments.data import cached_by_file, names_in, read_arrays
from perdl_experiments.engine import Config
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import Keep, Value, seeds_of
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.words import plural

NAME = "biclustering"
ABOUT = "Sparse layers of gene expressions tell subjects apart, all at once or gene by gene"
SOURCE = "Chen, Towfic, Sayed, IEEE TSP 2015, Section IV-C and Fig. 8"
DEFAULTS: dict[str, Value] = {
    "clients": 0,
    "rounds": 1,
    "seed": 0,
    "data": "",
    "seeds": 5,
    "atoms": 3,
    "k": "auto",
    "thresholds": "sure",
    "noise": 1.3,
    "informative": 160,
}
HELP: dict[str, str] = {
    "rounds": "passes over the genes",
    "data": "your expressions: `.npz` with `X` and, if known, `y`",
    "seeds": "planted data sets, one per seed; with your data, orders of its genes",
    "atoms": "layers",
    "k": "clusters: as many as labels, or atoms and one",
    "thresholds": "how Algorithm 3 chooses its thresholds, without labels: `sure` or `bic`",
    "noise": "of the planted data",
    "informative": "genes of the planted 400 that tell a type",
}
FIGURES: tuple[str, ...] = ("layers.png", "loadings.png")
ERROR = "ari_diffusion"

#: Algorithm 4's parameters, in units of the expressions' root mean square: the paper's gamma = 0.5,
#: beta = 0.01 and mu_w = 0.005 on data like lung200, where that is 1.63 and there are 56 subjects.
GAMMA, BETA, DELTA = 0.3, 0.004, 0.01
#: mu_w times the number of subjects.
STEP = 0.75
#: Relative error of the dual variables at which inference ends.
TOLERANCE = 1e-2
#: The bundled data.
SUBJECTS, GENES, TYPES = 60, 400, 4
METHODS = {
    "svd": "the plain SVD",
    "ssvd": "sparse layers, all genes at once (Algorithm 3)",
    "diffusion": "an agent per atom, gene by gene (Algorithm 4)",
}
#: Starts of k-means.
_STARTS = 20


class Data(NamedTuple):
    """Expressions of genes over subjects.

    Attributes
    ----------
    X : ndarray of shape (n_genes, n_subjects)
        Every gene has mean zero; the root mean square of all is 1.
    labels : ndarray of shape (n_subjects,), or None
        What the subjects are, as text.
    """

    X: Matrix
    labels: NDArray[np.str_] | None


def run(config: Config, keep: Keep) -> Outcome:
    """Run both algorithms and the plain SVD with every seed, cluster the subjects, and compare."""
    atoms = check_count("atoms", config["atoms"], 2)
    if int(config["clients"]) not in (0, atoms):
        raise ValueError(f"clients must be {atoms}, one per atom, got {config['clients']}.")
    parts = {f"seed-{seed}": partial(_one_seed, config, seed) for seed in seeds_of(config)}
    results = keep_all(keep, parts)
    data = _data(config, int(config["seed"]))
    metrics = {
        name: float(np.mean([float(one[name]) for one in results]))
        for name in results[0]
        if results[0][name].ndim == 0
    }
    return Outcome(
        metrics=metrics,
        curves={
            name: [float(one[name]) for one in results] for name in metrics if len(results) > 1
        },
        arrays={
            f"{part}_{name}": results[0][f"{part}_{name}"]
            for part in ("atoms", "clusters")
            for name in METHODS
        }
        | {name: results[0][name] for name in ("codes_ssvd", "codes_diffusion", "thresholds")},
        tables=_tables(data, results),
        pictures=_pictures(data, results[0]),
        notes=_notes(config, data, results[0]),
        rounds=round(metrics["rounds"]),
        floats_up=metrics["floats"],
        floats_down=metrics["floats"],
    )


def _one_seed(config: Config, seed: int) -> dict[str, NDArray[Any]]:
    """Return atoms, clusters and figures of all methods with one seed."""
    data, n_atoms = _data(config, seed), int(config["atoms"])
    k = _k(config, data)
    _, strengths, rows = np.linalg.svd(data.X, full_matrices=False)
    layers = ssvd(data.X, n_atoms, thresholds=str(config["thresholds"]))
    online = _online(data.X, n_atoms, int(config["rounds"]), seed)
    found = {
        "svd": (rows[:n_atoms], strengths[:n_atoms]),
        "ssvd": (layers.atoms, np.linalg.norm(layers.codes, axis=0)),
        "diffusion": (online["atoms"], np.linalg.norm(online["codes"], axis=0)),
    }
    kept: dict[str, NDArray[Any]] = {
        "k": np.array(k),
        "rounds": online["rounds"],
        "floats": online["floats"],
        "genes_per_layer": np.count_nonzero(layers.codes, axis=0).mean(),
        "codes_ssvd": layers.codes,
        "codes_diffusion": online["codes"],
        "thresholds": layers.thresholds,
    }
    for name, (atoms, weights) in found.items():
        clusters = _clusters(profiles(atoms, weights), k, seed)
        kept[f"atoms_{name}"], kept[f"clusters_{name}"] = atoms, clusters
        if data.labels is not None:
            kept[f"ari_{name}"] = _rand_index(data.labels, clusters)
            raw = _clusters(np.ascontiguousarray(atoms.T), k, seed)
            kept[f"ari_{name}_rows"] = _rand_index(data.labels, raw)
    if data.labels is None:
        kept["ari_between"] = _rand_index(kept["clusters_ssvd"], kept["clusters_diffusion"])
    return kept


def _online(X: Matrix, n_atoms: int, n_passes: int, seed: int) -> dict[str, NDArray[Any]]:
    """Return what Algorithm 4 comes to: an agent per atom, fully connected, gene by gene.

    The genes are coded once more with the atoms as they are in the end.
    """
    objective, topology = Biclustering(GAMMA, DELTA, BETA), Topology.complete(n_atoms)
    learner = ModelDiffusion(
        objective, step=STEP / X.shape[1], batch_size=1, tolerance=TOLERANCE, seed=seed
    )
    stream = np.concatenate([spawn(seed, SERVER, t).permutation(len(X)) for t in range(n_passes)])
    model = learner.fit(X[stream], topology)
    codes = np.concatenate(learner.infer(model, X, topology).codes, axis=1)
    return {
        "atoms": model.dictionaries[:, 0],
        "codes": codes,
        "rounds": np.array(model.rounds),
        "floats": np.array(float(model.rounds * X.shape[1] * (n_atoms - 1))),
    }


def _k(config: Config, data: Data) -> int:
    """Return the number of clusters that is asked for, or as many as labels, or atoms and one."""
    given, n_subjects = str(config["k"]), int(data.X.shape[1])
    if given == "auto":
        if data.labels is not None:
            return len(set(data.labels))
        return min(int(config["atoms"]) + 1, n_subjects)
    try:
        return check_count("k", int(given), 1, n_subjects)
    except ValueError:
        raise ValueError(
            f"k must be an integer from 1 to {n_subjects} or 'auto', got {given!r}."
        ) from None


def _clusters(places: Matrix, k: int, seed: int) -> NDArray[np.intp]:
    from sklearn.cluster import KMeans  # an extra: not needed to import this module

    k = min(k, len(np.unique(places.round(12), axis=0)))
    kmeans = KMeans(k, n_init=_STARTS, random_state=sklearn_seed(seed))
    clusters: NDArray[np.intp] = kmeans.fit_predict(places)
    return clusters


def _rand_index(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    from sklearn.metrics import adjusted_rand_score  # an extra

    return np.array(adjusted_rand_score(one, other))


# Data ----------------------------------------------------------------------------------------


def _data(config: Config, seed: int) -> Data:
    informative = check_count("informative", config["informative"], TYPES, GENES)
    noise = check_real("noise", config["noise"], 0)
    return _load(str(config["data"]), seed, informative, noise)


@cached_by_file(maxsize=2)
def _load(path: str, seed: int, informative: int, noise: float) -> Data:
    """Return the expressions, every gene with mean zero, all of root mean square 1.

    Parameters
    ----------
    path : str
        An ``.npz`` file with ``X`` (n_subjects, n_genes) and, optionally, ``y`` (n_subjects,),
        integers or texts; ``""`` for planted biclusters.
    seed : int
        Draws the planted ones.
    informative : int
        How many of their genes tell a type.
    noise : float
        Standard deviation of noise on them.
    """
    X, y = _planted(seed, informative, noise) if not path else _read(path)
    X = np.ldexp(X, -np.frexp(np.abs(X).max())[1])  # squares of large and small units are finite
    centred = (X - X.mean(axis=0)).T
    size = float(np.sqrt(np.square(centred).mean()))
    if size <= 1e-12 * float(np.abs(X).max()):
        raise ValueError(f"X in {path} must have a gene that varies over the subjects, got none.")
    return Data(np.ascontiguousarray(centred / size), None if y is None else y.astype(str))


def _planted(seed: int, informative: int, noise: float) -> tuple[Matrix, NDArray[Any]]:
    """Return subjects by genes, of which some rise by 1 to 2 in one type; and the types."""
    from sklearn.datasets import make_biclusters  # an extra

    shape = (SUBJECTS, informative)
    drawn = make_biclusters(shape, TYPES, minval=1, maxval=2, random_state=sklearn_seed(seed))
    blocks, rows, _ = drawn
    X = np.hstack([blocks, np.zeros((SUBJECTS, GENES - informative))])
    noisy: Matrix = X + noise * spawn(seed, DATA).standard_normal(X.shape)
    return noisy, np.char.add("type ", (rows.argmax(axis=0) + 1).astype(str))


def _read(path: str) -> tuple[Matrix, NDArray[Any] | None]:
    (X,) = read_arrays(path, "X")
    if X.ndim != 2 or min(X.shape) < 2 or X.dtype.kind not in "fiub":
        raise ValueError(
            f"X in {path} must be numbers of shape (n_subjects, n_genes), at least 2 each, got "
            f"{X.dtype} {X.shape}."
        )
    y = read_arrays(path, "y")[0] if "y" in names_in(path) else None
    if y is not None and (y.shape != X.shape[:1] or y.dtype.kind not in "iuUb"):
        raise ValueError(
            f"y in {path} must be {len(X)} integers or texts, got {y.dtype} {y.shape}."
        )
    return check_array(f"X in {path}", X.astype(np.float64)), y


# What a person reads -------------------------------------------------------------------------


def _tables(data: Data, results: Sequence[Mapping[str, NDArray[Any]]]) -> list[Table]:
    first = results[0]
    if data.labels is None:
        return []
    scores = Table(
        "Adjusted Rand index with the labels",
        "k-means on the subjects' profiles (directions of their places in the space of the layers) "
        "and, in the last column, on their rows of the atoms as they are. Over seeds.",
        ["", "mean", "least", "most", "rows, mean"],
        [
            [
                title,
                *(
                    f"{function([float(one[f'ari_{name}']) for one in results]):.3f}"
                    for function in (np.mean, np.min, np.max)
                ),
                f"{np.mean([float(one[f'ari_{name}_rows']) for one in results]):.3f}",
            ]
            for name, title in METHODS.items()
        ],
    )
    return [scores, *(_members(data.labels, first, name) for name in ("ssvd", "diffusion"))]


def _members(labels: NDArray[np.str_], result: Mapping[str, NDArray[Any]], name: str) -> Table:
    clusters, k = result[f"clusters_{name}"], int(result["k"])
    return Table(
        f"Who is in which cluster: {METHODS[name]}",
        "Numbers of subjects, first seed.",
        ["", *(f"cluster {j + 1}" for j in range(k))],
        [
            [str(label), *(str(int(np.sum((labels == label) & (clusters == j)))) for j in range(k))]
            for label in np.unique(labels)
        ],
    )


def _pictures(data: Data, result: Mapping[str, NDArray[Any]]) -> list[Picture]:
    from perdl_experiments import pictures  # an extra: matplotlib

    clusters = result["clusters_ssvd"]
    groups, by = data.labels, "their labels"
    if groups is None:
        groups = np.char.add("cluster ", (clusters + 1).astype(str))
        by = "Algorithm 3's clusters"
    atoms, codes = result["atoms_ssvd"], result["codes_ssvd"]
    rows = np.lexsort((atoms[0], groups))
    panels = {"data, genes as in layer 1": data.X[np.argsort(codes[:, 0])].T[rows]}
    for k, (atom, code) in enumerate(zip(atoms, codes.T, strict=True)):
        panels[f"layer {k + 1}"] = np.outer(atom[rows], code[np.argsort(code)])
    return [
        Picture(
            "layers",
            "The sparse rank-one layers",
            f"Algorithm 3, first seed. Rows: subjects by {by}; columns: genes by the layer's code.",
            pictures.layers(panels, [str(group) for group in groups[rows]], x="genes"),
        ),
        Picture(
            "loadings",
            "The subjects in the space of the atoms",
            "Algorithm 3 above, Algorithm 4 below (Fig. 8), first seed. Coloured by "
            f"{by}, which the algorithms do not know.",
            pictures.scatter(
                {
                    "Algorithm 3": result["atoms_ssvd"].T,
                    "Algorithm 4": result["atoms_diffusion"].T,
                },
                [str(group) for group in groups],
                axis="atom",
            ),
        ),
    ]


def _notes(config: Config, data: Data, result: Mapping[str, NDArray[Any]]) -> list[str]:
    n_genes, n_subjects = data.X.shape
    k, given = int(result["k"]), str(config["k"])
    because = "as given" if given != "auto" else "the number of labels"
    if given == "auto" and data.labels is None:
        because = "the number of atoms and one, as k centred groups have rank k - 1"
    what = "your data" if config["data"] else "planted biclusters, other ones for every seed"
    kept = result["genes_per_layer"]
    return [
        f"{n_subjects} subjects, {n_genes} genes ({what}); every gene has mean zero.",
        f"{plural(k, 'cluster')}: {because}. {plural(config['atoms'], 'layer')}, "
        f"{plural(config['atoms'], 'agent')}.",
        f"Algorithm 3's thresholds are chosen without labels ({config['thresholds']}); a layer has "
        f"{float(kept):.0f} genes on average.",
        f"Algorithm 4 sees every gene {plural(config['rounds'], 'time')}, in an order drawn by "
        "seed, "
        f"with gamma = {GAMMA}, delta = {DELTA}, beta = {BETA} and mu_w = {STEP} / {n_subjects} in "
        "units of the expressions' root mean square.",
    ]
