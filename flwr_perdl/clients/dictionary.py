"""A client with samples and a learner: its options, and evaluation.

`flwr_perdl.clients.perma` has the steps of PerMA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients.dispatch import ProtocolClient, rounded
from flwr_perdl.core.arrays import has_missing, observed
from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_count,
    check_function,
    check_kind,
    check_members,
)
from flwr_perdl.dictionary import Learner, WarmStart, reconstruct, sparse_code, warm_start
from flwr_perdl.dictionary.learners import (
    LEARNERS,
    check_samples,
)
from flwr_perdl.privacy.withholding import rows_allowed
from flwr_perdl.protocol.client_state import PrivateArrays
from flwr_perdl.protocol.local import StepRequest, StepResult
from flwr_perdl.protocol.records import NEW_STATE, Scalar
from flwr_perdl.random import spawn

#: Iterations of the client's learner that an update asks for.
LOCAL_STEPS = "perdl.local-steps"
#: Maximum number of local steps, refinement steps and atoms per sample in a request.
MOST_STEPS = 10_000
#: How far from 1 the squared norm of an atom in a request may be, and from 0 the product of two
#: that must be orthogonal.
_ODD = 2e-3
#: The largest cosine of two atoms in a request: differences of the replies' rows for two atoms that
#: are almost equal would show single samples.
_MOST_COHERENT = 0.99
#: Evaluation: numbers of atoms per sample, such as "5,10,20" (orthogonal matching pursuit).
N_NONZERO = "perdl.n-nonzero"
#: Numbers in a client's samples from which on its products take longer than Python's own work.
_LARGE = 2**16
#: The name of a client's own atoms in its private state.
LOCAL_ATOMS = "local_atoms"


class FirstDictionary(Protocol):
    """How a client makes its first dictionary."""

    def __call__(self, X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
        """Return a dictionary learned from ``X`` alone."""


#: ``(global atoms, local atoms) -> metrics``.
ExtraMetrics = Callable[[Matrix, Matrix], dict[str, float]]


class LearnerOptions(TypedDict, total=False):
    """The options of every `LearnerClient`."""

    evaluation: Mapping[str, Matrix] | None
    start: FirstDictionary
    min_support: int
    state_dir: str | Path | None
    max_runs: int
    max_requests: int
    extra_metrics: ExtraMetrics | None


class LearnerClient(ProtocolClient):
    """A client with samples and a learner; subclasses are the clients of a protocol.

    It rejects a request that its protocol does not send before it touches the samples, and answers
    a limited number. Metrics are means over at least ``min_support`` samples, with six significant
    digits; with fewer samples none are sent.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        The client's samples, float64 or float32.
    learner : Learner
        The local algorithm A_i (PerMA, Algorithm 4 or 5, or any other).
    context : Context
        The argument of the client's factory: identifies the client and keeps its state.
    evaluation : mapping of str to ndarray, optional
        Named sets of samples for `evaluate`; by default ``X`` under the name ``""``.
    start : callable, default `warm_start`
        ``(X, learner, rng=rng) -> WarmStart``: makes the client's first dictionary.
    min_support : int, default 3
        Fewest samples behind a row of a reply (`flwr_perdl.privacy.may_send`); 0 sends every row.
    state_dir : str or Path, optional
        Folder for the private state; by default see `private_store`.
    max_runs : int, default 8
        Number of strategy runs (tokens ``perdl.run``) in one Flower run that the client takes part
        in.
    max_requests : int, default 1000
        Number of training requests in one Flower run that the client answers, and of evaluations.
    extra_metrics : callable, optional
        ``(global_atoms, local_atoms) -> {name: number}``: additional metrics of an evaluation.

    Raises
    ------
    ValueError
        If ``X`` is empty, not finite or of another dtype, or the client's identity is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import Context, RecordDict
    >>> from flwr_perdl.clients import DictionaryClient, LearnerClient
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    >>> isinstance(DictionaryClient(np.eye(4), OrthogonalLearner(2), context), LearnerClient)
    True
    """

    only = (
        "PerMA needs a DictionaryClient, or your own LearnerClient, at every client; "
        "PersonalizedFedAvg trains any model with the clients' fit"
    )

    def __init__(
        self,
        X: Matrix,
        learner: Learner,
        context: Context,
        *,
        evaluation: Mapping[str, Matrix] | None = None,
        start: FirstDictionary = warm_start,
        min_support: int = 3,
        state_dir: str | Path | None = None,
        max_runs: int = 8,
        max_requests: int = 1000,
        extra_metrics: ExtraMetrics | None = None,
    ) -> None:
        algorithm = f"dictionary, {type(learner).__name__}"
        super().__init__(
            context,
            max_runs=max_runs,
            max_requests=max_requests,
            algorithm=algorithm,
            state_dir=state_dir,
        )
        check_members("learner", learner, "Learner", "code", "update")
        check_members("learner", learner, "Learner", "n_atoms", "orthogonal")
        self.learner = learner
        self.X: Matrix = self._samples("X", X, min_rows=1, squares=True)
        if not callable(start):
            raise TypeError(f"start must be a function, got {start!r}.")
        check_kind("evaluation", evaluation, (type(None), Mapping), "a mapping or None")
        self.evaluation = {
            name: self._samples(f"evaluation[{name!r}]", samples, columns=self.X.shape[1])
            for name, samples in (evaluation or {}).items()
        } or {"": self.X}
        self.start = start
        self.extra_metrics = check_function("extra_metrics", extra_metrics)
        # Threads pay where this library's code alone computes, and mostly without the GIL.
        ours = type(learner) in LEARNERS and getattr(start, "func", start) is warm_start
        long = not learner.orthogonal or self.X.size >= _LARGE
        self.allows_threads = ours and extra_metrics is None and long
        self.min_support = check_count("min_support", min_support)

    def _samples(self, name: str, value: object, **rules: Any) -> Matrix:
        """Return checked samples; NaN is a missing entry."""
        X = check_samples(name, value, self.learner, **{"squares": False, **rules})
        if not has_missing(X):
            return X
        # A sample of which nothing is known must not count where samples are counted.
        X = X[~np.isnan(X).all(axis=1)]
        if not len(X):
            raise ValueError(f"{name} must have an entry that is not NaN, got none.")
        return X

    # What every step needs --------------------------------------------------------------------

    def global_atoms(self, request: StepRequest) -> Matrix:
        """Return the atoms of a request, which have norm 1 and fit the client."""
        if len(request.arrays) != 1:
            raise ValueError(
                f"parameters must be [global atoms], got {len(request.arrays)} arrays."
            )
        G = check_array("global atoms", request.arrays[0], columns=self.X.shape[1])
        return check_atoms(G, most=self.learner.n_atoms)

    def first_dictionary(self, request: StepRequest, X: Matrix | None = None) -> Matrix:
        """Return the dictionary that the client learns from its samples alone, or from these."""
        rng = spawn(request.seed, self.partition)
        return self.start(self.X if X is None else X, self.learner, rng=rng).dictionary

    def own_atoms(
        self, G: Matrix, request: StepRequest, kept: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return the client's own atoms, and whether they are made anew, without a kept state."""
        return G[:0], False

    def may_send(self, weights: Matrix, X: Matrix) -> NDArray[np.bool_]:
        """Return which of the sums ``weights.T @ X`` may leave this client."""
        return rows_allowed(weights, X, self.min_support)

    def result(
        self,
        sent: Matrix,
        error: float,
        n_atoms: int,
        keep: Mapping[str, Matrix],
        *,
        new_state: bool = False,
    ) -> StepResult:
        """Return a training step's result, with what it says besides its array."""
        mse = {} if len(self.X) < self.min_support else {"mse": rounded(error)}
        orthogonal = int(self.learner.orthogonal)
        metrics = {**mse, "n_atoms": n_atoms, "orthogonal": orthogonal, NEW_STATE: int(new_state)}
        return StepResult([sent], len(self.X), metrics, keep)

    # Evaluation -------------------------------------------------------------------------------

    def measure(self, request: StepRequest, kept: PrivateArrays | None) -> StepResult:
        """Measure the reconstruction with the global atoms alone and with global + local atoms.

        With ``"perdl.n-nonzero"`` such as ``"5,10,20"`` in its config, samples are coded by
        orthogonal matching pursuit with so many atoms; without it by the learner's own coder.
        The loss is the first set's mean squared error with global + local atoms (the last number
        of atoms); there is none where that set has fewer than ``min_support`` samples. Metrics are
        ``mse_global[_k][_set]`` and ``mse_full[_k][_set]`` of the sets with as many, what
        ``extra_metrics`` adds where all sets have as many, and ``"perdl.state-lost": 1`` where
        there was no private state to measure with.
        """
        counts = atom_counts(str(request.config.get(N_NONZERO, "")))
        G = self.global_atoms(request)
        local_atoms, new_state = self.own_atoms(G, request, kept)
        metrics: dict[str, Scalar] = {NEW_STATE: 1} if new_state else {}
        D = np.vstack([G, local_atoms])
        losses: list[float] = []
        for name, samples in self.evaluation.items():
            error = nan
            for k in counts if len(samples) >= self.min_support else ():
                tail = "".join(f"_{part}" for part in (k, name) if part)
                metrics[f"mse_global{tail}"] = error = rounded(self._error(samples, G, k))
                if len(local_atoms):
                    error = rounded(self._error(samples, D, k))
                metrics[f"mse_full{tail}"] = error
            losses.append(error)
        if min(map(len, [self.X, *self.evaluation.values()])) >= self.min_support:
            extra = {} if self.extra_metrics is None else self.extra_metrics(G, local_atoms)
            metrics.update({name: rounded(value) for name, value in extra.items()})
        n_samples = len(next(iter(self.evaluation.values())))
        return StepResult([], n_samples, {**metrics, "loss": losses[0]})

    def _error(self, samples: Matrix, D: Matrix, k: str) -> float:
        """Return the mean squared error of ``samples`` coded with ``k`` atoms of ``D``."""
        if not len(D):
            return mean_square(samples)
        codes = sparse_code(samples, D, n_nonzero=int(k)) if k else self.learner.code(samples, D)
        return mean_square(samples - reconstruct(codes, D))


