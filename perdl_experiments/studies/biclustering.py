"""Bi-clustering of gene expressions: Section IV-C, Algorithms 3 and 4, Fig. 8.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. A sample is
one gene's expression over all subjects. Algorithm 3 finds sparse rank-one layers of the whole
matrix; Algorithm 4 sees every gene once, with one agent per atom. The atoms tell the subjects
apart: k-means clusters them, without labels, and the adjusted Rand index compares with labels.

``--data FILE.npz`` with ``X`` (subjects, genes) and, if known, ``y`` (subjects,); without it,
synthetic types.

Algorithm 4's passes and steps are chosen without labels: of `SCHEDULES`, the one after which the
genes have the least mean cost (7). ``--rounds`` (5) counts the passes of those that have several.

Metrics: adjusted Rand indices, means over seeds, ``ari_ssvd``, ``ari_diffusion``, ``ari_paper``
(one pass with a constant step), and of all genes in one place ``ari_svd`` and ``ari_kmeans``;
``ari_*_rows`` (k-means on bare rows instead of directions), ``cost_SCHEDULE``, ``genes_per_layer``,
``k``; without labels ``ari_between`` in place of ``ari_*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_array, check_count
from flwr_perdl.network import Biclustering, ModelDiffusion, Topology
from flwr_perdl.random import DATA, SERVER, spawn
from perdl_experiments.baselines import sklearn_seed
from perdl_experiments.biclustering import profiles, ssvd
from perdl_experiments.data import cached_by_file, check_kind, read_arrays, read_npz
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Auto, Keep
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

#: Algorithm 4's parameters, in units of the expressions' root mean square: the paper's gamma = 0.5,
#: beta = 0.01 on data like lung200, where that is 1.63.
GAMMA, BETA, DELTA = 0.3, 0.004, 0.01
#: Whether Algorithm 4 passes the genes more than once, its first step times the number of subjects,
#: and the power of t by which the t-th is divided. The paper's mu_w = 0.005 is 0.75 for lung200.
SCHEDULES = {
    "paper": (False, 0.75, 0.0),
    "constant": (True, 0.75, 0.0),
    "falling": (True, 2.0, 0.5),
}
#: Relative error of the dual variables at which inference ends.
TOLERANCE = 1e-2
#: The bundled data.
SUBJECTS, GENES, TYPES = 60, 400, 4
METHODS = ("svd", "kmeans", "ssvd", "diffusion", "paper")
#: Starts of k-means.
_STARTS = 20


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of biclustering.toml."""

    atoms: int
    k: int | Auto
    thresholds: str
    noise: float
    informative: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        self.check_nodes(self.atoms, "atom")

    def data_of(self, seed: int) -> Data:
        """Return the expressions; a seed draws the planted ones."""
        return _load(self.data, seed, self.informative, self.noise)


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
    """Run both algorithms, the plain SVD and k-means with every seed, and compare the clusters."""
    results = keep_all(
        keep, {f"seed-{seed}": partial(_one_seed, config, seed) for seed in config.each_seed}
    )
    data, first = config.data_of(config.seed), results[0]
    numbers = {
        name: [float(one[name]) for one in results] for name in first if first[name].ndim == 0
    }
    return Outcome(
        records=[*_records(numbers), *_members(data, first)],
        curves=numbers if len(results) > 1 else {},
        arrays={
            name: value for name, value in first.items() if value.ndim and value.dtype.kind in "fi"
        },
        figures=_figures(data, first),
        rounds=round(float(np.mean(numbers["rounds"]))),
        floats_up=float(np.mean(numbers["floats"])),
        floats_down=float(np.mean(numbers["floats"])),
        facts=_facts(config, data, first),
    )


def _one_seed(config: Config, seed: int) -> Arrays:
    """Return atoms, clusters and figures of all methods with one seed."""
    data, n_atoms = config.data_of(seed), config.atoms
    k = _k(config, data)
    _, strengths, rows = np.linalg.svd(data.X, full_matrices=False)
    layers = ssvd(data.X, n_atoms, thresholds=config.thresholds)
    online = {name: _online(data.X, config, seed, name) for name in SCHEDULES}
    chosen = min(online, key=lambda name: float(online[name]["cost"]))
    best, paper = online[chosen], online["paper"]
    found = {
        "svd": (rows[:n_atoms], strengths[:n_atoms]),
        "kmeans": (data.X, np.ones(len(data.X))),
        "ssvd": (layers.atoms, np.linalg.norm(layers.codes, axis=0)),
        "diffusion": (best["atoms"], np.linalg.norm(best["codes"], axis=0)),
        "paper": (paper["atoms"], np.linalg.norm(paper["codes"], axis=0)),
        **{
            name: (one["atoms"], np.linalg.norm(one["codes"], axis=0))
            for name, one in online.items()
            if name != "paper"
        },
    }
    kept: Arrays = {
        "k": np.array(k),
        "rounds": best["rounds"],
        "floats": best["floats"],
        "genes_per_layer": np.count_nonzero(layers.codes, axis=0).mean(),
        "codes_ssvd": layers.codes,
        "codes_diffusion": best["codes"],
        "thresholds": layers.thresholds,
    }
    for name, one in online.items():
        kept[f"cost_{name}"], kept[f"chosen_{name}"] = one["cost"], np.array(float(name == chosen))
    for name, (atoms, weights) in found.items():
        clusters = _clusters(profiles(atoms, weights), k, seed)
        kept[f"clusters_{name}"] = clusters
        if name != "kmeans":
            kept[f"atoms_{name}"] = atoms
        if data.labels is not None:
            kept[f"ari_{name}"] = _rand_index(data.labels, clusters)
            raw = _clusters(np.ascontiguousarray(atoms.T), k, seed)
            kept[f"ari_{name}_rows"] = _rand_index(data.labels, raw)
    if data.labels is None:
        kept["ari_between"] = _rand_index(kept["clusters_ssvd"], kept["clusters_diffusion"])
    return kept


