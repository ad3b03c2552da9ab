"""Blind hyperspectral unmixing: pixels as non-negative mixtures of a few materials' spectra.

The application of Chainais and Richard (iTWIST 2014): tiles of an image are nodes
that learn the spectra together (:func:`unmix`). A tile's neighbors are the tiles next to it and
those with a similar mean spectrum (:func:`tile_topology`). Every node applies vertex component
analysis to its own tile; by default the nodes then share what they have found, since a tile rarely
has all materials (:class:`SharedCandidates`).

VCA = Nascimento and Bioucas-Dias, "Vertex component analysis: a fast algorithm to unmix
hyperspectral data", IEEE TGRS 43(4), 2005.

=============================================  ================================================
VCA's paper, Algorithm 1 (columns)             here (rows)
=============================================  ================================================
``R``, L bands x N pixels                      ``X``, (n_pixels, n_bands)
``p``                                          ``n_endmembers``
``U_d``                                        leading directions, of ``X`` or centered ``X``
``[Y]_{:,j} = [X]_{:,j} / ([X]'_{:,j} u)``     pixels projected on the plane ``y @ mean = 1``
``Y = [X; c]``                                 centered pixels with a last coordinate c
``f``                                          a random direction orthogonal to what was chosen
``M``, mixing matrix                           ``Endmembers.spectra``, pixels without their noise
=============================================  ================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.dictionary.coding import nonnegative_from_gram
from flwr_perdl.network import DataDiffusion, Inbox, Topology, metropolis_weights
from flwr_perdl.network.data_diffusion import Diffused
from flwr_perdl.network.exchange import run_program
from flwr_perdl.network.schedule import rounds_to_all
from flwr_perdl.random import spawn

#: A candidate is the mean of at most so many pixels, those most similar to the one that VCA finds.
_NEAREST = 10
#: Pixels with less than this share of the mean pixel's brightness are not projected by VCA.
_DARK = 1e-3


class Endmembers(NamedTuple):
    """What :func:`vca` found."""

    #: Spectra of the chosen pixels in the signal's subspace, (n_endmembers, n_bands).
    spectra: Matrix
    #: The chosen pixels, (n_endmembers,).
    pixels: NDArray[np.intp]
    #: Estimated signal-to-noise ratio in dB, which decides the projection.
    snr: float


class SpectralMatch(NamedTuple):
    """Each true spectrum's partner among the estimates, see :func:`match_spectra`."""

    #: ``indices[j]``: the row of the estimate that true spectrum j is matched with.
    indices: NDArray[np.intp]
    #: Angles of the pairs in radians.
    angles: Matrix


def vca(X: Matrix, n_endmembers: int, *, rng: np.random.Generator) -> Endmembers:
    """Find the pixels that are purest (Nascimento and Bioucas-Dias 2005, Algorithm 1).

    Mixtures fill a simplex whose corners are the materials: the extreme pixel in a direction is one
    of them. Each direction is orthogonal to those found before.

    Parameters
    ----------
    X : ndarray of shape (n_pixels, n_bands)
        Spectra of the pixels.
    n_endmembers : int
        Materials, at least 2 and at most the number of bands and of pixels.
    rng : numpy.random.Generator
        Source of the directions.

    Returns
    -------
    Endmembers
        Spectra, pixels, signal-to-noise ratio.

    Raises
    ------
    ValueError
        If there are too few pixels or bands, or all pixels are zero.

    Notes
    -----
    The paper projects all pixels on a plane by dividing by their product with the mean pixel. For
    nearly black pixels that amplifies noise, so those with less than a thousandth of the mean
    pixel's product are left out. As in the paper, if there are fewer materials than asked for, the
    last directions yield arbitrary pixels, possibly some that were chosen before.
    """
    n, bands = X.shape
    p = check_count("n_endmembers", n_endmembers, 2, min(n, bands))
    if not X.any():
        raise ValueError("X must have a pixel that is not zero, got zeros only.")
    dtype, X = X.dtype, X.astype(np.float64)
    center = X.mean(axis=0)
    axes = _leading(X - center, p)
    snr = _snr(X, center, (X - center) @ axes.T, p)
    if snr < 15 + 10 * np.log10(p):
        axes = axes[: p - 1]
        inside = (X - center) @ axes.T
        height = np.sqrt(np.max(np.sum(inside**2, axis=1)))
        Y, lit = np.column_stack([inside, np.full(n, height)]), np.ones(n, dtype=bool)
    else:
        axes, center = _leading(X, p), np.zeros(bands)
        inside = X @ axes.T
        products = inside @ inside.mean(axis=0)
        lit = products > _DARK * products.mean()
        Y = inside / np.where(lit, products, 1)[:, None]
    chosen = np.zeros((p, p))
    chosen[0, -1] = 1
    pixels = np.zeros(p, dtype=np.intp)
    for i in range(p):
        w = rng.standard_normal(p)
        f = w - np.linalg.pinv(chosen) @ (chosen @ w)
        pixels[i] = np.where(lit, np.abs(Y @ f), -1).argmax()
        chosen[i] = Y[pixels[i]]
    spectra = inside[pixels] @ axes + center
    return Endmembers(spectra.astype(dtype), pixels, float(snr))