def read_local_steps(request: StepRequest) -> int:
    """Return how many iterations of its learner a client is to take."""
    return check_count(LOCAL_STEPS, request.config.get(LOCAL_STEPS, 1), 1, MOST_STEPS)


def data_warnings(X: Matrix, n_atoms: int) -> list[str]:
    """Return what is unusual about a client's samples for so many atoms, and what to do then."""
    n = int(np.count_nonzero(observed(X).any(axis=1)))
    zeros = "mostly zero samples: leave them out"
    few = "fewer samples than atoms, which may become copies of these: lower n_atoms or add samples"
    return [zeros] * (2 * n < len(X)) + [few] * (n < max(n_atoms, 2))


def mean_square(errors: Matrix) -> float:
    """Return the mean of the squares, without those of missing entries."""
    return float(np.mean(errors[~np.isnan(errors)] ** 2 if has_missing(errors) else errors**2))


def atom_counts(wanted: str) -> list[str]:
    """Return the numbers of atoms per sample that an evaluation asks for, as texts."""
    counts = [part.strip() for part in wanted.split(",")]
    for count in counts if wanted else ():
        if not count.isdecimal() or not 1 <= int(count) <= MOST_STEPS:
            raise ValueError(
                f"{N_NONZERO} must be integers between 1 and {MOST_STEPS}, got {wanted!r}."
            )
    return counts