def _online(X: Matrix, config: Config, seed: int, schedule: str) -> Arrays:
    """Return what Algorithm 4 comes to: an agent per atom, fully connected, gene by gene.

    The genes are coded once more with the atoms as they are in the end; their mean cost (7) says
    how well these explain them.
    """
    n_atoms, (several, step, decay) = config.atoms, SCHEDULES[schedule]
    passes = range(config.rounds if several else 1)
    objective, topology = Biclustering(GAMMA, DELTA, BETA), Topology.complete(n_atoms)
    learner = ModelDiffusion(
        objective,
        step=step / X.shape[1],
        decay=decay,
        batch_size=1,
        tolerance=TOLERANCE,
        seed=seed,
    )
    stream = np.concatenate([spawn(seed, SERVER, t).permutation(len(X)) for t in passes])
    model = learner.fit(X[stream], topology)
    codes = np.concatenate(learner.infer(model, X, topology).codes, axis=1)
    atoms = model.dictionaries[:, 0]
    cost = objective.loss(X - codes @ atoms) + objective.regulariser(codes)
    return {
        "atoms": atoms,
        "codes": codes,
        "cost": np.array(cost.mean()),
        "rounds": np.array(model.rounds),
        "floats": np.array(float(model.rounds * X.shape[1] * (n_atoms - 1))),
    }


def _k(config: Config, data: Data) -> int:
    """Return the number of clusters that is asked for, or as many as labels, or atoms and one."""
    n_subjects = int(data.X.shape[1])
    if config.k != "auto":
        return check_count("k", config.k, 1, n_subjects)
    return min(config.atoms + 1, n_subjects) if data.labels is None else len(set(data.labels))


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
    centered = (X - X.mean(axis=0)).T
    size = float(np.sqrt(np.square(centered).mean()))
    if size <= 1e-12 * float(np.abs(X).max()):
        raise ValueError(f"X in {path} must have a gene that varies over the subjects, got none.")
    return Data(np.ascontiguousarray(centered / size), None if y is None else y.astype(str))


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
    (X,), y = read_arrays(path, "X"), read_npz(path, "y").get("y")
    check_kind("X", path, X, "fiub", "numbers of shape (n_subjects, n_genes)")
    check_count(f"genes of X in {path}", X.shape[1], 2)
    if y is not None:
        check_kind("y", path, y, "iuUb", f"{len(X)} integers or texts", X.shape[:1])
    return check_array(f"X in {path}", X.astype(np.float64), min_rows=2), y


# The report ----------------------------------------------------------------------------------


def _records(numbers: Mapping[str, Sequence[float]]) -> Iterator[Record]:
    """Yield the figures, the indices of the methods, and those of all schedules."""
    for name, values in numbers.items():
        kind, _, method = name.partition("_")
        if kind == "ari" and method in METHODS:
            yield Record("ari", values, method)
            yield Record("ari_rows", numbers[f"{name}_rows"], method)
        elif name == "ari_between":
            yield Record("ari", values, "between")
        elif kind not in ("ari", "cost", "chosen"):
            yield Record(name, values)
    for schedule in SCHEDULES:
        at = {"schedule": schedule}
        yield Record("cost", numbers[f"cost_{schedule}"], parameters=at)
        yield Record("chosen", numbers[f"chosen_{schedule}"], parameters=at)
        if f"ari_{schedule}" in numbers:
            yield Record("ari_schedule", numbers[f"ari_{schedule}"], parameters=at)


def _members(data: Data, result: Mapping[str, NDArray[Any]]) -> Iterator[Record]:
    """Yield how many subjects of each label are in each cluster."""
    if data.labels is None:
        return
    for name in ("ssvd", "diffusion"):
        clusters = result[f"clusters_{name}"]
        for label in np.unique(data.labels):
            for j in range(int(result["k"])):
                count = int(np.sum((data.labels == label) & (clusters == j)))
                yield Record("subjects", count, name, {"label": str(label), "cluster": j + 1})


def _figures(data: Data, result: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: matplotlib

    groups = data.labels
    if groups is None:
        groups = np.char.add("cluster ", (result["clusters_ssvd"] + 1).astype(str))
    places = {"Algorithm 3": result["atoms_ssvd"].T, "Algorithm 4": result["atoms_diffusion"].T}
    return {"loadings": pictures.scatter(places, [str(group) for group in groups], axis="atom")}


def _facts(config: Config, data: Data, result: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    n_genes, n_subjects = data.X.shape
    because = "as given" if config.k != "auto" else "the number of labels"
    if config.k == "auto" and data.labels is None:
        because = "the number of atoms plus one, as k centered groups have rank k - 1"
    return {
        "n_subjects": n_subjects,
        "n_genes": n_genes,
        "what": "your data" if config.data else "synthetic biclusters, drawn anew for each seed",
        "n_clusters": int(result["k"]),
        "because": because,
        "by": "Algorithm 3's clusters" if data.labels is None else "their labels",
    }
