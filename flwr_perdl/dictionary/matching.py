"""Global matching (Algorithm 2) and alignment to the global atoms (Algorithm 3, lines 3-9).

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``D_1 ... D_N``, client by client       ``dictionaries``, a sequence of (r_i, n_features)
``r^g``                                 ``n_global``
``D^g``                                 ``Matching.global_atoms``
``index_i`` (line 7)                    ``Matching.indices[i]``, in the order of ``global_atoms``
``sign(<., .>)`` (line 6)               ``Matching.signs[i]``
length of the j-th shortest path (B.2)  ``Matching.path_lengths[j]``
``S``, ``P`` (Algorithm 3)              ``Alignment.indices``, ``Alignment.signs``
======================================= ====================================================

Deviations: averages are brought to unit norm; Algorithm 3's nearest atom is found for all global
atoms at once by optimal assignment, so that no two of them take the same local one; B.2's
"predefined threshold" is replaced by a rule without one (:func:`count_shared`).

The paper's chain of shortest paths (``method="paths"``) needs every client to be close to its
neighbors in the chain (Theorem 1), so it fails with many clients, or with a single bad one.
``method="consensus"``, the default, takes a few clients' atoms as candidates, keeps those that most
other clients have too, assigns every client's atoms to them optimally and averages, with little
weight on bad fits: its error does not grow with the number of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import betaincinv

from flwr_perdl.core.arrays import row_products
from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_each,
    is_auto,
)
from flwr_perdl.dictionary.atoms import atom_distances, normalize_atoms, signs_of, unit_atoms

#: Clients whose atoms are candidates in the consensus.
_CANDIDATE_CLIENTS = 16
#: Candidates as similar as this stand for the same atom.
_SAME = 0.6
#: Rounds of assignment and averaging in the consensus.
_ROUNDS = 5
#: Clients, evenly spread, whose versions of an atom are compared pair by pair.
_COMPARED = 256
#: Atoms whose distance is at least this share of what chance gives are not shared.
_APART = 0.6
#: Jumps up to this share of the distance that they start from are the spread of shared atoms.
_SPREAD = 0.1
#: So are jumps up to this share of what the last distance lacks to be half of what chance gives.
_MISSING = 0.4
#: Cosines held at a time while candidates are scored: what several clients with thousands of atoms
#: send is worked through in parts.
_BLOCK = 2**24


class Matching(NamedTuple):
    """The atoms that the clients share.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import global_matching
    >>> axes = np.eye(4)
    >>> found = global_matching([axes[[0, 1]], axes[[2, 0]], axes[[3, 0]]], 1)
    >>> found.indices.ravel()  # atom 0 of the first client, atom 1 of the others
    array([0, 1, 1])
    """

    #: Unit atoms, (n_global, n_features).
    global_atoms: Matrix
    #: Row of each client's dictionary that each global atom is, (n_clients, n_global); -1: none.
    indices: NDArray[np.intp]
    #: 1 or -1, (n_clients, n_global): ``signs * dictionary[indices]`` is near ``global_atoms``.
    signs: Matrix
    #: How far apart the clients are in each atom, comparable to the length of a path.
    path_lengths: Matrix


class Alignment(NamedTuple):
    """A dictionary split into global and local atoms.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import align_to_global
    >>> found = align_to_global(np.eye(3), -np.eye(3)[[2]])
    >>> found.indices, found.signs
    (array([2]), array([-1.]))
    """

    #: The atoms that stand for the global ones, in their order and with their signs.
    global_atoms: Matrix
    #: All others, in their order.
    local_atoms: Matrix
    #: Their rows in the dictionary, (n_global,).
    indices: NDArray[np.intp]
    #: 1 or -1, (n_global,).
    signs: Matrix


def global_matching(
    dictionaries: Sequence[Matrix], n_global: int | Literal["auto"], *, method: str = "consensus"
) -> Matching:
    """Find the atoms that the clients' dictionaries share, and average them.

    Parameters
    ----------
    dictionaries : sequence of ndarray of shape (n_atoms_i, n_features)
        One per client, with any numbers of atoms, whose lengths do not matter.
    n_global : int or "auto"
        Number of atoms to find; "auto" counts those on which the clients agree, see
        :func:`count_shared`.
    method : {"consensus", "paths"}, default "consensus"
        "paths": Algorithm 2, without the clients that have fewer atoms than ``n_global``.
        "consensus": such a client takes part with what it has.

    Returns
    -------
    Matching
        Best atoms first. For "consensus" a path length is ``n_clients - 1`` times the distance of
        two clients' versions of the atom: its median over one client and then over the other (of
        at most 256 clients, evenly spread), or that of orthogonal atoms where fewer than two
        clients have it.

    Raises
    ------
    ValueError
        If no client (for "consensus": not all clients together) has ``n_global`` atoms.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import global_matching
    >>> axes = np.eye(6)
    >>> dictionaries = [axes[[0, 1, 2]], axes[[1, 0, 3]], axes[[4, 0, 1]]]
    >>> found = global_matching(dictionaries, "auto")
    >>> found.global_atoms.shape
    (2, 6)
    >>> print(np.abs(found.global_atoms[:, :2]).sum().round(6))
    2.0
    """
    check_choice("method", method, ("consensus", "paths"))
    checked = check_each("dictionaries", dictionaries, "dictionary")
    sizes = [len(D) for D in checked]
    checked = [unit_atoms(D)[0] for D in checked]
    match = _shortest_paths if method == "paths" else _consensus
    if is_auto("n_global", n_global):
        # What one client alone has is not shared, so that the second largest dictionary is a bound.
        most = min(int(np.median(sizes)), sorted(sizes)[-2:][0])
        found = match(checked, most)
        taking_part = sum(size >= most for size in sizes) if method == "paths" else len(sizes)
        edges = found.path_lengths / max(taking_part - 1, 1)
        count = count_shared(edges, checked[0].shape[1], most)
        return found if count == most else match(checked, count)
    most = max(sizes) if method == "paths" else sum(sizes)  # what one client has, or all have
    return match(checked, check_count("n_global", n_global, 0, most))


def count_shared(edges: Matrix, n_features: int, n_atoms: int) -> int:
    """Count the atoms on which the clients agree (B.2), given distances of their versions.

    The largest jump from one distance to the next, best first, tells (Fig. 7), except at both ends,
    where there is no jump to see. Chance gives the scale: the median distance of a random direction
    to the nearest of ``n_atoms``. No atom is shared if even the best is no nearer than ``_APART``
    of it. All are if the largest jump is small: beside the distance that it starts from, as the
    spread among shared atoms is, or beside what the last distance lacks to half of chance.
    """
    chance = _chance(n_features, n_atoms)
    if not len(edges) or edges[0] >= _APART * chance:
        return 0
    # Shared atoms come first, with small distances; the others lie about where chance puts them.
    jumps = np.diff(edges)
    last = int(jumps.argmax()) if len(jumps) else 0
    missing = chance / 2 - edges[-1]
    if not len(jumps) or jumps[last] < max(_SPREAD * edges[last], _MISSING * missing):
        return len(edges)
    return last + 1


def _chance(n_features: int, n_atoms: int) -> float:
    """Median distance of a random direction to the nearest of so many atoms, up to sign."""
    dims, atoms = max(n_features, 2), max(n_atoms, 1)
    cosine = np.sqrt(betaincinv(0.5, (dims - 1) / 2, 0.5 ** (1 / atoms)))
    return float(np.sqrt(2 - 2 * cosine))


def align_to_global(D: Matrix, global_atoms: Matrix) -> Alignment:
    """Split a dictionary into the atoms that match global ones, and the others.

    Parameters
    ----------
    D : ndarray of shape (n_atoms, n_features)
        A client's dictionary; atoms are scaled to unit norm.
    global_atoms : ndarray of shape (n_global, n_features)
        The current global atoms, ``n_global <= n_atoms``.

    Returns
    -------
    Alignment

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import align_to_global
    >>> found = align_to_global(np.eye(3), -np.eye(3)[[2]])
    >>> found.indices  # the last atom stands for the global one
    array([2])
    >>> found.local_atoms
    array([[1., 0., 0.],
           [0., 1., 0.]])
    """
    D, _ = unit_atoms(check_array("D", D))
    global_atoms, _ = unit_atoms(check_array("global_atoms", global_atoms, columns=D.shape[1]))
    if len(global_atoms) > len(D):
        raise ValueError(f"D must have at least {len(global_atoms)} atoms, got {len(D)}.")
    indices = linear_sum_assignment(atom_distances(global_atoms, D))[1]
    signs = signs_of(row_products(global_atoms, D[indices]))
    own = np.ones(len(D), dtype=bool)
    own[indices] = False
    return Alignment(signs[:, None] * D[indices], D[own], indices, signs)


# Algorithm 2: shortest paths


def _shortest_paths(dictionaries: list[Matrix], n_global: int) -> Matching:
    """Algorithm 2: ``n_global`` times the shortest path through the layers, then its removal.

    ``costs[i]`` holds the length of the shortest path from the source to each node of layer
    ``i``, infinite for the nodes that are gone. Going forward only minima are taken; the path is
    found going back.
    """
    indices = np.full((len(dictionaries), n_global), -1, dtype=np.intp)
    chain = [i for i, D in enumerate(dictionaries) if len(D) >= n_global]
    dictionaries = [dictionaries[i] for i in chain]
    n = len(dictionaries)
    edges = [_lengths(A @ B.T) for A, B in pairwise(dictionaries)]
    penalties = [np.zeros(len(D)) for D in dictionaries]
    lengths = np.zeros(n_global)
    # Lines 4-9: a shortest path, its removal; line 6 for all paths below; line 10 at the clients.
    for j in range(n_global):
        costs = penalties[:1]
        for i in range(n - 1):
            # The best way to a node of the next layer, over all nodes of this one; a node that was
            # taken by an earlier path has an infinite penalty, and no way leads through it.
            costs.append((costs[i][:, None] + edges[i]).min(axis=0) + penalties[i + 1])
        path = np.zeros(n, dtype=np.intp)
        # Going back from the end of the shortest path, each node is the one that gave the minimum.
        path[-1] = costs[-1].argmin()
        lengths[j] = costs[-1][path[-1]]
        for i in range(n - 2, -1, -1):
            path[i] = (costs[i] + edges[i][:, path[i + 1]]).argmin()
        for penalty, node in zip(penalties, path, strict=True):
            penalty[node] = np.inf
        indices[chain, j] = path
    atoms = np.stack([D[rows] for D, rows in zip(dictionaries, indices[chain], strict=True)])
    signs = np.ones(indices.shape, dtype=atoms.dtype)
    # d_2 does not see signs; before atoms are averaged they must point to the same side.
    signs[chain] = signs_of(np.einsum("ijk,jk->ij", atoms, atoms[0]))
    mean = (signs[chain][..., None] * atoms).mean(axis=0)
    return Matching(normalize_atoms(mean, atoms[0]), indices, signs, lengths)


def _lengths(cosines: Matrix) -> Matrix:
    """Distances ``d_2`` of unit atoms with these cosines."""
    lengths: Matrix = np.sqrt(2 - 2 * np.minimum(np.abs(cosines), 1))
    return lengths


# Consensus


def _consensus(dictionaries: list[Matrix], n_global: int) -> Matching:
    """Pick candidates near which most clients have an atom, then assign and average."""
    n, d = len(dictionaries), dictionaries[0].shape[1]
    dtype = np.result_type(*dictionaries)
    chosen = np.unique(np.linspace(0, n - 1, min(n, _CANDIDATE_CLIENTS)).round().astype(int))
    candidates = np.vstack([dictionaries[i] for i in chosen])
    owner = np.repeat(chosen, [len(dictionaries[i]) for i in chosen])
    # Candidates are atoms of clients: the start of an iteration like k-means with assignment.
    picks = candidates[_spread_best(candidates, _scores(candidates, owner, dictionaries), n_global)]
    for _ in range(_ROUNDS):
        indices, cosines = _assign(dictionaries, picks)
        distances = _lengths(cosines)
        typical = np.median(distances, axis=0)
        ratio = distances / np.maximum(typical, np.sqrt(np.finfo(dtype).eps))
        if n == 2:  # no majority, and the start is one of the two: both count alike
            ratio[:] = 0
        # Weights of Geman and McClure: a client whose atom is another one hardly moves the mean.
        weights = np.where(indices < 0, 0, signs_of(cosines) / (1 + ratio**2) ** 2)
        total = np.zeros((n_global, d))
        for D, rows, w in zip(dictionaries, indices, weights, strict=True):
            has = rows >= 0
            total[has] += w[has, None] * D[rows[has]]
        picks = normalize_atoms(total.astype(dtype), picks)
    # A path has n - 1 edges: the length is comparable to what Algorithm 2 gives.
    lengths = (n - 1) * _disagreement(dictionaries, indices)
    order = np.argsort(lengths, kind="stable")
    signs = signs_of(cosines).astype(dtype)
    return Matching(picks[order], indices[:, order], signs[:, order], lengths[order])


def _disagreement(dictionaries: list[Matrix], indices: NDArray[np.intp]) -> Matrix:
    """Distance between two clients' versions of each atom: median over both of them.

    The largest there is, of orthogonal atoms, where there are no two.
    """
    disagreement = np.full(indices.shape[1], np.sqrt(2))
    for j, rows in enumerate(indices.T):
        has = np.flatnonzero(rows >= 0)
        if len(has) < 2:
            continue
        if len(has) > _COMPARED:
            has = has[np.linspace(0, len(has) - 1, _COMPARED).round().astype(int)]
        atoms = np.stack([dictionaries[i][rows[i]] for i in has])
        distances = _lengths(atoms @ atoms.T)
        np.fill_diagonal(distances, np.nan)
        disagreement[j] = np.median(np.nanmedian(distances, axis=1))
    return disagreement


def _scores(candidates: Matrix, owner: NDArray[np.intp], dictionaries: list[Matrix]) -> Matrix:
    """Disagreement with a candidate: how far, at most by chance, other clients' nearest atoms are.

    The mean, over clients, of ``1 - exp(-(2 x)^2)``, ``x`` being the distance relative to chance:
    clients that have no such atom count 1 each, however far they are.
    """
    total, count = np.zeros(len(candidates)), np.zeros(len(candidates))
    for i, D in enumerate(dictionaries):
        other = owner != i if len(dictionaries) > 1 else np.full(len(owner), True)
        count += other
        if len(D):
            rows = max(_BLOCK // len(D), 1)
            parts = [candidates[at : at + rows] for at in range(0, len(candidates), rows)]
            nearest = np.concatenate([np.abs(part @ D.T).max(axis=1) for part in parts])
            cosines = np.minimum(nearest, 1)
            squares = (2 - 2 * cosines) / _chance(D.shape[1], len(D)) ** 2
            total += other * np.exp(-4 * squares)
    return 1 - total / count


def _spread_best(candidates: Matrix, scores: Matrix, count: int) -> NDArray[np.intp]:
    """Pick the best-scored candidates, no two of them alike as long as there are others."""
    picks = np.zeros(count, dtype=np.intp)
    likeness = np.zeros(len(candidates))
    for j in range(count):
        free = likeness < _SAME
        picks[j] = np.where(free, scores, np.inf).argmin() if free.any() else likeness.argmin()
        likeness = np.maximum(likeness, np.abs(candidates @ candidates[picks[j]]))
    return picks


def _assign(dictionaries: list[Matrix], picks: Matrix) -> tuple[NDArray[np.intp], Matrix]:
    """Each client's atoms for the picks, by optimal assignment, and their cosines (-1, 0: none)."""
    indices = np.full((len(dictionaries), len(picks)), -1, dtype=np.intp)
    cosines = np.zeros(indices.shape)
    for i, D in enumerate(dictionaries):
        products = picks @ D.T
        rows, columns = linear_sum_assignment(np.abs(products), maximize=True)
        indices[i, rows] = columns
        cosines[i, rows] = products[rows, columns]
    return indices, cosines
