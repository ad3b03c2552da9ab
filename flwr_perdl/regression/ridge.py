"""Ridge regression of many clients from sums that each client forms once.

A model that is linear in fixed features ``Z`` follows from the sums over samples ``Z'Z``, ``Z'Y``
and the diagonal of ``Y'Y``: the shared model of all clients, models of groups of clients, and each
client's own deviation.

===================================  ==============================================================
literature                           here
===================================  ==============================================================
``z(x)``                             `RandomFeatures`: ``[1, x/sqrt(d), sqrt(2/D) cos(Wx + b)]``
``Z'Z, Z'Y, diag(Y'Y)``              `ridge_sums`, one vector: clients' vectors add up
``(Z'Z + penalty I) w = Z'Y``        `solve_ridge`, `choose_ridge`
``u = Z'(ZZ' + tau I)^-1 (Y - Zw)``  `fit_deviation`
``(R - HR)_i / (1 - H_ii)``          `fit_deviation`: the residual without sample i
``w_1, ..., w_k``; the groups        `Grouping`, `choose_groups`
===================================  ==============================================================

Rahimi and Recht, "Random features for large-scale kernel machines", NeurIPS 2007. The shared model
is known as analytic federated learning (He et al., "AFL", CVPR 2025); a deviation is a random
effect (Laird and Ware, Biometrics 1982) whose variance is chosen by leave-one-out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from flwr_perdl.core.checks import LARGE, Matrix, check_array, check_count, check_kind, check_real
from flwr_perdl.random import SERVER, spawn

#: Penalties of the shared model, and of a client's deviation from it, that are tried.
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)
STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, np.inf)
#: Standard deviations at which values are cut.
_CUT = 5.0
#: A column whose variance is this share of its mean square is constant but for rounding; errors
#: that differ by such a share are equal.
_ROUNDING, EQUAL = 1e-12, 1e-9
#: By how much, as a share, sums of a client may be off that are formed with rounding.
_ODD = 1e-8
#: Names of a model's arrays.
MODEL_ARRAYS = ("means", "deviations", "weights", "offsets", "coefficients", "classes")
#: The norm to which rows of features are cut where sums get noise, with responses of norm 1 that of
#: a sample's term; and a bound of a sample's term without noise.
_ROW = 1.5
ROW_LENGTH = sqrt(_ROW**4 + _ROW**2)
MOST_NORM = sqrt((_CUT**2 + 3) ** 2 + _CUT**2 + 4)
#: A simpler model is taken if its error is at most so many times the least.
SIMPLER = 1.01
#: Starts of the alternation; how many go on after one pass; the most passes.
_STARTS, _BEST, _PASSES = 12, 3, 100


def column_moments(X: Matrix) -> Matrix:
    """Return the counts, sums and sums of squares of columns, (3, d); NaN does not count."""
    there = ~np.isnan(X)
    values = np.where(there, X, 0.0).astype(np.float64, copy=False)
    return np.stack([there.sum(axis=0), values.sum(axis=0), (values**2).sum(axis=0)])


def of_bounds(bounds: Matrix) -> tuple[Matrix, Matrix]:
    """Return the middles and half the widths of bounds, (d, 2)."""
    return bounds.mean(axis=1), np.diff(bounds, axis=1)[:, 0] / 2


def standardize(moments: Matrix) -> tuple[Matrix, Matrix]:
    """Return the columns' means and deviations from the clients' total `column_moments`."""
    counts, sums, squares = moments
    n = np.maximum(counts, 1)
    means = sums / n
    variances = squares / n - means**2
    constant = variances <= _ROUNDING * squares / n
    return means, np.sqrt(np.where(constant, 1.0, variances))


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Random Fourier features of standardized columns, beside these and a constant.

    A missing value (NaN) counts as its column's mean; values are cut at 5 deviations.

    Parameters
    ----------
    means, deviations : ndarray of shape (d,)
        Of the columns.
    weights : ndarray of shape (d, n_features)
        Directions, normal with variance ``scale / d``.
    offsets : ndarray of shape (n_features,)
        Phases.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression.ridge import RandomFeatures
    >>> features = RandomFeatures.draw(np.zeros(2), np.ones(2), 4, scale=2.0, seed=0)
    >>> features(np.ones((3, 2))).shape
    (3, 7)
    """

    means: Matrix
    deviations: Matrix
    weights: Matrix
    offsets: Matrix

    @classmethod
    def draw(
        cls, means: Matrix, deviations: Matrix, n_features: int, *, scale: float, seed: int
    ) -> RandomFeatures:
        """Return the features of a seed, the same at every client.

        Parameters
        ----------
        means, deviations : ndarray of shape (d,)
            Of the columns.
        n_features : int
            Number of random features D; with 0 models are linear.
        scale : float
            d times the variance of ``weights``.
        seed : int
            The run's seed.

        Returns
        -------
        RandomFeatures
        """
        means = check_array("means", means, ndim=1, min_rows=1)
        deviations = check_array("deviations", deviations, ndim=1, columns=len(means))
        if not (deviations > 0).all():
            raise ValueError(f"deviations must be above 0, got {deviations.min():g}.")
        check_count("n_features", n_features, 0, 10**6)
        check_real("scale", scale, 0, LARGE, open_low=True)
        rng, d = spawn(seed, SERVER), len(means)
        weights = np.sqrt(scale / d) * rng.standard_normal((d, n_features))
        return cls(means, deviations, weights, rng.uniform(0, 2 * np.pi, n_features))

    @property
    def size(self) -> int:
        """The number of features, the constant and the columns included."""
        return 1 + len(self.means) + len(self.offsets)

    def __call__(self, X: Matrix) -> Matrix:
        """Return the features of samples, (n, 1 + d + n_features)."""
        d, D = self.weights.shape
        x = (X - self.means) / self.deviations
        x = np.clip(np.where(np.isnan(x), 0.0, x), -_CUT, _CUT)
        Z = np.empty((len(x), self.size))
        Z[:, 0] = 1
        Z[:, 1 : 1 + d] = x / np.sqrt(d)
        np.cos(x @ self.weights + self.offsets, out=Z[:, 1 + d :])
        Z[:, 1 + d :] *= np.sqrt(2 / max(D, 1))
        return Z


