"""Shared by both phases: options, the server's state, requests and answers.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, federated moment descent       :class:`MomentDescent`
``T``, ``T_1``, ``n_H``, ``Delta``      ``n_iterations``, ``n_products``, ``n_anchors``,
                                        ``separation``
Phase 2, FedX + clustering              :class:`Refinement`
``eta``, ``s``                          ``step_size``, ``n_steps``
======================================= ====================================================

An option of a phase is declared in one line (:func:`option`): default, rule, whether clients
receive it. The code that acts on it, at the server or at a client, is in ``fedmd.py`` or
``fedx.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core import aggregate, checks
from flwr_perdl.core.checks import LARGE, MOST_CLUSTERS, Matrix, check_count, check_kind
from flwr_perdl.regression.moments import ESTIMATES, STEPS

#: The steps that a client takes: not in the paper; Phase 1, line 9; lines 10-15; Phase 2.
ClientStep = Literal["describe", "moment", "anchors", "update"]
#: The check of a value, by its name: returns it, or raises a ValueError or TypeError.
OptionRule = Callable[[str, Any], Any]

_T = TypeVar("_T")
_K = TypeVar("_K", bound="Stage")

_COUNT = partial(check_count, low=1)
_SIZE = partial(checks.check_real, low=0, high=LARGE)
_POSITIVE = partial(_SIZE, open_low=True)


# Options ------------------------------------------------------------------------------------------


def option(
    default: Any,
    rule: OptionRule,
    *,
    sent: ClientStep | None = None,
    needs: tuple[str, Callable[[Any], bool]] | None = None,
) -> Any:
    """Declare an option: a field of a dataclass, with all that other code has to know about it.

    Parameters
    ----------
    default : Any
        Its default; None: there need not be one.
    rule : callable
        Its check, at the server and, if it is sent, at the clients.
    sent : str, optional
        The step whose requests carry it, under its name in ``Ask.options``, unless it is None.
    needs : tuple of str and callable, optional
        The option on whose value it depends whether this one does anything, and the test of that
        value.
    """
    return field(default=default, metadata={"rule": rule, "sent": sent, "needs": needs})


def _choice(*choices: str) -> OptionRule:
    return partial(checks.check_choice, choices=choices)


def _check_clusters(name: str, value: Any) -> int | str:
    return "auto" if checks.is_auto(name, value) else check_count(name, value, 1, MOST_CLUSTERS)


def _check_options(options: Any) -> None:
    """Raise an error if an option breaks its rule, or is given where it does nothing.

    Afterwards the options are what their rules return: Python's own numbers, a rule's name.
    """
    declared = [own for own in fields(options) if own.metadata]
    for own in declared:
        value = getattr(options, own.name)
        if value is not None or own.default is not None:
            object.__setattr__(options, own.name, own.metadata["rule"](own.name, value))
    for own in declared:
        other, used = own.metadata["needs"] or (own.name, lambda _: True)
        if not used(value := getattr(options, other)):
            reject_unused(options, f"with {other}={value!r}", own.name)


def reject_unused(options: Any, where: str, *names: str, **harmless: Any) -> None:
    """Raise a ValueError if one of these options is given, which do nothing ``where``.

    ``harmless`` are further ones, each with the value that says what happens anyway.
    """
    for name in (*names, *harmless):
        default, given = getattr(type(options), name), getattr(options, name)
        if given not in (default, harmless.get(name, default)):
            raise ValueError(f"{name} must be left out {where}: it does nothing, got {given}.")


@dataclass(frozen=True, kw_only=True)
class MomentDescent:
    """Phase 1: coarse models from any start. Other than by default: `TwoPhase.paper`.

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

    Raises
    ------
    ValueError
        If an option breaks its rule.
    """

    estimate: str = option("u-statistic", _choice(*ESTIMATES), sent="moment")
    anchor_step: str = option("least-squares", _choice(*STEPS), sent="anchors")
    n_anchors: int | None = option(None, _COUNT)
    n_iterations: int = option(1, _COUNT)
    n_products: int = option(2, _COUNT)
    separation: float | None = option(None, _POSITIVE)
    random_start: bool = option(False, checks.check_flag)

    def __post_init__(self) -> None:
        """Check the options."""
        _check_options(self)
        if self.estimate != "u-statistic" and self.n_products % 2:
            raise ValueError(f"n_products must be even, got {self.n_products}.")


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """Options of Phase 2: clients find their cluster while the clusters' models are refined.

    Parameters
    ----------
    local : {"fedavg", "fedprox"}, default "fedavg"
        Local work: gradient steps, or one proximal step.
    n_steps : int, default 1
        Local gradient steps s of "fedavg". With one the models converge to least squares; with more
        to a point nearby, further away the larger the steps and the fewer a client's points.
    step_size : float, optional
        The learning rate eta; by default ``work / n_steps`` ("fedprox": ``work``) over the largest
        curvature of the clients that hold 90 % of the points, and stable at all of them. Clients
        above ten times the median are ignored, and "fedavg" with ``robust="mean"`` leaves them out
        of Phase 2.
    work : float, default 1
        See ``step_size``; at 3, several local steps end up to 7 % further from the truth (C.1).
    normalise : {"cluster", "all"}, default "cluster"
        Divide by the cluster's points or by all.
    momentum : bool, default True
        Whether the server accelerates: Anderson acceleration over the last eleven rounds while a
        model's clients stay the same (at most 2 % of its points come or go) and robust="mean";
        otherwise Nesterov's momentum with gradient restart. Never with ``privacy`` of `FedX`.
    check_every : int, default 60
        Rounds between checks of the models; 0: never. Needs the squared loss.

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others.

    Examples
    --------
    >>> from flwr_perdl.regression import Refinement
    >>> from flwr_perdl.strategies import FedX
    >>> strategy = FedX(3, phase_2=Refinement(local="fedprox"))
    """

    local: str = option("fedavg", _choice("fedavg", "fedprox"), sent="update")
    n_steps: int = option(
        1,
        partial(_COUNT, high=10_000),  # a client's time is its own
        sent="update",
        needs=("local", lambda local: local == "fedavg"),
    )
    step_size: float | None = option(None, _POSITIVE, sent="update")
    work: float = option(1.0, _POSITIVE, needs=("step_size", lambda size: size is None))
    normalise: str = option("cluster", _choice("cluster", "all"))
    momentum: bool = option(True, checks.check_flag)
    check_every: int = option(60, check_count)

    def __post_init__(self) -> None:
        """Check the options."""
        _check_options(self)


#: The defaults.
DESCENT, REFINEMENT = MomentDescent(), Refinement()
_SENT = [own for own in (*fields(MomentDescent), *fields(Refinement)) if own.metadata["sent"]]
#: The rules of what a request carries: of the options that are sent, and of what the server finds.
OPTION_RULES: dict[str, OptionRule] = {
    "variance": partial(checks.check_real, low=0),
    "min_points": check_count,
    "transpose": checks.check_flag,
    **{own.name: own.metadata["rule"] for own in _SENT},
}


@dataclass(frozen=True)
class TwoPhase:
    """Settings of FedMD and FedX + clustering.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    phase_1 : optional
        How models are found, at the start and if there are too few: that of `paper`.
    phase_2 : Refinement
        How models are refined.
    max_clusters : int, default 8
        Largest number of models with "auto"; otherwise, of groups of anchors.
    robust : bool or str, default False
        Against malicious (Byzantine) clients: True is "filtered", which withstands 30 % of them
        (docs/faults.md), False "mean". "filtered": both phases leave out answers that are
        inconsistent with the others (`flwr_perdl.core.aggregate`); Phase 1 also looks for groups of
        malicious clients, and takes the largest k; Phase 2 leaves out clients whose steps do not
        follow the models as those down a convex loss do, for which the server, and its checkpoints,
        hold every client's last update. "clip", "trimmed", "median" and "geometric-median": the
        average of Phase 2 (`average_updates`).
    start : {"fedmd", "random", "one-shot"}, default "fedmd"
        Where the first models come from. "fedmd": Phase 1. "random": draws of ``N(0, I) /
        sqrt(d)``, as in IFCA. "one-shot": fixed clusters, by k-means of the clients' local
        least-squares estimates (Ghosh et al., 2019).

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others.

    Notes
    -----
    Values per client: Phase 1 takes d + 1 up, ``n_products`` times ``(width + 1) d`` down and
    ``width * d`` up, with ``width`` = 2 k + 4 (k: ``max_clusters`` with "auto") but at most d, and,
    for the anchors' estimates, ``(dimensions + 1) d`` down, for a subspace of k dimensions ("auto":
    as many as are found), and d + 1 up. With h named anchors, from the second iteration on, a
    product takes h times as much. Phase 2 takes k d down and d + 2 up per round.

    Examples
    --------
    >>> from flwr_perdl.regression import TwoPhase
    >>> TwoPhase.paper(3).n_clusters
    3
    """

    n_clusters: int | str = option("auto", _check_clusters)
    phase_1: MomentDescent = DESCENT
    phase_2: Refinement = REFINEMENT
    max_clusters: int = option(8, _COUNT)
    robust: bool | str = option(False, lambda _, rule: checks.check_robust(rule, aggregate.RULES))
    start: str = option("fedmd", _choice("fedmd", "random", "one-shot"))

    def __post_init__(self) -> None:
        """Check the options."""
        _check_options(self)
        check_kind("phase_1", self.phase_1, MomentDescent, "a MomentDescent")
        check_kind("phase_2", self.phase_2, Refinement, "a Refinement")
        auto = self.n_clusters == "auto"
        if auto and (self.phase_1.estimate != "u-statistic" or self.start != "fedmd"):
            raise ValueError(
                'n_clusters must be given unless estimate="u-statistic" and start="fedmd", got '
                '"auto".'
            )
        where = f"with start={self.start!r}"
        if self.start == "one-shot":
            reject_unused(self.phase_2, where, check_every=0)
            reject_unused(self, where, "phase_1", "max_clusters")
        if self.start == "random" and not self.phase_2.check_every:
            reject_unused(self, f"{where} and check_every=0", "phase_1")
        if not auto and self.robust != "filtered" and not self.phase_2.check_every:
            where = "with n_clusters given and no checks of the models"
            reject_unused(self, where, "max_clusters")

    @classmethod
    def paper(cls, n_clusters: int, separation: float | None = None) -> TwoPhase:
        """Return the paper's own variant, as its Appendix C runs it (without its oversights).

        Parameters
        ----------
        n_clusters : int
            Number of models k.
        separation : float, optional
            Delta; without it anchors are joined until k groups are left.

        Returns
        -------
        TwoPhase
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

    def begin(self, centers: Matrix | None = None) -> Stage:
        """Return the state before the first request.

        Parameters
        ----------
        centers : ndarray of shape (k, d), optional
            Models to start Phase 2 from; without them Phase 1 comes first.

        Returns
        -------
        Stage
        """
        if centers is None:
            return Stage(centers=np.zeros((0, 0)))
        centers = checks.check_array("centers", centers, min_rows=1)
        if self.phase_2.step_size is None or self.adapts(len(centers)):
            return Stage(centers=centers)
        return Refining.start(Stage(centers=centers, step_size=self.phase_2.step_size), centers)

    def adapts(self, n_clusters: int) -> bool:
        """Whether models may be dropped, merged and added."""
        alone = self.n_clusters != "auto" and n_clusters == 1
        return self.phase_2.check_every > 0 and not alone and self.start != "one-shot"

    def sent_options(self, step: ClientStep) -> dict[str, Any]:
        """Return the options of the phases that the requests of a step carry."""
        values = vars(self.phase_1) | vars(self.phase_2)
        names = [own.name for own in _SENT if own.metadata["sent"] == step]
        return {name: values[name] for name in names if values[name] is not None}

    @property
    def most_clusters(self) -> int:
        """Most models there may be."""
        return self.max_clusters if self.n_clusters == "auto" else int(self.n_clusters)


