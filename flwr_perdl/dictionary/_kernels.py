"""The inner loops of sparse coding, one sample after the other, and of two updates, compiled.

With the Gram matrix ``D @ D.T`` of the atoms, what a sample ``x`` still has to do with them follows
from its products ``D @ x`` alone; no loop of the coding runs over features. The functions of
:mod:`flwr_perdl.dictionary.coding` check the arguments, bring all arrays to one dtype, and share
blocks of samples among threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.compiled import compiled

#: Atoms become active in :func:`coordinate_descent` that violate optimality by more than this
#: share of the worst violation. More at once make longer sweeps, fewer make more rounds: 0.5 to
#: 0.9 differ by a third.
_WORST = 0.8


@compiled
def matching_pursuit(
    products: Matrix,
    peaks: Matrix,
    gram: Matrix,
    k: int,
    level: float,
    by_residual: bool,
    tiny: float,
    least: float,
    C: Matrix,
) -> None:
    """Write the codes of orthogonal matching pursuit with unit atoms to ``C``, which holds zeros.

    ``products`` is ``X @ D.T``, ``peaks`` the samples' largest magnitudes, since samples may be
    orthogonal to all atoms up to rounding, and ``gram`` is ``D @ D.T``. A sample takes at most
    ``k`` atoms, none of them with a product below ``level`` with what is left. ``by_residual``: the
    atom is taken after which least is left, not the one with the largest product. ``tiny`` is
    rounding, relative to products, and ``least`` the least squared distance of an atom from the
    span of those taken.

    A sample's steps are those of a Cholesky factorization of the Gram matrix that chooses its
    pivots: ``basis[s]`` holds the products of all atoms with the ``s``-th orthonormal direction of
    the atoms taken, ``factor`` is the triangle that leads from these directions to the atoms, and
    ``rest`` the products of all atoms with what is left of the sample.
    """
    n, r = products.shape
    basis = np.empty((k, r), gram.dtype)
    factor = np.empty((k, k), gram.dtype)
    along = np.empty(k, gram.dtype)
    taken = np.empty(k, np.intp)
    rest, left = np.empty(r, gram.dtype), np.empty(r, gram.dtype)
    weight, score = np.empty(r, gram.dtype), np.empty(r, gram.dtype)
    for i in range(n):
        peak = peaks[i]
        for j in range(r):
            rest[j] = products[i, j]
            peak = max(peak, abs(rest[j]))
            left[j] = gram[j, j]  # squared norms of the atoms beside the directions
            weight[j] = 1  # 1 / sqrt(left) if `by_residual`; 0 of what is taken
        s = 0
        for _ in range(k):
            new = _best_atom(rest, weight, tiny, score)
            product = abs(rest[new])
            if product <= tiny * peak or product < level:
                break
            weight[new] = 0
            square = gram[new, new]
            for t in range(s):
                factor[t, s] = basis[t, new]
                square -= factor[t, s] ** 2
            if square <= least:
                continue
            pivot = np.sqrt(square)
            taken[s], factor[s, s], along[s] = new, pivot, rest[new] / pivot
            for j in range(r):
                basis[s, j] = gram[new, j]
            for t in range(s):
                for j in range(r):
                    basis[s, j] -= factor[t, s] * basis[t, j]
            for j in range(r):
                basis[s, j] /= pivot
                rest[j] -= along[s] * basis[s, j]
            if by_residual:
                for j in range(r):
                    left[j] -= basis[s, j] ** 2
                    if weight[j] > 0:
                        weight[j] = 1 / np.sqrt(left[j]) if left[j] > least else 0
            s += 1
        for t in range(s - 1, -1, -1):
            code = along[t]
            for u in range(t + 1, s):
                code -= factor[t, u] * C[i, taken[u]]
            C[i, taken[t]] = code / factor[t, t]


@compiled
def _best_atom(rest: Matrix, weight: Matrix, tiny: float, score: Matrix) -> int:
    """Return the atom of the largest score; of those that are equal up to rounding the first."""
    best = 0.0
    for j in range(len(rest)):
        score[j] = weight[j] * abs(rest[j])
        best = max(best, score[j])
    new = 0
    while score[new] < (1 - tiny) * best:
        new += 1
    return new


@compiled
def _gap(
    m: int, codes: Matrix, given: Matrix, left: Matrix, largest: float, square: float, alpha: float
) -> float:
    """Return the duality gap of codes; the dual point is what is left, scaled to be feasible."""
    penalty = fitted = along = 0.0
    for a in range(m):
        penalty += alpha * abs(codes[a])
        fitted += codes[a] * given[a]
        along += codes[a] * left[a]
    scale, error = alpha / largest, max(square - fitted - along, 0.0)
    return 0.5 * (1 - scale) ** 2 * error + penalty - scale * along


@compiled
def _descend(m: int, codes: Matrix, left: Matrix, gram: Matrix, alpha: float) -> bool:
    """Minimize over one code after the other; return whether any changed its sign."""
    changed = False
    for a in range(m):
        target = left[a] + gram[a, a] * codes[a]
        new = 0.0
        if target > alpha:
            new = (target - alpha) / gram[a, a]
        elif target < -alpha:
            new = (target + alpha) / gram[a, a]
        step = new - codes[a]
        if step != 0:
            changed = changed or new * codes[a] <= 0
            codes[a] = new
            for b in range(m):
                left[b] -= step * gram[a, b]
    return changed


@compiled
def _newton(
    m: int,
    codes: Matrix,
    left: Matrix,
    gram: Matrix,
    factor: Matrix,
    used: NDArray[np.intp],
    step: Matrix,
    alpha: float,
) -> bool:
    """Move the codes that are not zero to their minimum, no further than where one becomes zero.

    Return whether they came there.

    The Cholesky factor of their atoms' Gram matrix leads there. Where an atom depends on those
    before it, codes can move without a change of the fit, in the direction that lowers the penalty.
    """
    k, dependent = 0, False
    for a in range(m):
        if codes[a] == 0:
            continue
        value = left[a] - (alpha if codes[a] > 0 else -alpha)
        square = gram[a, a]
        for t in range(k):
            product = gram[a, used[t]]
            for u in range(t):
                product -= factor[k, u] * factor[t, u]
            factor[k, t] = product / factor[t, t]
            square -= factor[k, t] ** 2
            value -= factor[k, t] * step[t]
        used[k] = a
        dependent = square <= 1e-12 * gram[a, a]
        if dependent:
            step[k] = 1.0 if value > 0 else -1.0
            for t in range(k):
                step[t] = -step[k] * factor[k, t]
            break
        factor[k, k] = np.sqrt(square)
        step[k] = value / factor[k, k]
        k += 1
    for t in range(k - 1, -1, -1):
        step[t] /= factor[t, t]
        for u in range(t):
            step[u] -= factor[t, u] * step[t]
    k += dependent
    length, zero = np.inf if dependent else 1.0, -1
    for t in range(k):
        code = codes[used[t]]
        if step[t] * code < 0 and abs(code) < length * abs(step[t]):
            length, zero = -code / step[t], used[t]
    if length == np.inf:
        return True
    for t in range(k):
        move, row = length * step[t], gram[used[t]]
        codes[used[t]] += move
        for b in range(m):
            left[b] -= move * row[b]
    if zero >= 0:
        codes[zero] = 0
    return zero < 0


@compiled
def _subtract(m: int, codes: Matrix, atoms: NDArray[np.intp], gram: Matrix, rest: Matrix) -> None:
    """Take what these codes make of the sample off the products of all atoms with what is left."""
    for a in range(m):
        if codes[a] != 0:
            code, row = codes[a], gram[atoms[a]]
            for j in range(len(rest)):
                rest[j] -= code * row[j]


@compiled
def _begin(
    products: Matrix,
    gram: Matrix,
    given: Matrix,
    rest: Matrix,
    is_active: NDArray[np.bool_],
    atoms: NDArray[np.intp],
    codes: Matrix,
) -> int:
    """Move a sample's given codes to those of its active atoms; return how many these are."""
    m = 0
    for j in range(len(rest)):
        rest[j] = products[j] if gram[j, j] > 0 else 0  # zero atoms have no codes
        is_active[j] = False
        if given[j] != 0:
            if gram[j, j] > 0:
                is_active[j], atoms[m], codes[m] = True, j, given[j]
                m += 1
            given[j] = 0
    _subtract(m, codes, atoms, gram, rest)
    return m


