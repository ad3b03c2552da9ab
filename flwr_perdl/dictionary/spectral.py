"""A spectral start: atoms from fourth moments of the samples, without iterations.

======================================= ====================================================
Arora, Ge, Ma and Moitra (COLT 2015)    here
======================================= ====================================================
Algorithm 3, ``M_uv``                   ``sum_i <u, y_i> <v, y_i> y_i y_i'`` of two samples u, v
``delta_2 / delta_1`` small             pairs are taken in order of this ratio
``z``, farther than ``1 / log m``       cosines with the atoms found so far below ``_ALIKE``
======================================= ====================================================

Two samples that share one atom give that atom as the first eigenvector (the idea of Agarwal,
Anandkumar, Jain, Netrapalli and Tandon, COLT 2014, too). Deviations: samples are whitened, so that
atoms which are not nearly orthogonal are found as well; what Gaussian samples would have is
subtracted; u and v are left out of their sum, and a sum that one sample dominates is not used.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.core.checks import Matrix, check_array, check_count, check_members, check_rng
from flwr_perdl.dictionary.atoms import normalize_atoms, principal_directions
from flwr_perdl.dictionary.learners import Learner
from flwr_perdl.dictionary.polar import polar_factor
from flwr_perdl.dictionary.warm_start import WarmStart, iterate

#: Whitened atoms with a larger cosine than this are one atom.
_ALIKE = 0.8
#: The first threshold, in units of the learner's own, and its factor per iteration: codes of
#: atoms that are nearly right have small entries where there should be none.
_BOOST, _DECAY = 4.0, 0.9
#: The largest share that one sample may have of the squares of a sum's terms.
_MOST = 2 / 3


def spectral_start(
    X: Matrix, learner: Learner, *, rng: np.random.Generator, n_iter: int = 25, n_pairs: int = 20
) -> WarmStart:
    """Find atoms by a spectral method, then take iterations of the learner from there.

    It stands in for `warm_start`, also as ``DictionaryClient(start=spectral_start)``. It needs many
    samples, each of a small share of the atoms (a sixth or less), and is surest for at most as many
    atoms as features. Its time is that of ``n_pairs * n_atoms`` products of ``X.T`` with ``X``, in
    at most ``n_atoms`` coordinates.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Without missing entries.
    learner : Learner
        Atoms that are not found are those of its own start.
    rng : numpy.random.Generator
    n_iter : int, default 25
        Iterations of the learner; its threshold or penalty begins at four times its own.
    n_pairs : int, default 20
        Pairs of samples to draw, per atom.

    Returns
    -------
    WarmStart
        With one objective.

    Raises
    ------
    ValueError
        If ``X`` is empty, has missing entries, or an option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import MODLearner, dictionary_distance, spectral_start
    >>> rng = np.random.default_rng(0)
    >>> D = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.6, 0.8]])
    >>> X = rng.choice([-1, 0, 1], (1000, 3), p=[0.1, 0.8, 0.1]) @ D
    >>> found = spectral_start(X, MODLearner(3), rng=rng)
    >>> bool(dictionary_distance(D, found.dictionary) < 1e-6)
    True
    """
    check_members("learner", learner, "Learner", "start", "code", "update", "loss")
    check_rng(rng)
    X = check_array("X", X, min_rows=1, squares=True)
    check_count("n_iter", n_iter)
    check_count("n_pairs", n_pairs)
    D = learner.start(X, rng)
    found = _spectral_atoms(X, len(D), n_pairs * len(D), rng)
    start = np.vstack([found.astype(D.dtype), D[len(found) :]])
    start = polar_factor(start, D) if learner.orthogonal else start
    D = iterate(learner, X, start, [max(1.0, _BOOST * _DECAY**t) for t in range(n_iter)])
    objective = learner.loss(X, learner.code(X, D), D)
    return WarmStart(D, objective, (objective,))


def _spectral_atoms(X: Matrix, n_atoms: int, n_pairs: int, rng: np.random.Generator) -> Matrix:
    """Return at most so many different unit atoms, of the pairs that tell them best."""
    V = principal_directions(X.astype(np.float64), min(n_atoms, X.shape[1]))
    Y = X @ V.T
    scales = np.sqrt(np.mean(Y**2, axis=0))
    Y /= scales
    energies = np.sum(Y**2, axis=1)
    ratios, vectors = [], []
    for pair in rng.integers(len(Y), size=(n_pairs, 2)) if len(V) > 1 else ():
        weights = np.prod(Y @ Y[pair].T, axis=1)
        weights[pair] = 0
        terms = (weights * energies) ** 2
        if terms.max() > _MOST * terms.sum() or not terms.any():
            continue
        u, v = Y[pair]
        moment = (Y * weights[:, None]).T @ Y / len(Y)
        moment -= (u @ v) * np.eye(len(u)) + np.outer(u, v) + np.outer(v, u)
        values, U = np.linalg.eigh(moment)
        second, first = np.argsort(np.abs(values))[-2:]
        ratios.append(np.abs(values[second] / values[first]))
        vectors.append(U[:, first])
    atoms = np.zeros((0, len(V)))
    for i in np.argsort(ratios, kind="stable"):
        if len(atoms) < n_atoms and np.abs(atoms @ vectors[i]).max(initial=0) < _ALIKE:
            atoms = np.vstack([atoms, vectors[i]])
    return normalize_atoms(atoms * scales @ V)
