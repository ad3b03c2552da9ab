r"""Bi-clustering by a sparse singular value decomposition: Algorithm 3, and how clusters are read.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. Its
Algorithm 3 simplifies Lee, Shen, Huang, Marron, "Biclustering via Sparse Singular Value
Decomposition", Biometrics 2010: sparse rank-one layers of the data, one after the other. Of a
matrix of genes by patients, a layer's atom tells which patients it concerns, its code which genes.

========================================= ====================================================
paper (columns)                           here (rows)
========================================= ====================================================
``X``, patients x genes (M x T)           ``X.T``: samples (genes) x features (patients)
``w_k`` (M), ``y_k`` (T)                  ``atoms[k]``, ``codes[:, k]``
``X ~ sum_k w_k y_k'`` (70)               ``X ~ codes @ atoms``
``lambda``, ``beta``, the thresholds      ``thresholds[k]``, of codes and of atoms
``([w_1]_m, ..., [w_N]_m)``, Fig. 8       rows of :func:`profiles`
========================================= ====================================================

Algorithm 4, the online one over a network, is `ModelDiffusion` with the objective `Biclustering`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import soft_threshold

#: From so many iterations on, a layer keeps its thresholds: chosen anew, they may go in circles.
SETTLED = 100


class Layers(NamedTuple):
    """Sparse rank-one layers of a matrix.

    Attributes
    ----------
    atoms : ndarray of shape (n_layers, n_features)
        Sparse, of norm one; zero where nothing of the data was left.
    codes : ndarray of shape (n_samples, n_layers)
        Sparse; the norm of a column is the layer's strength.
    thresholds : ndarray of shape (n_layers, 2)
        Of the codes and of the atom, in units of ``X``.
    n_iter : ndarray of shape (n_layers,)
        Iterations per layer.
    converged : ndarray of shape (n_layers,)
        Whether the atom stood still within the tolerance.
    """

    atoms: Matrix
    codes: Matrix
    thresholds: Matrix
    n_iter: NDArray[np.intp]
    converged: NDArray[np.bool_]


def ssvd(
    X: Matrix,
    n_layers: int,
    *,
    thresholds: str | tuple[float, float] = "sure",
    tol: float = 1e-10,
    max_iter: int = 1000,
) -> Layers:
    """Find sparse rank-one layers of ``X``, each of what the ones before it leave (Algorithm 3).

    A layer starts at the first singular vectors; its code and its atom are in turn soft-thresholded
    and brought to norm one. In step 2 the paper divides by the norm of the code; it must be the
    atom's own, or the atom shrinks to nothing.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        The data, of mean zero in each sample where the samples' means are of no interest.
    n_layers : int
        Number of layers, at most the lesser side of ``X``.
    thresholds : "sure", "bic" or tuple of two floats, default "sure"
        The paper's lambda (codes) and beta (atoms), at least 0, in units of ``X``; or the rule by
        which :func:`choose_threshold` chooses both in every iteration, until they settle. Lee et
        al. choose by BIC; on weak signals that thresholds a layer down to one entry.
    tol : float, default 1e-10
        A layer is found when no entry of its atom moves by as much (the paper's), or by ten units
        of rounding where that is more.
    max_iter : int, default 1000
        Most iterations per layer.

    Returns
    -------
    Layers

    Raises
    ------
    ValueError
        If there are more layers than sides allow, or the given thresholds leave nothing of one.

    Examples
    --------
    >>> import numpy as np
    >>> layers = ssvd(np.outer([3.0, 0, 0, 1], [0.6, 0.8, 0]), 1)
    >>> np.abs(layers.codes @ layers.atoms).round(3).max()
    np.float64(2.4)
    """
    check_count("n_layers", n_layers, 1, min(X.shape))
    tol = max(tol, 10 * float(np.finfo(X.dtype).eps))
    layers, floor, left = [], _floor(X), X
    for _ in range(n_layers):
        layer = _layer(left, thresholds, tol, max_iter, floor)
        left = left - np.outer(layer.code, layer.atom)
        layers.append(layer)
    return Layers(
        np.stack([layer.atom for layer in layers]),
        np.stack([layer.code for layer in layers], axis=1),
        np.array([layer.thresholds for layer in layers], dtype=X.dtype),
        np.array([layer.n_iter for layer in layers]),
        np.array([layer.converged for layer in layers]),
    )


class _Layer(NamedTuple):
    atom: Matrix
    code: Matrix
    thresholds: tuple[float, float]
    n_iter: int
    converged: bool


def _layer(
    X: Matrix, asked: str | tuple[float, float], tol: float, max_iter: int, floor: float
) -> _Layer:
    """Return the sparse rank-one layer of ``X``, zero where ``X`` has no norm above ``floor``."""
    total = float(np.square(X).sum())
    rule, (lam, beta) = (asked, (0.0, 0.0)) if isinstance(asked, str) else ("", asked)
    if total <= floor:
        return _Layer(np.zeros_like(X[0]), np.zeros_like(X[:, 0]), (lam, beta), 0, True)
    atom = np.linalg.svd(X, full_matrices=False)[2][0]
    for n_iter in range(1, max_iter + 1):
        choose = rule and n_iter <= SETTLED
        products = X @ atom
        if choose:
            lam = choose_threshold(products, _residual(total, products), X.size, rule)
        code = _unit(soft_threshold(products, lam), "lambda", lam)
        products = code @ X
        if choose:
            beta = choose_threshold(products, _residual(total, products), X.size, rule)
        before, atom = atom, _unit(soft_threshold(products, beta), "beta", beta)
        converged = bool(np.abs(atom - before).max() < tol)
        if converged:
            break
    return _Layer(atom, (code @ X @ atom) * code, (lam, beta), n_iter, converged)


def _residual(total: float, products: Matrix) -> float:
    """Return what a side of a layer leaves of the energy; not below 0, where rounding leads."""
    return max(0.0, total - float(products @ products))


def _unit(vector: Matrix, name: str, threshold: float) -> Matrix:
    norm = np.linalg.norm(vector)
    if not norm:
        raise ValueError(f"thresholds must leave something of every layer, got {name} {threshold}.")
    scaled: Matrix = vector / norm
    return scaled


def _floor(X: Matrix) -> float:
    """Return the energy below which what is left of ``X`` is rounding."""
    relative: float = max(X.shape) * float(np.finfo(X.dtype).eps)
    return float(np.square(X).sum()) * relative**2


def choose_threshold(products: Matrix, residual: float, size: int, rule: str = "sure") -> float:
    r"""Choose the threshold of one side of a layer; no labels are needed.

    With the other side ``u`` held (of norm one), the layer's least squares are ``a = X u``, each
    entry with the noise of an entry of ``X``. Of all soft thresholds of ``a`` that keep at least
    one entry, the one with the least

        ||v - a||^2 / sigma^2 + penalty * (non-zeros of v),  v = soft_threshold(a, threshold)

    is returned, ``sigma^2 = ||X - a u'||^2 / (size - len(a))``. With a penalty of 2 that is Stein's
    unbiased estimate of v's risk (Donoho and Johnstone, JASA 1995); with ``log(size)`` it is the
    BIC of Lee et al. (2010), who lower the entries less the larger they are.

    Parameters
    ----------
    products : ndarray of shape (n,)
        ``a``.
    residual : float
        ``||X - a u'||^2``.
    size : int
        Number of entries of ``X``.
    rule : {"sure", "bic"}, default "sure"
        The penalty.

    Returns
    -------
    float
        The threshold; 0 where there is no noise to be seen.
    """
    falling = np.sort(np.abs(products).astype(np.float64))[::-1]
    squares = np.square(falling)
    # at most what rounding leaves of `residual` where this layer is all there is
    nothing = len(products) * float(np.finfo(products.dtype).eps) * float(squares.sum())
    if size <= len(products) or residual <= nothing:
        return 0.0
    kept = np.arange(1, len(falling) + 1)
    candidates = np.append(falling[1:], 0.0)  # the j-th keeps the j greatest
    dropped = np.append(np.cumsum(squares[::-1])[::-1][1:], 0.0)
    change = dropped + kept * np.square(candidates)
    variance = residual / (size - len(products))
    penalty = 2.0 if rule == "sure" else float(np.log(size))
    criterion = np.where(candidates < falling[0], change / variance + penalty * kept, np.inf)
    return float(candidates[int(np.argmin(criterion))])


def profiles(atoms: Matrix, strengths: Matrix) -> Matrix:
    """Return the features' places in the space of the layers, brought to the unit sphere.

    Fig. 8 draws feature m at ``([w_1]_m, ..., [w_N]_m)``. Here each layer counts by its strength,
    so that two features are as far apart as the layers make them, and only the direction of a
    feature is kept: features that go up and down together over the samples are close, however
    strongly they do, as under the correlation that gene expressions are commonly compared by.

    Parameters
    ----------
    atoms : ndarray of shape (n_layers, n_features)
        Of Algorithm 3 or 4.
    strengths : ndarray of shape (n_layers,)
        Root mean squares of the layers' codes; every agent knows its own.

    Returns
    -------
    ndarray of shape (n_features, n_layers)
        Rows of norm one; a feature that is in no layer is zero.
    """
    places = atoms.T * strengths
    norms = np.linalg.norm(places, axis=1, keepdims=True)
    directions: Matrix = places / np.where(norms > 0, norms, 1)
    return directions