def ridge_sums(Z: Matrix, Y: Matrix) -> Matrix:
    """Return ``Z'Z`` (its upper triangle), ``Z'Y`` and the diagonal of ``Y'Y`` as one vector."""
    gram = (Z.T @ Z)[_upper(Z.shape[1])]
    return np.concatenate([gram, (Z.T @ Y).ravel(), (Y**2).sum(axis=0)])


@lru_cache(maxsize=1)
def _upper(p: int) -> NDArray[np.bool_]:
    """Return where the upper triangle of a matrix is."""
    return np.triu(np.ones((p, p), dtype=bool))


def bounded_sums(Z: Matrix, Y: Matrix) -> Matrix:
    """Return `ridge_sums` to which no sample adds a vector longer than ``ROW_LENGTH``.

    Off-diagonal products count by the root of two, so that a sample's are as long as its features'
    square; there are no squares of responses, of which rows have norm 1 at most.
    """
    lengths = np.linalg.norm(Z, axis=1, keepdims=True)
    sums = ridge_sums(Z * np.minimum(1, _ROW / lengths), Y)
    return sums * _term_weights(Z.shape[1], Y.shape[1])


def _term_weights(p: int, q: int) -> Matrix:
    weights = np.full((p, p), sqrt(2))
    weights[np.diag_indices(p)] = 1
    return np.concatenate([weights[_upper(p)], np.ones(p * q), np.zeros(q)])


