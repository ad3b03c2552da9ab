"""A noised sum: the server, and all who see what it publishes, get the clients' sum with noise.

With ``trust="distributed"`` each client adds its share of the noise under Flower's SecAgg+, and the
server sees the noised sum only. With ``trust="central"`` the server sees each client's sum, and the
noise is the one share that it adds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import INFO
from math import sqrt
from typing import Any, cast

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.core.models import fixed_entries, settled
from flwr_perdl.privacy.basis import PublicBasis
from flwr_perdl.privacy.noise import Noise, Release, noise_multiplier, spent
from flwr_perdl.privacy.noised_client import BUDGET, CHANGES, SUMS, Promise, is_summed
from flwr_perdl.privacy.secure_server import SecureMean, check_secure, largest_range
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.part import SUMS_RANK, Part
from flwr_perdl.protocol.records import (
    MAX_WEIGHT,
    MIN_CLIENTS,
    NORM,
    PROMISE,
    Kept,
    Limits,
    Reply,
    Scalar,
    check_shapes,
    read_reply,
)
from flwr_perdl.protocol.request import FAILED, Channel, Lost, Sent, Summed, read_replies

#: The largest magnitude of a sum in steps of the grid, where the server itself adds the noise.
_CENTRAL = 2**40
#: Where a run keeps what its channel keeps.
_SPENT, _ROUNDS, _SUM = "spent", "rounds", "sum"


@dataclass(frozen=True, kw_only=True)
class NoisedSum:
    """What the server gets of a round under a guarantee: one sum with noise, as a mean.

    Parameters
    ----------
    noise : Noise
        The guarantee for the whole run.
    summed : Summed
        What the request declares.
    secure : mapping, optional
        Options of SecAgg+.
    """

    noise: Noise
    summed: Summed
    secure: Mapping[str, float] = field(default_factory=dict)
    kept: dict[str, NDArray[Any]] = field(default_factory=dict)
    n_required: int = 1
    save: Callable[[], None] | None = None

    def begin(
        self, kept: Kept, rounds: int | None, min_clients: int, save: Callable[[], None]
    ) -> NoisedSum:
        """Return the channel of a run, or raise a ValueError that says why there is none."""
        least = MIN_CLIENTS if self._distributed else 1
        if min_clients < least:
            raise ValueError(
                f'min_clients must be at least {least} with privacy of trust="distributed", whose '
                f"noise needs that many clients, got {min_clients}."
            )
        if self.noise.level == "record" and not self.summed.by_sample:
            raise ValueError(
                'level in privacy must be "client" if the sums are not over samples that can be '
                'bounded, got "record".'
            )
        if rounds is None:
            raise ValueError(
                "privacy must come with the strategy's own start, for whose number of rounds the "
                "budget is, got another interface."
            )
        if _SPENT not in kept:
            budget = self.summed.budget
            kept |= {_ROUNDS: np.array(budget[1] if budget else rounds), _SPENT: np.array(0)}
        return replace(self, kept=kept, n_required=min_clients, save=save)

    @property
    def ended(self) -> str:
        """Why the run ends before its last round; empty if it goes on."""
        rounds = int(self.kept.get(_ROUNDS, 1))  # before the run begins, nothing is spent
        if int(self.kept.get(_SPENT, 0)) < rounds:
            return ""
        return f"epsilon={self.noise.epsilon:g} is spent after {rounds} rounds"

    @property
    def _units(self) -> int:
        """How much of the budget the sum takes."""
        return self.summed.budget[0] if self.summed.budget else 1

    @property
    def _distributed(self) -> bool:
        return self.noise.trust == "distributed"

    def config(self, n_clients: int) -> dict[str, Scalar]:
        """Return what the clients are told: the guarantee."""
        promise = self._promise(n_clients)
        return {MAX_WEIGHT: 1, NORM: float(promise.limit), PROMISE: promise.text}

    def _promise(self, n_clients: int) -> Promise:
        """Return what a round in which so many clients are asked says of the noise."""
        return Promise(
            **{name: getattr(self.noise, name) for name in BUDGET},
            rounds=int(self.kept[_ROUNDS]),
            clients=self.n_required,
            limit=largest_range(n_clients) // 2 if self._distributed else _CENTRAL,
            size=self._size,
            of=self.summed.of,
            units=self._units,
            entries=self.summed.budget[2] if self.summed.budget else 0,
        )

    def gather(
        self, grid: Grid, sent: Sent, round_: int, *, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the noised mean in place of each reply, and who is not in it."""
        gather = self._gather_masked if self._distributed else self._gather_plain
        # Written before a sum is opened: a crash may cost budget, and never gives some back.
        self._spend(self._units)
        total, there, lost = gather(grid, sent, round_, limits, timeout)
        if len(there) < self.n_required:
            self._spend(-self._units)
            why = f"{len(there)} clients answered, and the noise needs at least {self.n_required}"
            return {}, {p: Lost(FAILED, why) for p in there} | lost
        sigma = self._release(len(sent)).sigma
        if self._distributed:  # more shares than are needed
            sigma *= sqrt(len(there) / self.n_required)
        arrays = self._finish_sum(total, sigma, len(there))
        noise, (rounds, done) = self.noise, (int(self.kept[name]) for name in (_ROUNDS, _SPENT))
        epsilon = spent(noise_multiplier(noise.epsilon, noise.delta, rounds), noise.delta, done)
        metrics = {"clip": noise.clip, "sigma": sigma, "epsilon": epsilon}
        return {p: Reply(arrays, 1, dict(metrics)) for p in there}, lost

    def _spend(self, n_sums: int) -> None:
        """Count sums, on disk where the run is kept there."""
        self.kept[_SPENT] = np.array(int(self.kept[_SPENT]) + n_sums)
        if self.save is not None:
            self.save()

    def _gather_masked(
        self, grid: Grid, sent: Sent, round_: int, limits: Limits, timeout: float | None
    ) -> tuple[Matrix, list[int], dict[int, Lost]]:
        """Return the sum of the clients' noised replies, who is in it, and why others are not."""
        release, options = self._release(len(sent)), cast(Any, self.secure)
        channel = SecureMean((self._size,), release.limit, min_clients=self.n_required, **options)
        good, lost = channel.gather(grid, sent, round_, limits=limits, timeout=timeout)
        means = [reply.arrays[0] for reply in good.values()]
        return release.read(len(good) * means[0]) if good else np.zeros(0), list(good), lost

    def _gather_plain(
        self, grid: Grid, sent: Sent, round_: int, limits: Limits, timeout: float | None
    ) -> tuple[Matrix, list[int], dict[int, Lost]]:
        """Return the clients' sum with the server's noise, who is in it, and why others are not."""
        replies = grid.send_and_receive([message for _, message in sent], timeout=timeout)
        good, lost = read_replies(sent, replies, partial(self._read, limits))
        release, rng = self._release(len(sent)), self.noise.rng
        total = np.zeros(self._size)
        for partition in sorted(good):
            total += good[partition].arrays[0]
        noised = release.read(release.add_noise(total, None if rng is None else rng()))
        return noised, sorted(good), lost

    def _read(self, limits: Limits, reply: Message) -> Reply:
        """Return what a client adds to the sum."""
        read = read_reply(reply.content, limits)
        check_shapes([(self._size,)], read)
        return read

    def _finish_sum(self, total: Matrix, sigma: float, n_clients: int) -> list[Matrix]:
        """Return what the protocol goes on with: all that is done here costs no privacy."""
        summed, earlier = self.summed, self.summed.earlier
        if earlier:
            total = total + earlier * self.kept.get(_SUM, np.zeros_like(total))
            self.kept[_SUM] = total
        ends = np.cumsum([part.size for part in self._parts])[:-1]
        parts = iter(np.split(total / n_clients, ends))
        arrays = [
            _restore(old, next(parts) if is_summed(summed.of, old) else None, summed)
            for old in summed.start
        ]
        if summed.finish is not None:
            kept = (1 - earlier ** (2 * int(self.kept[_SPENT]))) / (1 - earlier**2)
            arrays = summed.finish(arrays, sqrt(kept) * sigma / n_clients)
        return [a.astype(b.dtype, copy=False) for a, b in zip(arrays, summed.start, strict=True)]

    @property
    def _size(self) -> int:
        return sum(part.size for part in self._parts)

    @property
    def _parts(self) -> list[Matrix]:
        """The parts of ``start`` that are summed."""
        summed = self.summed
        return [array for array in summed.start if is_summed(summed.of, array)]

    def _release(self, n_clients: int) -> Release:
        """Return how the sum of a round is noised in which so many clients are asked."""
        return self._promise(n_clients).release


