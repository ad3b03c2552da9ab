"""All clients of a simulated run, and the run without messages, for studies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_count,
    check_kind,
    check_list,
)
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression.exchange import Answers, Ask, State
from flwr_perdl.regression.fedx import estimate_alone
from flwr_perdl.regression.losses import SQUARED, Loss, check_labels, check_loss, check_points
from flwr_perdl.regression.phases import TwoPhase
from flwr_perdl.regression.two_phase import answered, two_phases

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

    Raises
    ------
    ValueError
        If there is no client, or one's data are not as they should be.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Clients
    >>> X = np.random.default_rng(0).standard_normal((20, 8, 2))
    >>> len(Clients(X, X[..., 0]))
    20
    """

    def __init__(self, X: Sequence[Matrix], y: Sequence[Matrix], loss: Loss = SQUARED) -> None:
        check_loss(loss)
        check_list("X", X), check_list("y", y)
        if not len(X) or len(X) != len(y):
            raise ValueError(f"X and y must have one entry per client, got {len(X)} and {len(y)}.")
        self.X, self.y, self.loss = list(X), list(y), loss
        for i, (A, b) in enumerate(zip(X, y, strict=True)):
            self.X[i], self.y[i] = check_points(A, b, name=f"[{i}]")
            check_array(f"X[{i}]", A, columns=self.X[0].shape[1])
            check_labels(f"y[{i}]", self.y[i], loss)
        self.n_samples = np.array([float(len(b)) for b in self.y])
        #: Who has as many points as others, and their data, (m, n, d) and (m, n).
        self._stacks = list[tuple[NDArray[np.intp], Matrix, Matrix]]()
        self._alone = dict[int, Matrix]()
        for n in np.unique(self.n_samples):
            alike = np.flatnonzero(self.n_samples == n)
            at_once = max(_WINDOW // int(n * self.X[0].shape[1]), 1)
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
        if ask.own or ask.noise:
            each = [(self.X[i][None], self.y[i][None], ask.to(int(i)), self.loss) for i in everyone]
            stack = np.concatenate([answered(*one) for one in each])
            return Answers(everyone, self.n_samples, stack)
        parts = []
        for i, (_, X, y) in enumerate(self._stacks):
            if ask.step == "update" and len(ask.arrays) > 1 and i not in self._alone:
                self._alone[i] = estimate_alone(X, y)  # the same in every round
            parts.append(answered(X, y, ask, self.loss, self._alone.get(i)))
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
    clients: Clients | Callable[[int], Clients],
    settings: TwoPhase,
    n_rounds: int,
    *,
    centers: Matrix | None = None,
    seed: int = 0,
) -> Run:
    """Run both phases, or the second from given models, for a number of exchanges.

    What the strategies compute with clients that withhold nothing (``min_support=0``), by the same
    generator, `two_phases`.

    Parameters
    ----------
    clients : Clients, or callable
        Who answers. ``clients(round_)``, rounds from 1, may return the same clients with fresh
        samples, as P2's analysis has them.
    settings : TwoPhase
        What is asked.
    n_rounds : int
        Exchanges in all.
    centers : ndarray of shape (k, d), optional
        Models to start Phase 2 from.
    seed : int, default 0
        The run's one seed.

    Returns
    -------
    Run
        ``state``, the server's last one, and ``history``, the models (k, d) by round.

    Raises
    ------
    ValueError
        If an argument is not as it must be.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Clients, TwoPhase, model_error, simulate
    >>> slopes = np.array([[2.0, 0.0], [-2.0, 1.0]])
    >>> X = np.random.default_rng(0).standard_normal((20, 8, 2))
    >>> y = [own @ slopes[i % 2] for i, own in enumerate(X)]
    >>> run = simulate(Clients(X, y), TwoPhase(2), 40)
    >>> model_error(run.state.centers, slopes) < 1e-3
    True
    """
    check_kind("settings", settings, TwoPhase, "a TwoPhase")
    state, history = settings.begin(centers), []
    rounds = simulate_rounds(clients, settings, n_rounds, centers=centers, seed=seed)
    for round_, state in enumerate(rounds, start=1):
        if len(state.centers):
            history.append((round_, state.centers))
    return Run(state, history)


def simulate_rounds(
    clients: Clients | Callable[[int], Clients],
    settings: TwoPhase,
    n_rounds: int,
    *,
    centers: Matrix | None = None,
    seed: int = 0,
) -> Iterator[State]:
    """Yield the server's state after every exchange; the arguments are those of `simulate`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.regression import Clients, TwoPhase, simulate_rounds
    >>> X = np.random.default_rng(0).standard_normal((20, 8, 2))
    >>> clients = Clients(X, X[..., 0])
    >>> [state.step for state in simulate_rounds(clients, TwoPhase(1), 4)]
    ['moment', 'moment', 'moment', 'update']
    >>> def fresh(round_):
    ...     X = np.random.default_rng(round_).standard_normal((20, 8, 2))
    ...     return Clients(X, X[..., 0])
    >>> *_, last = simulate_rounds(fresh, TwoPhase(1), 12)
    >>> bool(np.abs(last.centers - [[1, 0]]).max() < 0.01)
    True
    """
    check_kind("settings", settings, TwoPhase, "a TwoPhase")
    check_count("n_rounds", n_rounds)
    check_count("seed", seed)
    first = here = _drawn(clients, 1)
    if centers is not None:
        centers = check_array("centers", centers, columns=first.X[0].shape[1])
    run = two_phases(settings, settings.begin(centers))
    ask = next(run)
    for round_ in range(1, n_rounds + 1):
        rng = spawn(seed, SERVER, round_)
        if round_ > 1 and here is not clients:
            here = _drawn(clients, round_, first)
        ask = run.send((here.answer(ask.drawn(rng)), rng))
        yield ask.state


def _drawn(
    clients: Clients | Callable[[int], Clients], round_: int, like: Clients | None = None
) -> Clients:
    """Return the clients of a round, as many and with as many features as in the first."""
    here = clients(round_) if callable(clients) else clients
    check_kind("clients", here, Clients, "Clients, or a function that returns them")
    shape, wanted = ((len(one), one.X[0].shape[1]) for one in (here, like or here))
    if shape != wanted:
        raise ValueError(
            f"clients must be {wanted[0]} with {wanted[1]} features in every round, got {shape[0]} "
            f"with {shape[1]} in round {round_}."
        )
    return here
