"""A noised sum: the server, and all who see what it publishes, get the clients' sum with noise.

With ``trust="distributed"`` each client adds its share of the noise under Flower's SecAgg+, and the
server sees the noised sum only. With ``trust="central"`` the server sees each client's sum, and the
noise is the one share that it adds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any, cast

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.core.models import fixed_entries, is_float, settled
from flwr_perdl.privacy.noise import Noise, Release, floor_eigenvalues, noise_multiplier, spent
from flwr_perdl.privacy.noised_client import BALANCE, CHANGES, HEAD, PROMISE, SUMS, UPDATES, Promise
from flwr_perdl.privacy.secure_client import MAX_WEIGHT, MIN_CLIENTS, NORM
from flwr_perdl.privacy.secure_server import SecureMean, check_secure, largest_range
from flwr_perdl.protocol.records import Limits, Reply, Scalar, check_shapes, read_reply
from flwr_perdl.protocol.request import FAILED, Channel, Lost, read_replies

#: The largest magnitude of a sum in steps of the grid, where the server itself adds the noise.
_CENTRAL = 2**40
#: The weight with which the sums of earlier rounds count in the next one.
_EARLIER = 0.5
#: Where a run keeps what its channel keeps.
_SPENT, _ROUNDS, _SUM = "spent", "rounds", "sum"


#: Partitions and the requests to them.
Sent = Sequence[tuple[int, Message]]


@dataclass(frozen=True, kw_only=True)
class NoisedSum:
    """What the server gets of a round under a promise: one sum with noise, as a mean.

    Parameters
    ----------
    noise : Noise
        The promise for the whole run.
    start : sequence of ndarray
        The arrays of a reply: their shapes where replies are summed; where their changes are, what
        they begin from.
    of : str, default "sums"
        What is summed: replies ("sums"), their changes from ``start`` ("changes"), those of atoms
        ("atoms"), or of rows what follows a loss and a cluster ("updates").
    records : bool, default False
        Whether a reply is a sum over samples, each of which can be bounded; such sums of earlier
        rounds count in the next one.
    moments : int, default 0
        So many first columns of the one array are a matrix of second moments.
    secure : mapping, optional
        Options of SecAgg+.
    metrics : mapping, optional
        What every reply is taken to say.
    """

    noise: Noise
    start: Sequence[Matrix]
    of: str = SUMS
    records: bool = False
    moments: int = 0
    secure: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    kept: dict[str, NDArray[Any]] = field(default_factory=dict)
    n_required: int = 1
    save: Callable[[], None] | None = None

    def begin(
        self,
        kept: dict[str, NDArray[Any]],
        rounds: int | None,
        min_clients: int,
        save: Callable[[], None],
    ) -> NoisedSum:
        """Return the channel of a run, or raise a ValueError that says why there is none."""
        least = MIN_CLIENTS if self._distributed else 1
        if min_clients < least:
            raise ValueError(
                f'min_clients must be at least {least} with privacy of trust="distributed", whose '
                f"noise is for so many clients, got {min_clients}."
            )
        if self.noise.level == "record" and not self.records:
            raise ValueError(
                'level in privacy must be "client" where what is summed is no sum over samples, as '
                'PerMA\'s aggregation="statistics" is, got "record".'
            )
        if rounds is None:
            raise ValueError(
                "privacy must come with the strategy's own start, which says for how many rounds "
                "its budget is, got another interface."
            )
        if not kept:
            kept |= {_ROUNDS: np.array(rounds), _SPENT: np.array(0)}
        return replace(self, kept=kept, n_required=min_clients, save=save)

    @property
    def ended(self) -> str:
        """Why the run ends before its last round; empty if it goes on."""
        rounds = int(self.kept.get(_ROUNDS, 1))  # before the run begins, nothing is spent
        if int(self.kept.get(_SPENT, 0)) < rounds:
            return ""
        return f"epsilon={self.noise.epsilon:g} is spent after {rounds} rounds"

    @property
    def _distributed(self) -> bool:
        return self.noise.trust == "distributed"

    def config(self, n_clients: int) -> dict[str, Scalar]:
        """Return what the clients are told: the promise."""
        promise = self._promise(n_clients)
        return {MAX_WEIGHT: 1, NORM: float(promise.limit), PROMISE: promise.text}

    def _promise(self, n_clients: int) -> Promise:
        """Return what a round in which so many clients are asked says of the noise."""
        noise = self.noise
        return Promise(
            epsilon=noise.epsilon,
            delta=noise.delta,
            trust=noise.trust,
            level=noise.level,
            clip=noise.clip,
            rounds=int(self.kept[_ROUNDS]),
            clients=self.n_required,
            limit=largest_range(n_clients) // 2 if self._distributed else _CENTRAL,
            size=self._size,
            of=self.of,
        )

    def gather(
        self,
        grid: Grid,
        sent: Sent,
        round_: int,
        *,
        limits: Limits,
        timeout: float | None,
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the noised mean in place of each reply, and who is not in it."""
        gather = self._masked if self._distributed else self._plain
        # Written before a sum is opened: a crash may cost budget, and never gives some back.
        self._spend(1)
        total, there, lost = gather(grid, sent, round_, limits, timeout)
        if len(there) < self.n_required:
            self._spend(-1)
            why = f"{len(there)} clients answered, and the noise is for {self.n_required} at least"
            return {}, {p: Lost(FAILED, why) for p in there} | lost
        sigma = self._release(len(sent)).sigma
        if self._distributed:  # more shares than are needed
            sigma *= sqrt(len(there) / self.n_required)
        arrays = self._finished(total, sigma, len(there))
        noise, (rounds, done) = self.noise, (int(self.kept[name]) for name in (_ROUNDS, _SPENT))
        epsilon = spent(noise_multiplier(noise.epsilon, noise.delta, rounds), noise.delta, done)
        metrics = {"clip": noise.clip, "sigma": sigma, "epsilon": epsilon}
        return {p: Reply(arrays, 1, {**metrics, **self.metrics}) for p in there}, lost

    def _spend(self, n_sums: int) -> None:
        """Count sums, on disk where the run is kept there."""
        self.kept[_SPENT] = np.array(int(self.kept[_SPENT]) + n_sums)
        if self.save is not None:
            self.save()

    def _masked(
        self, grid: Grid, sent: Sent, round_: int, limits: Limits, timeout: float | None
    ) -> tuple[Matrix, list[int], dict[int, Lost]]:
        """Return the sum of the clients' noised replies, who is in it, and why others are not."""
        release, options = self._release(len(sent)), cast(Any, self.secure)
        channel = SecureMean((self._size,), release.limit, min_clients=self.n_required, **options)
        good, lost = channel.gather(grid, sent, round_, limits=limits, timeout=timeout)
        means = [reply.arrays[0] for reply in good.values()]
        return release.read(len(good) * means[0]) if good else np.zeros(0), list(good), lost

    def _plain(
        self, grid: Grid, sent: Sent, round_: int, limits: Limits, timeout: float | None
    ) -> tuple[Matrix, list[int], dict[int, Lost]]:
        """Return the clients' sum with the server's noise, who is in it, and why others are not."""
        replies = grid.send_and_receive([message for _, message in sent], timeout=timeout)
        good, lost = read_replies(sent, replies, partial(self._read, limits))
        release, rng = self._release(len(sent)), self.noise.rng
        total = np.zeros(self._size)
        for partition in sorted(good):
            total += good[partition].arrays[0]
        noised = release.read(release.noised(total, None if rng is None else rng()))
        return noised, sorted(good), lost

    def _read(self, limits: Limits, reply: Message) -> Reply:
        """Return what a client adds to the sum."""
        read = read_reply(reply.content, limits)
        check_shapes([(self._size,)], read)
        return read

    def _finished(self, total: Matrix, sigma: float, n_clients: int) -> list[Matrix]:
        """Return what the protocol goes on with: all that is done here costs no privacy."""
        if self.records:
            total = total + _EARLIER * self.kept.get(_SUM, np.zeros_like(total))
            self.kept[_SUM] = total
        summed = self._summed
        ends = np.cumsum([array.size for array in summed])[:-1]
        parts = np.split(total / n_clients, ends)
        arrays = [p.reshape(a.shape) for p, a in zip(parts, summed, strict=True)]
        if self.of == CHANGES:
            rest = iter(arrays)
            return [
                settled(old + next(rest), old, fixed_entries(old)) if is_float(old) else old
                for old in self.start
            ]
        if self.of == UPDATES:
            arrays = [np.pad(array, ((0, 0), (HEAD, 0))) for array in arrays]
        elif self.of != SUMS:
            arrays = [old + change for old, change in zip(self.start, arrays, strict=True)]
        if self.moments:
            weight = BALANCE if self.noise.level == "record" else 1.0
            A = arrays[0][:, : self.moments] / weight
            kept = (1 - _EARLIER ** (2 * int(self.kept[_SPENT]))) / (1 - _EARLIER**2)
            # twice the largest eigenvalue of the noise, below which noise decides
            floor = 2 * sqrt(2 * self.moments * kept) * sigma / weight / n_clients
            arrays[0][:, : self.moments] = floor_eigenvalues((A + A.T) / 2, floor)
        return [a.astype(old.dtype) for a, old in zip(arrays, self.start, strict=True)]

    @property
    def _size(self) -> int:
        return sum(array.size for array in self._summed)

    @property
    def _summed(self) -> list[Matrix]:
        """What is summed of ``start``: of a model the floats, its integers stay as they are."""
        return [array for array in self.start if self.of != CHANGES or is_float(array)]

    def _release(self, n_clients: int) -> Release:
        """Return how the sum of a round is noised in which so many clients are asked."""
        return self._promise(n_clients).release


