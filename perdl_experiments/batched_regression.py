"""FedMD and FedX with all clients of a simulated run at once, without messages.

What the strategies compute with clients that withhold nothing (``min_support=0``), by the same
generator, `two_phases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import Loss, SquaredLoss, TwoPhase, answer, moment_step, two_phases
from flwr_perdl.regression.losses import SQUARED
from flwr_perdl.regression.phases import Answers, Ask, Stage

#: Numbers of features that are computed at once: a megabyte, which a processor's cache holds.
_WINDOW = 2**17


class Clients:
    """Many clients' data, and their answers.

    Phase 2 with the squared loss, of which runs have most, is computed for all clients of one size
    at once.

    Parameters
    ----------
    X, y : sequence of ndarray of shape (n_i, d) and (n_i,)
        Each client's features and responses.
    loss : Loss, default SQUARED
        The loss of Phase 2.
    """

    def __init__(self, X: Sequence[Matrix], y: Sequence[Matrix], loss: Loss = SQUARED) -> None:
        self.loss = loss
        d = np.shape(X[0])[-1]
        self.X = [check_array(f"X[{i}]", A, min_rows=1, columns=d) for i, A in enumerate(X)]
        self.y = [check_array(f"y[{i}]", b, ndim=1) for i, b in enumerate(y)]
        self.n_samples = np.array([float(len(b)) for b in self.y])
        #: Who has as many points as others, and their data, (m, n, d) and (m, n).
        self._stacks = list[tuple[NDArray[np.intp], Matrix, Matrix]]()
        for n in np.unique(self.n_samples):
            alike = np.flatnonzero(self.n_samples == n)
            at_once = max(_WINDOW // int(n * d), 1)
            for who in np.array_split(alike, -(-len(alike) // at_once)):
                X_, y_ = (np.stack([own[i] for i in who]) for own in (self.X, self.y))
                self._stacks.append((who, X_, y_))
                for i, row in enumerate(who):
                    self.X[row], self.y[row] = X_[i], y_[i]  # held once

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.X)

    def answer(self, ask: Ask) -> Answers:
        """Return the clients' answers to what is asked."""
        everyone = np.arange(len(self))
        if ask.step == "update" and type(self.loss) is SquaredLoss:
            return Answers(everyone, self.n_samples, self._updates(ask))
        pairs = zip(self.X, self.y, strict=True)
        sent = [answer(A, b, ask.to(i), self.loss) for i, (A, b) in enumerate(pairs)]
        return Answers(everyone, self.n_samples, np.stack(sent))

    @cached_property
    def _estimates(self) -> Matrix:
        """Each client's least-squares estimate: the same in every round of one-shot clustering."""
        d = self.X[0].shape[1]
        pairs = zip(self.X, self.y, strict=True)
        return np.stack([moment_step(A, b, np.zeros(d), np.eye(d)) for A, b in pairs])

    def _updates(self, ask: Ask) -> Matrix:
        """Return every client's loss, cluster and change of its model, (n_clients, 1, d + 2)."""
        centers, *groups = ask.arrays
        found = np.empty((len(self), 1, centers.shape[1] + 2))
        for who, X, y in self._stacks:
            residuals = y[..., None] - X @ centers.T
            losses = np.einsum("mnk,mnk->mk", residuals, residuals) / (2 * X.shape[1])
            labels = losses.argmin(axis=1)
            if groups and len(groups[0]):
                apart = self._estimates[who][:, None] - groups[0]
                labels = np.linalg.norm(apart, axis=2).argmin(axis=1)
            found[who, 0, 0], found[who, 0, 1] = losses[np.arange(len(who)), labels], labels
            found[who, 0, 2:] = _changes(X, y, centers[labels], ask.options)
        return found


def _changes(X: Matrix, y: Matrix, theta: Matrix, options: Mapping[str, Any]) -> Matrix:
    """Return how the local work of clients of one size moves their models, (m, d)."""
    (n, d), across, step = X.shape[1:], X.swapaxes(1, 2), float(options["step_size"])
    ahead = theta[..., None]
    if options["local"] == "fedavg":
        for _ in range(int(options["n_steps"])):
            ahead = ahead - step * (across @ (X @ ahead - y[..., None]) / n)
        return ahead[..., 0] - theta
    residual = y[..., None] - X @ ahead
    if n <= d:
        inner = np.linalg.solve(np.eye(n) + step / n * (X @ across), residual)
        return np.asarray((step / n * (across @ inner))[..., 0])
    kernel = np.eye(d) + step / n * (across @ X)
    return np.asarray(np.linalg.solve(kernel, step / n * (across @ residual))[..., 0])


class Counted(Clients):
    """Clients that count the floats that each of them sends and receives, the mean of all."""

    def __init__(self, X: Sequence[Matrix], y: Sequence[Matrix]) -> None:
        super().__init__(X, y)
        self.floats: list[tuple[float, float]] = []

    def answer(self, ask: Ask) -> Answers:
        """Return the answers, and note what they cost."""
        answers = super().answer(ask)
        shared = sum(array.size for array in ask.arrays) * (len(self) - len(ask.per_client))
        own = sum(array.size for arrays in ask.per_client.values() for array in arrays)
        self.floats.append((float(answers.stack[0].size), (shared + own) / len(self)))
        return answers


class Run(NamedTuple):
    """What a simulated run came to."""

    #: The server's last state.
    state: Stage
    #: The models after every round in which there were any, as (round, centers).
    history: list[tuple[int, Matrix]]


def simulate(
    clients: Clients,
    settings: TwoPhase,
    n_rounds: int,
    *,
    centers: Matrix | None = None,
    seed: int = 0,
) -> Run:
    """Run both phases, or the second from given models, for a number of exchanges.

    Parameters
    ----------
    clients : Clients
        Who answers.
    settings : TwoPhase
        What is asked.
    n_rounds : int
        Exchanges in all.
    centers : ndarray of shape (k, d), optional
        Models to start Phase 2 from.
    seed : int, default 0
        The run's one seed.
    """
    state, history = settings.begin(centers), []
    rounds = simulate_rounds(clients, settings, n_rounds, centers=centers, seed=seed)
    for round_, state in enumerate(rounds, start=1):
        if len(state.centers):
            history.append((round_, state.centers))
    return Run(state, history)


def simulate_rounds(
    clients: Clients,
    settings: TwoPhase,
    n_rounds: int,
    *,
    centers: Matrix | None = None,
    seed: int = 0,
) -> Iterator[Stage]:
    """Yield the server's state after every exchange; the arguments are those of `simulate`."""
    run = two_phases(settings, settings.begin(centers))
    ask = next(run)
    for round_ in range(1, n_rounds + 1):
        rng = spawn(seed, SERVER, round_)
        ask = run.send((clients.answer(ask), rng))
        yield ask.state