def _leading(X: Matrix, n: int) -> Matrix:
    """Return the ``n`` leading directions of the rows of ``X``, as rows."""
    directions: Matrix = np.linalg.eigh(X.T @ X)[1][:, ::-1][:, :n].T
    return directions


def _snr(X: Matrix, center: Matrix, inside: Matrix, p: int) -> float:
    """Estimate the signal-to-noise ratio in dB as the paper does; ``inside``: p directions."""
    total = float(np.mean(np.sum(X**2, axis=1)))
    signal = float(np.mean(np.sum(inside**2, axis=1)) + center @ center)
    least = np.finfo(np.float64).eps * total
    above, below = signal - p / X.shape[1] * total, total - signal
    return float(10 * np.log10(max(above, least) / max(below, least)))


def abundances(X: Matrix, spectra: Matrix) -> Matrix:
    """Return how much of each material is in each pixel: least squares, none below zero.

    Parameters
    ----------
    X : ndarray of shape (n_pixels, n_bands)
        Pixels.
    spectra : ndarray of shape (n_endmembers, n_bands)
        Linearly independent spectra, however similar: all is computed in float64.

    Returns
    -------
    ndarray of shape (n_pixels, n_endmembers)

    Raises
    ------
    ValueError
        If the spectra are linearly dependent: the abundances would not be determined.
    """
    if np.linalg.matrix_rank(spectra) < len(spectra):
        raise ValueError(
            f"spectra must be linearly independent, got shape {spectra.shape}, dependent."
        )
    dtype, X, spectra = X.dtype, X.astype(np.float64), spectra.astype(np.float64)
    return nonnegative_from_gram(X @ spectra.T, spectra @ spectra.T).astype(dtype, copy=False)


def spectral_angles(A: Matrix, B: Matrix) -> Matrix:
    """Return the angles between spectra, in radians.

    Parameters
    ----------
    A : ndarray of shape (n_a, n_bands)
        Spectra of any length, none zero.
    B : ndarray of shape (n_b, n_bands)
        Others.

    Returns
    -------
    ndarray of shape (n_a, n_b)
        Within [0, pi], accurate for small angles too.
    """
    A, B = normalize_atoms(A.astype(np.float64)), normalize_atoms(B.astype(np.float64))
    apart = np.linalg.norm(A[:, None] - B, axis=2)
    angles: Matrix = 2 * np.arctan2(apart, np.linalg.norm(A[:, None] + B, axis=2))
    return angles


def match_spectra(truth: Matrix, estimate: Matrix) -> SpectralMatch:
    """Give every true spectrum its own estimated one, with the least sum of angles.

    Parameters
    ----------
    truth : ndarray of shape (n_true, n_bands)
        True spectra.
    estimate : ndarray of shape (n_estimated, n_bands)
        At least as many.

    Returns
    -------
    SpectralMatch
        Indices and angles, each of shape (n_true,).

    Raises
    ------
    ValueError
        If there are fewer estimates than true spectra.
    """
    angles = spectral_angles(truth, estimate)
    if angles.shape[0] > angles.shape[1]:
        raise ValueError(
            f"estimate must have at least {angles.shape[0]} spectra, got {angles.shape[1]}."
        )
    rows, indices = linear_sum_assignment(angles)
    return SpectralMatch(indices, angles[rows, indices])


