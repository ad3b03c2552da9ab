"""All clients' answers at once: the same numbers as one by one, for studies of parameters.

Clients of like size are stacked, shorter ones filled up with zero rows, which contribute nothing
to any sum. Local gradient steps and proximal steps are Lemma 1's closed form (P2): a rotation of
each client's rows, which changes no squared error, makes its Gram matrix and ``P_i`` diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_array, check_count, check_real
from flwr_perdl._random import SERVER, spawn
from flwr_perdl.regression.anchors import nearest_group
from flwr_perdl.regression.answers import (
    DESCRIBE,
    MOMENT,
    UPDATE,
    Answers,
    Ask,
    alone,
    answer,
    groups_of,
    misfit_bound,
)
from flwr_perdl.regression.clustering import assign, spectral_filter
from flwr_perdl.regression.losses import SQUARED, Loss, SquaredLoss, check_labels, check_points
from flwr_perdl.regression.two_phase import State, TwoPhase

#: Clients are stacked with others at most this much larger.
_WASTE = 1.25


class _Group(NamedTuple):
    """Clients of like size."""

    clients: NDArray[np.intp]
    X: Matrix  # (m, n, d)
    y: Matrix  # (m, n)
    n: Matrix  # (m,)
    own: Matrix  # (m, d), what each estimates alone; (0, 0) until it is asked for
    rotated: Matrix  # (m, r, d), orthogonal rows, r = min(n, d)
    target: Matrix  # (m, r), the responses rotated alike
    rest: Matrix  # (m,), squares of the responses that no model can reach
    values: Matrix  # (m, r), the rotated rows' squares over n
    pulls: dict[tuple[float, int, str], Matrix]  # (m, r), see `_changes`, by what local work is


class Clients:
    """Many clients' data, and their answers to what a server asks.

    Parameters
    ----------
    X : sequence of ndarray of shape (n_i, d)
        Each client's features.
    y : sequence of ndarray of shape (n_i,)
        Each client's responses.
    loss : Loss, default SQUARED
        The loss of Phase 2; others than the squared loss are computed client by client.

    Raises
    ------
    ValueError
        If there is no client, or one has no points, another number of features, responses that are
        not as many as its points, or, with the logistic loss, one other than -1 and 1.
    """

    def __init__(self, X: Sequence[Matrix], y: Sequence[Matrix], loss: Loss = SQUARED) -> None:
        if not len(X) or len(X) != len(y):
            raise ValueError(f"X and y must have one entry per client, got {len(X)} and {len(y)}.")
        points = [
            check_points(A, b, name=f"[{i}]") for i, (A, b) in enumerate(zip(X, y, strict=True))
        ]
        self.X, self.y = [A for A, _ in points], [b for _, b in points]
        for i, (A, b) in enumerate(points):
            check_array(f"X[{i}]", A, columns=self.X[0].shape[1])
            check_labels(f"y[{i}]", b, loss)
        self.loss = loss
        self.n_samples = np.array([float(len(b)) for b in self.y])
        self._groups = self._stack() if isinstance(loss, SquaredLoss) else []

    def _stack(self) -> list[_Group]:
        order = np.argsort(self.n_samples, kind="stable")
        groups, start = [], 0
        sizes = self.n_samples[order]
        while start < len(order):
            stop = int(np.searchsorted(sizes, _WASTE * sizes[start], side="right"))
            groups.append(self._group(np.sort(order[start:stop])))
            start = stop
        return groups

    def _group(self, clients: NDArray[np.intp]) -> _Group:
        n = self.n_samples[clients]
        m, longest, d = len(clients), int(n.max()), self.X[0].shape[1]
        X, y = np.zeros((m, longest, d)), np.zeros((m, longest))
        for row, i in enumerate(clients):
            X[row, : len(self.y[i])], y[row, : len(self.y[i])] = self.X[i], self.y[i]
        A, b, rest = X, y, np.zeros(m)
        if longest > d:
            Q, A = np.linalg.qr(X)
            b = (y[:, None] @ Q)[:, 0]
            rest = np.maximum((y**2).sum(axis=1) - (b**2).sum(axis=1), 0)
        values, vectors = np.linalg.eigh(A @ A.swapaxes(1, 2) / n[:, None, None])
        b = (b[:, None] @ vectors)[:, 0]
        A = np.ascontiguousarray(vectors.swapaxes(1, 2) @ A)
        return _Group(clients, X, y, n, np.zeros((0, 0)), A, b, rest, np.maximum(values, 0), {})

    def _own_estimates(self) -> Matrix:
        return np.stack([alone(X, y) for X, y in zip(self.X, self.y, strict=True)])

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.X)

    def answer(self, ask: Ask, present: NDArray[np.bool_] | None = None) -> Answers:
        """Return the answers of the clients that are present (by default all).

        Parameters
        ----------
        ask : Ask
            What is asked.
        present : ndarray of shape (n_clients,), optional
            Who answers.
        """
        here = np.arange(len(self)) if present is None else np.flatnonzero(present)
        together: dict[str, Callable[[_Group, Ask, Matrix], None]] = {
            DESCRIBE: _describe,
            MOMENT: _moment,
            UPDATE: _update,
        }
        batched = ask.step in together and not ask.own and not ask.noise
        if self._groups and batched and ask.options.get("local") != "exact":
            if ask.step == UPDATE and len(groups_of(ask)) and not len(self._groups[0].own):
                own = self._own_estimates()
                self._groups = [group._replace(own=own[group.clients]) for group in self._groups]
            stack = np.empty((len(self), *_shape(ask, self.X[0].shape[1])))
            for group in self._groups:
                first, last = group.clients[0], group.clients[-1] + 1
                if last - first == len(group.clients):  # one after the other
                    together[ask.step](group, ask, stack[first:last])
                    continue
                part = np.empty((len(group.clients), *stack.shape[1:]))
                together[ask.step](group, ask, part)
                stack[group.clients] = part
            stack = stack[here] if present is not None else stack
        else:
            stack = np.stack(
                [answer(self.X[i], self.y[i], ask.to(int(i)), self.loss) for i in here]
            )
        return Answers(here, self.n_samples[here], stack)


def _shape(ask: Ask, d: int) -> tuple[int, ...]:
    """Return the shape of a client's answer."""
    if ask.step == UPDATE:
        return (len(ask.arrays[0]) if ask.options["soft"] else 1, d + 2)
    return (d + 1,) if ask.step == DESCRIBE else ask.arrays[1].shape


