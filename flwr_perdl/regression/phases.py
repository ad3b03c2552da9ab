"""How each of the two phases is done: the options, and their rules.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, federated moment descent       :class:`MomentDescent`
``T``, ``T_1``, ``n_H``, ``Delta``      ``n_iterations``, ``n_products``, ``n_anchors``,
                                        ``separation``
Phase 2, FedX + clustering              :class:`Refinement`
``eta``, ``s``                          ``step_size``, ``n_steps``
======================================= ====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from flwr_perdl.core import aggregate, checks
from flwr_perdl.core.checks import (
    LARGE,
    MOST_CLUSTERS,
    Matrix,
    check_choice,
    check_count,
    check_kind,
    check_real,
    check_robust,
)
from flwr_perdl.regression.clustering import LOCALS
from flwr_perdl.regression.exchange import Refining, State
from flwr_perdl.regression.moments import ESTIMATES, STEPS

STARTS = ("fedmd", "random", "one-shot")
_SIZE = partial(check_real, low=0, high=LARGE)
_COUNTS = "n_anchors", "n_iterations", "n_products", "max_clusters"
#: The rules of the options that have one of their own, and of what a request asks for.
RULES: dict[str, Callable[[str, Any], float | int | str]] = {
    "estimate": partial(check_choice, choices=ESTIMATES),
    "anchor_step": partial(check_choice, choices=STEPS),
    "local": partial(check_choice, choices=LOCALS),
    "normalise": partial(check_choice, choices=("cluster", "all")),
    "start": partial(check_choice, choices=STARTS),
    "n_steps": partial(check_count, low=1, high=10_000),  # a client's time is its own
    **dict.fromkeys(("check_every", "min_points"), check_count),
    "variance": partial(check_real, low=0),
    "perturbation": _SIZE,
    **dict.fromkeys(_COUNTS, partial(check_count, low=1)),
    **dict.fromkeys(("random_start", "momentum", "transpose"), checks.check_flag),
    **dict.fromkeys(("separation", "step_size", "work"), partial(_SIZE, open_low=True)),
}


def _check_each(options: Any) -> None:
    """Raise a ValueError if an option breaks its own rule; None may stay what it is by default."""
    checks.own_numbers(options)
    for own in fields(options):
        value = getattr(options, own.name)
        if own.name in RULES and (value is not None or own.default is not None):
            RULES[own.name](own.name, value)


def reject_idle(options: Any, where: str, **harmless: Any) -> None:
    """Raise a ValueError if an option is given that does nothing ``where``.

    ``harmless`` are the options, each with the value that says what happens anyway.
    """
    for name, value in harmless.items():
        given = getattr(options, name)
        if given not in (getattr(type(options), name), value):
            raise ValueError(
                f"{name} must be left out {where}, where it does nothing, got {given}."
            )


@dataclass(frozen=True, kw_only=True)
class MomentDescent:
    """Phase 1: coarse models from any start.

    Parameters
    ----------
    estimate : {"u-statistic", "halves", "pair"}, default "u-statistic"
        How the residual moment is estimated.
    anchor_step : {"least-squares", "paper"}, default "least-squares"
        How an anchor moves.
    n_anchors : int, optional
        Anchors drawn at random among the clients with enough points; by default all.
    n_iterations : int, default 1
        Moment-descent iterations T.
    n_products : int, default 2
        Products with the moment per iteration, T_1; even unless "u-statistic".
    separation : float, optional
        The paper's Delta.
    random_start : bool, default False
        Start from ``N(0, I) / sqrt(d)`` instead of zero.
    perturbation : float, default 0
        Standard deviation of the noise in the two copies of the anchors' estimates that every
        client receives (Remark 2); needs ``n_iterations`` above 1.

    Raises
    ------
    ValueError
        If an option breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.regression import MomentDescent
    >>> from flwr_perdl.strategies import FedMD
    >>> strategy = FedMD(3, phase_1=MomentDescent(n_anchors=50))
    """

    estimate: str = "u-statistic"
    anchor_step: str = "least-squares"
    n_anchors: int | None = None
    n_iterations: int = 1
    n_products: int = 2
    separation: float | None = None
    random_start: bool = False
    perturbation: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        _check_each(self)
        if self.estimate != "u-statistic" and self.n_products % 2:
            raise ValueError(f"n_products must be even, got {self.n_products}.")
        if self.n_iterations == 1:
            reject_idle(self, "with n_iterations=1", perturbation=0)


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """Phase 2: clients find their cluster while the clusters' models are refined.

    Parameters
    ----------
    local : {"fedavg", "fedprox"}, default "fedavg"
        Local work: gradient steps, or one proximal step.
    n_steps : int, default 1
        Local gradient steps s of "fedavg". With one the models converge to least squares; with
        more to a point nearby, further away the larger the steps and the fewer a client's points.
    step_size : float, optional
        eta; by default ``work / n_steps`` ("fedprox": ``work``) over the largest curvature of the
        clients that hold 90 % of the points, and stable at all of them. Clients above ten times the
        median do not count for it, and "fedavg" with ``robust="mean"`` leaves them out of Phase 2.
    work : float, default 1
        See ``step_size``; at 3, several local steps end up to 7 % further from the truth (C.1).
    normalise : {"cluster", "all"}, default "cluster"
        Divide by the cluster's points or by all.
    momentum : bool, default True
        Whether the server accelerates: Anderson acceleration over the last eleven rounds while a
        model's clients stay the same (at most 2 % of its points come or go) and robust="mean";
        otherwise Nesterov's momentum with gradient restart. With ``privacy`` `FedX` never does.
    check_every : int, default 60
        Rounds between checks of the models; 0: never. Needs the squared loss.

    Raises
    ------
    ValueError
        If an option breaks its rule, or does nothing beside the others.

    Examples
    --------
    >>> from flwr_perdl.regression import Refinement
    >>> from flwr_perdl.strategies import FedX
    >>> strategy = FedX(3, phase_2=Refinement(local="fedprox"))
    """

    local: str = "fedavg"
    n_steps: int = 1
    step_size: float | None = None
    work: float = 1.0
    normalise: str = "cluster"
    momentum: bool = True
    check_every: int = 60

    def __post_init__(self) -> None:
        """Check the options."""
        _check_each(self)
        if self.local != "fedavg":
            reject_idle(self, f"with local={self.local!r}", n_steps=1)
        if self.step_size is not None:
            reject_idle(self, "with step_size given", work=1)


#: The defaults.
DESCENT, REFINEMENT = MomentDescent(), Refinement()


@dataclass(frozen=True)
class TwoPhase:
    """FedMD and FedX + clustering, and how they are done.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    phase_1 : MomentDescent
        How models are found where there are none, and where there are too few.
    phase_2 : Refinement
        How models are refined.
    max_clusters : int, default 8
        Most models, with "auto"; most groups of anchors that are looked for otherwise.
    robust : bool or str, default False
        Against clients that lie: True stands for "filtered", which withstands three in ten of them
        (docs/faults.md), False for "mean". "filtered": both phases leave out answers that are not
        consistent with the others (`flwr_perdl.core.aggregate`); Phase 1 looks for liars' groups
        too, and takes the largest k; Phase 2 leaves out clients whose steps do not follow the
        models as those down a convex loss do, for which the server, and its checkpoints, hold every
        client's last update. "clip", "trimmed", "median" and "geometric-median": Phase 2's average
        (`average_updates`).
    start : {"fedmd", "random", "one-shot"}, default "fedmd"
        Where the first models come from: Phase 1; draws of ``N(0, I) / sqrt(d)``, as in IFCA; or,
        for good, clusters of what the clients estimate alone: k-means of the least squares on their
        own points (Ghosh et al., 2019).

    Raises
    ------
    ValueError
        If an option breaks its rule, or does nothing beside the others.

    Notes
    -----
    Floats per client: Phase 1 takes d + 1 up, ``n_products`` times ``(width + 1) d`` down and
    ``width * d`` up, with ``width`` = 2 k + 4 (k: ``max_clusters`` with "auto") but at most d, and,
    for the anchors' estimates, ``(dimensions + 1) d`` down, of a subspace of k dimensions ("auto":
    as many as are found), and d + 1 up. With h named anchors, from the second iteration on, a
    product takes h times as much. Phase 2 takes k d down and d + 2 up per round.

    Examples
    --------
    >>> from flwr_perdl.regression import TwoPhase
    >>> TwoPhase.paper(3).n_clusters
    3
    """

    n_clusters: int | str = "auto"
    phase_1: MomentDescent = DESCENT
    phase_2: Refinement = REFINEMENT
    max_clusters: int = 8
    robust: bool | str = False
    start: str = "fedmd"

    def __post_init__(self) -> None:
        """Check the options."""
        _check_each(self)
        object.__setattr__(self, "robust", check_robust(self.robust, aggregate.RULES))
        check_kind("phase_1", self.phase_1, MomentDescent, "a MomentDescent")
        check_kind("phase_2", self.phase_2, Refinement, "a Refinement")
        auto = checks.is_auto("n_clusters", self.n_clusters)
        if not auto:
            check_count("n_clusters", self.n_clusters, 1, MOST_CLUSTERS)
        if auto and (self.phase_1.estimate != "u-statistic" or self.start != "fedmd"):
            raise ValueError(
                'n_clusters must be given unless estimate="u-statistic" and start="fedmd", got '
                '"auto".'
            )
        where = f"with start={self.start!r}"
        if self.start == "one-shot":
            reject_idle(self.phase_2, where, check_every=0)
            reject_idle(self, where, phase_1=DESCENT, max_clusters=8)
        if self.start == "random" and not self.phase_2.check_every:
            reject_idle(self, f"{where} and check_every=0", phase_1=DESCENT)
        if not auto and self.robust != "filtered" and not self.phase_2.check_every:
            reject_idle(self, "with n_clusters given and no checks of the models", max_clusters=8)

    @classmethod
    def paper(cls, n_clusters: int, separation: float | None = None) -> TwoPhase:
        """Return the paper's own variant, as its Appendix C runs it (without its oversights).

        Parameters
        ----------
        n_clusters : int
            Number of models k.
        separation : float, optional
            Delta; without it anchors are joined until k groups are left.
        """
        check_count("n_clusters", n_clusters, 1, MOST_CLUSTERS)
        descent = MomentDescent(
            estimate="halves",
            anchor_step="paper",
            n_anchors=max(round(3 * n_clusters * float(np.log(n_clusters))), 1),
            n_iterations=5,
            n_products=10,
            separation=separation,
            random_start=True,
        )
        refinement = Refinement(n_steps=5, work=3.0, normalise="all", momentum=False, check_every=0)
        return cls(n_clusters, descent, refinement)

    def begin(self, centers: Matrix | None = None) -> State:
        """Return the state before the first request.

        Parameters
        ----------
        centers : ndarray of shape (k, d), optional
            Models to start Phase 2 from; without them Phase 1 comes first.
        """
        if centers is None:
            return State(centers=np.zeros((0, 0)))
        centers = checks.check_array("centers", centers, min_rows=1)
        if self.phase_2.step_size is None or self.adapts(len(centers)):
            return State(centers=centers)
        return Refining.start(State(centers=centers, step_size=self.phase_2.step_size), centers)

    def adapts(self, n_clusters: int) -> bool:
        """Whether models may be dropped, merged and added."""
        alone = self.n_clusters != "auto" and n_clusters == 1
        return self.phase_2.check_every > 0 and not alone and self.start != "one-shot"

    @property
    def most_clusters(self) -> int:
        """Most models there may be."""
        return self.max_clusters if self.n_clusters == "auto" else int(self.n_clusters)
