"""One dictionary from data that stay at four nodes: the patches of P3.

P3 = Chainais and Richard, "A diffusion strategy for distributed dictionary learning", iTWIST 2014:
48 random atoms of dimension 16 (4 x 4 pixels), samples that mix three of them, four nodes in a
ring. An atom counts as found if some learned atom has |cosine| of at least 0.99 with it, at every
node.

Metrics: ``recovered_min_median`` (atoms found at the worst node, median over seeds),
``recovered_min_least``, ``share_at_least_45``, and the same per method of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.diffusion import (
    CombinationMatrix,
    Topology,
    metropolis_weights,
    relative_degree_variance_weights,
)
from flwr_perdl.diffusion.data_diffusion import REPLACEMENTS, DataDiffusion, DictionaryState
from flwr_perdl.random import DATA, spawn
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

N_ATOMS, SHAPE, N_NONZERO = 48, (4, 4), 3
#: Cosine at which an atom counts as found, and how many the paper finds.
FOUND, PAPER = 0.99, 45
#: Seeds of what is compared on networks and noise.
FEW = 3
#: Noise at the noisy node of the ring, as a share of the data's root mean square.
NOISY = 1.0
NOISES = (0.01, 0.03, 0.1, 0.2)
#: What is drawn; the tables have all.
COMPARED = ("headline", "none", "paper", "isolated")


class Method(NamedTuple):
    """One row of the tables.

    Attributes
    ----------
    words : str
        What a reader sees.
    learner : DataDiffusion
        The options.
    start : str
        The first atoms.
    network : str
        "ring", or another of `_network`.
    noise : tuple of float
        Noise of all nodes but the last, and of the last.
    """

    words: str
    learner: DataDiffusion
    start: str = "common"
    network: str = "ring"
    noise: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of patches.toml."""

    update: str
    replacement: str
    samples: int
    noise: float


def run(config: Config, keep: Keep) -> Outcome:
    """Learn with every method from all seeds' data, and on other networks and noise from a few."""
    first, seeds = config.seed, config.seeds
    compared, few = _methods(config), _networks(config)
    counts = {**dict.fromkeys(compared, seeds), **dict.fromkeys(few, min(FEW, seeds))}
    parts = {
        f"{name}-seed-{seed}": partial(_one, config, method, seed)
        for name, method in {**compared, **few}.items()
        for seed in range(first, first + counts[name])
    }
    kept = dict(zip(parts, keep_all(keep, parts), strict=True))
    found = {
        name: np.stack([kept[f"{name}-seed-{first + i}"]["found"] for i in range(count)]) * 1.0
        for name, count in counts.items()
    }
    shown = kept[f"headline-seed-{first}"]
    floats = float(kept[f"headline-seed-{first + seeds - 1}"]["floats"])
    groups = {**dict.fromkeys(compared, "all"), **dict.fromkeys(few, "few")}
    return Outcome(
        records=[
            Record("found", curve[:, -1], name, {"group": groups[name]})
            for name, curve in found.items()
        ],
        curves={
            f"recovered_{name}": np.median(curve, axis=0).tolist() for name, curve in found.items()
        },
        arrays={
            "planted": shown["planted"],
            "dictionaries": shown["dictionaries"],
            **{f"found_{name}": curve for name, curve in found.items()},
        },
        figures=_figures(compared, found),
        rounds=config.rounds,
        floats_up=floats,
        floats_down=floats,
        facts={
            "words": {"method": {n: method.words for n, method in {**compared, **few}.items()}},
            "headline": compared["headline"].words,
            "dimension": SHAPE[0] * SHAPE[1],
            "few": min(FEW, seeds),
        },
    )


def _methods(config: Config) -> dict[str, Method]:
    """Return what is compared on all seeds, the config's own first."""
    update, replacement, noise = config.update, config.replacement, config.noise
    headline = _learner(update, replacement)
    titles = {"mod": "MOD", "ksvd": "approximate K-SVD", "gradient": "gradient steps"}
    own = f"{titles[update]}, replacement {replacement}"
    methods = {
        "headline": Method(own, headline),
        **{
            kind: Method(f"{titles[update]}, replacement {kind}", _learner(update, kind))
            for kind in (*REPLACEMENTS, "none")
            if kind != replacement
        },
        **{
            kind: Method(f"{title}, replacement {replacement}", _learner(kind, replacement))
            for kind, title in titles.items()
            if kind != update
        },
        "paper": Method(
            "the paper's: gradient, own samples as start", _learner("gradient", "none"), "samples"
        ),
        "isolated": Method(f"{own}, without neighbors", headline, network="isolated"),
        "central": Method(f"{own}, all data in one place", headline, network="central"),
    }
    return {name: method._replace(noise=(noise, noise)) for name, method in methods.items()}