def denoised_sums(sums: Matrix, p: int, q: int) -> Matrix:
    """Return sums of `bounded_sums` with noise as `ridge_sums`, positive semidefinite."""
    weights = _term_weights(p, q)
    sums = np.where(weights > 0, sums / np.where(weights > 0, weights, 1), 0)
    gram = unpack_sums(sums, p, q)[0]
    values, vectors = np.linalg.eigh(gram, UPLO="U")
    gram = (vectors * np.maximum(values, 0)) @ vectors.T
    return np.concatenate([gram[_upper(p)], sums[p * (p + 1) // 2 :]])


def sums_size(p: int, q: int) -> int:
    """Return the length of the sums of ``p`` features and ``q`` outputs."""
    return p * (p + 1) // 2 + p * q + q


def unpack_sums(sums: Matrix, p: int, q: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return ``Z'Z``, of which the lower triangle is 0, ``Z'Y`` and the diagonal of ``Y'Y``."""
    gram, at = np.zeros((p, p)), p * (p + 1) // 2
    gram[_upper(p)] = sums[:at]
    return gram, sums[at : at + p * q].reshape(p, q), sums[at + p * q :]


def check_sums(folds: Matrix, p: int, q: int, n: int, *, classes: bool) -> None:
    """Raise a ValueError unless these may be a client's `ridge_sums` by fold.

    Parameters
    ----------
    folds : ndarray of shape (n_folds, sums_size(p, q))
        The sums; the first feature is a constant.
    p, q, n : int
        Numbers of features, of outputs and of the client's samples.
    classes : bool
        Whether each response is one of ``q`` classes.
    """
    counts = folds[:, 0]
    if abs(counts.sum() - n) > _ODD * n or counts.min() < 0:
        raise ValueError(f"the sums must be of the client's {n} samples, got {counts.sum():g}")
    for count, fold in zip(counts, folds, strict=True):
        gram, cross, squares = unpack_sums(fold, p, q)
        sizes = np.diagonal(gram)
        # Features are bounded: a value is cut, and divided by the root of their number or less.
        if sizes.max() > (1 + _ODD) * _CUT**2 * max(count, 0) or squares.min() < 0:
            raise ValueError("the sums must be of features within their bounds")
        if classes and abs(squares.sum() - count) > _ODD * count:
            raise ValueError("the sums must be of one class for each sample")
        gram[np.diag_indices(p)] += _ODD * sizes.sum() + np.finfo(float).tiny
        try:
            # The transpose is in LAPACK's order: it needs no copy.
            lower, _ = cho_factor(gram.T, lower=True, overwrite_a=True, check_finite=False)
            inside = solve_triangular(lower, cross, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            raise ValueError("the sums must be positive semidefinite, got others") from None
        if ((inside**2).sum(axis=0) > (1 + _ODD) * squares).any():
            raise ValueError("the sums must be positive semidefinite with those of responses")
        del gram, lower, sizes  # before the next fold's is made


def join_moments(sums: Matrix, p: int, q: int) -> Matrix:
    """Return `sufficient_statistics` of each output from `ridge_sums`, (q, (p + 1)^2 + 1)."""
    gram, cross, squares = unpack_sums(sums, p, q)
    joined = np.empty((q, p + 1, p + 1))
    joined[:, :p, :p] = gram + np.triu(gram, 1).T
    joined[:, :p, p] = joined[:, p, :p] = cross.T
    joined[:, p, p] = squares
    return np.column_stack([np.full(q, gram[0, 0]), joined.reshape(q, -1)])


def solve_ridge(sums: Matrix, p: int, q: int, penalty: float) -> Matrix:
    """Return the coefficients (p, q) of a ridge regression; the constant is penalized, too."""
    gram, cross, _ = unpack_sums(sums, p, q)
    gram[np.diag_indices(p)] += penalty
    factor = cho_factor(gram.T, lower=True, overwrite_a=True, check_finite=False)
    solved: Matrix = cho_solve(factor, cross)
    return solved


def error_weights(w: Matrix) -> Matrix:
    """Return the vector whose product with sums is a model's squared error on their samples."""
    products = 2 * (w @ w.T)
    products[np.diag_indices(len(w))] /= 2
    return np.concatenate([products[_upper(len(w))], -2 * w.ravel(), np.ones(w.shape[1])])


class Ridge(NamedTuple):
    """A ridge regression whose penalty was chosen by folds."""

    #: Coefficients, (p, q).
    coefficients: Matrix
    penalty: float
    #: The squared error of each fold by the others' models, added up.
    error: float


def choose_ridge(folds: Matrix, p: int, q: int, penalties: Sequence[float] = PENALTIES) -> Ridge:
    """Return the ridge regression with the least squared error on folds that it has not seen.

    Parameters
    ----------
    folds : ndarray of shape (n_folds, sums_size(p, q))
        The clients' total `ridge_sums` by fold.
    p, q : int
        Numbers of features and of outputs.
    penalties : sequence of float, optional
        What is tried, ascending; of equals the largest is taken.
    """
    total = folds.sum(axis=0)
    errors = [
        sum(fold @ error_weights(solve_ridge(total - fold, p, q, penalty)) for fold in folds)
        for penalty in (penalties if len(penalties) > 1 else ())
    ]
    best = last_least(errors) if errors else 0
    error = float(errors[best]) if errors else float("nan")
    return Ridge(solve_ridge(total, p, q, penalties[best]), penalties[best], error)


def last_least(errors: Sequence[float]) -> int:
    """Return the last position of the least error, up to rounding."""
    found = np.asarray(errors)
    least = found.min()
    return int(np.flatnonzero(found <= least + EQUAL * abs(least))[-1])


class Deviation(NamedTuple):
    """How a client's own model differs from the one that it begins with."""

    #: To be added to the coefficients, (p, q).
    coefficients: Matrix
    #: The penalty that was chosen; infinite: no deviation.
    strength: float
    #: The squared error of each sample without itself, added up.
    error: float


def fit_deviation(Z: Matrix, R: Matrix, strengths: Sequence[float] = STRENGTHS) -> Deviation:
    """Return a client's deviation from a model, its penalty chosen by leave-one-out.

    Parameters
    ----------
    Z : ndarray of shape (n, p)
        Features.
    R : ndarray of shape (n, q)
        What the model leaves of the responses: ``Y - Z w``.
    strengths : sequence of float, optional
        Penalties, ascending; of equals the largest is taken.

    Returns
    -------
    Deviation

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression.ridge import fit_deviation
    >>> fit_deviation(np.ones((4, 1)), np.full((4, 1), 2.0), (1.0, 4.0)).coefficients
    array([[1.6]])
    """
    U, s, Vt = np.linalg.svd(Z, full_matrices=False)
    inner, tried = U.T @ R, []
    for tau in strengths:
        gain = s**2 / (s**2 + tau)
        # 1 - H_ii: of what the features do not span, and of what is shrunk.
        left = 1 - (U**2).sum(axis=1) + U**2 @ (1 - gain)
        residuals = R - U @ (gain[:, None] * inner)
        with np.errstate(divide="ignore", invalid="ignore"):
            without = residuals / left[:, None]
        tried.append(float(np.nan_to_num(without**2, nan=np.inf).sum()))
    best = last_least(tried)
    shrunk = s / (s**2 + strengths[best])
    return Deviation(Vt.T @ (shrunk[:, None] * inner), strengths[best], tried[best])


def fit_part(Z: Matrix, R: Matrix, random: str) -> Matrix:
    """Return a client's deviation (p, q), of the constant alone if ``random`` is "intercept"."""
    size = 1 if random == "intercept" else Z.shape[1]
    found = np.zeros((Z.shape[1], R.shape[1]))
    found[:size] = fit_deviation(Z[:, :size], R).coefficients
    return found


def expect_deviation(Z: Matrix, R: Matrix, variances: Matrix, noise: Matrix) -> Matrix:
    """Return the mean of a client's deviation given its samples, from variances of a mixed model.

    Parameters
    ----------
    Z, R : ndarray of shape (n, p) and (n, q)
        Features, and what the common model leaves of the responses.
    variances : ndarray of shape (q, p)
        Of the deviations of each output's coefficients over clients.
    noise : ndarray of shape (q,)
        Variances of the noise.
    """
    found = np.empty((Z.shape[1], R.shape[1]))
    for j, (own, s) in enumerate(zip(variances, noise, strict=True)):
        root = np.sqrt(own)
        scaled = Z * root
        inner = s * np.eye(len(root)) + scaled.T @ scaled
        found[:, j] = root * np.linalg.solve(inner, scaled.T @ R[:, j])
    return found


class Groups(NamedTuple):
    """Models of groups of clients."""

    #: Coefficients, (k, p, q); the group of the first client is the first, and so on.
    models: Matrix
    #: Each client's group, (n_clients,).
    members: NDArray[np.intp]


class Grouping:
    """Models of groups of clients, from every client's `ridge_sums`.

    Parameters
    ----------
    sums : ndarray of shape (n_clients, sums_size(p, q))
        The sums.
    p, q : int
        Numbers of features and of outputs.
    penalty : float
        Of each group's model.
    """

    def __init__(self, sums: Matrix, p: int, q: int, penalty: float) -> None:
        self.sums, self._form = sums, (p, q, penalty)
        self._known: dict[bytes, tuple[Matrix, Matrix]] = {}

    def of(self, group: NDArray[np.bool_]) -> tuple[Matrix, Matrix]:
        """Return a group's model, and each client's squared error with it."""
        if (key := group.tobytes()) not in self._known:
            w = solve_ridge(group.astype(float) @ self.sums, *self._form)
            self._known[key] = w, self.sums @ error_weights(w)
        return self._known[key]

    def assign(self, members: NDArray[np.intp], k: int) -> tuple[NDArray[np.intp], float] | None:
        """Return each client's best group after a pass, and the error; None: a group is empty."""
        if len(np.unique(members)) < k:
            return None
        errors = np.stack([self.of(members == j)[1] for j in range(k)])
        return errors.argmin(axis=0), float(errors.min(axis=0).sum())

    def fit(self, k: int, rng: np.random.Generator) -> Groups | None:
        """Return ``k`` ridge regressions, each of the clients that it fits best.

        Assignments and solutions alternate from twelve starts, each of ``k`` clients' own
        solutions; after one pass the best three go on. None if each has lost a group.
        """
        m, best = len(self.sums), None
        starts = [np.zeros(m, dtype=np.intp)]
        if k > 1:
            alone = np.stack([self.of(np.arange(m) == i)[1] for i in range(m)])
            drawn = [rng.choice(m, k, replace=False) for _ in range(_STARTS if k <= m else 0)]
            passed = (self.assign(alone[start].argmin(axis=0), k) for start in drawn)
            ranked = sorted((one for one in passed if one), key=lambda one: one[1])
            starts = [members for members, _ in ranked[:_BEST]]
        for members in starts:
            for _ in range(_PASSES):
                last, found = members, self.assign(members, k)
                if found is None or np.array_equal(last, members := found[0]):
                    break
            if found is not None and (best is None or found[1] < best[1]):
                best = found
        if best is None:
            return None
        numbers = [*dict.fromkeys(best[0].tolist())]  # by who comes first, whatever start it was
        models = np.stack([self.of(best[0] == j)[0] for j in numbers])
        return Groups(models, np.array([numbers.index(j) for j in best[0]]))


def choose_groups(
    folds: Matrix,
    p: int,
    q: int,
    candidates: Sequence[int],
    penalty: float,
    *,
    rng: np.random.Generator,
) -> tuple[Groups, list[Groups]]:
    """Return the fewest groups whose held-out error is within 1 % of the least.

    Parameters
    ----------
    folds : ndarray of shape (n_folds, n_clients, sums_size(p, q))
        Every client's `ridge_sums` by fold.
    p, q : int
        Numbers of features and of outputs.
    candidates : sequence of int
        Numbers of groups, ascending.
    penalty : float
        Of each group's model.
    rng : numpy.random.Generator
        Source of the starts.

    Returns
    -------
    groups : Groups
        Of all folds.
    without : list of Groups
        As many, of all folds but one each.
    """
    total, errors = folds.sum(axis=0), dict.fromkeys(candidates, 0.0)
    found: dict[int, list[Groups]] = {k: [] for k in candidates}
    for fold in folds:
        grouping = Grouping(total - fold, p, q, penalty)
        for k in candidates:
            if (groups := grouping.fit(k, rng)) is None:
                errors[k] = np.inf
            else:
                found[k].append(groups)
                weights = np.stack([error_weights(w) for w in groups.models])
                errors[k] += float((fold * weights[groups.members]).sum())
    whole, most = Grouping(total, p, q, penalty), SIMPLER * min(errors.values())
    for k in (k for k in candidates if errors[k] <= most < np.inf):
        if (groups := whole.fit(k, rng)) is not None:
            return groups, found[k]
    raise ValueError(f"n_clusters must be a number of groups that clients form, got {candidates}.")


@dataclass(frozen=True, eq=False)
class RidgeModel:
    """A model of `flwr_perdl.strategies.FederatedRidge`, for new samples.

    Parameters
    ----------
    features : RandomFeatures
        The features.
    coefficients : ndarray of shape (p, q)
        Of each feature and output.
    classes : int, default 0
        Number of classes; 0: regression.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import RidgeModel
    >>> from flwr_perdl.regression.ridge import RandomFeatures
    >>> features = RandomFeatures.draw(np.zeros(1), np.ones(1), 0, scale=1.0, seed=0)
    >>> RidgeModel(features, np.array([[0.5, 0.5], [-1.0, 1.0]]), 2).predict([[-1.0], [1.0]])
    array([0, 1])
    """

    features: RandomFeatures
    coefficients: Matrix
    classes: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_kind("features", self.features, RandomFeatures, "RandomFeatures")
        check_array("coefficients", self.coefficients, rows=self.features.size)
        check_count("classes", self.classes)

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> RidgeModel:
        """Return the model in arrays by name, such as ``strategy.result.model_of(client)``.

        Parameters
        ----------
        arrays : mapping of str to array
            An ArrayRecord of the strategy's result.

        Returns
        -------
        RidgeModel

        Raises
        ------
        ValueError
            If an array is missing, or there are models of several groups.
        """
        check_kind("arrays", arrays, Mapping, "arrays by name")
        if missing := {*MODEL_ARRAYS} - arrays.keys():
            raise ValueError(f"arrays must have {min(missing)!r}, got {sorted(map(str, arrays))}.")
        own = [getattr(arrays[name], "numpy", lambda n=name: arrays[n])() for name in MODEL_ARRAYS]
        *of_features, coefficients, classes = map(np.asarray, own)
        if coefficients.ndim != 2:
            raise ValueError(
                "arrays must be of one model, as of result.models[0], got coefficients of shape "
                f"{coefficients.shape}."
            )
        return cls(RandomFeatures(*of_features), coefficients, int(classes))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all that `of` reads.

        Returns
        -------
        dict of str to ndarray
        """
        values = (*vars(self.features).values(), self.coefficients, np.array(self.classes))
        return dict(zip(MODEL_ARRAYS, values, strict=True))

    def decision(self, X: Matrix) -> Matrix:
        """Return the outputs of samples: of classes, the larger the likelier.

        Parameters
        ----------
        X : ndarray of shape (n, d)
            Samples; NaN where a value is missing.

        Returns
        -------
        ndarray of shape (n, q)
        """
        X = check_array("X", X, columns=len(self.features.means), missing=True)
        return self.features(X) @ self.coefficients

    def predict(self, X: Matrix) -> NDArray[Any]:
        """Return the classes of samples, or their responses: (n,), of several outputs (n, q).

        Parameters
        ----------
        X : ndarray of shape (n, d)
            Samples; NaN where a value is missing.

        Returns
        -------
        ndarray
        """
        found: NDArray[Any] = self.decision(X)
        if self.classes:
            found = found.argmax(axis=1)
        return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found

    def predict_proba(self, X: Matrix) -> Matrix:
        """Return the classes' shares: outputs within [0, 1], uniform where all are 0.

        Parameters
        ----------
        X : ndarray of shape (n, d)
            Samples.

        Returns
        -------
        ndarray of shape (n, classes)
        """
        if not self.classes:
            raise ValueError("predict_proba must be asked of classes, got a regression.")
        shares = np.clip(self.decision(X), 0, 1)
        total = shares.sum(axis=1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / self.classes)
