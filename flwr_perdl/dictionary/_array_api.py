"""Matching pursuit and the lasso on arrays of other libraries, all samples at once.

A loop over the elements of a GPU's array would be slow, so each step here is one operation on the
arrays of all samples. NumPy's arrays go to :mod:`flwr_perdl.dictionary._kernels`, whose functions
have the same names and find the same codes.
"""

from __future__ import annotations

from flwr_perdl._arrays import beside, cast, namespace, put
from flwr_perdl._checks import Matrix


def pursue(
    products: Matrix,
    peaks: Matrix,
    gram: Matrix,
    k: int,
    level: float,
    by_residual: bool,
    tiny: float,
) -> Matrix:
    """Return the codes of orthogonal matching pursuit."""
    xp, here = namespace(products, gram), beside(products)
    (n, r), dtype = products.shape, products.dtype
    rows, steps, atoms = (xp.arange(m, **here) for m in (n, k, r))
    rest = products
    done = tiny * xp.maximum(xp.max(xp.abs(rest), axis=1), peaks)
    basis = xp.zeros((k, n, r), dtype=dtype, **here)
    factor = xp.zeros((n, k, k), dtype=dtype, **here)
    along = xp.zeros((n, k), dtype=dtype, **here)
    taken = xp.zeros((n, k), dtype=xp.int64, **here)
    free = xp.full((n, r), True, **here)
    going = xp.full((n,), True, **here)
    left = xp.broadcast_to(gram[atoms, atoms], (n, r))
    score = xp.abs(rest)
    for s in range(k):
        score = xp.where(free, score, -1)
        best = xp.max(score, axis=1, keepdims=True)
        choice = xp.argmax(cast(score >= (1 - tiny) * best, xp.int8), axis=1)
        put(free, choice[:, None], False)
        taken[:, s] = choice
        chosen = rest[rows, choice]
        going = going & (xp.abs(chosen) > done) & (xp.abs(chosen) >= level)
        if not xp.any(going):
            k = s
            break
        before = basis[steps[:s], rows[:, None], choice[:, None]]
        square = gram[choice, choice] - xp.sum(before**2, axis=1)
        live = going & (square > tiny)
        pivot = xp.sqrt(xp.where(live, square, 1))
        told = (before[:, None, :] @ xp.permute_dims(basis[:s, ...], (1, 0, 2)))[:, 0, :]
        new = (xp.take(gram, choice, axis=0) - told) / pivot[:, None]
        basis[s, ...] = xp.where(live[:, None], new, 0)
        along[:, s] = xp.where(live, chosen / pivot, 0)
        factor[:, :s, s] = xp.where(live[:, None], before, 0)
        factor[:, s, s] = pivot
        rest = rest - along[:, s, None] * basis[s, ...]
        score = xp.abs(rest)
        if by_residual:
            left = left - basis[s, ...] ** 2
            score = xp.where(left > tiny, score / xp.sqrt(xp.where(left > tiny, left, 1)), 0)
    C: Matrix = xp.zeros((n, r), dtype=dtype, **here)
    if k:
        put(C, taken[:, :k], xp.linalg.solve(factor[:, :k, :k], along[:, :k, None])[..., 0])
    return C