def _networks(config: Config) -> dict[str, Method]:
    """Return what is compared on a few seeds: the config's own method elsewhere."""
    own, many = _methods(config)["headline"], 3 * config.clients
    gradient = own._replace(learner=_learner("gradient", config.replacement))
    return {
        "complete": own._replace(words="everyone hears everyone", network="complete"),
        "ring_many": own._replace(words=f"a ring of {many}, as much data in all", network="many"),
        "ring_many_gradient": gradient._replace(
            words=f"a ring of {many}, gradient steps", network="many"
        ),
        "random_many_gradient": gradient._replace(
            words=f"a random graph of {many}, gradient steps", network="random"
        ),
        **{
            f"noise_{noise:g}": own._replace(
                words=f"noise {_decibel(noise)} below the data", noise=(noise, noise)
            )
            for noise in NOISES
        },
        "one_noisy": own._replace(
            words=f"noise at one node {_decibel(NOISY)} below its data", noise=(0.01, NOISY)
        ),
        "one_noisy_weighted": own._replace(
            words="one noisy node, relative degree-variance weights (5)",
            noise=(0.01, NOISY),
            network="weighted",
        ),
    }


def _decibel(noise: float) -> str:
    return f"{abs(20 * np.log10(noise)):.0f} dB"


def _learner(update: str, replacement: str) -> DataDiffusion:
    return DataDiffusion(
        N_ATOMS,
        n_nonzero=N_NONZERO,
        update=update,
        replacement=None if replacement == "none" else replacement,
    )


def _network(method: Method, nodes: int) -> CombinationMatrix:
    """Return the method's network of ``nodes`` nodes, or three times as many."""
    if method.network == "weighted":
        noise = np.full(nodes, method.noise[0])
        noise[-1] = method.noise[1]
        return relative_degree_variance_weights(Topology.ring(nodes), noise**2)
    topologies = {
        "ring": partial(Topology.ring, nodes),
        "complete": partial(Topology.complete, nodes),
        "many": partial(Topology.ring, 3 * nodes),
        "random": partial(Topology.erdos_renyi, 3 * nodes, 0.5),
        "isolated": partial(Topology.from_edges, nodes, []),
        "central": partial(Topology.complete, 1),
    }
    topology = topologies[method.network]()
    return metropolis_weights(topology)


def draw(
    seed: int, nodes: int, samples: int, noise: tuple[float, float] = (0.0, 0.0)
) -> tuple[Matrix, list[Matrix]]:
    """Return the planted atoms and every node's samples.

    Parameters
    ----------
    seed : int
        Decides everything; noise changes nothing else.
    nodes, samples : int
        Nodes, and samples of each.
    noise : tuple of float
        Standard deviation of the noise at all nodes but the last, and at the last, as a share of
        the data's root mean square.
    """
    rng = spawn(seed, DATA)
    atoms = normalize_atoms(rng.standard_normal((N_ATOMS, SHAPE[0] * SHAPE[1])))
    codes = np.zeros((nodes * samples, N_ATOMS))
    used = rng.random(codes.shape).argsort(axis=1)[:, :N_NONZERO]
    np.put_along_axis(codes, used, rng.uniform(-0.5, 0.5, used.shape), axis=1)
    X = codes @ atoms
    level = np.repeat([*[noise[0]] * (nodes - 1), noise[1]], samples)[:, None]
    X = X + level * np.sqrt(np.mean(X**2)) * rng.standard_normal(X.shape)
    return atoms, np.split(X, nodes)


def n_found(dictionary: Matrix, planted: Matrix) -> int:
    """Return how many planted atoms a dictionary holds."""
    found: NDArray[np.bool_] = np.abs(planted @ dictionary.T).max(axis=1) >= FOUND
    return int(found.sum())


def _one(config: Config, method: Method, seed: int) -> Arrays:
    """Return how many atoms the node that has found fewest has found, after every round."""
    nodes = config.clients
    planted, data = draw(seed, nodes, config.samples, method.noise)
    network = _network(method, nodes)
    data = [np.concatenate(part) for part in _dealt(data, network.topology.n_nodes)]
    found: list[int] = []

    def note(round_: int, state: DictionaryState) -> None:
        found.append(min(n_found(D, planted) for D in state.dictionaries))

    ended = method.learner.fit(
        data, network, config.rounds, start=method.start, seed=seed, callback=note
    )
    return {
        "found": np.array(found),
        "planted": planted,
        "dictionaries": ended.dictionaries,
        "floats": np.array(ended.floats_sent / network.topology.n_nodes),
    }


def _dealt(data: list[Matrix], nodes: int) -> list[list[Matrix]]:
    """Deal the samples, in order, to another number of nodes."""
    if nodes == len(data):
        return [[own] for own in data]
    return [[part] for part in np.array_split(np.concatenate(data), nodes)]


def _figures(compared: Mapping[str, Method], found: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: matplotlib

    drawn = plots.lines(
        {compared[name].words: found[name] for name in COMPARED if name in compared},
        x="round",
        y="atoms found at the worst node",
        levels={"the paper reports": float(PAPER)},
    )
    return {"recovery": drawn}
