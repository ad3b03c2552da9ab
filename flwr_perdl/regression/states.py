"""What the server knows before each step, one type per step: what `TwoPhase` goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix
from flwr_perdl.regression.answers import ANCHORS, DESCRIBE, MOMENT, UPDATE

K = TypeVar("K", bound="Known")


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """What the server knows in every step.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase
    >>> state = TwoPhase(2).begin(np.eye(2))
    >>> state.centers
    array([[1., 0.],
           [0., 1.]])
    """

    #: The step to take next.
    step: ClassVar[str]
    #: Models, (k, d).
    centers: Matrix
    #: Whose answers to the last exchange stood out: partition and share, (m, 2).
    odd: Matrix = field(default_factory=lambda: np.zeros((0, 2)))

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays, such as a checkpoint holds."""
        return {"step": np.asarray(self.step)} | {n: np.asarray(v) for n, v in vars(self).items()}

    @staticmethod
    def unpack(arrays: Mapping[str, NDArray[Any]]) -> State:
        """Return the state that was packed."""
        kind = _KINDS[str(arrays["step"])]
        values: dict[str, Any] = {own.name: arrays[own.name] for own in fields(kind)}
        return kind(**{name: v if v.ndim else v.item() for name, v in values.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Describing(State):
    """Before the clients have described their data."""

    step = DESCRIBE


@dataclass(frozen=True, kw_only=True, eq=False)
class Known(State):
    """What the server knows from then on."""

    #: Step size, mean square of the features, noise variance.
    step_size: float
    power: float = 1.0
    variance: float = 0.0
    #: Checks of the models left that need not wait.
    patience: int = 5
    #: Clients too steep for the step size, which Phase 2 leaves out.
    steep: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    #: "filtered": whose last updates these are (m,), of which cluster and change (m, d + 1), at
    #: which models (k, d), and how they have changed with the models so far (m,).
    who: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    said: Matrix = field(default_factory=lambda: np.zeros((0, 1)))
    asked: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    slopes: Matrix = field(default_factory=lambda: np.zeros(0))

    def to(self, kind: type[K], **more: Any) -> K:
        """Return the state of another step: what both know, and what is given."""
        names = {own.name for own in fields(kind)} & vars(self).keys()
        return kind(**{name: getattr(self, name) for name in names} | more)


@dataclass(frozen=True, kw_only=True, eq=False)
class Phase1(Known):
    """What either step of Phase 1 needs."""

    #: The anchors' estimates, (h, d), or where all start, (1, d); columns to multiply with, or
    #: those of the subspaces, (h, d, width).
    thetas: Matrix
    columns: Matrix
    #: The anchors' partitions, where they are chosen, and who of them has answered so far.
    anchors: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    moved: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    #: Iterations done.
    iteration: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Searching(Phase1):
    """Before a product with the residual moment."""

    step = MOMENT
    #: Products done in this iteration.
    products: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimating(Phase1):
    """Before the anchors' estimates."""

    step = ANCHORS
    #: Fewest points of an anchor.
    min_points: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Refining(Known):
    """Phase 2: before a round of updates."""

    step = UPDATE
    #: The models of the round before, (k, d).
    previous: Matrix
    #: Rounds since the restart of each model's momentum, and its cluster's points, (k,): of the
    #: clients that answered, and of the absent ones as they last did since the last check.
    tempo: Matrix
    counts: Matrix
    #: Who answered since the last check, and its points in every cluster, (m, 1 + k).
    heard: Matrix
    #: One-shot: the groups to which clients belong for good, (k, d), else (0, d).
    groups: Matrix
    #: What the acceleration remembers: the models that the clients had and their mean changes, the
    #: last rounds (rounds, k, d), how many of these count (k,), and who answered the last, and its
    #: points in every cluster (m, 1 + k).
    points: Matrix
    changes: Matrix
    memory: Matrix
    told: Matrix
    #: Rounds since the last check of the models.
    since: int = 0

    @classmethod
    def start(cls, known: Known, centers: Matrix, groups: Matrix | None = None) -> Refining:
        """Return the state in which Phase 2 starts from these models."""
        k = len(centers)
        none = np.zeros((0, *centers.shape))
        return known.to(
            cls,
            centers=centers,
            previous=centers,
            tempo=np.zeros(k),
            counts=np.zeros(k),
            heard=np.zeros((0, 1 + k)),
            points=none,
            changes=none,
            memory=np.zeros(k),
            told=np.zeros((0, 1 + k)),
            groups=centers[:0] if groups is None else groups,
        )


_KINDS = {kind.step: kind for kind in (Describing, Searching, Estimating, Refining)}