# What the server knows, and what travels ------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What the server knows at every stage; alone, before the clients have described their data.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase
    >>> TwoPhase(2).begin(np.eye(2)).step
    'describe'
    """

    #: The step to take next; of Phase 1, its first one.
    step: ClassVar[ClientStep] = "describe"
    #: Models, (k, d).
    centers: Matrix
    #: Whose answers to the last exchange stood out: partition and share, (m, 2).
    outliers: Matrix = field(default_factory=lambda: np.zeros((0, 2)))
    #: Step size, mean square of the features, noise variance.
    step_size: float = 0.0
    power: float = 1.0
    variance: float = 0.0
    #: Checks of the models left that need not wait.
    patience: int = 5
    #: Clients too steep for the step size, which Phase 2 leaves out.
    steep: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    #: "filtered": of each client's last update the partition, how its changes have followed the
    #: models so far, cluster and change, (m, 3 + d); and the models that they are of, (k, d).
    received: Matrix = field(default_factory=lambda: np.zeros((0, 3)))
    sent: Matrix = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        """Check that each field is an array or a number."""
        for own in fields(self):
            kinds = (np.ndarray, np.generic, int, float)
            check_kind(own.name, getattr(self, own.name), kinds, "an array or a number")

    def to(self, kind: type[_K], **more: Any) -> _K:
        """Return the state of another step: what every state knows, and what is given."""
        return kind(**{own.name: getattr(self, own.name) for own in fields(Stage)} | more)

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays, such as a checkpoint holds."""
        return {"step": np.asarray(self.step)} | {n: np.asarray(v) for n, v in vars(self).items()}

    @staticmethod
    def unpack(arrays: Mapping[str, NDArray[Any]]) -> Stage:
        """Return the state that was packed."""
        (kind,) = (k for k in (Stage, Descent, Refining) if k.step == arrays["step"])
        values: dict[str, Any] = {own.name: arrays[own.name] for own in fields(kind)}
        return kind(**{name: v if v.ndim else v.item() for name, v in values.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Descent(Stage):
    """What it knows in Phase 1.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase, answer, two_phases
    >>> from flwr_perdl.regression.phases import Answers, Descent
    >>> X, settings = np.random.default_rng(0).standard_normal((20, 8, 2)), TwoPhase(1)
    >>> run = two_phases(settings, settings.begin())
    >>> ask = next(run)
    >>> sent = np.stack([answer(own, own[:, 0], ask) for own in X])
    >>> answers = Answers(np.arange(20), np.full(20, 8.0), sent)
    >>> state = run.send((answers, np.random.default_rng(1))).state
    >>> isinstance(state, Descent), state.columns.shape
    (True, (1, 2, 2))
    """

    step = "moment"
    #: The anchors' estimates theta_{i,t}, (h, d), or where all start, (1, d).
    thetas: Matrix
    #: Columns to multiply with; after the last product the subspaces U_{i,t}. (h, d, width)
    columns: Matrix
    #: The anchors' partitions, where they are named, and who of them has answered so far.
    anchors: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    moved: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    #: Iterations done, products done in this one, and the fewest points of an anchor.
    iteration: int = 0
    products: int = 0
    min_points: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Refining(Stage):
    """What it knows in Phase 2."""

    step = "update"
    #: The models of the round before, (k, d).
    previous: Matrix
    #: Rounds since the restart of each model's momentum, and its cluster's points, (k,): of the
    #: clients that answered, and of the absent ones as they last did since the last check.
    tempo: Matrix
    counts: Matrix
    #: Who answered since the last check, and in the last round, and its points in every cluster,
    #: (m, 1 + k).
    checked: Matrix
    answered: Matrix
    #: What the acceleration remembers: the models that the clients had and their mean changes, the
    #: last round last, (m, k, d), and how many of these rounds count for each model, (k,).
    points: Matrix
    changes: Matrix
    memory: Matrix
    #: One-shot: the groups to which clients belong for good, (k, d), else (0, d).
    groups: Matrix
    #: Rounds since the last check of the models.
    since: int = 0

    @classmethod
    def start(cls, known: Stage, centers: Matrix, groups: Matrix | None = None) -> Refining:
        """Return the state in which Phase 2 starts from these models."""
        k = len(centers)
        more: dict[str, Any] = dict.fromkeys(("tempo", "counts", "memory"), np.zeros(k))
        more |= dict.fromkeys(("checked", "answered"), np.zeros((0, 1 + k)))
        more |= dict.fromkeys(("points", "changes"), np.zeros((0, *centers.shape)))
        more |= {"previous": centers, "groups": centers[:0] if groups is None else groups}
        return known.to(cls, centers=centers, **more)


class Ask(NamedTuple):
    """One request to every client.

    Attributes
    ----------
    step : str
        "describe", "moment", "anchors" or "update".
    arrays : tuple of ndarray
        What every client receives.
    options : mapping
        Scalars.
    per_client : mapping of int to tuple of ndarray
        What these clients receive instead of ``arrays``; only where anchors are named
        (``n_anchors`` or ``n_iterations``).
    shape : tuple of int or None
        The shape of an answer; None in the exchange that finds the dimension.
    state : Stage, optional
        What the server knows before the exchange.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase, two_phases
    >>> settings = TwoPhase(2)
    >>> next(two_phases(settings, settings.begin(np.eye(2)))).step
    'describe'
    """

    step: ClientStep
    arrays: tuple[Matrix, ...] = ()
    options: Mapping[str, float | int | str] = {}
    per_client: Mapping[int, tuple[Matrix, ...]] = {}
    shape: tuple[int, ...] | None = None
    state: Stage = Stage(centers=np.zeros((0, 0)))

    def to(self, partition: int) -> Ask:
        """Return the request as this client receives it."""
        return Ask(self.step, self.per_client.get(partition, self.arrays), self.options)


class Answers(NamedTuple):
    """The clients' answers, in ascending order of partition.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import answer
    >>> from flwr_perdl.regression.phases import Answers, Ask
    >>> X = np.random.default_rng(0).standard_normal((3, 10, 2))
    >>> sent = np.stack([answer(own, own[:, 0], Ask("describe")) for own in X])
    >>> Answers(np.arange(3), np.full(3, 10.0), sent).partitions
    array([0, 1, 2])
    """

    #: Who answered, (n_clients,).
    partitions: NDArray[np.intp]
    #: Their numbers of points, (n_clients,).
    n_samples: Matrix
    #: Their answers, (n_clients, ...).
    stack: Matrix

    def outliers(self, shares: NDArray[Any]) -> Matrix:
        """Return the partitions of outliers, and to which share of the answer they are, as rows."""
        return np.column_stack([self.partitions, shares])[shares > 0]


#: A protocol, or a part of one: it yields what to ask, receives the answers and the round's own
#: source of randomness, and returns what it came to.
Exchanges = Generator[Ask, tuple[Answers, np.random.Generator], _T]