def tile_pixels(shape: tuple[int, int], tiles: int) -> list[NDArray[np.intp]]:
    """Return the pixels (row-major numbers) of ``tiles`` x ``tiles`` tiles, row by row.

    Parameters
    ----------
    shape : tuple of int
        Height and width of the image.
    tiles : int
        Tiles along each side, at most the shorter side.
    """
    tiles = check_count("tiles", tiles, 1, min(shape))
    number = np.arange(shape[0] * shape[1]).reshape(shape)
    bands = [np.array_split(rows, tiles, axis=1) for rows in np.array_split(number, tiles, axis=0)]
    return [tile.ravel() for row in bands for tile in row]


def tile_topology(means: Matrix, tiles: int, *, n_spectral: int = 3) -> Topology:
    """Return the graph of tiles: spatial neighbors, and those with the most similar mean spectra.

    Parameters
    ----------
    means : ndarray of shape (tiles * tiles, n_bands)
        Every tile's mean spectrum, row by row.
    tiles : int
        Tiles along each side.
    n_spectral : int, default 3
        Tiles that each tile is joined with because their mean spectra make the smallest angles with
        its own.

    Returns
    -------
    Topology
        Undirected.
    """
    links = Topology.grid(tiles, tiles).adjacency.toarray()
    unit = normalize_atoms(means, np.ones_like(means))  # a black tile looks like a flat one
    angles = spectral_angles(unit, unit)
    np.fill_diagonal(angles, np.inf)
    for tile, nearest in enumerate(np.argsort(angles, axis=1, kind="stable")):
        near = nearest[: min(n_spectral, len(means) - 1)]
        links[tile, near] = links[near, tile] = 1
    return Topology(links)


def unmix(
    data: Sequence[Matrix],
    network: Any,
    n_endmembers: int,
    n_rounds: int = 100,
    *,
    start: str = "pooled",
    seed: int = 0,
) -> Diffused:
    """Learn the spectra of an image's materials at many nodes, each with pixels of its own.

    **What a neighbor receives**: spectra in every round. The first are means of some of a node's
    pixels, and go to everyone in the network (``start="pooled"``); or single pixels but for noise
    (``start="own"``).

    Parameters
    ----------
    data : sequence of ndarray of shape (n_pixels, n_bands)
        Every node's pixels.
    network : Topology, CombinationMatrix or InMemoryNetwork
        Who hears whom, see `DataDiffusion.fit`.
    n_endmembers : int
        Materials.
    n_rounds : int, default 100
        Communication rounds of learning.
    start : {"pooled", "own"}, default "pooled"
        "pooled": nodes first share what vertex component analysis finds in their pixels (in as many
        rounds as the network's diameter), and all make the same choice from it. "own": every node
        starts from what it finds itself, and neighbors' spectra are matched one to one. That may
        mix up materials if most nodes have only a few of them.
    seed : int, default 0
        Seed of all draws.

    Returns
    -------
    Diffused
        Every node's spectra as unit vectors; rounds and floats include those of the start.

    Raises
    ------
    ValueError
        If no node has as many pixels as there are materials, where ``start`` is "pooled".
    """
    # Neighbors' spectra are matched one to one before they are combined.
    learner = DataDiffusion(
        n_endmembers,
        coder="nonnegative",
        update="gradient",
        nonnegative=True,
        alignment="assignment",
        replacement=None,
    )
    if isinstance(network, Topology):
        network = metropolis_weights(network)
    if start == "own":
        own = partial(own_start, n_endmembers=n_endmembers)
        return learner.fit(data, network, n_rounds, start=own, seed=seed)
    program = SharedCandidates(dict(enumerate(data)), len(data), n_endmembers, seed)
    most = max(map(len, data))
    if most < n_endmembers:
        raise ValueError(
            f"data must have a node with n_endmembers={n_endmembers} pixels or more where start is "
            f'"pooled", got {most} at most.'
        )
    run = run_program(program, network, rounds_to_all(network))
    chosen = run.observed["spectra"]
    ended = learner.fit(data, network, n_rounds, start=chosen, seed=seed)
    return ended._replace(
        rounds=run.rounds + ended.rounds, floats_sent=run.floats_sent + ended.floats_sent
    )


class CandidateState(NamedTuple):
    """What the nodes hosted here know of everyone's candidates.

    Attributes
    ----------
    nodes : ndarray of shape (m,)
        Their ids.
    known : ndarray of shape (m, n_nodes)
        One where a node's candidates are known.
    spectra : ndarray of shape (m, n_nodes, n_endmembers, n_bands)
        The candidates.
    """

    nodes: NDArray[np.intp]
    known: Matrix
    spectra: Matrix