def check_atoms(atoms: Matrix, *, most: int) -> Matrix:
    """Return the atoms of a request, or raise a ValueError unless they have norm 1.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        Finite.
    most : int
        The client's own number of atoms, which is the largest in a request.
    """
    if len(atoms) > most:
        raise ValueError(f"global atoms must be at most {most}, got {len(atoms)}.")
    with np.errstate(over="ignore"):
        squares = np.einsum("ij,ij->i", atoms, atoms)
    invalid = np.flatnonzero(~(np.abs(squares - 1) <= _ODD))
    if len(invalid):
        norm = float(squares[invalid[0]]) ** 0.5
        raise ValueError(f"global atoms must have norm 1, got norm {norm:g} in row {invalid[0]}.")
    return atoms


def check_products(atoms: Matrix, *, orthogonal: bool) -> None:
    """Raise a ValueError if atoms of norm 1 are too alike to train with.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        From `check_atoms`.
    orthogonal : bool
        Whether the rows must be orthogonal; else they must differ.
    """
    cosines = atoms @ atoms.T
    np.fill_diagonal(cosines, 0)
    largest, limit = float(np.abs(cosines).max(initial=0)), _ODD if orthogonal else _MOST_COHERENT
    if largest > limit:
        raise ValueError(
            f"global atoms must have cosines of at most {limit:g} with each other for what is "
            f"asked of this client's learner, got {largest:.3g}."
        )
