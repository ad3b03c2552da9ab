"""Inference in fewer coordinates, in memory: the same iteration in the span of sample and atoms.

It saves time where the span is much smaller than the space; the results are the same but for
rounding. Where no bound ever binds, the estimates stay in the span of the sample and the atoms: a
gradient (62) is a sum of the sample, nu and atoms. With a bounded V_f (37), as under Huber's loss,
a few entries meet their bounds: large ones of the sample. These are kept; all others are expressed
in the span, where f*, the atoms' correlations and (37) keep their form (`_Turned`). If one of
them has left its bounds in the end, it is kept as well in a second run.

Where codes and atoms are nonnegative, an estimate that starts from 0 never exceeds ``x /
strong_convexity``, and after ``n`` rounds of step mu not ``1 - (1 - mu strong_convexity / N)^n`` of
that: entries of x that stay below the bound for this reason need not be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.diffusion._dual import norms
from flwr_perdl.diffusion.objectives import Objective

#: Rounds, and what all agents show: codes, estimates and residuals.
Found = tuple[int, dict[str, Matrix]]
Solve = Callable[[Objective, Matrix, Sequence[Matrix]], Found]


class _Span:
    """Coordinates in the span of all atoms and a sample, whose own is the last: an isometry."""

    def __init__(self, atoms: Matrix) -> None:
        self._basis = np.linalg.qr(atoms.T)[0]

    def atoms(self, D: Matrix) -> Matrix:
        """Return an agent's atoms in these coordinates."""
        return np.pad(D @ self._basis, ((0, 0), (0, 1)))

    def samples(self, X: Matrix) -> tuple[Matrix, Matrix]:
        """Return samples in these coordinates, and what is across the atoms' span of each."""
        along = X @ self._basis
        across = X - along @ self._basis.T
        return np.hstack([along, norms(across)[:, None]]), across

    def back(self, nu: Matrix, turned: Matrix, across: Matrix) -> Matrix:
        """Return estimates (..., n_samples, n_coordinates) in the original coordinates."""
        unit = across / np.maximum(turned[:, -1:], np.finfo(across.dtype).tiny)
        original: Matrix = nu[..., :-1] @ self._basis.T + nu[..., -1:] * unit
        return original


@dataclass(frozen=True)
class _Turned(Objective):
    """An objective in coordinates of which only the first ``n_kept`` are bounded.

    Only f* and h matter to a diffusion; f is not used.
    """

    of: Objective
    n_kept: int

    @property
    def strong_convexity(self) -> float:
        """That of the original."""
        return self.of.strong_convexity

    @property
    def bound(self) -> float:
        """That of the original, for the first coordinates."""
        return self.of.bound

    @property
    def nonnegative(self) -> bool:
        """That of the original: codes' signs are the same in all coordinates."""
        return self.of.nonnegative

    def code(self, S: Matrix) -> Matrix:
        """Return the original's codes: the atoms' correlations are the same."""
        return self.of.code(S)

    def loss(self, U: Matrix) -> Matrix:
        raise NotImplementedError

    def project(self, NU: Matrix) -> Matrix:
        """Return the nearest points of V_f."""
        if not self.n_kept:
            return NU
        # The kept entries are features still: (37) clips each by itself, whatever the others are.
        projected = NU.copy()
        projected[..., : self.n_kept] = self.of.project(NU[..., : self.n_kept])
        return projected


def in_span(
    objective: Objective,
    X: Matrix,
    dictionaries: Sequence[Matrix],
    reach: float,
    solve: Solve,
    *,
    back: bool,
) -> Found:
    """Return what ``solve(objective, X, dictionaries)`` returns, found in fewer coordinates.

    ``reach`` is the share of ``x / strong_convexity`` that an entry of nu can reach. ``solve`` is
    called with other coordinates: once, or with a finite bound until no other entry meets it.
    ``back`` says whether nu is needed in the original ones.
    """
    W, bounded = np.concatenate(list(dictionaries)), bool(np.isfinite(objective.bound))
    kept = (np.abs(X) * reach > objective.bound * objective.strong_convexity).any(axis=0)
    while True:
        on, off = np.flatnonzero(kept), np.flatnonzero(~kept)
        span = _Span(W[:, off])
        turned, across = span.samples(X[:, off])
        rounds, seen = solve(
            _Turned(objective.gamma, objective.delta, objective, len(on)) if bounded else objective,
            np.hstack([X[:, on], turned]),
            [np.hstack([D[:, on], span.atoms(D[:, off])]) for D in dictionaries],
        )
        if not (bounded or back):
            return rounds, seen
        nu = span.back(seen["nu"][..., len(on) :], turned, across)
        if not bounded:
            return rounds, {**seen, "nu": nu}
        whole = np.empty((len(dictionaries), *X.shape), dtype=X.dtype)
        whole[..., on], whole[..., off] = seen["nu"][..., : len(on)], nu
        outside = (np.abs(whole) > objective.bound).any(axis=(0, 1)) & ~kept
        if not outside.any():
            return rounds, {**seen, "nu": whole}
        kept |= outside  # their bounds are unknown in the span: begin again, with these kept