def _describe(group: _Group, ask: Ask, out: Matrix) -> None:
    out[:, 0] = group.values[:, -1]
    out[:, 1:] = np.einsum("mnd,mnd->md", group.X, group.X) / group.n[:, None]


def _moment(group: _Group, ask: Ask, out: Matrix) -> None:
    thetas, Q, centers = ask.arrays
    estimate, half = str(ask.options["estimate"]), group.n // 2
    if estimate == "u-statistic":
        weight = 1 / np.maximum(group.n - 1, 1)
    else:  # two halves of the points, or their first two
        half = np.minimum(half, 1) if estimate == "pair" else half
        weight = (1 if estimate == "pair" else group.n) / np.maximum(half, 1) ** 2
    weight = np.where(group.n > 1, weight, 0)
    if len(centers):
        squares = _residuals(group, centers)[0].min(axis=1) / group.n
        weight[squares <= misfit_bound(group.n) * float(ask.options["variance"])] = 0
    across = group.X.swapaxes(1, 2)
    first, second = (group.y[:, None] - theta @ across for theta in thetas[[0, -1]])
    if estimate == "u-statistic":
        same = first * second
    else:
        place = np.arange(group.X.shape[1]) // np.maximum(half, 1)[:, None]
        first *= (place == 0)[:, None]
        second *= (place == 1)[:, None]
    a, b = first @ group.X, second @ group.X
    for h in range(len(Q)):
        if estimate != "u-statistic":
            left, right = (b, a) if ask.options["transpose"] else (a, b)
            np.multiply(left[:, h, :, None], (right[:, h] @ Q[h])[:, None], out=out[:, h])
            continue
        pairs = a[:, h, :, None] * (b[:, h] @ Q[h])[:, None]
        pairs += b[:, h, :, None] * (a[:, h] @ Q[h])[:, None]
        out[:, h] = pairs / 2 - across @ (same[:, h, :, None] * (group.X @ Q[h]))
    out *= weight[:, None, None, None]


