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
k-ary randomised response                  `LocalPrivacy.choose`; half of epsilon, in equal parts
=========================================  =====================================================

Why not Flower's ``LocalDpMod``: it asks for a reply with the names and shapes of the request, which
PerMA's first round and FedX's replies do not have; it would turn the rows of zeros by which a
client withholds an atom, and FedX's cluster number, into noise that the server takes at its word;
it leaves metrics as they are (mean errors and numbers of samples say something about the data);
its noise is for one message, by a formula that holds for epsilon below 1; and it draws from NumPy's
global generator. Flower's accountant (1.41, with the extra ``dp``) is for central privacy.

Noise is drawn from floating-point numbers: an adversary who sees their last bits may learn more
than the theorem says (Mironov, 2012).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from scipy.optimize import brentq
from scipy.special import log_ndtr

from flwr_perdl._checks import Matrix, check_count, check_real
from flwr_perdl._records import (
    ARRAYS,
    METRICS,
    NUM_EXAMPLES,
    STEP,
    read_request,
    to_arrays,
    to_record,
)
from flwr_perdl.clients.dictionary import ATOMS, SENDS, UPDATE
from flwr_perdl.clients.regression import OPTION

_SPENT = "perdl.privacy"
#: Columns of FedX's reply before the change: loss and cluster.
_HEAD = 2
#: Share of epsilon for the choice of a cluster.
_CHOICE = 0.5


class LocalPrivacy:
    """A mod for ``client_app(..., train_mods=[mod], evaluate_mods=[mod])``.

    It answers update rounds of PerMA (``aggregation`` other than "statistics") and of FedX (hard
    assignment, "fedavg" or "fedprox"), and refuses every step that it cannot make private, such as
    PerMA's matching round and FedMD: a run begins from given atoms or models, such as public data
    or a pilot's gave. Of PerMA's reply it clips and noises the difference from the global atoms,
    withheld atoms standing still; of FedX's the change, and it may name another cluster. Metrics
    are left out, every client counts as one sample, and evaluations are not made. An error leaves
    with its text, as without the mod: data that cannot be read are better found before a run.

    Parameters
    ----------
    epsilon, delta : float
        The budget of all rounds of a run together; epsilon > 0, 0 < delta < 1.
    n_rounds : int
        Replies that the budget is for; a further request is refused. The count is kept in
        ``context.state``: a restarted SuperNode, and another run, begin a budget of their own.
    clip : float
        Greatest Frobenius norm of a difference; more is scaled down.
    rng : callable, default ``numpy.random.default_rng``
        Makes a generator for each reply. Its seed must be a secret: the server's would let the
        server take the noise away.

    Raises
    ------
    ValueError
        If an argument breaks its rule, or a request cannot be answered privately.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        n_rounds: int,
        clip: float,
        *,
        rng: Callable[[], np.random.Generator] = np.random.default_rng,
    ) -> None:
        self.epsilon = check_real("epsilon", epsilon, 0, open_low=True)
        self.delta = check_real("delta", delta, 0, np.nextafter(1, 0), open_low=True)
        self.n_rounds = check_count("n_rounds", n_rounds, 1)
        self.clip = check_real("clip", clip, 0, open_low=True)
        if not callable(rng):
            raise TypeError(f"rng must be a function that makes a generator, got {rng!r}.")
        self._rng = rng

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Answer a message privately."""
        nothing = {METRICS: MetricRecord({NUM_EXAMPLES: 1})}
        if message.metadata.message_type == MessageType.EVALUATE:
            return Message(RecordDict(dict[str, Any](nothing)), reply_to=message)
        given, config = read_request(message)
        step, sends = config.get(STEP), str(config.get(SENDS, ""))
        regression = f"{OPTION}local" in config
        hard = not config.get(f"{OPTION}soft") and config.get(f"{OPTION}local") != "exact"
        if step != UPDATE or not given or not (sends == ATOMS or (regression and hard)):
            raise ValueError(
                f"step must be an update of atoms or of models under local privacy, got {step!r}"
                f"{sends and ' of ' + sends}."
            )
        record = context.state.get(_SPENT)
        spent = int(str(record["replies"])) if isinstance(record, ConfigRecord) else 0
        if spent >= self.n_rounds:
            raise ValueError(f"n_rounds must be more to go on: the budget is for {self.n_rounds}.")
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        (arrays,) = to_arrays(reply.content.array_records[ARRAYS])
        hide = self._models if regression else self._atoms
        private = hide(arrays, given[0], self._rng())
        context.state[_SPENT] = ConfigRecord({"replies": spent + 1})
        reply.content = RecordDict({ARRAYS: to_record([private]), **nothing})
        return reply

    def _atoms(self, updated: Matrix, current: Matrix, rng: np.random.Generator) -> Matrix:
        """Return PerMA's update: the global atoms, and a noisy difference."""
        shown = updated.any(axis=1, keepdims=True)
        return current + self.blur(np.where(shown, updated - current, 0), self.epsilon, rng)

    def _models(self, answer: Matrix, models: Matrix, rng: np.random.Generator) -> Matrix:
        """Return FedX's answer: no loss, perhaps another cluster, and a noisy change."""
        alone = len(models) == 1
        cluster = self.choose(int(answer[0, 1]), len(models), rng)
        rest = self.epsilon * (1 if alone else 1 - _CHOICE)
        change = self.blur(answer[:, _HEAD:], rest, rng)
        return np.concatenate([np.array([[0, cluster]], change.dtype), change], axis=1)

    def blur(self, difference: Matrix, epsilon: float, rng: np.random.Generator) -> Matrix:
        """Return ``difference``, no longer than ``clip``, and noise for ``epsilon`` in all rounds.

        Two of them are at most twice ``clip`` apart.
        """
        length = float(np.linalg.norm(difference))
        clipped = difference * min(1.0, self.clip / length if length else 1.0)
        scale = 2 * self.clip * noise_multiplier(epsilon, self.delta, self.n_rounds)
        noisy: Matrix = clipped + scale * rng.standard_normal(difference.shape)
        return noisy.astype(difference.dtype, copy=False)

    def choose(self, label: int, n_labels: int, rng: np.random.Generator) -> int:
        """Return ``label``, or another: each other one exp(-epsilon / (2 n_rounds)) as often."""
        lie = np.exp(-_CHOICE * self.epsilon / self.n_rounds)
        odds = np.where(np.arange(n_labels) == label, 1.0, lie)
        return int(rng.choice(n_labels, p=odds / odds.sum()))


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, delta: float, n_releases: int = 1) -> float:
    """Return the standard deviation of noise per unit of sensitivity.

    ``n_releases`` Gaussian releases with it are together (epsilon, delta)-differentially private,
    and with less are not.

    Parameters
    ----------
    epsilon, delta : float
        The budget of all releases.
    n_releases : int, default 1
        Their number.
    """

    def excess(log_mu: float) -> float:
        """Return how much log delta is too large, bounded below where rounding decides."""
        mu = np.exp(log_mu)
        first, second = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
        ratio = min(float(epsilon + second - first), -1e-15)
        return max(float(first + np.log(-np.expm1(ratio))), -1e6) - float(np.log(delta))

    mu = np.exp(brentq(excess, np.log(epsilon) - 12, np.log(epsilon + 100) + 12, xtol=1e-12))
    return float(np.sqrt(n_releases) / mu)
