"""Local differential privacy: a Flower mod that makes what leaves a client private.

A client's replies to ``n_rounds`` requests are together (epsilon, delta)-differentially private
with respect to *all* of its data: whoever reads them can hardly tell them from those of a client
with any other data. Nothing needs to be trusted but the client's own process.

=========================================  =====================================================
mechanism                                  here
=========================================  =====================================================
Gaussian mechanism, n_rounds times,        `noise_multiplier`: exact, by Balle and Wang, "Improving
(epsilon, delta)                           the Gaussian Mechanism for Differential Privacy", 2018,
                                           Theorem 8, and Dong, Roth and Su, "Gaussian Differential
                                           Privacy", 2019, Corollary 3.3 (n releases of mu are one
                                           of mu * sqrt(n))
discrete Gaussian noise                    OpenDP's sampler: exact, from the operating system's
                                           random numbers; Canonne, Kamath and Steinke, "The
                                           Discrete Gaussian for Differential Privacy", 2020
k-ary randomized response                  OpenDP's sampler; half of epsilon, in equal parts
=========================================  =====================================================

The order of the work carries the promise. (1) The request is checked by itself: what is refused
here is refused whatever the data are. (2) The budget is spent. (3) The noise is drawn. (4) The
client is called. From here on nothing but the noisy answer leaves: a client that fails, for
whatever reason, has a difference of zero, and the reason goes to the client's own log.

Why not Flower's ``LocalDpMod``: it asks for a reply with the names and shapes of the request, which
PerMA's first round and FedX's replies do not have; it would turn the rows of zeros by which a
client withholds an atom, and FedX's cluster number, into noise that the server takes at its word;
it leaves metrics as they are (mean errors and numbers of samples say something about the data);
its noise is for one message, by a formula that holds for epsilon below 1; and it draws from NumPy's
global generator. Flower's accountant (1.41, with the extra ``dp``) is for central privacy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from logging import WARNING
from math import exp, sqrt
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from flwr_perdl.clients.base import identify
from flwr_perdl.clients.dictionary import LOCAL_STEPS
from flwr_perdl.clients.perma import ATOMS, REFINE_STEPS, SENDS, UPDATE
from flwr_perdl.clients.regression import OPTION
from flwr_perdl.core import files
from flwr_perdl.core.checks import (
    Matrix,
    check_array,
    check_count,
    check_function,
    check_kind,
    check_real,
)
from flwr_perdl.privacy.noise import discrete_gaussian, noise_multiplier, opendp_prelude
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    NAME,
    PARTITION_ID,
    ROUND,
    RUN,
    SEED,
    STEP,
    Scalar,
    error_of,
    read_request,
    reply_to,
    to_arrays,
    to_record,
)
from flwr_perdl.regression.clustering import LOCALS

_SPENT = "perdl.privacy"
#: Columns of FedX's reply before the change: loss and cluster.
_HEAD = 2
#: Share of epsilon for the choice of a cluster.
_CHOICE = 0.5
#: Largest coefficient of a model and largest step size in a request, and how far from 1 the norm
#: of an atom may be.
_LARGEST, _ODD = 1e9, 1e-3
#: Steps of the noise's grid per standard deviation.
_STEPS = 2.0**40
#: Norms in whose range squares neither overflow nor vanish.
_CLIPS = 1e-100, 1e100


class _PrivateRequest(NamedTuple):
    """A request that can be answered privately; nothing in it depends on the data."""

    #: The global atoms, or the models.
    given: Matrix
    #: What the client reads of the config, and nothing else.
    config: dict[str, Scalar]
    #: Whether models are asked for.
    regression: bool

    @property
    def n_labels(self) -> int:
        """Number of clusters that the reply may name."""
        return len(self.given) if self.regression else 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the difference that leaves the client."""
        return (1 if self.regression else len(self.given)), self.given.shape[1]