def _restore(old: Matrix, mean: Matrix | None, summed: Summed) -> Matrix:
    """Return an array of the replies' mean, or as it was where it is not summed."""
    if mean is None:
        return old
    mean = mean.reshape(old.shape)
    if summed.of == CHANGES:
        return settled(old + mean, old, fixed_entries(old))
    return mean if summed.of == SUMS else old + mean


@dataclass(frozen=True, eq=False)
class Sums(Part):
    """The server gets sums of what clients send, and no single reply: secure, with noise, or both.

    Parameters
    ----------
    privacy : Noise or None
        The guarantee; None: there is no noise, and sums are secure.
    secure : bool or mapping, default False
        Whether sums are secure; options of SecAgg+.

    Raises
    ------
    ValueError, TypeError
        If one of the options breaks its rule, or there is no secure sum for the other one.
    """

    name, rank = "sums", SUMS_RANK

    privacy: Noise | None
    secure: bool | Mapping[str, float] = False

    def __post_init__(self) -> None:
        """Check the options."""
        check_kind("privacy", self.privacy, (Noise, type(None)), "a Noise or None")
        options, privacy = check_secure(self.secure), self.privacy
        if privacy is not None and privacy.trust == "central" and options is not None:
            raise ValueError(
                'secure must be left out with privacy of trust="central", whose server adds the '
                f"noise to what it sees, got {self.secure!r}."
            )

    @property
    def sums_only(self) -> bool:
        """Whether nothing else leaves the clients."""
        return self.privacy is not None

    @property
    def _basis(self) -> PublicBasis | None:
        """The space where the model is learned; None: where the samples are."""
        return None if self.privacy is None else self.privacy.basis

    def begin(
        self, names: Sequence[str], model: list[Matrix], kept: Kept
    ) -> tuple[Part, Sequence[str], list[Matrix]]:
        """Bring the initial model to where it is learned."""
        basis = self._basis
        return self, names, model if basis is None else [basis.project(array) for array in model]

    def lift(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return a model where the samples are."""
        basis = self._basis
        return list(model) if basis is None else [basis.lift(array) for array in model]

    def log_begin(self, *, evaluates: bool) -> None:
        """Log what is off."""
        if self.sums_only:
            log(
                INFO,
                "privacy: replies are noised sums only; evaluations, metrics and numbers of "
                "examples are off.",
            )

    def channel(self, summed: Summed) -> Channel:
        """Return how replies of which this is summed reach the server."""
        options: Any = check_secure(self.secure) or {}
        if self.privacy is not None:
            return NoisedSum(noise=self.privacy, summed=summed, secure=options)
        return SecureMean(summed.start[0].shape, summed.norm, summed.max_weight, **options)
