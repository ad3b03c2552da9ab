"""What the clients of the three dictionary protocols share: reading a request, and the start.

`flwr_perdl.clients.perma`, `averaging` and `perpca` each hold the steps of one protocol, which
`flwr_perdl.clients.DictionaryClient` takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from flwr_perdl._checks import Matrix, check_array, check_count
from flwr_perdl._random import spawn
from flwr_perdl._records import LARGEST_INT, ROUND, RUN, SEED, Scalar
from flwr_perdl.clients._requests import check_atoms, digest
from flwr_perdl.clients.base import Member, PrivateArrays, PrivateState, step_of
from flwr_perdl.dictionary import Learner, WarmStart, warm_start
from flwr_perdl.dictionary.learners import LEARNERS

#: Iterations of the client's learner that an update asks for.
LOCAL_STEPS = "perdl.local-steps"
#: Maximum number of local steps, refinement steps and atoms per sample in a request.
MOST_STEPS = 10_000
#: The name of a client's own atoms in its private state.
LOCAL_ATOMS = "local_atoms"

#: Samples times features times atoms above which a start is not repeated without a sample.
_LONG = 2**22


class Start(Protocol):
    """How a client makes its first dictionary."""

    def __call__(self, X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
        """Return a dictionary learned from ``X`` alone."""


class Asked(NamedTuple):
    """What a request says; nothing in it depends on a client's samples."""

    step: str
    round: int
    seed: int
    run: str
    #: The global atoms, or nothing in a protocol's first step.
    parameters: list[Matrix]
    config: Mapping[str, Scalar]
    #: What tells this request from every other one.
    digest: str


class Taken(NamedTuple):
    """The result of a step at a client."""

    #: What leaves the client; withheld rows are zero.
    sent: Matrix
    #: Mean squared error of the samples.
    error: float
    n_atoms: int
    #: Whether there was no private state, so that the client made its own atoms anew.
    anew: bool = False


class DictionaryMember(Member):
    """A client with samples and a learner, as `DictionaryClient` documents them."""

    X: Matrix
    learner: Learner
    start: Start
    min_support: int
    digits: int | None


class Participant(NamedTuple):
    """A client, and its private state in the run that asks."""

    client: DictionaryMember
    state: PrivateState


class Steps(ABC):
    """One protocol's steps, as clients take them."""

    #: What requests call them.
    names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, client: DictionaryMember, asked: Asked) -> Matrix | None:
        """Return the request's global atoms, None in a first step.

        Raises a ValueError if the protocol does not send such a request.
        """

    def at_once(self, client: DictionaryMember, asked: Asked) -> bool:
        """Return whether a step of many such clients is one computation on stacked arrays."""
        return False

    @abstractmethod
    def take(
        self, participants: Sequence[Participant], G: Matrix | None, asked: Asked
    ) -> list[Taken]:
        """Take the step that is asked for at each client, and save its state."""

    @abstractmethod
    def own_atoms(
        self, client: DictionaryMember, G: Matrix, asked: Asked, saved: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return the client's own atoms, and whether they are made anew, without a saved state."""


def read(parameters: list[Matrix], config: Mapping[str, Scalar]) -> Asked:
    """Return what the request says; a missing key, or one out of its range, is named."""
    try:
        step, run = step_of(config), str(config.get(RUN, ""))
        round_ = check_count(ROUND, config[ROUND], 0, LARGEST_INT)
        seed = check_count(SEED, config[SEED], 0, LARGEST_INT)
    except KeyError as error:
        raise ValueError(f"config must have {error}, got {sorted(config)}.") from None
    return Asked(step, round_, seed, run, parameters, config, digest(parameters, config))


def read_local_steps(asked: Asked) -> int:
    """Return how many iterations of its learner a client is to take."""
    return check_count(LOCAL_STEPS, asked.config.get(LOCAL_STEPS, 1), 1, MOST_STEPS)


def global_atoms(client: DictionaryMember, asked: Asked) -> Matrix:
    """Return the atoms of a request, which have norm 1 and fit the client."""
    if len(asked.parameters) != 1:
        raise ValueError(f"parameters must be [global atoms], got {len(asked.parameters)} arrays.")
    G = check_array("global atoms", asked.parameters[0], columns=client.X.shape[1])
    return check_atoms(G, most=client.learner.n_atoms)


def own_start(client: DictionaryMember, asked: Asked, X: Matrix | None = None) -> Matrix:
    """Return the client's first dictionary, from its samples or from ``X``."""
    rng = spawn(asked.seed, client.partition)
    return client.start(client.X if X is None else X, client.learner, rng=rng).dictionary


def started_without(client: DictionaryMember, asked: Asked) -> Callable[[int], Matrix] | None:
    """Return how to start without a sample, None where that takes long.

    The atom that is nearest to the sample stands for all: atoms have no order in a start.
    """
    X = client.X
    if len(X) == 1 or X.size * client.learner.n_atoms > _LONG:
        return None

    def without(i: int) -> Matrix:
        others = own_start(client, asked, np.delete(X, i, axis=0))
        nearest = np.abs(others @ X[i]).argsort()[-1:]
        return others[nearest] if len(others) else np.zeros_like(X[:1])

    return without


def is_ours(client: DictionaryMember) -> bool:
    """Return whether nothing but this library's code computes, which threads may run."""
    start = getattr(client.start, "func", client.start)  # of a partial
    return type(client.learner) in LEARNERS and start is warm_start


def mean_square(errors: Matrix) -> float:
    """Return the mean of the squares."""
    return float(np.mean(errors**2))
