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
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network._dual import norms
from flwr_perdl.network.objectives import Objective

#: Rounds, and what all agents show: codes, estimates and residuals.
Found = tuple[int, dict[str, Matrix]]
Solve = Callable[[Any, Matrix, Sequence[Matrix]], Found]


class _Turned:
    """An objective in coordinates of which only the first ``n_kept`` are bounded.

    Only f* and h matter to a diffusion, and h sees correlations, which stay the same.
    """

    def __init__(self, of: Objective, n_kept: int) -> None:
        self.of, self.n_kept = of, n_kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def project(self, NU: Matrix) -> Matrix:
        """Return the nearest points of V_f."""
        if not self.n_kept:
            return NU
        # The kept entries are features still: (37) clips each by itself, whatever the others are.
        projected = NU.copy()
        projected[..., : self.n_kept] = self.of.project(NU[..., : self.n_kept])
        return projected


def in_span(
    objective: Objective, X: Matrix, dictionaries: Sequence[Matrix], reach: float, solve: Solve
) -> Found:
    """Return what ``solve(objective, X, dictionaries)`` returns, found in fewer coordinates.

    ``reach`` is the share of ``x / strong_convexity`` that an entry of nu can reach. ``solve`` is
    called with other coordinates: once, or with a finite bound until no other entry meets it.
    """
    W, bounded = np.concatenate(list(dictionaries)), bool(np.isfinite(objective.bound))
    kept = (np.abs(X) * reach > objective.bound * objective.strong_convexity).any(axis=0)
    while True:
        on, off = np.flatnonzero(kept), np.flatnonzero(~kept)
        # An isometry of the span of all atoms and a sample, whose own coordinate is the last.
        basis = np.linalg.qr(W[:, off].T)[0]
        along = X[:, off] @ basis
        across = X[:, off] - along @ basis.T
        length = norms(across)[:, None]
        turned = [np.pad(D[:, off] @ basis, ((0, 0), (0, 1))) for D in dictionaries]
        rounds, seen = solve(
            _Turned(objective, len(on)) if bounded else objective,
            np.hstack([X[:, on], along, length]),
            [np.hstack([D[:, on], own]) for D, own in zip(dictionaries, turned, strict=True)],
        )
        unit = across / np.maximum(length, np.finfo(across.dtype).tiny)
        nu = seen["nu"][..., len(on) : -1] @ basis.T + seen["nu"][..., -1:] * unit
        if not bounded:
            return rounds, {**seen, "nu": nu}
        whole = np.empty((len(dictionaries), *X.shape), dtype=X.dtype)
        whole[..., on], whole[..., off] = seen["nu"][..., : len(on)], nu
        outside = (np.abs(whole) > objective.bound).any(axis=(0, 1)) & ~kept
        if not outside.any():
            return rounds, {**seen, "nu": whole}
        kept |= outside  # their bounds are unknown in the span: begin again, with these kept
