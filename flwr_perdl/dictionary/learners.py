"""Local learners: the algorithms ``A_i`` that a client runs on its own data.

All alternate between coding with the current dictionary and updating the dictionary from the
codes; they differ in the update.

======================================= ====================================================
paper (Liang et al., NeurIPS 2023)      here
======================================= ====================================================
``A_i(Y, D)``, one iteration            ``learner.step(X, D)``
``HT_zeta(D' Y)``, Alg. 4 and 5 line 2  ``learner.code(X, D)``; ``zeta`` is ``threshold``, with
                                        ``coding="threshold"`` where atoms are not orthogonal
``Polar(Y X')``, Alg. 4 line 3          :class:`OrthogonalLearner`
gradient step ``eta``, Alg. 5 line 3    :class:`GradientLearner`
======================================= ====================================================

Deviations: Algorithm 4 also learns thin dictionaries (fewer atoms than features); Algorithm 5's
step is scaled by default, ``eta = 0.5 / ||C' C||_2``, as a fixed one stalls, and its atoms are
brought back to unit norm; learners whose atoms need not be orthogonal code by orthogonal matching
pursuit that stops at the threshold. MOD, approximate K-SVD and online dictionary learning
(:class:`LassoLearner`) are not in the paper.

No start and no update puts a raw sample into a dictionary: starts are random rotations of the
data's principal directions, and an atom with its own update moves only with at least two samples
behind it (:func:`atom_support`).

NaN in the samples of :class:`MODLearner` and :class:`LassoLearner` is a missing entry: codes use
the others, and an update completes each sample by its own reconstruction, a few times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from flwr_perdl.core.arrays import has_missing, observed, row_norms, squared_norm
from flwr_perdl.core.checks import (
    Matrix,
    brief_repr,
    check_array,
    check_choice,
    check_count,
    check_members,
    check_real,
    check_rng,
    is_auto,
    own_numbers,
)
from flwr_perdl.dictionary.atoms import (
    descended_atoms,
    least_squares_atoms,
    normalize_atoms,
    principal_directions,
    symmetric_inverse,
    unit_atoms,
)
from flwr_perdl.dictionary.coding import by_direction, fill_missing, hard_threshold, lasso, pursue
from flwr_perdl.dictionary.polar import polar_factor, rounding_share

#: ``threshold="auto"`` is this multiple of the root mean square norm of the samples.
AUTO_THRESHOLD = 0.11
#: ``alpha="auto"`` is this multiple of a sample's norm.
AUTO_PENALTY = 0.05
#: Atoms that a sample may have where a pursuit with a threshold codes it.
PURSUED = 10
#: Samples that must stand behind an atom before a learner moves it.
_LEAST_SUPPORT = 2
#: Updates of samples with missing entries, by the same codes: each completes them by the last one's
#: atoms. One completion moves atoms too little: the more is missing, the less they move.
_COMPLETIONS = 5
#: Supports this near to a whole number, relative to it, are that number up to rounding.
_WHOLE = 1e-9


class Learner(Protocol):
    """What PerMA needs of a local learner; `D` may have any number of atoms.

    ``X`` has no NaN, a missing entry, unless the learner has ``accepts_missing = True``.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import Learner, OrthogonalLearner
    >>> learner: Learner = OrthogonalLearner(2, threshold=0.5)
    >>> X = np.array([[1.0, 0.1], [0.2, 2.0]])
    >>> codes = learner.code(X, np.eye(2))
    >>> codes
    array([[1., 0.],
           [0., 2.]])
    """

    @property
    def n_atoms(self) -> int:
        """Atoms of the dictionary that :meth:`start` makes."""

    @property
    def orthogonal(self) -> bool:
        """Whether the atoms are orthonormal."""

    def start(self, X: Matrix, rng: np.random.Generator) -> Matrix:
        """Return a dictionary to start from.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        rng : numpy.random.Generator

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """

    def code(self, X: Matrix, D: Matrix, scale: float = 1.0) -> Matrix:
        """Return the codes of ``X``.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        D : ndarray of shape (n_atoms, n_features)
        scale : float, default 1
            Factor of the threshold or penalty (divides ``n_nonzero``); above 1 for sparser codes.

        Returns
        -------
        ndarray of shape (n_samples, n_atoms)
        """

    def update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return the updated dictionary.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        C : ndarray of shape (n_samples, n_atoms)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """

    def step(self, X: Matrix, D: Matrix) -> Matrix:
        """Return ``update(X, code(X, D), D)``: one iteration of ``A_i``.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """

    def loss(self, X: Matrix, C: Matrix, D: Matrix) -> float:
        """Return the objective that the iterations decrease, to compare starts.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        C : ndarray of shape (n_samples, n_atoms)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        float
        """


