"""Global matching: the paper's chain of shortest paths against the consensus, and against networkx.

Run from the repository's root: ``python benchmarks/matching.py``; it writes
``benchmarks/results/matching.json`` and the tables of it, ``matching.md``.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
from _measure import cell, in_turn, main

from flwr_perdl.dictionary import dictionary_distance, global_matching, normalize_atoms
from flwr_perdl.dictionary.atoms import atom_distances
from perdl_experiments.render import markdown_table

DRAWS, TURNS = 10, 5
METHODS = ("paths", "consensus")
#: Clients, error per atom, share of clients whose dictionaries are random.
CASES = [
    (100, 0.3, 0.0),
    (100, 0.5, 0.0),
    (100, 0.7, 0.0),
    (100, 0.3, 0.2),
    (100, 0.3, 0.4),
    (300, 0.3, 0.2),
    (300, 0.5, 0.0),
]


def draw(
    rng: np.random.Generator,
    n_clients: int,
    error: float,
    random: float,
    *,
    n_features: int = 64,
    n_atoms: int = 32,
    n_global: int = 8,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Draw dictionaries that share atoms up to an error of given length, order and signs.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws everything.
    n_clients : int
        Dictionaries.
    error : float
        Length of the random vector added to each unit atom, before it is brought to unit norm.
    random : float
        Share of the clients that share nothing.
    n_features, n_atoms, n_global : int
        Dimension, atoms per client, shared atoms.

    Returns
    -------
    tuple
        The dictionaries, and the atoms that they share.
    """

    def unit(n: int) -> np.ndarray:
        return normalize_atoms(rng.standard_normal((n, n_features)))

    shared = np.linalg.qr(rng.standard_normal((n_features, n_global)))[0].T
    dictionaries = []
    for i in range(n_clients):
        D = np.vstack([shared, unit(n_atoms - n_global)])
        D = unit(n_atoms) if i < random * n_clients else normalize_atoms(D + error * unit(n_atoms))
        dictionaries.append(D[rng.permutation(n_atoms)] * rng.choice([-1.0, 1.0], (n_atoms, 1)))
    return [dictionaries[i] for i in rng.permutation(n_clients)], shared


def networkx_paths(dictionaries: list[np.ndarray], n_global: int) -> np.ndarray:
    """Return the lengths of Algorithm 2's paths, found as the paper's listing says."""
    graph = nx.DiGraph()
    for i, (A, B) in enumerate(pairwise(dictionaries)):
        lengths = atom_distances(A, B)
        graph.add_weighted_edges_from(
            ((i, a), (i + 1, b), lengths[a, b]) for a in range(len(A)) for b in range(len(B))
        )
    last = len(dictionaries) - 1
    graph.add_weighted_edges_from(("s", (0, a), 0.0) for a in range(len(dictionaries[0])))
    graph.add_weighted_edges_from(((last, a), "t", 0.0) for a in range(len(dictionaries[last])))
    found = []
    for _ in range(n_global):
        length, path = nx.single_source_dijkstra(graph, "s", "t")
        found.append(length)
        graph.remove_nodes_from(path[1:-1])
    return np.array(found)


def robustness() -> list[dict[str, Any]]:
    """Measure the share of draws with a final error below 0.2, per case and method."""
    rows = []
    for n_clients, error, random in CASES:
        row: dict[str, Any] = {"clients": n_clients, "error": error, "random": random}
        errors: dict[str, list[float]] = {method: [] for method in METHODS}
        for seed in range(DRAWS):
            D, shared = draw(np.random.default_rng(seed), n_clients, error, random)
            for method, found in errors.items():
                atoms = global_matching(D, 8, method=method).global_atoms
                found.append(dictionary_distance(atoms, shared))
        runs = {m: partial(global_matching, D, 8, method=m) for m in METHODS}  # of the last draw
        for method, seconds in in_turn(runs, TURNS).items():
            row[f"share_{method}"] = float(np.mean(np.array(errors[method]) < 0.2))
            row[f"error_{method}"] = float(np.median(errors[method]))
            row[f"ms_{method}"] = 1000 * seconds
        rows.append(row)
    return rows


def speed() -> dict[str, Any]:
    """Time Algorithm 2 with networkx and here: N = 100, d = 64, r = 128, r_g = 32."""
    dictionaries, _ = draw(np.random.default_rng(0), 100, 0.3, 0.0, n_atoms=128, n_global=32)
    slow = partial(networkx_paths, dictionaries, 32)
    fast = partial(global_matching, dictionaries, 32, method="paths")
    took = in_turn({"networkx": slow, "paths": fast}, TURNS)
    return {
        "seconds": took,
        "ratio": took["networkx"] / took["paths"],
        "largest_difference_of_path_lengths": np.abs(fast().path_lengths - slow()).max(),
    }


def table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = [
        [
            *(str(row["clients"]), str(row["error"]), f"{row['random']:.0%}"),
            *(f"{row[f'share_{m}']:.1f} ({row[f'error_{m}']:.3f})" for m in METHODS),
            *(cell(row[f"ms_{m}"]) for m in METHODS),
        ]
        for row in results["robustness"]
    ]
    heads = ["clients", "error per atom", "random clients", "chain: share < 0.2 (median)"]
    heads += ["consensus: share < 0.2 (median)", "chain (ms)", "consensus (ms)"]
    took = results["speed"]
    return (
        f"{markdown_table(heads, rows)}\n"
        f"Times are medians of {TURNS} turns, and their range. Algorithm 2 at N = 100, d = 64, "
        f"r = 128, r_g = 32: networkx {cell(took['seconds']['networkx'])} s, here "
        f"{cell(took['seconds']['paths'])} s, {cell(took['ratio'])} times faster; path lengths "
        f"differ by at most {took['largest_difference_of_path_lengths']:.0e}.\n"
    )


def ratios() -> dict[str, Any]:
    """Measure times."""
    found = speed()
    return {"ratios": {"networkx / chain": found["ratio"]}, "speed": found}


def rest() -> dict[str, Any]:
    """Measure errors."""
    return {"draws": DRAWS, "robustness": robustness()}


if __name__ == "__main__":
    main("matching", (__doc__ or "").splitlines()[0], ratios, rest, table)