@compiled
def _violations(rest: Matrix, is_active: NDArray[np.bool_], alpha: float) -> tuple[float, float]:
    """Return the largest product with what is left, and that of an atom that is not active."""
    largest = worst = alpha
    for j in range(len(rest)):
        size = abs(rest[j])
        largest = max(largest, size)
        if not is_active[j]:
            worst = max(worst, size)
    return largest, worst


@compiled
def coordinate_descent(
    products: Matrix,
    squares: Matrix,
    gram: Matrix,
    alpha: float,
    tol: float,
    max_iter: int,
    C: Matrix,
    sweeps: NDArray[np.intp],
    gaps: Matrix,
) -> None:
    """Write the codes that minimize ``0.5 * ||x - c @ D||^2 + alpha * ||c||_1`` to ``C``.

    Coordinate descent on a set of active atoms, from the codes that ``C`` holds. After a sweep that
    changes no sign, Newton steps lead to the minimum over the codes that are not zero. When the
    active atoms are optimal among themselves, the others are looked at, and those that violate
    optimality most become active too.

    ``products`` is ``X @ D.T``, ``squares`` are ``||x||^2``, and ``gram`` is ``D @ D.T``. A duality
    gap of ``tol`` is small enough, relative to the objective of zeros, ``0.5 * ||x||^2``; a sample
    has ``max_iter`` sweeps at most. ``sweeps`` and ``gaps`` receive what each of them came to.
    """
    n, r = products.shape
    rest, is_active, atoms = np.empty(r), np.empty(r, np.bool_), np.empty(r, np.intp)
    # of the active atoms: codes, products with the sample and with what is left, Gram matrix
    codes, before, given, left = np.empty(r), np.empty(r), np.empty(r), np.empty(r)
    among, factor = np.empty((0, 0)), np.empty((0, 0))
    used, step = np.empty(r, np.intp), np.empty(r)
    for i in range(n):
        goal, known, sweep = 0.5 * tol * squares[i], 0, 0
        m = _begin(products[i], gram, C[i], rest, is_active, atoms, codes)
        while True:
            largest, worst = _violations(rest, is_active, alpha)
            for a in range(m):
                before[a], left[a] = codes[a], rest[atoms[a]]
                given[a] = products[i, atoms[a]]
            gap = _gap(m, codes, given, left, largest, squares[i], alpha)
            if gap <= goal or sweep == max_iter:
                break
            enough = alpha + _WORST * (worst - alpha)
            for j in range(r):
                if abs(rest[j]) > enough and not is_active[j]:
                    is_active[j], atoms[m], codes[m], before[m] = True, j, 0, 0
                    left[m], given[m] = rest[j], products[i, j]
                    m += 1
            if m > len(among):
                among, factor, known = np.empty((2 * m, 2 * m)), np.empty((2 * m, 2 * m)), 0
            for a in range(known, m):
                for b in range(a + 1):
                    among[a, b] = among[b, a] = gram[atoms[a], atoms[b]]
            known = m
            gap = np.inf
            while gap > 0.3 * goal and sweep < max_iter:  # the whole gap is a little larger
                sweep += 1
                if not _descend(m, codes, left, among, alpha):
                    while not _newton(m, codes, left, among, factor, used, step, alpha):
                        pass
                largest = alpha
                for a in range(m):
                    largest = max(largest, abs(left[a]))
                gap = _gap(m, codes, given, left, largest, squares[i], alpha)
            for a in range(m):
                before[a] = codes[a] - before[a]
            _subtract(m, before, atoms, gram, rest)
        for a in range(m):
            C[i, atoms[a]] = codes[a]
        sweeps[i], gaps[i] = sweep, 2 * gap / squares[i] if gap > 0 else 0


