"""One dictionary from data that stay at four nodes: the patches experiment of the paper.

Chainais and Richard, "A diffusion strategy for distributed dictionary learning", iTWIST 2014:
48 random atoms of dimension 16 (4 x 4 pixels), samples that mix three of them, four nodes in "a
symmetrically connected network", iterated until convergence. That is a ring or a complete graph:
the paper's method runs on both, on the complete graph for three times as many rounds. An atom
counts as found if some learned atom has |cosine| of at least 0.99 with it, at every node.

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
from flwr_perdl.network import (
    CombinationMatrix,
    DataDiffusion,
    Topology,
    metropolis_weights,
    relative_degree_variance_weights,
)
from flwr_perdl.network.data_diffusion import REPLACEMENTS, DictionaryState
from flwr_perdl.random import DATA, spawn
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

N_ATOMS, SHAPE, N_NONZERO = 48, (4, 4), 3
#: Cosine at which an atom counts as found, and how many the paper finds.
FOUND, PAPER = 0.99, 45
#: The paper iterates until convergence: its method gets so many times the rounds.
PATIENCE = 3
#: Noise at the noisy node of the ring, as a share of the data's root mean square.
NOISY = 1.0
NOISES = (0.01, 0.03, 0.1, 0.2)
#: Other settings, of which the paper says nothing: samples of a node, in units of ``samples``, and
#: noise.
SETTINGS = {"half": (0.5, 0.0), "double": (2.0, 0.0), "noisy": (1.0, 0.1), "noisier": (1.0, 0.2)}
#: What is drawn; the tables have all.
COMPARED = ("headline", "paper", "paper_ring", "isolated")
TITLES = {"mod": "MOD", "ksvd": "approximate K-SVD", "gradient": "gradient steps"}


class Method(NamedTuple):
    """One row of the tables.

    Attributes
    ----------
    words : str
        What a reader sees.
    learner : DataDiffusion
        The options.
    network : CombinationMatrix
        Who receives what.
    noise : tuple of float
        Noise of all nodes but the last, and of the last.
    start : str
        The first atoms.
    patience : int
        Rounds, in units of ``rounds``.
    group : str
        The table.
    share : float
        Samples of a node, in units of ``samples``.
    """

    words: str
    learner: DataDiffusion
    network: CombinationMatrix
    noise: tuple[float, float]
    start: str = "common"
    patience: int = 1
    group: str = "methods"
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of patches.toml."""

    update: str
    replacement: str
    samples: int
    noise: float


def run(config: Config, keep: Keep) -> Outcome:
    """Learn with every method from every seed's data."""
    rows = methods(config)
    parts = {
        f"{name}-seed-{seed}": partial(_one, config, method, seed)
        for name, method in rows.items()
        for seed in config.each_seed
    }
    kept = dict(zip(parts, keep_all(keep, parts), strict=True))
    found = {
        name: np.stack([kept[f"{name}-seed-{seed}"]["found"] for seed in config.each_seed]) * 1.0
        for name in rows
    }
    shown, words = kept[f"headline-seed-{config.seed}"], {n: one.words for n, one in rows.items()}
    return Outcome(
        records=[
            Record("found", curve[:, -1], name, {"group": rows[name].group})
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
        figures=_figures(words, found),
        rounds=config.rounds,
        floats_up=float(shown["floats"]),
        floats_down=float(shown["floats"]),
        facts={"words": {"method": words}, "dimension": SHAPE[0] * SHAPE[1]},
    )


def methods(config: Config) -> dict[str, Method]:
    """Return all rows, the config's own method first."""
    nodes, many, level = config.clients, 3 * config.clients, (config.noise, config.noise)
    update, kind = config.update, config.replacement
    ring, complete = Topology.ring(nodes), Topology.complete(nodes)
    own = Method(
        f"{TITLES[update]}, replacement {kind}, ring",
        _learner(update, kind),
        metropolis_weights(ring),
        level,
    )
    paper = own._replace(learner=_learner("gradient", "none"), start="samples")
    elsewhere = own._replace(group="networks")

    def on(row: Method, topology: Topology, words: str, patience: int = 1) -> Method:
        network = metropolis_weights(topology)
        return row._replace(words=words, network=network, patience=patience)

    long = f"complete graph, {PATIENCE * config.rounds} rounds"
    weights = relative_degree_variance_weights(ring, np.array([*[1e-4] * (nodes - 1), NOISY**2]))
    noisy = elsewhere._replace(
        words=f"noise at one node {_decibel(NOISY)} below its data", noise=(0.01, NOISY)
    )
    settings = {}
    for name, (share, noise) in SETTINGS.items():
        samples = round(share * config.samples)
        setting = f"{samples} samples" if not noise else f"noise {_decibel(noise)} below the data"
        for whose, row in {"paper": paper, "ours": own}.items():
            title = "the paper's method" if whose == "paper" else "ours"
            settings[f"{whose}_{name}"] = on(
                row, complete, f"{title}: {setting}", PATIENCE
            )._replace(noise=(noise, noise), group="settings", share=share)
    return {
        "headline": own,
        "paper": on(paper, complete, f"the paper's method: {long}", PATIENCE),
        "paper_ring": paper._replace(words=f"the paper's method: ring, {config.rounds} rounds"),
        "long": on(own, complete, f"ours: {long}", PATIENCE),
        **{
            other: own._replace(
                words=f"{TITLES[update]}, replacement {other}", learner=_learner(update, other)
            )
            for other in (*REPLACEMENTS, "none")
            if other != kind
        },
        **{
            other: own._replace(words=f"{title}, replacement {kind}", learner=_learner(other, kind))
            for other, title in TITLES.items()
            if other != update
        },
        "isolated": on(own, Topology.from_edges(nodes, []), "local training (no neighbors)"),
        "central": on(own, Topology.complete(1), "ours, centralized"),
        "complete": on(elsewhere, complete, "complete graph"),
        "ring_many": on(
            elsewhere, Topology.ring(many), f"ring of {many} nodes, equally much data in all"
        ),
        **{
            f"noise_{noise:g}": elsewhere._replace(
                words=f"noise {_decibel(noise)} below the data", noise=(noise, noise)
            )
            for noise in NOISES
        },
        "one_noisy": noisy,
        "one_noisy_weighted": noisy._replace(
            words="one noisy node, relative degree-variance weights (5)", network=weights
        ),
        **settings,
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
    samples = round(method.share * config.samples)
    planted, data = draw(seed, config.clients, samples, method.noise)
    nodes, found = method.network.topology.n_nodes, list[int]()
    if nodes != len(data):
        data = np.array_split(np.concatenate(data), nodes)

    def note(round_: int, state: DictionaryState) -> None:
        found.append(min(n_found(D, planted) for D in state.dictionaries))

    rounds = method.patience * config.rounds
    ended = method.learner.fit(
        data, method.network, rounds, start=method.start, seed=seed, callback=note
    )
    return {
        "found": np.array(found),
        "planted": planted,
        "dictionaries": ended.dictionaries,
        "floats": np.array(ended.floats_sent / nodes),
    }


def _figures(words: Mapping[str, str], found: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: matplotlib

    drawn = plots.lines(
        {words[name]: found[name] for name in COMPARED},
        x="round",
        y="atoms found at the worst node",
        levels={"the paper reports": float(PAPER)},
    )
    return {"recovery": drawn}
