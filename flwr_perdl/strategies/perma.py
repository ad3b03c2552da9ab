"""PerMA: personalized matching and averaging (Algorithm 1).

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The paper stores atoms as columns; here rows are atoms.

=============================  ==================================================================
paper                          here
=============================  ==================================================================
N clients, Y_i                 clients by partition; ``DictionaryClient(X)``, rows are samples
D_i^(0)                        reply to ``"start"``: the client's warm-started dictionary
global_matching (Alg. 2)       `flwr_perdl.dictionary.global_matching`
D^g,(t)                        ``global_atoms`` (n_global, n_features), request of ``"update"``
D_i^l,(t)                      the client's private local atoms
local_update (Alg. 3)          the client's reply to ``"update"``
1/N sum_i D_i^g,(t+1)          ``aggregation="mean"``
r^g                            ``n_global``; "agree": B.2's rule
=============================  ==================================================================

Deviations from the paper, and why:

- Line 7 broadcasts every client's local atoms; here each client keeps the rest of its own
  dictionary, so that the server sends nothing private and a client that joins late does the same.
- Averages of unit vectors are not unit vectors: global atoms are projected to the set of the
  clients' learners (the nearest matrix with orthonormal rows, or unit rows).
- ``aggregation="statistics"`` (the default) sums the statistics that the clients' updates are
  computed from, instead of averaging the updates; ``"mean"`` is the paper's.
- ``matching="consensus"`` (the default) has an error that does not grow with the number of
  clients; ``"paths"`` is the paper's.
- ``n_global="auto"`` is not in the paper: it tries five shares (0 to 100 %) in the first rounds and
  keeps the one with the lowest error on samples that the clients hold out.
- The client withholds atoms with too few samples behind them (`flwr_perdl.privacy.may_send`), in
  every round.

What each party receives:

- *The server*, in round one: every client's dictionary, without withheld atoms. Later: per client
  and global atom, the updated atom, or (statistics) the row of C_g' (X - C_l D_l), a sum over the
  samples that use the atom; for learners that are not orthogonal also the row of C_g' C_g. While
  "auto" chooses, in up to four rounds, this for each number tried, thus of all atoms. In every
  round: numbers of samples and atoms, mean errors ("auto": a few on held-out samples), and
  whether the client had lost its state.
  Never samples, codes, or, once the number is chosen, local atoms.
  With ``secure=True`` it receives the updates of later rounds only as a sum over clients. With
  ``privacy`` there is no round one, and the sums have noise: with ``trust="distributed"`` it sees
  no others, with "central" it adds the noise to everything that it sends. It receives nothing else.
- *A client*: the global atoms, the seed and the options above; nothing of any other client.
- *Evaluations* return mean errors only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from logging import WARNING
from typing import Any, ClassVar, Literal, Unpack

import numpy as np

from flwr_perdl.clients.dictionary import LOCAL_STEPS, MOST_STEPS, N_NONZERO
from flwr_perdl.clients.perma import (
    ATOMS,
    GLOBAL_ATOMS,
    PERMA,
    REFINE_STEPS,
    SENDS,
    START,
    STATISTICS,
    UPDATE,
)
from flwr_perdl.core.aggregate import CAP, RULES
from flwr_perdl.core.checks import Matrix, check_array, check_choice, check_count, check_robust
from flwr_perdl.dictionary import aggregate_atoms, global_matching, normalize_atoms, polar_factor
from flwr_perdl.dictionary.aggregation import (
    ATOM_AVERAGES,
    Aggregation,
    aggregate_statistics,
    finish_atoms,
)
from flwr_perdl.dictionary.atoms import merge_atoms
from flwr_perdl.dictionary.bounded import BALANCE, denoise_moments
from flwr_perdl.dictionary.warm_start import pooled_start
from flwr_perdl.parts import given
from flwr_perdl.privacy import Noise
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import JUDGED, NO_MODEL, Needs, ServerOptions, check_support
from flwr_perdl.protocol.records import (
    Replies,
    Reply,
    Scalar,
    check_shapes,
    scalars,
)
from flwr_perdl.protocol.report import Models
from flwr_perdl.protocol.request import Protocol, Request, State, Summed
from flwr_perdl.strategies._choice import (
    Update,
    atoms_kind,
    atoms_of,
    begun,
    choose,
    is_choosing,
    is_orthogonal,
    numbers_to_try,
)
from flwr_perdl.strategies._own_models import EndsWithModels

AGGREGATIONS = ("statistics", *ATOM_AVERAGES)
#: Those of which the server needs no more than a sum.
SUMMABLE = ("statistics", "mean", "weighted")
_SUMMED = "secure", "privacy"
_NO_ERRORS = '"auto" compares errors of single clients, and 0 atoms have no sum'
MATCHINGS = ("consensus", "paths")
#: `PerMA.n_global` by name: the best on samples held out; on how many the clients agree.
AUTO, AGREE = NAMED = "auto", "agree"
#: The weight with which statistics with noise count in those of the next round.
EARLIER = 0.5
#: The aggregation that withstands the largest share of liars.
ROBUST = "geometric-median"
#: By default a client may send at most this many times the median number of atoms, and never more
#: than `MOST_ATOMS`: the work of the matching round grows with the square of these numbers.
ATOMS_FACTOR = 10
MOST_ATOMS = 4096


class PerMA(EndsWithModels):
    """Learn a global dictionary that all clients share, and local atoms for each client.

    Round one matches the clients' dictionaries, every later round updates the global atoms;
    ``num_rounds`` of `start` counts both. Given ``[global atoms]`` as initial arrays it skips the
    matching. With "auto" the rounds after the first, four at most, choose the number of global
    atoms.

    Parameters
    ----------
    n_global : int, "auto" or "agree", default "auto"
        Number of global atoms. "auto" tries five shares of the atoms (0, 25, 50, 75 and 100 %) in
        parallel, and compares their errors on a third of each client's samples, held out for these
        rounds. It keeps the largest number whose error is within a quarter of a standard error (of
        the clients' paired differences) of the lowest; clients then restart their local atoms from
        all samples. Where samples are too few to match that many atoms, all that clients may send
        are shared. Errors are those of evaluations (``"perdl.n-nonzero"`` of ``evaluate_config``).
        Such a round sends about three times as much as an update of all atoms, and takes five times
        its work. "agree" finds in the matching round on how many atoms the clients agree (Appendix
        B.2): correct on synthetic dictionaries, few or none on images. "auto" tries that number
        too.
    matching : {"consensus", "paths"}, default "consensus"
        How the server finds the global atoms among the clients' dictionaries; "paths" is the
        paper's.
    aggregation : str, default "statistics"
        "statistics", "mean" (the paper's), "weighted" (by examples), "median" (coordinate-wise),
        "geometric-median" or "trimmed".
    local_steps : int, default 1
        Iterations of the client's learner per round.
    refine_steps : int, default 0
        Iterations of local refinement (Algorithm 6) before each update.
    reuse_last_reply : int, default 0
        Update rounds for which the last good reply of a failing client is used again, so that its
        data still count. The server, and its checkpoints, then hold a contribution per client. 0 is
        the paper's.
    robust : bool or str, default False
        Aggregation rule against malicious (Byzantine) clients: True is "geometric-median", or a
        rule's name. Four of ten clients that collude on a small push multiply the error by 2.3 with
        "geometric-median", and by 10 with "statistics" (docs/faults.md).
    secure : bool or mapping, default False
        Secure aggregation by Flower's SecAgg+: the server gets only the sum of the clients' updates
        (docs/security.md). ``{"reconstruction_threshold": 0.8}`` sets the share of clients that
        must answer to the end (above 0.5; by default two thirds). Clients need `client_app`; round
        one is in the clear.
    privacy : Noise, optional
        A guarantee of differential privacy for the whole run: the sum of every round has noise, and
        nothing else leaves the clients (`flwr_perdl.privacy.Noise`). It needs initial arrays that
        don't depend on any client's data, orthonormal ones only with an `OrthogonalLearner`, and
        "statistics", or "mean" with ``level="client"``.
    max_atoms : int, optional
        Maximum number of atoms in a client's dictionary; by default ten times the median over the
        clients, and at most 4,096. A client with more is left out of the matching and named.
    **options
        See `ServerOptions`: ``fraction_train``, ``min_clients``, ``seed``, ``checkpoint_dir``, …

    Raises
    ------
    ValueError
        If an option breaks its rule; in round one, if half of the clients or more have fewer atoms
        than ``n_global``. (Fewer such clients, and those that differ from most in features or in
        having an orthogonal learner, are left out and noted.)

    Notes
    -----
    Result: ``strategy.start(...).arrays.to_numpy_ndarrays()`` is ``[global atoms]`` of shape
    (n_global, n_features). Communication per client: its dictionary up once; then n_global x
    n_features values down, and as many up (with learners that are not orthogonal and "statistics",
    n_global x n_global more).

    Clients are `DictionaryClient`, or subclasses of `LearnerClient`.

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
    >>> result = PerMA(n_global=2).start(grid, num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()[0].shape
    (2, 6)
    """

    protocol_name = after_protocol = PERMA
    _reads = Models(names=(GLOBAL_ATOMS,))
    flags = ("orthogonal",)
    unsupported: ClassVar = {
        "clusters": "its clients share one set of global atoms",
        "parts": NO_MODEL,
    }
    needs = (
        Needs(_SUMMED, "n_global", (AUTO, 0), _NO_ERRORS, never=True),
        Needs(_SUMMED, "robust", (False,), JUDGED),
        Needs(("secure",), "aggregation", SUMMABLE, "others are of single updates"),
        Needs(("privacy",), "aggregation", SUMMABLE[:2], "noise does not cover numbers of samples"),
        Needs(_SUMMED, "reuse_last_reply", (0,), "the server has no client's own contribution"),
        Needs(("robust",), "aggregation", ("statistics",), "robust names the aggregation"),
        # Of the clients' data, which say so themselves.
        Needs(("missing",), "aggregation", ("statistics",), "only sums remain of them"),
    )
    privacy: Noise | None

    def __init__(
        self,
        n_global: int | Literal["auto", "agree"] = "auto",
        *,
        matching: str = "consensus",
        aggregation: str = "statistics",
        local_steps: int = 1,
        refine_steps: int = 0,
        reuse_last_reply: int = 0,
        robust: bool | str = False,
        secure: bool | Mapping[str, float] = False,
        privacy: Noise | None = None,
        max_atoms: int | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(*given(privacy=privacy, secure=secure), **options)
        self.max_atoms = None if max_atoms is None else check_count("max_atoms", max_atoms, 1)
        word = isinstance(n_global, str) and check_choice("n_global", n_global, NAMED)
        self.n_global = n_global if word else check_count("n_global", n_global)
        self._least_rounds = 3 if n_global == AUTO else 1  # a choice takes one, and one after it
        self.matching = check_choice("matching", matching, MATCHINGS)
        self.aggregation = check_choice("aggregation", aggregation, AGGREGATIONS)
        rules = [rule for rule in ATOM_AVERAGES if rule in RULES]
        self.aggregation = check_robust(robust, rules, ROBUST, plain=self.aggregation)
        self.local_steps = check_count("local_steps", local_steps, 1, MOST_STEPS)
        self.refine_steps = check_count("refine_steps", refine_steps, 0, MOST_STEPS)
        self.reuse_last_reply = check_count("reuse_last_reply", reuse_last_reply)
        self.privacy, self.secure = privacy, secure
        check_support(self, self._options_with(robust=robust, aggregation=aggregation))

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Algorithm 1: one request per communication round."""
        if state is None and initial:
            state = self._given(initial)
        if state is None:
            config: dict[str, Scalar] = {SENDS: self._sends}
            check = partial(check_dictionary, self.max_atoms)
            replies = yield Request(START, config=config, check=check, max_weight=None)
            state = self._match(replies)
        if is_choosing(state):
            best, replies = yield from choose(state, self._update_of_candidates())
            state = {
                "global_atoms": best,
                "orthogonal": state["orthogonal"],
                "samples": median_samples(replies),
            }
        while True:  # line 8; the driver ends it: the next request's model is line 16's result
            global_atoms, orthogonal = state["global_atoms"], bool(state["orthogonal"])
            replies = yield Request(  # lines 7, 14; clients: lines 9-12
                UPDATE,
                [global_atoms],
                self._config,
                state,
                partial(self._check, global_atoms, orthogonal),
                max_values=global_atoms.size + len(global_atoms) ** 2,
                max_weight=None,
                summed=self._summed(state, orthogonal),
                reuse_last_reply=self.reuse_last_reply,
            )
            if not self._only_sums:  # what is summed is of the kind that was known before
                replies = replies.keep_majority(is_orthogonal, atoms_kind)
                orthogonal = is_orthogonal(next(iter(replies.values())))
            state = {
                **state,
                "global_atoms": self._aggregate(replies, 0, global_atoms, orthogonal),
                "orthogonal": np.array(orthogonal),
                "samples": median_samples(replies),
            }

    @property
    def _sends(self) -> str:
        """What a client sends of an update."""
        return STATISTICS if self.aggregation == "statistics" else ATOMS

    @property
    def _config(self) -> dict[str, Scalar]:
        """What a client is told of an update."""
        steps = {LOCAL_STEPS: self.local_steps, REFINE_STEPS: self.refine_steps}
        return {SENDS: self._sends, **steps}

    def _update_of_candidates(self) -> Update:
        """Return how "auto" updates, and measures, each number of global atoms."""
        config = self._config
        if self._evaluate_config is not None:
            config |= {n: v for n, v in scalars(self._evaluate_config).items() if n == N_NONZERO}
        mean = np.mean if self.aggregation in SUMMABLE else np.median
        return Update(config, self._check, self._aggregate, mean)

    @property
    def _only_sums(self) -> bool:
        """Whether the server gets the sum of the clients' updates alone."""
        return self.privacy is not None or self.secure is not False

    def _summed(self, state: State, orthogonal: bool) -> Summed:
        """Return what of the updates is summed where the server gets no more."""
        atoms = state["global_atoms"]
        shape = self._shape(atoms, orthogonal)
        if self._only_sums and not shape[0]:
            raise ValueError(
                'n_global must be a number with secure here: "agree" found no atom on which the '
                "clients agree, so there is nothing to sum."
            )
        statistics = self.aggregation == "statistics"
        # A client counts for as many samples as where the server sees it alone. All count alike for
        # the paper's mean, and in a first round from given atoms, where nothing is known.
        most = 1
        if self.aggregation != "mean" and "samples" in state:
            most = max(int(CAP * float(state["samples"])), 1)
        if not statistics:  # atoms have norm 1 each
            return Summed([atoms], "rows", norm=shape[0] ** 0.5, max_weight=most)
        # Statistics come at a scale at which 1 is their largest norm.
        start = [np.zeros(shape, atoms.dtype)]
        finish = None if orthogonal else self._finish
        return Summed(start, max_weight=most, by_sample=True, earlier=EARLIER, finish=finish)

    def _finish(self, arrays: list[Matrix], deviation: float) -> list[Matrix]:
        """Return the mean of statistics, in whose second moments noise does not decide."""
        by_sample = self.privacy is not None and self.privacy.level == "record"
        weight = BALANCE if by_sample else 1.0
        return [denoise_moments(array, deviation, weight=weight) for array in arrays]

    def _check(self, atoms: Matrix, orthogonal: bool, reply: Reply) -> None:
        """Accept an update of the shape that is asked for."""
        if not self._only_sums:
            orthogonal = is_orthogonal(reply)
        check_shapes([self._shape(atoms, orthogonal)], reply)

    def _shape(self, atoms: Matrix, orthogonal: bool) -> tuple[int, int]:
        """Return the shape of an update's reply."""
        wide = self.aggregation == "statistics" and not orthogonal
        return len(atoms), atoms.shape[1] + wide * len(atoms)

    def _given(self, initial: list[Matrix]) -> State:
        """Return the user's global atoms, of norm 1, with which there is no matching round."""
        if len(initial) != 1:
            raise ValueError(f"initial_arrays must be [global atoms], got {len(initial)} arrays.")
        atoms = check_array("initial_arrays", initial[0], min_rows=1)
        zero = np.flatnonzero(~atoms.any(axis=1))
        if len(zero):
            raise ValueError(f"initial_arrays must have no zero row, got one at {zero[0]}.")
        atoms = normalize_atoms(atoms)
        if self.n_global not in (*NAMED, len(atoms)):
            raise ValueError(
                f"initial_arrays must have n_global={self.n_global} atoms, got {len(atoms)}."
            )
        orthogonal = np.allclose(atoms @ atoms.T, np.eye(len(atoms)), atol=1e-5)  # up to rounding
        return {"global_atoms": atoms, "orthogonal": np.array(orthogonal)}

    def _match(self, replies: Replies) -> State:
        """Find the global atoms in the clients' dictionaries (line 6)."""
        replies = replies.keep_majority(lambda r: r.arrays[0].shape[1], "{} features".format)
        replies = replies.keep_majority(is_orthogonal, atoms_kind)
        if self.max_atoms is None:
            replies = within_bounds(replies)
        orthogonal = is_orthogonal(next(iter(replies.values())))
        numbers = [self.n_global] if isinstance(self.n_global, int) else []
        if self.n_global == AUTO:
            numbers = numbers_to_try(replies)
        replies = with_enough(replies, max(numbers, default=0), self.client_names)
        dictionaries = [reply.arrays[0] for reply in replies.values() if len(reply.arrays[0])]
        if not dictionaries:
            raise ValueError(
                "min_support must leave atoms to match, got none from any client: each atom must "
                "be used by that many samples, so clients need more samples, or a learner with a "
                "smaller penalty or threshold."
            )
        state = {"orthogonal": np.array(orthogonal), "samples": median_samples(replies)}
        matched = partial(self._match_atoms, dictionaries, orthogonal=orthogonal)
        found = matched(numbers[-1] if numbers else "auto")
        if self.n_global == AUTO and len(found) == numbers[-1]:
            others = [*map(matched, numbers[:-1])]
            return {**state, **begun([*others, found, matched("auto")], self._num_rounds)}
        if self.n_global == AUTO:
            log(
                WARNING,
                "Samples are too few to choose n_global: all atoms are shared that at least "
                "min_support samples of a client use.",
            )
        if not len(found) and self.n_global == AGREE:
            log(
                WARNING,
                'n_global="agree" found no atom on which the clients agree: nothing is shared. '
                '"auto" tries several numbers.',
            )
        return {**state, "global_atoms": found}

    def _match_atoms(
        self, dictionaries: list[Matrix], n_global: int | Literal["auto"], *, orthogonal: bool
    ) -> Matrix:
        """Return the global atoms (line 6)."""
        lengths = [len(D) for D in dictionaries]
        most = sum(lengths) if self.matching == "consensus" else max(lengths)
        if n_global != "auto" and n_global > most:
            log(
                WARNING,
                "n_global is at most %d, since the clients sent no more atoms to match: those that "
                "fewer than min_support samples use stay at the clients.",
                most,
            )
            n_global = most
        atoms = global_matching(dictionaries, n_global, method=self.matching).global_atoms
        # The mean of matched orthonormal atoms is not orthonormal, and learners need that it is.
        if orthogonal and len(atoms):
            return polar_factor(atoms, atoms)
        if len(atoms) >= np.median(lengths):  # no atoms of their own, which matching sets apart
            return pooled_start(dictionaries, atoms)
        # The means of different atoms may be one atom, which clients do not take twice.
        return merge_atoms(np.eye(len(atoms), dtype=atoms.dtype), atoms)

    def _aggregate(self, replies: Replies, i: int, current: Matrix, orthogonal: bool) -> Matrix:
        """Return the new global atoms (line 13) from the replies' array ``i``."""
        stack = np.stack([reply.arrays[i] for reply in replies.values()])
        if self._only_sums:
            stack = stack[:1]  # every reply holds the same mean
        if self.aggregation == "statistics":
            return _note(replies, aggregate_statistics(stack, current, orthogonal=orthogonal))
        if self._only_sums:  # the mean's rows are shorter the less the clients agree
            seen = np.any(stack[0] != 0, axis=1)
            return finish_atoms(stack[0], current, seen, orthogonal=orthogonal)
        weights, rule = replies.sizes, self.aggregation
        found = aggregate_atoms(stack, current, method=rule, weights=weights, orthogonal=orthogonal)
        return _note(replies, found)


def _note(replies: Replies, found: Aggregation) -> Matrix:
    """Return the new atoms, and note what the aggregation did to the replies."""
    for effect, shares in found.outlyingness.items():
        replies.note(effect, dict(zip(replies, shares, strict=False)))
    return found.global_atoms


def median_samples(replies: Replies) -> Matrix:
    """Return the median over clients of their numbers of samples."""
    return np.array(np.median(replies.sizes))


def check_dictionary(max_atoms: int | None, reply: Reply) -> None:
    """Accept one matrix of unit atoms, not too many of them."""
    shapes: list[Any] = [array.shape for array in reply.arrays]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        raise ValueError(
            "wrong shape: the client's whole dictionary is asked for, one matrix with a row of "
            f"norm 1 per atom, got {shapes}"
        )
    (D,), most = reply.arrays, MOST_ATOMS if max_atoms is None else max_atoms
    if len(D) > most:
        raise ValueError(f"too many atoms: at most {most} are accepted (max_atoms), got {len(D)}")
    norms = np.linalg.norm(D, axis=1)
    wrong = np.flatnonzero(~np.isclose(norms, 1, rtol=0, atol=1e-3))
    if len(wrong):
        raise ValueError(
            "atoms must have norm 1: the client's dictionary is asked for, one atom per row, "
            f"and row {wrong[0]} has norm {norms[wrong[0]]:g}"
        )


def within_bounds(replies: Replies) -> Replies:
    """Return the replies of clients without far more atoms than most; others are left out."""
    have = [atoms_of(reply) for reply in replies.values()]  # withheld atoms are not sent
    most = ATOMS_FACTOR * max(float(np.median(have)), 1.0)
    why = f"it sent {{}} atoms, more than {ATOMS_FACTOR} times the median (max_atoms)"
    sizes = {partition: len(reply.arrays[0]) for partition, reply in replies.items()}
    return replies.leave_out({p: why.format(n) for p, n in sizes.items() if n > most})


def with_enough(replies: Replies, n_global: int, names: Mapping[int, str]) -> Replies:
    """Return the replies of clients with at least ``n_global`` atoms; others are left out.

    Raises
    ------
    ValueError
        If these are half of the clients or more; ``names`` are the clients'.
    """
    sizes = {partition: atoms_of(reply) for partition, reply in replies.items()}
    few = {partition: n_atoms for partition, n_atoms in sizes.items() if n_atoms < n_global}
    if few and 2 * len(few) >= len(sizes):
        who, n_atoms = next(iter(few.items()))
        raise ValueError(
            f"n_global must be at most every client's number of atoms, got n_global={n_global} "
            f"with {n_atoms} atoms at client {names.get(who, who)}."
        )
    return replies.leave_out({p: f"it has {n_atoms} atoms only" for p, n_atoms in few.items()})
