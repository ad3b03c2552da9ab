"""Bi-clustering of gene expressions: Section IV-C, Algorithms 3 and 4, Fig. 8.

P1 = Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. A sample is
one gene's expression over all subjects. Algorithm 3 finds sparse rank-one layers of the whole
matrix; Algorithm 4 sees every gene once, with one agent per atom. The atoms tell the subjects
apart: k-means clusters them, without labels, and the adjusted Rand index compares with labels.

``--data FILE.npz`` with ``X`` (subjects, genes) and, if known, ``y`` (subjects,); without it,
planted types.

``--rounds`` (1) counts passes over the genes. Metrics: ``ari_ssvd``, ``ari_diffusion``, ``ari_svd``
(adjusted Rand indices, means over seeds), ``ari_*_rows`` (k-means on the atoms' bare rows),
``genes_per_layer``, ``k``; without labels ``ari_between`` in place of ``ari_*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_array, check_count
from flwr_perdl.diffusion.model_diffusion import ModelDiffusion
from flwr_perdl.diffusion.objectives import Biclustering
from flwr_perdl.diffusion.topology import Topology
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
#: beta = 0.01 on data like lung200, where that is 1.63. Its mu_w = 0.005 is ``step=0.75`` there,
#: with 56 subjects.
GAMMA, BETA, DELTA = 0.3, 0.004, 0.01
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


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of biclustering.toml."""

    atoms: int
    k: int | Auto
    thresholds: str
    noise: float
    informative: int
    step: float
    decay: float

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
    """Run both algorithms and the plain SVD with every seed, cluster the subjects, and compare."""
    results = keep_all(
        keep, {f"seed-{seed}": partial(_one_seed, config, seed) for seed in config.each_seed}
    )
    data, first = config.data_of(config.seed), results[0]
    numbers = {
        name: [float(one[name]) for one in results] for name in first if first[name].ndim == 0
    }
    return Outcome(
        records=[
            *(Record(name, values) for name, values in numbers.items() if "ari_" not in name),
            *_scores(numbers),
            *_members(data, first),
        ],
        curves=numbers if len(results) > 1 else {},
        arrays={
            f"{part}_{name}": first[f"{part}_{name}"]
            for part in ("atoms", "clusters")
            for name in METHODS
        }
        | {name: first[name] for name in ("codes_ssvd", "codes_diffusion", "thresholds")},
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
    online = _online(data.X, config, seed)
    found = {
        "svd": (rows[:n_atoms], strengths[:n_atoms]),
        "ssvd": (layers.atoms, np.linalg.norm(layers.codes, axis=0)),
        "diffusion": (online["atoms"], np.linalg.norm(online["codes"], axis=0)),
    }
    kept: Arrays = {
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


def _online(X: Matrix, config: Config, seed: int) -> Arrays:
    """Return what Algorithm 4 comes to: an agent per atom, fully connected, gene by gene.

    The genes are coded once more with the atoms as they are in the end.
    """
    n_atoms, passes = config.atoms, range(config.rounds)
    objective, topology = Biclustering(GAMMA, DELTA, BETA), Topology.complete(n_atoms)
    learner = ModelDiffusion(
        objective,
        step=config.step / X.shape[1],
        decay=config.decay,
        batch_size=1,
        tolerance=TOLERANCE,
        seed=seed,
    )
    stream = np.concatenate([spawn(seed, SERVER, t).permutation(len(X)) for t in passes])
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


def _scores(numbers: Mapping[str, Sequence[float]]) -> Iterator[Record]:
    for name in METHODS:
        if f"ari_{name}" in numbers:
            yield Record("ari", numbers[f"ari_{name}"], name)
            yield Record("ari_rows", numbers[f"ari_{name}_rows"], name)
    if "ari_between" in numbers:
        yield Record("ari", numbers["ari_between"], "between")


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
        "what": "your data" if config.data else "planted biclusters, new ones for every seed",
        "n_clusters": int(result["k"]),
        "because": because,
        "by": "Algorithm 3's clusters" if data.labels is None else "their labels",
    }