class LocalPrivacy:
    """A mod for ``client_app(..., train_mods=[mod])``.

    It answers update rounds of PerMA (``aggregation`` other than "statistics") and of FedX (hard
    assignment, "fedavg" or "fedprox"), and refuses every step that it cannot make private, such as
    PerMA's matching round and FedMD: a run begins from given atoms or models, such as public data
    or a pilot's gave. Of PerMA's reply it clips and noises the difference from the global atoms,
    withheld atoms standing still; of FedX's the change, and it may name another cluster. Metrics
    are left out, every client counts as one sample, evaluations are not made, and the question who
    the client is is answered from its node config.

    A client that fails answers with noise alone, like any other, and spends as much of the budget;
    its own log says why. So look into the clients' logs, and try the data without the mod first.

    The promise holds against

    - an honest-but-curious server, and everybody who sees the replies or what is computed from
      them: other clients, and strangers on the network;
    - a server that sends what it likes, within one run of Flower's; over several runs, which such a
      server can start, and restarts of the SuperNode with ``ledger`` only;
    - a node that lies: it learns no more than the server does. (That it may spoil the result is
      another matter, see PerMA's ``aggregation``.)

    It does not hold against a thief of the client's disk, where the data are, nor against somebody
    who removes the ledger. How long an answer takes, and that a process is killed or crashes (for
    want of memory, say), may depend on the data: neither is hidden.

    Parameters
    ----------
    epsilon, delta : float
        The budget of all replies together; 1e-6 <= epsilon <= 1e9, 0 < delta < 1.
    n_rounds : int
        Replies that the budget is for; a further request is refused. The count is kept in
        ``context.state``, which another run and a restarted SuperNode begin anew, see ``ledger``.
    clip : float
        Greatest Frobenius norm of a difference, 1e-100 to 1e100; more is scaled down.
    ledger : str or Path, optional
        A folder on the client's disk in which it counts its replies over all runs, in a file that
        only its owner may read. To grant a client a further budget, remove its file.
    rng : callable, optional
        Makes a NumPy generator for each reply, for tests and simulations whose results shall be
        reproducible: whoever knows or guesses its state takes the noise away. By default the noise
        is OpenDP's (extra ``privacy``).

    Raises
    ------
    ValueError
        If an argument breaks its rule, or a request cannot be answered privately.
    ImportError
        If OpenDP is not installed and ``rng`` is not given.

    Examples
    --------
    >>> from flwr_perdl.clients import LocalPrivacy, client_app
    >>> mod = LocalPrivacy(epsilon=8.0, delta=1e-5, n_rounds=10, clip=1.0)
    >>> app = client_app(lambda context: None, train_mods=[mod])
    """

    #: `client_app` puts the mod around evaluations and queries, too.
    for_all_messages = True

    def __init__(
        self,
        epsilon: float,
        delta: float,
        n_rounds: int,
        clip: float,
        *,
        ledger: str | Path | None = None,
        rng: Callable[[], np.random.Generator] | None = None,
    ) -> None:
        self.epsilon = check_real("epsilon", epsilon, 1e-6, 1e9)
        self.delta = check_real("delta", delta, 0, np.nextafter(1, 0), open_low=True)
        self.n_rounds = check_count("n_rounds", n_rounds, 1)
        self.clip = check_real("clip", clip, *_CLIPS)
        check_kind("ledger", ledger, (str, Path, type(None)), "a path or None")
        self.ledger = None if ledger is None else Path(ledger)
        # A weaker source of noise must be asked for: nobody would notice it otherwise.
        if rng is None and find_spec("opendp") is None:
            raise ImportError(
                "LocalPrivacy must have OpenDP for its noise, which is not installed "
                "(pip install opendp)."
            )
        self._rng = check_function("rng", rng, "a function that makes a generator")
        self._multiplier(1)  # needs the accountant: it is missed now, and not in the first round

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Answer a message privately."""
        kind = message.metadata.message_type
        if kind == MessageType.EVALUATE:
            return reply_to(message, None, 1, {})
        if kind == MessageType.QUERY:
            who = ConfigRecord({**identify(context)})
            return Message(RecordDict({CONFIG: who}), reply_to=message)
        if kind != MessageType.TRAIN:
            raise ValueError(f"message_type must be one of Flower's own three, got {kind!r}.")
        asked = _read(message)
        spent = self._spend(context, asked)
        # Drawn before the data are touched: what goes wrong here says nothing of them.
        rng = None if self._rng is None else self._rng()
        noise, shift = self._noise(asked, rng), self._shift(asked.n_labels, rng)
        config = ConfigRecord({**asked.config})
        # What the client gets is rebuilt from what was checked: a server may put more into a
        # request than this mod knows, and the client could answer to it.
        message.content = RecordDict({ARRAYS: to_record([asked.given]), CONFIG: config})
        label, difference = self._ask(message, context, call_next, asked)
        context.state[_SPENT] = spent  # the client may have put another state in its place
        # The sum is of whole numbers: its rounding, and all that follows, adds no information.
        private = self._step(asked.n_labels) * (difference + noise)
        if asked.regression:
            # Randomized response: with odds that are the same for all labels, another one is named.
            head = [0, (label + shift) % asked.n_labels]
            private = np.concatenate([[head], private], axis=1)
        else:
            private += asked.given
        return reply_to(message, [private.astype(asked.given.dtype)], 1, {})

    def _spend(self, context: Context, asked: _PrivateRequest) -> ConfigRecord:
        """Spend the budget's share for a reply, and return what to keep in the state.

        One letter stands for each reply. A reply that names a cluster leaves less of epsilon to the
        noise, and a mixture of both kinds would cost more than either.
        """
        record = context.state.get(_SPENT)
        kept = record if isinstance(record, ConfigRecord) else ConfigRecord()
        last, replies = int(str(kept.get("round", 0))), str(kept.get("replies", ""))
        round_, letter = int(asked.config[ROUND]), "m" if asked.n_labels > 1 else "s"
        if round_ <= last:
            raise ValueError(f"{ROUND} must be more than the last one, {last}, got {round_}.")
        file = None if self.ledger is None else self._file(self.ledger, context)
        if file is not None and os.path.lexists(file):
            replies = _noted(file)
        self._check_budget(replies + letter)
        if file is not None:
            # Written before the reply: a crash may cost budget, and never gives some back. What
            # another process wrote in between is counted too.
            replies = _noted(file, letter)
            self._check_budget(replies + letter)
        spent = ConfigRecord({"round": round_, "replies": replies + letter})
        context.state[_SPENT] = spent
        return spent

    def _check_budget(self, replies: str) -> None:
        """Refuse the last of these replies where it goes beyond the budget."""
        if len(replies) > self.n_rounds:
            raise ValueError(f"n_rounds must be more to go on: the budget is for {self.n_rounds}.")
        if len(set(replies)) > 1:
            raise ValueError(
                "arrays must have one row for models in every request of a budget or more in "
                "every one, got both."
            )

    @staticmethod
    def _file(folder: Path, context: Context) -> Path:
        """Return this client's ledger; the run's config, which is the server's, has no say."""
        who = identify(context)
        return folder / f"{quote(str(who.get(NAME, who[PARTITION_ID])), safe='')}.spent"

    def _ask(
        self,
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
        asked: _PrivateRequest,
    ) -> tuple[int, Matrix]:
        """Return the client's cluster and its difference in steps of the grid; never raise.

        A difference is at most ``clip`` long, and zero if the client fails: two clients' are at
        most twice ``clip`` apart.
        """
        try:
            return self._difference(call_next(message, context), asked)
        except KeyboardInterrupt:  # the operator's, not the data's
            raise
        # SystemExit and the panics of extension modules, which are no Exception, may depend on the
        # data as any error may.
        except BaseException as error:
            log(WARNING, "This client failed, and its reply is noise alone: %r", error)
            return 0, np.zeros(asked.shape)

    def _difference(self, reply: Message, asked: _PrivateRequest) -> tuple[int, Matrix]:
        """Return the cluster that a reply names and its difference, or raise."""
        if reply.has_error():
            raise ValueError(error_of(reply))
        (answer,) = to_arrays(reply.content.array_records[ARRAYS])
        rows, columns = asked.shape
        wanted = (rows, columns + _HEAD) if asked.regression else (rows, columns)
        if answer.shape != wanted:
            raise ValueError(f"the reply must have shape {wanted}, got {answer.shape}")
        answer = check_array("the reply", answer.astype(np.float64))
        label = 0
        if asked.regression:
            label, difference = int(answer[0, 1]), answer[:, _HEAD:]
        else:
            difference = np.where(answer.any(axis=1, keepdims=True), answer - asked.given, 0)
        length = float(np.linalg.norm(difference))
        shortened = difference * (min(1.0, self.clip / length) if length else 1.0)
        return label, np.rint(shortened / self._step(asked.n_labels))

    def _multiplier(self, n_labels: int) -> float:
        """Return the noise multiplier of replies that may name one of so many clusters."""
        share = 1 - _CHOICE if n_labels > 1 else 1.0
        return noise_multiplier(share * self.epsilon, self.delta, self.n_rounds)

    def _step(self, n_labels: int) -> float:
        """Return the step of the grid on which differences and noise are."""
        return 2 * self.clip * self._multiplier(n_labels) / _STEPS

    def _noise(self, asked: _PrivateRequest, rng: np.random.Generator | None) -> Matrix:
        """Return the noise of a reply, in steps of the grid.

        On a grid so fine the discrete Gaussian is a rounded normal distribution but for a factor of
        1 +- 2**-80 per entry. The standard deviation has a margin for the rounding of a difference
        to the grid, a step per entry of two clients' at most, and for that of its norm.
        """
        size = asked.shape[0] * asked.shape[1]
        deviation = _STEPS * (1 + size * 2.0**-50) + self._multiplier(asked.n_labels) * sqrt(size)
        return discrete_gaussian(deviation, size, rng).reshape(asked.shape)

    def _odds(self, n_labels: int) -> float:
        """Return how likely each false label is, rounded up."""
        true = exp(min(_CHOICE * self.epsilon / self.n_rounds, 30.0))
        return min(1 / n_labels, 1 / (true + n_labels - 1) + 2.0**-52)

    def _shift(self, n_labels: int, rng: np.random.Generator | None) -> int:
        """Return by how much to change a label.

        Each change is exp(-epsilon / (2 n_rounds)) times as likely as none.
        """
        if n_labels == 1:
            return 0
        honest = 1 - (n_labels - 1) * self._odds(n_labels)
        if rng is None:
            return _response(n_labels, honest)(0)
        return int(rng.integers(1, n_labels)) if rng.random() >= honest else 0


