"""FedMD and FedX with all clients of a simulated run at once, without messages.

What the strategies compute with clients that withhold nothing (``min_support=0``), by the same
generator, `two_phases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import (
    SQUARED,
    Answers,
    Ask,
    Loss,
    State,
    TwoPhase,
    answer,
    estimate_alone,
    two_phases,
)

#: Numbers of features that are computed at once: a megabyte, which a processor's cache holds.
_WINDOW = 2**17


class Clients:
    """Many clients' data, and their answers: those of one size answer at once.

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
        self._alone = dict[int, Matrix]()
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
        if ask.per_client or ask.noise:
            each = [(self.X[i][None], self.y[i][None], ask.to(int(i)), self.loss) for i in everyone]
            return Answers(everyone, self.n_samples, np.concatenate([answer(*one) for one in each]))
        parts = []
        for i, (_, X, y) in enumerate(self._stacks):
            if ask.step == "update" and len(ask.arrays) > 1 and i not in self._alone:
                self._alone[i] = estimate_alone(X, y)  # the same in every round
            parts.append(answer(X, y, ask, self.loss, self._alone.get(i)))
        stack = np.empty((len(self), *parts[0].shape[1:]))
        for (who, _, _), part in zip(self._stacks, parts, strict=True):
            stack[who] = part
        return Answers(everyone, self.n_samples, stack)


class Run(NamedTuple):
    """What a simulated run came to."""

    #: The server's last state.
    state: State
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
) -> Iterator[State]:
    """Yield the server's state after every exchange; the arguments are those of `simulate`."""
    run = two_phases(settings, settings.begin(centers))
    ask = next(run)
    for round_ in range(1, n_rounds + 1):
        rng = spawn(seed, SERVER, round_)
        ask = run.send((clients.answer(ask.draw_seed(rng)), rng))
        yield ask.state