def check_privacy(
    privacy: Noise | None, secure: bool | Mapping[str, float] = False
) -> dict[str, float] | None:
    """Return the options of SecAgg+ for this privacy, None where it is not wanted.

    Raises
    ------
    ValueError, TypeError
        If one of the options breaks its rule, or there is no secure sum for the other one.
    """
    check_kind("privacy", privacy, (Noise, type(None)), "a Noise or None")
    options = check_secure(secure)
    if privacy is None:
        return options
    if privacy.trust == "distributed":
        return options or {}
    if options is not None:
        raise ValueError(
            'secure must be left out with privacy of trust="central", whose server adds the noise '
            f"to what it sees, got {secure!r}."
        )
    return None


def sum_channel(
    secure: Mapping[str, float] | None,
    privacy: Noise | None,
    start: Sequence[Matrix],
    norm: float = 1.0,
    max_weight: int = 1,
    **options: Any,
) -> Channel | None:
    """Return how the sum of the clients' arrays is gathered; None: in the clear.

    Parameters
    ----------
    secure : mapping or None
        Options of SecAgg+.
    privacy : Noise or None
        The promise.
    start : sequence of ndarray
        See `NoisedSum`; without a promise it is one array, whose shape counts alone.
    norm : float, default 1.0
        Largest norm of a client's array, without a promise.
    max_weight : int, default 1
        See `SecureMean`; under a promise all count alike.
    **options
        See `NoisedSum`.
    """
    if privacy is not None:
        return NoisedSum(noise=privacy, start=start, secure=secure or {}, **options)
    if secure is None:
        return None
    return SecureMean(start[0].shape, norm, max_weight, **cast(Any, secure))