def atom_support(C: Matrix) -> Matrix:
    """Return the effective number of samples behind each atom, ``(sum |c|)^2 / sum c^2``.

    An atom's update, and its row of the statistics, is a sum of samples with weights ``c``; this is
    Kish's effective sample size for these weights. ``m`` samples that use an atom equally count
    ``m``, an unused atom counts 0. A support of ``m`` means that no sample has more than ``1 /
    sqrt(m)`` of the weight.

    Parameters
    ----------
    C : ndarray of shape (n_samples, n_atoms)
        Codes (sparse coefficients).

    Returns
    -------
    ndarray of shape (n_atoms,)

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary.learners import atom_support
    >>> atom_support(np.array([[1.0, 5.0], [1.0, 0.0], [-1.0, 0.0]]))
    array([3., 1.])
    """
    C = np.abs(check_array("C", C))
    largest = C.max(axis=0, initial=0)
    C = C / np.where(largest > 0, largest, 1)  # squares of very small or large codes are no numbers
    squares = (C * C).sum(axis=0)
    support: Matrix = C.sum(axis=0) ** 2 / np.where(squares > 0, squares, 1)
    # m codes of one size count m, whatever rounding makes of it
    whole, slack = np.round(support), max(_WHOLE, 100 * float(np.finfo(C.dtype).eps))
    return np.where(np.abs(support - whole) <= slack * whole, whole, support)


