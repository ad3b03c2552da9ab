"""What travels in an exchange, and what the server knows before it: plain records of arrays."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.random import spawn

#: The steps that a client takes: not in the paper; Phase 1, line 9; lines 10-15; Phase 2.
Step = Literal["describe", "moment", "anchors", "update"]

T = TypeVar("T")
K = TypeVar("K", bound="State")


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """What the server knows in every step; alone, before the clients have described their data.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase
    >>> TwoPhase(2).begin(np.eye(2)).step
    'describe'
    """

    #: The step to take next; of Phase 1, its first one.
    step: ClassVar[Step] = "describe"
    #: Models, (k, d).
    centers: Matrix
    #: Whose answers to the last exchange stood out: partition and share, (m, 2).
    odd: Matrix = field(default_factory=lambda: np.zeros((0, 2)))
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

    def to(self, kind: type[K], **more: Any) -> K:
        """Return the state of another step: what every state knows, and what is given."""
        return kind(**{own.name: getattr(self, own.name) for own in fields(State)} | more)

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays, such as a checkpoint holds."""
        return {"step": np.asarray(self.step)} | {n: np.asarray(v) for n, v in vars(self).items()}

    @staticmethod
    def unpack(arrays: Mapping[str, NDArray[Any]]) -> State:
        """Return the state that was packed."""
        (kind,) = (k for k in (State, Descent, Refining) if k.step == arrays["step"])
        values: dict[str, Any] = {own.name: arrays[own.name] for own in fields(kind)}
        return kind(**{name: v if v.ndim else v.item() for name, v in values.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Descent(State):
    """What it knows in Phase 1.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Answers, Descent, TwoPhase, answer, two_phases
    >>> X, settings = np.random.default_rng(0).standard_normal((20, 8, 2)), TwoPhase(1)
    >>> run = two_phases(settings, settings.begin())
    >>> answers = Answers(np.arange(20), np.full(20, 8.0), answer(X, X[..., 0], next(run)))
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
class Refining(State):
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
    def start(cls, known: State, centers: Matrix, groups: Matrix | None = None) -> Refining:
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
    own : mapping of int to tuple of ndarray
        What these clients receive instead of ``arrays``; only where anchors are named
        (``n_anchors`` or ``n_iterations``).
    noise, seed : float, int
        Remark 2: the first array is followed by a second copy, and this noise, a client's own, is
        added to both.
    shape : tuple of int or None
        The shape of an answer; None in the exchange that finds the dimension.
    state : State, optional
        What the server knows before the exchange.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import TwoPhase, two_phases
    >>> settings = TwoPhase(2)
    >>> next(two_phases(settings, settings.begin(np.eye(2)))).step
    'describe'
    """

    step: Step
    arrays: tuple[Matrix, ...] = ()
    options: Mapping[str, float | int | str] = {}
    own: Mapping[int, tuple[Matrix, ...]] = {}
    noise: float = 0.0
    seed: int = 0
    shape: tuple[int, ...] | None = None
    state: State = State(centers=np.zeros((0, 0)))

    def drawn(self, rng: np.random.Generator) -> Ask:
        """Return the request with the seed of its noise, if it has any."""
        return self._replace(seed=int(rng.integers(2**31))) if self.noise else self

    def to(self, partition: int) -> Ask:
        """Return the request as this client receives it."""
        arrays = self.own.get(partition, self.arrays)
        if self.noise:
            rng = spawn(self.seed, partition)
            copies = np.concatenate([arrays[0], arrays[0]])
            copies += self.noise * rng.standard_normal(copies.shape)
            arrays = (copies, *arrays[1:])
        return Ask(self.step, arrays, self.options)


class Answers(NamedTuple):
    """The clients' answers, in ascending order of partition.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Answers, Ask, answer
    >>> X = np.random.default_rng(0).standard_normal((3, 10, 2))
    >>> Answers(np.arange(3), np.full(3, 10.0), answer(X, X[..., 0], Ask("describe"))).partitions
    array([0, 1, 2])
    """

    #: Who answered, (n_clients,).
    partitions: NDArray[np.intp]
    #: Their numbers of points, (n_clients,).
    n_samples: Matrix
    #: Their answers, (n_clients, ...).
    stack: Matrix

    def odd(self, shares: Matrix) -> Matrix:
        """Return who stands out, and to which share of the answer, as rows."""
        rows: Matrix = np.column_stack([self.partitions, shares])[shares > 0]
        return rows


#: A protocol, or a part of one: it yields what to ask, receives the answers and the round's own
#: source of randomness, and returns what it came to.
Exchanges = Generator[Ask, tuple[Answers, np.random.Generator], T]
