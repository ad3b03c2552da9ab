"""Diffusion in fewer coordinates where V_f bounds the dual variables (37): an in-memory fast path.

Where no bound ever binds, the agents' estimates stay in the span of the sample and the atoms, and
`infer` iterates there. Under Huber's loss a few entries meet their bounds: large ones of the
sample. Those stay as they are; all others are turned into the span, an isometry under which f*, the
atoms' correlations and (37) keep their form. What a projection does elsewhere is looked at
afterwards: an entry that left its bounds stays as it is in a second run.

An estimate of nu that starts from 0 never exceeds ``x / strong_convexity`` in size where codes and
atoms are nonnegative, and after ``n`` rounds of step mu not ``1 - (1 - mu strong_convexity / N)^n``
of that: entries of x that this keeps within the bound need no watching from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl.diffusion.inference import ATC, Inference, Span, infer
from flwr_perdl.diffusion.objectives import Objective
from flwr_perdl.diffusion.topology import CombinationMatrix, Topology


@dataclass(frozen=True)
class _Turned(Objective):
    """An objective in coordinates of which only the first ``n_kept`` are bounded.

    Only f* and h matter to a diffusion; f is what has this f*.
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

    def loss(self, U: Matrix) -> Matrix:
        """Return the original's f on the first coordinates, and half a square on the others."""
        square = np.square(U[..., self.n_kept :]).sum(axis=-1) / (2 * self.strong_convexity)
        values: Matrix = self.of.loss(U[..., : self.n_kept]) + square
        return values

    def conjugate(self, NU: Matrix) -> Matrix:
        """Return f* of every row."""
        square = self.strong_convexity / 2 * np.square(NU[..., self.n_kept :]).sum(axis=-1)
        values: Matrix = self.of.conjugate(NU[..., : self.n_kept]) + square
        return values

    def project(self, NU: Matrix) -> Matrix:
        """Return the nearest points of V_f."""
        if not self.n_kept:
            return NU
        projected = NU.copy()
        projected[..., : self.n_kept] = self.of.project(NU[..., : self.n_kept])
        return projected


def infer_bounded(
    objective: Objective,
    X: Matrix,
    dictionaries: Sequence[Matrix],
    topology: Topology,
    *,
    method: str,
    n_rounds: int,
    tolerance: float,
    informed: Sequence[int] | None = None,
    weights: CombinationMatrix | None = None,
    **options: Any,
) -> Inference:
    """Return what `infer` does by a diffusion with a bounded V_f, in fewer coordinates.

    Parameters
    ----------
    objective : Objective
        With a finite bound.
    X, dictionaries, topology, method, n_rounds, tolerance, informed, weights, **options
        As in `infer`; the method is ``"atc"`` or ``"exact_diffusion"``.

    Returns
    -------
    Inference
        With ``nu`` in the original coordinates.
    """
    W = np.concatenate(list(dictionaries))
    reach = 1.0
    if objective.nonnegative and method == "atc":
        program = ATC(objective, topology, dictionaries, X, informed, step=options.get("step"))
        reach = 1 - (1 - program.mu * program.curvature) ** n_rounds
    kept = (np.abs(X) * reach > objective.bound * objective.strong_convexity).any(axis=0)
    while True:
        on, off = np.flatnonzero(kept), np.flatnonzero(~kept)
        span = Span(W[:, off])
        turned, across = span.samples(X[:, off])
        inner = [np.hstack([D[:, on], span.atoms(D[:, off])]) for D in dictionaries]
        found = infer(
            _Turned(objective.gamma, objective.delta, objective, len(on)),
            np.hstack([X[:, on], turned]),
            inner,
            topology,
            method=method,
            n_rounds=n_rounds,
            tolerance=tolerance,
            informed=informed,
            weights=weights,
            compress=False,
            **options,
        )
        assert found.nu is not None
        nu = np.empty((len(dictionaries), *X.shape), dtype=X.dtype)
        nu[..., on] = found.nu[..., : len(on)]
        nu[..., off] = span.back(found.nu[..., len(on) :], turned, across)
        outside = (np.abs(nu) > objective.bound).any(axis=(0, 1)) & ~kept
        if not outside.any():
            return found._replace(nu=nu)
        kept |= outside