def _residuals(group: _Group, centers: Matrix) -> tuple[Matrix, Matrix]:
    """Return every model's sums of squared residuals (m, k), and rotated residuals (k, m, r).

    One product with all clients' rows; the residuals lie in its memory.
    """
    (m, r), (k, d) = group.target.shape, centers.shape
    residuals = (centers @ group.rotated.reshape(m * r, d).T).reshape(k, m, r)
    np.subtract(group.target, residuals, out=residuals)
    return (np.einsum("kmr,kmr->km", residuals, residuals) + group.rest).T, residuals


def _update(group: _Group, ask: Ask, out: Matrix) -> None:
    centers, groups = ask.arrays[0], groups_of(ask)
    squares, residuals = _residuals(group, centers)
    losses = squares / (2 * group.n[:, None])
    if len(groups):
        weights = nearest_group(group.own, groups)
    else:
        weights = assign(losses, group.n, float(ask.options["temperature"]))
    out[:, :, 0] = np.einsum("mk,mk->m", weights, losses)[:, None]
    if ask.options["soft"]:
        out[:, :, 1] = weights
        for j in range(len(centers)):
            _changes(group, residuals[j], weights[:, j, None], ask, out[:, j : j + 1, 2:])
    else:
        labels = weights.argmax(axis=1)
        out[:, 0, 1] = labels
        _changes(group, residuals[labels, np.arange(len(labels))], None, ask, out[:, :, 2:])


def _changes(
    group: _Group, residuals: Matrix, weights: Matrix | None, ask: Ask, out: Matrix
) -> None:
    """Lemma 1: write every client's change of one model, (m, 1, d); of weight 1 without weights."""
    size, n_steps, local = (ask.options[name] for name in ("step_size", "n_steps", "local"))
    work = float(size), int(n_steps), str(local)
    pulls = group.pulls.get(work) if weights is None else None
    if pulls is None:
        step = work[0] * (1 if weights is None else weights)
        pulls = step / group.n[:, None] * spectral_filter(step * group.values, *work[1:])
    if weights is None:
        group.pulls.clear()
        group.pulls[work] = pulls
    np.matmul((pulls * residuals)[:, None], group.rotated, out=out)


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
    dropout: float = 0.0,
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
    dropout : float, default 0
        Probability that a client does not answer, per client and round; in a round without any
        answer nothing changes.

    Returns
    -------
    Run

    Raises
    ------
    ValueError
        If an argument is not as it must be.
    """
    check_count("n_rounds", n_rounds)
    check_count("seed", seed)
    check_real("dropout", dropout, 0, 1)
    if centers is not None:
        centers = check_array("centers", centers, columns=clients.X[0].shape[1])
    state, history = settings.begin(centers), []
    for round_ in range(1, n_rounds + 1):
        rng = spawn(seed, SERVER, round_)
        present = rng.random(len(clients)) >= dropout if dropout else None
        if present is None or present.any():
            answers = clients.answer(settings.ask(state, rng), present)
            state = settings.advance(state, answers, rng)
        if len(state.centers):
            history.append((round_, state.centers))
    return Run(state, history)
