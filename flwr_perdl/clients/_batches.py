"""Samples that do not fit into memory: batches, read once per pass, of which sums remain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from flwr_perdl.core.arrays import has_missing, observed, squared_norm
from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.dictionary import Learner, reconstruct
from flwr_perdl.dictionary.coding import completed
from flwr_perdl.dictionary.learners import CodeSums, SummedLearner, with_level
from flwr_perdl.privacy.withholding import SupportRule

#: The client's X where it comes in batches: a sequence of them, or what returns an iterator.
Batched = Sequence[Matrix] | Callable[[], Iterable[Matrix]]

#: Values that are coded at a time.
_AT_ONCE = 2**21
#: The least number of samples that are drawn of many, if these have no more values than a batch.
_DRAWN = 2**13


def reader(X: object) -> Callable[[], Iterable[Matrix]] | None:
    """Return what reads the batches of a client's samples; None of an array in memory."""
    if callable(X):
        return X
    if isinstance(X, np.memmap) and X.ndim == 2 and X.size > _AT_ONCE:
        return lambda: [X]
    if isinstance(X, list | tuple) and X and all(getattr(part, "ndim", 0) == 2 for part in X):
        return lambda: X
    return None


class Batches:
    """The batches of a client's samples, checked as they are read.

    The first pass counts the samples and draws some, evenly spaced, for the start and evaluations.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Matrix]],
        check: Callable[..., Matrix],
        weights: Sequence[float] | None = None,
    ) -> None:
        self._read, self._check, self._weights = read, check, weights
        self.n_samples, self.energy, self.missing, stride = 0, 0.0, False, 1
        self._columns: int | None = None
        self._dtype: np.dtype[Any] | None = None
        drawn: list[Matrix] = []
        n_batches = 0
        for i, X in self._pass():
            n_batches = i + 1
            drawn.append(X[-self.n_samples % stride :: stride].copy())
            self.n_samples += len(X)
            self.energy += squared_norm(observed(X))
            self.missing |= has_missing(X)
            while sum(map(len, drawn)) > 2 * min(_DRAWN, max(_AT_ONCE // X.shape[1], 1)):
                drawn, stride = [np.concatenate(drawn)[::2].copy()], 2 * stride
        self.drawn = np.concatenate(drawn) if drawn else np.empty((0, 0))
        if weights is not None and len(weights) != n_batches:
            raise ValueError(
                f"weights must be one number per batch of X, got {len(weights)} of {n_batches}."
            )

    def __iter__(self) -> Iterator[tuple[Matrix, float]]:
        """Yield the batches and their weights; those of every pass are the same."""
        n_samples = 0
        for i, X in self._pass():
            n_samples += len(X)
            yield X, 1.0 if self._weights is None else float(self._weights[i])
        if n_samples != self.n_samples:
            raise ValueError(
                f"X must yield the same batches in every pass, got {self.n_samples} samples in the "
                f"first and {n_samples} in another."
            )

    def _pass(self) -> Iterator[tuple[int, Matrix]]:
        """Yield parts of the batches that are coded at once, with their batch's number."""
        batches = check_kind("X", self._read(), Iterable, "a function that returns its batches")
        for i, batch in enumerate(batches):
            shape, parts = np.shape(batch), [batch]
            if len(shape) == 2:
                rows = max(_AT_ONCE // max(shape[1], 1), 1)
                parts = [batch[start : start + rows] for start in range(0, shape[0], rows)]
            for part in parts:
                X = self._check(f"X[{i}]", part, columns=self._columns)
                self._columns, self._dtype = X.shape[1], self._dtype or X.dtype
                yield i, X.astype(self._dtype, copy=False)


class Update(NamedTuple):
    """What a pass over the samples leaves: an update, and what may be sent of it."""

    #: The learner's dictionary after it, (n_atoms, n_features).
    updated: Matrix
    #: `local_statistics` of all samples, but for rounding, without withheld ones.
    statistics: Matrix
    #: The mean squared error of the observed entries before it.
    error: float
    #: The weighted sum of the squares of all (completed) samples.
    energy: float


def update_in_batches(
    batches: Batches,
    learner: Learner,
    D: Matrix,
    n_global: int,
    min_support: int,
    past: CodeSums | None,
) -> Update:
    """Code all batches with ``D``, of which the first atoms are global, and update it by sums."""
    # `check_summed` has seen to it that the learner is one of this library's.
    learner = with_level(cast(SummedLearner, learner), batches.energy, batches.n_samples)
    r = n_global
    sums: CodeSums | None = None
    rules: list[SupportRule] = []
    squares, n_entries, energy = 0.0, 0, 0.0
    for X, weight in batches:
        C = learner.code(X, D)
        full, own = completed(X, C, D), C[:, :r]
        squares += squared_norm(observed(X - reconstruct(C, D)))
        n_entries += X.size - int(np.count_nonzero(np.isnan(X)))
        energy += weight * squared_norm(full)
        part = CodeSums.of(full, C).times(weight)
        sums = part if sums is None else sums.plus(part)
        rows = [SupportRule.count_rows(own, full - reconstruct(C[:, r:], D[r:]))]
        rows += [SupportRule.count_entries(own, X)] if batches.missing else []
        rules = [a.add(b) for a, b in zip(rules, rows, strict=True)] if rules else rows
    assert sums is not None  # there is a batch
    sums = sums if past is None else sums.plus(past)
    # Withholding asks of the new samples alone: two replies differ by these, whatever the past.
    shared = rules[0].allows(min_support)
    local = np.append(~shared, np.ones(len(D) - r, dtype=bool))
    moments = (sums.products[:r] - sums.gram[:r, local] @ D[local]) * shared[:, None]
    gram = sums.gram[:r, :r] * shared * shared[:, None]
    for rule in rules[1:]:  # a withheld entry's sum is that of a reconstruction
        moments = np.where(rule.allows(min_support), moments, gram @ D[:r])
    sent = (moments if learner.orthogonal else np.hstack([gram, moments])).astype(D.dtype)
    return Update(learner.update_sums(sums, D), sent, squares / n_entries, energy)
