"""The client of `PerMA` (Algorithm 1, lines 2-5; Algorithms 3 and 6).

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The paper stores atoms as columns; here rows are atoms.

=======================================  =======================================================
paper                                    here
=======================================  =======================================================
D_i^(0), local initialization (line 3)   `DictionaryClient.initialize`
D^g,(t)                                  ``G``, which comes with ``"update"``
D_i^l,(t)                                ``L``, in the client's private state
r^g, of several, the best                `DictionaryClient.choose`; not in the paper
local refinement (Algorithm 6)           `flwr_perdl.dictionary.refine_local`
local_update (Algorithm 3)               `DictionaryClient.update`
=======================================  =======================================================

Deviations: a client keeps its own local atoms instead of receiving them (line 7); it withholds rows
of its replies that few of its samples make up (`flwr_perdl.privacy.may_send`).
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from math import inf
from typing import ClassVar, Unpack

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients.dictionary import (
    LOCAL_ATOMS,
    MOST_STEPS,
    N_NONZERO,
    LearnerClient,
    LearnerOptions,
    atom_counts,
    check_products,
    data_warnings,
    mean_square,
    read_local_steps,
)
from flwr_perdl.clients.dispatch import rounded, step
from flwr_perdl.core.arrays import has_missing, observed
from flwr_perdl.core.checks import (
    Matrix,
    check_choice,
    check_count,
)
from flwr_perdl.dictionary import (
    Learner,
    align_to_global,
    local_statistics,
    normalize_atoms,
    reconstruct,
    refine_local,
)
from flwr_perdl.dictionary.bounded import bounded_statistics
from flwr_perdl.dictionary.coding import fill_missing
from flwr_perdl.dictionary.learners import update_weights
from flwr_perdl.privacy.noised_client import BOUND, SAMPLE_BOUND
from flwr_perdl.privacy.withholding import may_send_entries
from flwr_perdl.protocol.client_state import PrivateArrays
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import EVALUATE, MAX_WEIGHT, Scalar
from flwr_perdl.random import spawn

PERMA = "perma"
START = "start"
#: One update of each of several numbers of global atoms, measured on samples held out.
CHOOSE = "choose"
UPDATE = "update"
#: What an update sends of the global atoms: the updated atoms, or the statistics of the update.
SENDS = "perdl.sends"
ATOMS = "atoms"
STATISTICS = "statistics"
REFINE_STEPS = "perdl.refine-steps"
#: The names of a choice's errors on samples held out, in a reply.
HELD_OUT = "mse_held_out_"
#: One sample in so many is held out, drawn as in a round that no run has.
_HELD, _DRAW = 3, 2**32 - 1
#: Errors below this share of the mean square are rounding, by which nothing is chosen.
_ROUNDING = 1e-12

#: The name of the first dictionary in a client's private state, before it knows its local atoms.
DICTIONARY = "dictionary"
#: What the server calls its result.
GLOBAL_ATOMS = "global_atoms"


class DictionaryClient(LearnerClient):
    """A client of `PerMA`: it learns a dictionary whose *global* atoms all clients share.

    What leaves it: in the ``"start"`` round the atoms of its whole dictionary; afterwards, per
    global atom (while ``n_global="auto"`` chooses: per atom), the updated atom or a row of the
    update's statistics. Each of these is a sum over samples, sent only if at least ``min_support``
    samples have a term in it and none of them more than two thirds of the terms' squares
    (`flwr_perdl.privacy.may_send`). Samples, codes (sparse coefficients) and local atoms stay: the
    latter in ``context.state`` and, with ``state_dir``, on this client's disk. Differences of
    several replies, and combinations of rows, can reveal single samples (docs/security.md), so
    ``max_requests`` limits the number of replies. Under a guarantee for records
    (`flwr_perdl.privacy.Noise`) each sample is coded with the global atoms only, and adds at most
    ``clip`` to the statistics; then nothing is withheld, and no metrics are sent.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        The client's samples, float64 or float32. NaN is a missing entry, which `MODLearner` and
        `LassoLearner` accept with the strategy's ``aggregation`` "statistics": the sums are over
        samples completed by their own reconstruction, `may_send` holds for each of their entries,
        and errors are those of the observed entries.
    learner : Learner
        The local algorithm A_i (Algorithm 4 or 5, or any other).
    context : Context
        The argument of the client's factory: identifies the client and keeps its state.
    digits : int, optional
        Round an update to this number of digits of its largest entry before it leaves; by default
        it is not rounded. With two digits, differences between replies of several rounds reveal far
        fewer samples, at a small cost in accuracy (docs/security.md, SecAgg+); this guarantees
        nothing.
    **options
        ``evaluation``, ``start``, ``min_support``, ``state_dir``, ``max_runs``, ``max_requests``,
        ``extra_metrics``: see `LearnerClient`.

    Raises
    ------
    ValueError
        If ``X`` is empty, not finite or of another dtype, or the client's identity is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryClient, client_app
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryClient(own, OrthogonalLearner(5), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = PerMA(n_global=2).start(grid, num_rounds=2)
    >>> grid.local_atoms()[0].shape
    (3, 6)
    """

    #: Whether the log names what is odd about the samples.
    warns: ClassVar[bool] = True

    def __init__(
        self,
        X: Matrix,
        learner: Learner,
        context: Context,
        *,
        digits: int | None = None,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(X, learner, context, **options)
        self.digits = None if digits is None else check_count("digits", digits, 1, 15)

    def initialize(self, request: StepRequest) -> StepResult:
        """Local initialization (Algorithm 1, lines 2-5): send the dictionary of own samples."""
        if request.arrays:
            raise ValueError(f"parameters must be none, got {len(request.arrays)} arrays.")
        X = self.X
        D = self.first_dictionary(request)
        C = self.learner.code(X, D)
        error = mean_square(X - reconstruct(C, D))
        if self.warns and (warnings := data_warnings(self.X, len(D))):
            log(WARNING, "This client has %s.", "; and ".join(warnings))
        allowed = self.may_send(C, observed(X))
        sent = D[allowed]
        if has_missing(X):
            entries = may_send_entries(C, X, self.min_support)
            sent = np.where(entries, D, 0)[allowed]
            sent = normalize_atoms(sent[sent.any(axis=1)])
        return self.result(sent, error, len(D), {DICTIONARY: D})

    def choose(self, request: StepRequest, kept: PrivateArrays | None) -> StepResult:
        """Update each of several numbers of global atoms, and measure them on samples held out."""
        candidates = [self.global_atoms(request._replace(arrays=[G])) for G in request.arrays]
        if len({*map(len, candidates)}) < len(candidates):  # each is an answer, of `max_requests`
            raise ValueError(
                f"parameters must be of different numbers of atoms, got {[*map(len, candidates)]}."
            )
        counts = atom_counts(str(request.config.get(N_NONZERO, "")))
        held, new_state = self._held_out(request), kept is None
        if kept is None or DICTIONARY in kept:  # the start has seen the samples held out
            kept = {DICTIONARY: self.first_dictionary(request, self.X[~held])}
        sent, errors, keep, metrics = [], [], {}, {}
        for G in candidates:
            L, _ = self.own_atoms(G, request, kept)
            own, error, D = self._update(request, self.X[~held], G, L)
            sent.append(own)
            errors.append(error)
            keep[f"{LOCAL_ATOMS}_{len(G)}"] = D[len(G) :]
            if held.any():
                # Of the shared atoms as they came: the client has fitted its update to its samples.
                now = np.concatenate([G, L])
                found = float(np.mean([self._error(self.X[held], now, k) for k in counts]))
                exact = found <= _ROUNDING * mean_square(self.X[held])
                metrics[f"{HELD_OUT}{len(G)}"] = 0.0 if exact else rounded(found)
        result = self.result(sent[0], min(errors), len(D), keep, new_state=new_state)
        return result._replace(arrays=sent, metrics={**result.metrics, **metrics})

    def update(self, request: StepRequest, kept: PrivateArrays | None) -> StepResult:
        """Local update (Algorithm 3), after local refinement (Algorithm 6) if asked for."""
        G = self.global_atoms(request)
        chosen = any(name.startswith(f"{LOCAL_ATOMS}_") for name in kept or ())
        if chosen and len(G) < self.learner.n_atoms:
            # The number is chosen: the local atoms start from all samples, those held out too.
            kept = {DICTIONARY: self.first_dictionary(request)}
        L, new_state = self.own_atoms(G, request, kept)
        sent, error, D = self._update(request, self.X, G, L)
        result = self.result(sent, error, len(D), {LOCAL_ATOMS: D[len(G) :]}, new_state=new_state)
        bound = SAMPLE_BOUND.get()
        if bound is None or request.config.get(SENDS) != STATISTICS:
            return result
        return result._replace(metrics={**result.metrics, BOUND: bound})

    def adapted(self, request: StepRequest, n_fits: int) -> dict[str, Matrix]:
        """Return the global atoms, and the best local ones learned beside them, which stay."""
        G = self.global_atoms(request)
        tried = [self.own_atoms(G, request, None)[0]]
        for _ in range(n_fits):
            D = np.vstack([G, tried[-1]])
            tried.append(refine_local(self.X, D, len(G), self.learner, n_iter=1)[len(G) :])
        measured = [self.measure(request, {LOCAL_ATOMS: L}).metrics for L in tried]
        losses = [float(metrics.get("loss", inf)) for metrics in measured]
        return {GLOBAL_ATOMS: G, LOCAL_ATOMS: tried[losses.index(min(losses))]}

    def _update(
        self, request: StepRequest, X: Matrix, G: Matrix, L: Matrix
    ) -> tuple[Matrix, float, Matrix]:
        """Return what is sent of an update, the error before it, and the dictionary after it."""
        # A request is checked before anything is computed from samples: atoms that are not unit, or
        # too much alike, would have a reply show more than a sum.
        config, learner = request.config, self.learner
        statistics = check_choice(SENDS, config.get(SENDS, ATOMS), (ATOMS, STATISTICS)) != ATOMS
        refine_steps = check_count(REFINE_STEPS, config.get(REFINE_STEPS, 0), 0, MOST_STEPS)
        check_products(G, orthogonal=statistics and learner.orthogonal)
        if has_missing(X) and not statistics:
            raise ValueError(
                'aggregation must be "statistics" where X has NaN, got one of the atoms themselves.'
            )
        n_steps, r = read_local_steps(request), len(G)
        bound = SAMPLE_BOUND.get() if statistics else None
        if refine_steps:
            L = refine_local(X, np.vstack([G, L]), r, learner, n_iter=refine_steps)[r:]
        errors, after = [], np.concatenate([G, L])
        for _ in range(n_steps):
            D = after
            C = learner.code(X, D)
            errors.append(mean_square(X - reconstruct(C, D)))
            # Algorithm 3, lines 3-9: the updated atoms nearest to G take its places and signs.
            aligned = align_to_global(learner.update(X, C, D), G)
            after = np.concatenate([aligned.global_atoms, aligned.local_atoms])
        if bound is not None:
            return self._bound_statistics(X, G, bound), errors[0], after
        # Of the last step's codes and the D before it: with these the server does the update.
        if statistics:
            sent, energy = self._statistics(X, C, D, r)
        else:
            weights = update_weights(learner, X, C, D)[:, aligned.indices]
            sent = np.where(self.may_send(weights, X)[:, None], after[:r], 0)
        if statistics and MAX_WEIGHT in config:  # of a secure sum
            sent = _rescale(energy, sent)
        return _round_digits(sent, self.digits), errors[0], after

    def _statistics(self, X: Matrix, C: Matrix, D: Matrix, r: int) -> tuple[Matrix, float]:
        """Return the statistics of the first ``r`` atoms, and the samples' energy."""
        full = fill_missing(X, C, D)
        # Asked before the sums are formed, since what a withheld atom explains counts as local.
        shared = self.may_send(C[:, :r], full - C[:, r:] @ D[r:])
        sent = local_statistics(full, C, D, shared, orthogonal=self.learner.orthogonal)
        if has_missing(X):  # a withheld entry's sum is that of a reconstruction
            entries = may_send_entries(C[:, :r], X, self.min_support)
            sent[:, r:] = np.where(entries, sent[:, r:], sent[:, :r] @ D[:r])
        return sent, float(np.vdot(full, full))

    def _bound_statistics(self, X: Matrix, G: Matrix, bound: float) -> Matrix:
        """Return the statistics to which each sample adds ``bound`` at most, for a sum with noise.

        Each sample's term depends on that sample and on G alone: it is coded by itself, and without
        the local atoms, which all samples have made. It is in float64, whose rounding errors are no
        part of a bound, and not rounded in a unit that all samples have made.
        """
        codes = np.vstack([self.learner.code(x[None], G) for x in X])
        full = fill_missing(X.astype(np.float64), codes, G)
        return bounded_statistics(full, codes, bound, orthogonal=self.learner.orthogonal)

    def own_atoms(
        self, G: Matrix, request: StepRequest, kept: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return the local atoms, and whether they had to be made anew.

        After the start they are what the global atoms leave of the dictionary. A client that joins
        late, or has lost its state, makes its own start and aligns it in the same way.
        """
        for name in (LOCAL_ATOMS, f"{LOCAL_ATOMS}_{len(G)}"):  # the latter until the choice is made
            if kept is not None and name in kept:
                return kept[name], False
        if len(G) == self.learner.n_atoms:  # the start, which takes long, would leave none
            return G[:0], kept is None
        D = self.first_dictionary(request) if kept is None else kept[DICTIONARY]
        return align_to_global(D, G).local_atoms, kept is None

    def _held_out(self, request: StepRequest) -> NDArray[np.bool_]:
        """Return which samples are held out, (n_samples,): none where these are too few."""
        held = np.zeros(len(self.X), dtype=bool)
        if (n_held := len(self.X) // _HELD) >= max(self.min_support, 1):
            rng = spawn(request.seed, self.partition, _DRAW)
            held[rng.permutation(len(self.X))[:n_held]] = True
        return held


@step(PERMA, START, client=LearnerClient)
def start(local: Local, request: StepRequest) -> StepResult:
    """Algorithm 1, lines 2-5."""
    client: DictionaryClient = local.client
    return client.initialize(request)


@step(PERMA, CHOOSE, client=LearnerClient)
def try_numbers(local: Local, request: StepRequest) -> StepResult:
    """Not in the paper: one update of each of several numbers of global atoms."""
    client: DictionaryClient = local.client
    return client.choose(request, local.kept.before(request.round))


@step(PERMA, UPDATE, client=LearnerClient)
def update_atoms(local: Local, request: StepRequest) -> StepResult:
    """Algorithm 1, line 8."""
    client: DictionaryClient = local.client
    return client.update(request, local.kept.before(request.round))


@step(PERMA, EVALUATE, kind=EVALUATE, client=LearnerClient)
def measure_dictionary(local: Local, request: StepRequest) -> StepResult:
    """Measure the dictionary on the client's samples."""
    client: LearnerClient = local.client
    return client.measure(request, local.kept.after(request.round))


def held_out_errors(metrics: Mapping[str, Scalar]) -> dict[int, float]:
    """Return the errors in a client's metrics on samples held out, by number of global atoms."""
    found = {n.removeprefix(HELD_OUT): e for n, e in metrics.items() if n.startswith(HELD_OUT)}
    return {int(number): float(error) for number, error in found.items()}


def _round_digits(sent: Matrix, digits: int | None) -> Matrix:
    """Return ``sent`` rounded to this number of digits of its largest entry; None: unchanged."""
    if digits is None:
        return sent
    unit = sent.dtype.type(np.abs(sent).max(initial=0) * 10.0**-digits)
    return np.round(sent / unit) * unit if unit else sent


def _rescale(energy: float, statistics: Matrix) -> Matrix:
    """Return statistics at the scale that all clients of a secure round share.

    They are those of samples of mean norm 1, divided by the number of samples. For orthonormal
    atoms their norm is then 1 at most: neither codes nor residuals are longer than samples.
    """
    scale = statistics.dtype.type(energy)
    return statistics / scale if scale else statistics