def update_weights(learner: Learner, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
    """Return the weights with which a learner's updated atoms sum up samples.

    Parameters
    ----------
    learner : Learner
        Its own ``weights(X, C, D)``, if it has that method; else the weights are the codes.
    X, C, D : ndarray
        The arguments of ``learner.update``: data, codes, current dictionary.

    Returns
    -------
    ndarray of shape (n_samples, n_atoms)
        ``W``: atom ``j`` of ``learner.update(X, C, D)`` is about ``sum_i w_ij x_i``, up to its
        length.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import MODLearner
    >>> from flwr_perdl.dictionary.learners import update_weights
    >>> X, C = np.eye(2), np.array([[1.0, 1.0], [1.0, -1.0]])
    >>> update_weights(MODLearner(2), X, C, np.eye(2)).round(6)
    array([[ 0.5,  0.5],
           [ 0.5, -0.5]])
    """
    check_members("learner", learner, "Learner", "code", "update")
    X, C, D = _check_fit(learner, X, C, D)
    own = getattr(learner, "weights", None)
    return C if own is None else np.asarray(own(X, C, D))


@dataclass(frozen=True)
class AlternatingLearner(ABC):
    """Start, coding and update, which all learners share."""

    n_atoms: int

    orthogonal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        check_count("n_atoms", self.n_atoms, 1)

    @property
    def accepts_missing(self) -> bool:
        """Whether NaN in samples is a missing entry; else it is an error."""
        return False

    def start(self, X: Matrix, rng: np.random.Generator) -> Matrix:
        """Return a random rotation of the data's principal directions.

        Random directions are added where the data has too few, and beyond ``n_features``
        orthonormal atoms random unit vectors. If no sample has a feature, atoms are zero.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        rng : numpy.random.Generator

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        check_rng(rng)
        X = check_samples("X", X, self, min_rows=1)
        seen, X, d = ~np.isnan(X).all(axis=0), observed(X), X.shape[1]
        check_count("n_atoms", self.n_atoms, 1, d if self.orthogonal else None)
        k = min(self.n_atoms, d)
        spanned = principal_directions(X, k)
        filled = np.vstack([spanned, rng.standard_normal((k - len(spanned), d))])
        basis = np.linalg.qr(filled.T)[0].T
        # Principal directions themselves are no good start: codes of all samples are dense in them.
        rotation = np.linalg.qr(rng.standard_normal((k, k)))[0]
        more = normalize_atoms(rng.standard_normal((self.n_atoms - k, k)))
        D: Matrix = np.vstack([rotation, more]).astype(X.dtype) @ basis.astype(X.dtype)
        return D if seen.all() else normalize_atoms(np.where(seen, D, 0), D)

    def code(self, X: Matrix, D: Matrix, scale: float = 1.0) -> Matrix:
        """Return the codes of ``X``, ``C`` with ``X ≈ C @ D``.

        The atoms' lengths do not matter: codes are those of unit atoms divided by them.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        D : ndarray of shape (n_atoms, n_features)
        scale : float, default 1
            Factor of the threshold or penalty (divides ``n_nonzero``); above 1 for sparser codes.

        Returns
        -------
        ndarray of shape (n_samples, n_atoms)
        """
        X = check_samples("X", X, self)
        D = check_array("D", D, columns=X.shape[1], squares=True)
        check_real("scale", scale, 0, open_low=True)
        return by_direction(lambda unit: self._code(X, unit, scale), D)

    @abstractmethod
    def _code(self, X: Matrix, D: Matrix, scale: float = 1.0) -> Matrix:
        """Return the codes of arguments that are as they should be, of unit atoms."""

    def update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return the next dictionary, unit atoms; what the codes leave open stays as in ``D``.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        C : ndarray of shape (n_samples, n_atoms)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        return self._update(*_check_fit(self, X, C, D))

    @abstractmethod
    def _update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return the next dictionary of arguments that are as they should be."""

    def step(self, X: Matrix, D: Matrix) -> Matrix:
        """Return ``update(X, code(X, D), D)``: one iteration.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        X = check_samples("X", X, self)
        D = check_array("D", D, columns=X.shape[1])
        return self.steps(X, unit_atoms(D)[0], [1.0])

    def steps(self, X: Matrix, D: Matrix, scales: Sequence[float]) -> Matrix:
        """Return the dictionary after one iteration per scale of `code`; ``D`` has unit atoms."""
        for scale in scales:
            D = self._update(X, self._code(X, D, scale), D)
        return D

    @abstractmethod
    def loss(self, X: Matrix, C: Matrix, D: Matrix) -> float:
        """Return the objective that the iterations bring down, as the learner's class states it.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        C : ndarray of shape (n_samples, n_atoms)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        float
        """


class SummedLearner(AlternatingLearner):
    """A learner whose update needs sums over samples alone."""

    def _update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        for _ in range(_COMPLETIONS if has_missing(X) else 1):
            kept, rest = _well_supported(X, C, D)
            D = self._solve(kept.T @ kept, kept.T @ rest, D)
        return D

    @abstractmethod
    def _solve(self, gram: Matrix, products: Matrix, D: Matrix) -> Matrix:
        """Return the next dictionary by ``C.T @ C`` and ``C.T @ X`` of well supported atoms."""


@dataclass(frozen=True)
class ThresholdLearner(AlternatingLearner):
    """Coding by a threshold, or by a number of atoms per sample.

    The objective is ``||X - C @ D||^2``, plus ``threshold^2`` per non-zero code if thresholding.
    """

    threshold: float | Literal["auto"] = "auto"
    n_nonzero: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not is_auto("threshold", self.threshold):
            check_real("threshold", self.threshold, 0, 1e150)  # its square is a number
        if self.n_nonzero is not None:
            check_count("n_nonzero", self.n_nonzero, 1)

    def level(self, X: Matrix) -> float:
        """Return the threshold that applies to ``X``."""
        if self.threshold == "auto":
            return float(AUTO_THRESHOLD * np.sqrt(squared_norm(observed(X)) / max(len(X), 1)))
        return float(self.threshold)

    def _code(self, X: Matrix, D: Matrix, scale: float = 1.0) -> Matrix:
        if self.n_nonzero is not None:
            return pursue(X, D, min(max(1, round(self.n_nonzero / scale)), *D.shape))
        return hard_threshold(X @ D.T, scale * self.level(X))

    def loss(self, X: Matrix, C: Matrix, D: Matrix) -> float:
        """Return the objective."""
        X, C, D = _check_fit(self, X, C, D)
        error = float(np.nansum((X - C @ D) ** 2))
        if self.n_nonzero is not None:
            return error
        return error + self.level(X) ** 2 * int(np.count_nonzero(C))


@dataclass(frozen=True)
class OrthogonalLearner(ThresholdLearner):
    """Algorithm 4: orthonormal atoms, updated to the polar factor of ``C.T @ X``.

    This is the orthonormal dictionary that minimizes ``||X - C @ D||``.

    Parameters
    ----------
    n_atoms : int
        Atoms of the dictionary, at most the number of features.
    threshold : float or "auto", default "auto"
        Codes are ``X @ D.T`` without the entries below this; "auto" is ``AUTO_THRESHOLD`` times the
        root mean square norm of the samples.
    n_nonzero : int or None, default None
        Keep this many codes per sample instead.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance, warm_start
    >>> rng = np.random.default_rng(0)
    >>> D = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    >>> X = rng.choice([-1, 0, 1], (200, 6), p=[0.1, 0.8, 0.1]) @ D
    >>> found = warm_start(X, OrthogonalLearner(6), rng=rng, restarts=5)
    >>> bool(dictionary_distance(D, found.dictionary) < 1e-6)
    True
    """

    orthogonal: ClassVar[bool] = True

    def _update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        return polar_factor(C.T @ X, D)

    def weights(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return ``C (S S')^(-1/2)`` with ``S = C.T @ X``: each atom is a mixture of all sums."""
        S = C.T @ X
        squares, U = np.linalg.eigh((S @ S.T).astype(np.float64))
        known = squares > (10 * rounding_share(S)) ** 2 * squares.max(initial=0)
        root: Matrix = (U[:, known] / np.sqrt(squares[known])) @ U[:, known].T
        return C @ root.astype(C.dtype)


@dataclass(frozen=True)
class GeneralLearner(ThresholdLearner):
    """Coding for atoms that need not be orthogonal, as `GradientLearner` says."""

    coding: Literal["pursuit", "threshold"] = "pursuit"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_choice("coding", self.coding, ("pursuit", "threshold"))

    def _code(self, X: Matrix, D: Matrix, scale: float = 1.0) -> Matrix:
        if self.n_nonzero is not None or self.coding == "threshold":
            return super()._code(X, D, scale)
        return pursue(X, D, min(PURSUED, *D.shape), scale * self.level(X))


@dataclass(frozen=True)
class GradientLearner(SummedLearner, GeneralLearner):
    """Algorithm 5: one gradient step on ``||X - C @ D||^2``, then unit atoms.

    Algorithm 5 as printed is ``coding="threshold"`` with a number ``eta``, except for the unit
    atoms.

    Parameters
    ----------
    n_atoms : int
        Atoms of the dictionary; may exceed the number of features.
    threshold : float or "auto", default "auto"
        Codes below this are zero; "auto" is ``AUTO_THRESHOLD`` times the root mean square norm of
        the samples.
    n_nonzero : int or None, default None
        Code by orthogonal matching pursuit (OMP) with this many atoms per sample instead.
    coding : {"pursuit", "threshold"}, default "pursuit"
        "pursuit": orthogonal matching pursuit (OMP), up to ``PURSUED`` atoms per sample, until no
        atom's product with the residual reaches the threshold. "threshold": the paper's, as in
        `OrthogonalLearner`. It counts twice what two atoms have in common, and needs a start near
        the truth or nearly orthogonal atoms; on images the error can grow.
    eta : float or "auto", default "auto"
        The learning rate: ``D + 2 * eta * C.T @ (X - C @ D)``. The sum is over samples, so a number
        must decrease with their count, and diverges above ``1 / ||C.T @ C||_2``; "auto" is half of
        that. With "statistics" of `PerMA` it counts only at the clients: the server solves for the
        shared atoms.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import GradientLearner, warm_start
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 6))
    >>> learner = GradientLearner(8, n_nonzero=2, eta=0.001)
    >>> warm_start(X, learner, rng=rng, n_iter=5).dictionary.shape
    (8, 6)
    """

    eta: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not is_auto("eta", self.eta):
            check_real("eta", self.eta, 0, 1e150, open_low=True)

    def _solve(self, gram: Matrix, products: Matrix, D: Matrix) -> Matrix:
        if self.eta != "auto":
            share = 1 / (1 + 2 * self.eta)  # of any length: no overflow
            return normalize_atoms(share * D + 2 * self.eta * share * (products - gram @ D), D)
        curvature = float(np.linalg.norm(gram, 2))
        if curvature == 0:
            return D.copy()
        return normalize_atoms(D + (products - gram @ D) / curvature, D)


@dataclass(frozen=True)
class MODLearner(SummedLearner, GeneralLearner):
    """Method of optimal directions: the least-squares dictionary, then unit atoms.

    What the codes leave open, such as unused atoms, does not change.

    Parameters
    ----------
    n_atoms, threshold, n_nonzero, coding
        As for `GradientLearner`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import MODLearner, warm_start
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 6))
    >>> warm_start(X, MODLearner(8, n_nonzero=2), rng=rng, n_iter=5).dictionary.shape
    (8, 6)
    """

    @property
    def accepts_missing(self) -> bool:
        """Whether NaN in samples is a missing entry: where orthogonal matching pursuit codes."""
        return self.n_nonzero is not None or self.coding == "pursuit"

    def _solve(self, gram: Matrix, products: Matrix, D: Matrix) -> Matrix:
        return least_squares_atoms(gram, products, D)

    def weights(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return ``C (C' C)^(-1)``, whose columns are the weights of the least-squares atoms."""
        kept, _ = _well_supported(X, C, D)
        # The inverse leaves rounding in the column of an atom that no sample uses.
        return kept @ symmetric_inverse(kept.T @ kept) * kept.any(axis=0)


@dataclass(frozen=True)
class KSVDLearner(GeneralLearner):
    """Approximate K-SVD: fits each atom in turn, with its codes, to the residual of the others.

    One power iteration per atom stands in for the singular value decomposition.

    Parameters
    ----------
    n_atoms, threshold, n_nonzero, coding
        As for `GradientLearner`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import KSVDLearner, warm_start
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 6))
    >>> warm_start(X, KSVDLearner(8, n_nonzero=2), rng=rng, n_iter=5).dictionary.shape
    (8, 6)
    """

    def _update(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        from flwr_perdl.dictionary import _kernels  # compiled: Numba is imported where it is needed

        rest = np.ascontiguousarray(X - C @ D)
        atoms = np.array(D, rest.dtype, order="C")
        chosen = np.flatnonzero(atom_support(C) >= _LEAST_SUPPORT)
        _kernels.fit_atoms(rest, np.ascontiguousarray(C, rest.dtype), chosen, atoms)
        return atoms.astype(D.dtype, copy=False)


@dataclass(frozen=True)
class LassoLearner(SummedLearner):
    """Online dictionary learning (Mairal, Bach, Ponce and Sapiro, ICML 2009).

    Codes are the lasso's. The update is block-coordinate descent on ``C.T @ C`` and ``C.T @ X``,
    sums over samples: a round of `PerMA` with "statistics" is an iteration on all clients' pooled
    samples. The objective is the sum over samples of ``||x - c @ D||^2 / 2 + penalty * ||c||_1``.

    Deviations from the paper: an iteration takes all samples and forgets earlier codes; atoms have
    norm 1, not at most 1; an atom that no sample uses becomes the normalized sum of two others that
    are used together, never a sample.

    Parameters
    ----------
    n_atoms : int
        Atoms of the dictionary; may exceed the number of features.
    alpha : float or "auto", default "auto"
        The penalty, the same for all samples; with "auto" ``AUTO_PENALTY`` times each sample's
        norm, so that the data's scale does not matter and dark and bright images count alike.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.dictionary import LassoLearner
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((200, 8))
    >>> learner = LassoLearner(12)
    >>> D = learner.start(X, rng)
    >>> better = learner.step(X, D)
    >>> learner.loss(X, learner.code(X, better), better) < learner.loss(X, learner.code(X, D), D)
    True
    """

    alpha: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not is_auto("alpha", self.alpha):
            check_real("alpha", self.alpha, 0, 1e150, open_low=True)

    @property
    def accepts_missing(self) -> bool:
        """NaN in samples is a missing entry."""
        return True

    def steps(self, X: Matrix, D: Matrix, scales: Sequence[float]) -> Matrix:
        """Return the dictionary after the iterations; each starts from the codes of the last."""
        C = None
        for scale in scales:
            C = self._code(X, D, scale, C)
            D = self._update(X, C, D)
        return D

    def _code(
        self, X: Matrix, D: Matrix, scale: float = 1.0, start: Matrix | None = None
    ) -> Matrix:
        if self.alpha != "auto":
            return lasso(X, D, scale * self.alpha, start=start).codes
        norms = row_norms(observed(X))[:, None]
        lengths = np.where(norms > 0, norms, 1)
        start = None if start is None else start / lengths
        return lasso(X / lengths, D, scale * AUTO_PENALTY, start=start).codes * norms

    def _solve(self, gram: Matrix, products: Matrix, D: Matrix) -> Matrix:
        return descended_atoms(gram, products, D)

    def loss(self, X: Matrix, C: Matrix, D: Matrix) -> float:
        """Return the objective."""
        X, C, D = _check_fit(self, X, C, D)
        penalties = AUTO_PENALTY * row_norms(observed(X)) if self.alpha == "auto" else self.alpha
        penalty = (penalties * np.abs(C).sum(axis=1)).sum()
        return float(0.5 * np.nansum((X - C @ D) ** 2) + penalty)


def check_samples(name: str, value: object, learner: Learner, **rules: Any) -> Matrix:
    """Return samples; they may have NaN, missing entries, if the learner codes without these.

    ``rules`` are those of `check_array`.
    """
    X = check_array(name, value, missing=True, **{"squares": True, **rules})
    if has_missing(X) and not getattr(learner, "accepts_missing", False):
        raise ValueError(
            f"{name} must have no NaN for {brief_repr(learner)}, got {np.isnan(X).sum()}: "
            "LassoLearner and MODLearner with coding='pursuit' learn from the other entries."
        )
    return X


def _check_fit(learner: Learner, X: Matrix, C: Matrix, D: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return samples, codes and dictionary, if they fit."""
    D = check_array("D", D, squares=True)
    X = check_samples("X", X, learner, columns=D.shape[1])
    return X, check_array("C", C, rows=len(X), columns=len(D), squares=True), D


def _well_supported(X: Matrix, C: Matrix, D: Matrix) -> tuple[Matrix, Matrix]:
    """Codes of the atoms that at least two samples stand behind, and what the others leave of X."""
    weak, X = atom_support(C) < _LEAST_SUPPORT, fill_missing(X, C, D)
    if not weak.any():
        return C, X
    return np.where(weak, 0, C), X - C[:, weak] @ D[weak]


#: The learners of this library; a subclass may do what these do not.
LEARNERS = (OrthogonalLearner, GradientLearner, MODLearner, KSVDLearner, LassoLearner)
