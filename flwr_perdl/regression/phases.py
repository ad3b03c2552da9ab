"""How each of the two phases is done: the options, and what is refused.

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

from dataclasses import dataclass
from typing import Any

from flwr_perdl._checks import (
    LARGE,
    check_choice,
    check_count,
    check_flag,
    check_real,
    own_numbers,
)
from flwr_perdl.regression.answers import EXACT, MOST_STEPS
from flwr_perdl.regression.clustering import LOCALS
from flwr_perdl.regression.moments import ESTIMATES, STEPS


def refuse_idle(options: Any, where: str, **harmless: Any) -> None:
    """Raise a ValueError if an option is given that does nothing.

    Parameters
    ----------
    options : dataclass
        The options.
    where : str
        Why they do nothing, for the message.
    **harmless
        The options' names, each with the value that says what happens anyway.
    """
    for name, value in harmless.items():
        given, default = getattr(options, name), getattr(type(options), name)
        if given not in (default, value):
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
    anchor_step : {"least-squares", "line-search", "paper"}, default "least-squares"
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
        client receives (Remark 2), which needs ``n_iterations`` above 1; 0 sends the estimates as
        they are.

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
        own_numbers(self)
        check_choice("estimate", self.estimate, ESTIMATES)
        check_choice("anchor_step", self.anchor_step, STEPS)
        if self.n_anchors is not None:
            check_count("n_anchors", self.n_anchors, 1)
        check_count("n_iterations", self.n_iterations, 1)
        check_count("n_products", self.n_products, 1)
        if self.estimate != "u-statistic" and self.n_products % 2:
            raise ValueError(f"n_products must be even, got {self.n_products}.")
        if self.separation is not None:
            check_real("separation", self.separation, 0, LARGE, open_low=True)
        check_flag("random_start", self.random_start)
        check_real("perturbation", self.perturbation, 0, LARGE)
        if self.n_iterations == 1:
            refuse_idle(self, "with n_iterations=1", perturbation=0)


@dataclass(frozen=True)
class OneShot:
    """Instead of Phase 1, and of every later assignment: clusters of what clients estimate alone.

    The estimates are least squares on a client's own points, and are clustered by k-means (Ghosh et
    al., 2019).

    Examples
    --------
    >>> from flwr_perdl.regression import OneShot, TwoPhase
    >>> TwoPhase(3, OneShot()).n_clusters
    3
    """


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """Phase 2: clients find their cluster while the clusters' models are refined.

    Parameters
    ----------
    local : {"fedavg", "fedprox", "exact"}, default "fedavg"
        Local work. "exact": clients send their Gram matrix, and the server solves.
    n_steps : int, default 1
        Local gradient steps s of "fedavg". With one the models converge to least squares; with
        more to a point nearby, further away the larger the steps and the fewer a client's points.
    step_size : float, optional
        eta; by default ``work / n_steps`` ("fedprox": ``work``) over the largest curvature of the
        clients that hold 90 % of the points, and stable at all of them. One client's curvature does
        not decide it: clients above ten times the median do not count, and a "fedavg" with
        ``robust="mean"``, whose average they would ruin, leaves them out of Phase 2, unless
        ``step_size`` is given; with another rule none counts for more than three medians.
    work : float, default 1
        See ``step_size``. With several local steps, more local work ends further from least
        squares: at 3, up to 7 % further from the truth in setting C.1.
    softness : float, default 0
        0 for hard assignment; otherwise the temperature of `assign` in units of twice the mean
        loss, which is the noise's variance.
    normalise : {"cluster", "all"}, default "cluster"
        Divide by the cluster's points or by all.
    momentum : bool, default True
        Whether the server accelerates: Anderson acceleration over the last eleven rounds while a
        model's clients stay the same (at most 2 % of its points come or go) and robust="mean";
        otherwise Nesterov's momentum with gradient restart. Replies with noise, as under local
        differential privacy or from Flower's SecAgg+, want False.
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
    softness: float = 0.0
    normalise: str = "cluster"
    momentum: bool = True
    check_every: int = 60

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        if isinstance(self.local, str) and self.local == "client":
            raise ValueError(
                "local must be 'fedavg', 'fedprox' or 'exact', got 'client': models that "
                'the clients\' own fit trains are for ClusteredFedAvg(k, start="given"), which '
                "takes those that FedMD finds."
            )
        check_choice("local", self.local, (*LOCALS, EXACT))
        check_count("n_steps", self.n_steps, 1, MOST_STEPS)
        if self.step_size is not None:
            check_real("step_size", self.step_size, 0, LARGE, open_low=True)
        check_real("work", self.work, 0, LARGE, open_low=True)
        check_real("softness", self.softness, 0, LARGE)
        check_choice("normalise", self.normalise, ("cluster", "all"))
        check_flag("momentum", self.momentum)
        check_count("check_every", self.check_every)
        if self.local != "fedavg":
            refuse_idle(self, f"with local={self.local!r}", n_steps=1)
        if self.local == EXACT:
            idle = {"step_size": None, "work": 1, "normalise": "cluster", "momentum": False}
            refuse_idle(self, 'with local="exact"', **idle)
        if self.step_size is not None:
            refuse_idle(self, "with step_size given", work=1)


#: The defaults.
DESCENT, REFINEMENT = MomentDescent(), Refinement()