def _noted(ledger: Path, letter: str = "") -> str:
    """Return the letters in a ledger, before one that is added at its end."""
    with files.private(ledger, os.O_APPEND, buffering=0) as opened:
        opened.seek(0, os.SEEK_END)
        opened.write(letter.encode())
        os.fsync(opened.fileno())
        before = opened.tell() - len(letter)  # others may follow
        opened.seek(0)
        found = opened.read(before).decode("latin-1")
    if set(found) - {"m", "s"}:
        raise ValueError(f"{ledger} must hold a letter m or s for each reply, got others.")
    return str(found)


def _read(message: Message) -> _PrivateRequest:
    """Return what a request asks for, or raise what depends on nothing but the request."""
    arrays, config = read_request(message)
    step, sends = config.get(STEP), str(config.get(SENDS, ""))
    local = config.get(f"{OPTION}local")
    regression = local is not None
    private = local in LOCALS if regression else sends == ATOMS
    if step != UPDATE or not arrays or not private:
        raise ValueError(
            f"step must be an update of atoms or of models under local privacy, got {step!r}"
            f"{' of ' + sends if sends and arrays else ''}: PerMA needs initial_arrays and "
            'aggregation="mean", FedX models to start from.'
        )
    if len(arrays) != 1:
        raise ValueError(f"arrays must be [global atoms] or [models], got {len(arrays)} arrays.")
    given = check_array("arrays", arrays[0], min_rows=int(regression))
    largest = np.abs(given).max(initial=0)
    if regression and largest > _LARGEST:
        raise ValueError(f"models must be within {_LARGEST:g}, got {largest:g}.")
    odd = np.abs(np.linalg.norm(given, axis=1) - 1).max(initial=0)
    if not regression and odd > _ODD:
        raise ValueError(f"global atoms must have norm 1, got one that is off by {odd:g}.")
    known: dict[str, Scalar] = {
        STEP: UPDATE,
        ROUND: check_count(ROUND, config.get(ROUND), 1),
        SEED: check_count(SEED, config.get(SEED)),
        RUN: str(config.get(RUN, "")),
    }
    if regression:
        known |= {
            f"{OPTION}local": str(local),
            f"{OPTION}n_steps": check_count("n_steps", config.get(f"{OPTION}n_steps"), 1),
            f"{OPTION}step_size": check_real(
                "step_size", config.get(f"{OPTION}step_size"), 0, _LARGEST, open_low=True
            ),
        }
    else:
        known |= {
            SENDS: ATOMS,
            LOCAL_STEPS: check_count(LOCAL_STEPS, config.get(LOCAL_STEPS, 1), 1),
            REFINE_STEPS: check_count(REFINE_STEPS, config.get(REFINE_STEPS, 0)),
        }
    return _PrivateRequest(given, known, regression)


@lru_cache(maxsize=64)
def _response(n_labels: int, honest: float) -> Callable[[int], int]:
    """Return OpenDP's randomized response."""
    mechanism: Callable[[int], int] = opendp_prelude().m.make_randomized_response(
        list(range(n_labels)), honest
    )
    return mechanism