@compiled
def fit_atoms(rest: Matrix, C: Matrix, chosen: NDArray[np.intp], D: Matrix) -> None:
    """Fit the ``chosen`` atoms and their codes, one after the other, to what the others leave.

    One power iteration stands for the singular value decomposition of K-SVD: the atom becomes the
    sum of what the others leave, weighted by its codes, and each sample's code its product with it.
    ``rest`` is ``X - C @ D``, and is updated, as are the unit atoms ``D``, but for one whose sum is
    zero.
    """
    (n, d), users = rest.shape, np.empty(len(rest), np.intp)
    for j in chosen:
        m, squares = 0, rest.dtype.type(0)
        for i in range(n):
            if C[i, j] != 0:
                users[m], m, squares = i, m + 1, squares + C[i, j] ** 2
        atom = squares * D[j]
        for i in users[:m]:
            for f in range(d):
                atom[f] += C[i, j] * rest[i, f]
        peak = rest.dtype.type(0)
        for f in range(d):
            peak = max(peak, abs(atom[f]))
        if peak > 0:
            atom /= peak  # squares would leave the range where samples are very long or short
            atom /= np.sqrt(np.dot(atom, atom))
        else:
            atom[:] = D[j]
        turn = np.dot(D[j], atom)
        for i in users[:m]:
            before = C[i, j]
            code = np.dot(rest[i], atom) + before * turn
            for f in range(d):
                rest[i, f] += before * D[j, f] - code * atom[f]
        D[j] = atom


@compiled
def descend_atoms(
    others: Matrix, sums: Matrix, used: NDArray[np.intp], n_sweeps: int, atoms: Matrix
) -> None:
    """Give each used atom, in turn, the direction of its sum less what the others make of it.

    ``others`` is ``C.T @ C`` with a diagonal of zeros, ``sums`` is ``C.T @ X``; each row of both
    may have any factor.
    """
    r, d = atoms.shape
    atom = np.empty(d, atoms.dtype)
    for _ in range(n_sweeps):
        for j in used:
            atom[:] = sums[j]
            for other in range(r):
                weight = others[j, other]
                if weight != 0:
                    for f in range(d):
                        atom[f] -= weight * atoms[other, f]
            square = 0.0
            for f in range(d):
                square += atom[f] * atom[f]
            if square > 0:
                norm = np.sqrt(square)
                for f in range(d):
                    atoms[j, f] = atom[f] / norm