class SharedCandidates:
    """A program by which all nodes receive, and choose from, the candidates of all.

    A node's candidates are what vertex component analysis finds in its pixels, each the mean of the
    pixels most like it (at most ten, a tenth of the node's), which keeps odd pixels out; a node
    with fewer pixels than materials has none. They are handed on from neighbor to neighbor for as
    many rounds as the network's diameter. Then every node holds the same candidates and draws the
    same directions, and vertex component analysis of the candidates gives all nodes the same
    spectra.

    Parameters
    ----------
    data : mapping of int to ndarray of shape (n_pixels, n_bands)
        Node -> its pixels, of the nodes that may be hosted here.
    n_nodes : int
        Nodes of the whole network.
    n_endmembers : int
        Materials.
    seed : int, default 0
        Seed of all draws.
    """

    def __init__(
        self, data: Mapping[int, Matrix], n_nodes: int, n_endmembers: int, seed: int = 0
    ) -> None:
        self.data, self.seed = data, seed
        self.n_nodes, self.n_endmembers = n_nodes, n_endmembers

    def start(self, nodes: NDArray[np.intp]) -> CandidateState:
        """Return the state in which every node knows its own candidates."""
        own = [self._candidates(int(node)) for node in nodes]
        m, rows = len(nodes), np.arange(len(nodes))
        known = np.zeros((m, self.n_nodes))
        spectra = np.zeros((m, self.n_nodes, *own[0].shape), dtype=own[0].dtype)
        known[rows, nodes], spectra[rows, nodes] = 1, own
        return CandidateState(nodes, known, spectra)

    def adapt(self, state: CandidateState, round_: int) -> CandidateState:
        """Do nothing."""
        return state

    def message(self, state: CandidateState) -> tuple[Matrix, ...]:
        """Return all candidates that a node knows."""
        return state.known, state.spectra

    def combine(self, state: CandidateState, inbox: Inbox) -> CandidateState:
        """Take over what the neighbors know."""
        known, spectra = inbox.arrays
        best = inbox.argmax(known)
        return state._replace(
            known=np.take_along_axis(known, best, axis=0),
            spectra=spectra[best, np.arange(self.n_nodes)],
        )

    def observe(self, state: CandidateState) -> dict[str, Matrix]:
        """Return the spectra that every node chooses, (m, n_endmembers, n_bands), unit vectors."""
        pools = zip(state.known, state.spectra, strict=True)
        return {"spectra": np.stack([self._chosen(own[known == 1]) for known, own in pools])}

    def _candidates(self, node: int) -> Matrix:
        X = self.data[node]
        if len(X) < self.n_endmembers or not X.any():
            return np.zeros((self.n_endmembers, X.shape[1]), dtype=X.dtype)
        pixels = vca(X, self.n_endmembers, rng=spawn(self.seed, node)).pixels
        unit = normalize_atoms(X, np.zeros_like(X))
        alike = np.argsort(-unit[pixels] @ unit.T, axis=1, kind="stable")
        groups = X[alike[:, : max(2, min(_NEAREST, len(X) // _NEAREST))]]
        return np.asarray(groups.mean(axis=1))

    def _chosen(self, spectra: Matrix) -> Matrix:
        pool = spectra.reshape(-1, spectra.shape[-1])
        pool = pool[pool.any(axis=1)]
        return own_start(pool, spawn(self.seed), self.n_endmembers)


def own_start(X: Matrix, rng: np.random.Generator, n_endmembers: int) -> Matrix:
    """Return the spectra that VCA finds in a node's own pixels, as non-negative unit atoms.

    They are, but for noise, spectra of single pixels. If there are too few pixels, or only black
    ones, the rest are flat spectra.

    Parameters
    ----------
    X : ndarray of shape (n_pixels, n_bands)
        Pixels.
    rng : numpy.random.Generator
        Source of VCA's directions.
    n_endmembers : int
        Materials.
    """
    flat = np.full((n_endmembers, X.shape[1]), X.shape[1] ** -0.5, dtype=X.dtype)
    if not X.any():
        return flat
    if len(X) < n_endmembers:
        flat[: len(X)] = normalize_atoms(np.maximum(X, 0), flat[: len(X)])
        return flat
    return normalize_atoms(np.maximum(vca(X, n_endmembers, rng=rng).spectra, 0), flat)
