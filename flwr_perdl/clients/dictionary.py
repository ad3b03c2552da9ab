"""The client of the dictionary protocols: PerMA's side (P0, Algorithm 1 and 3), and the baselines'.

One client serves `PerMA`, `DictionaryAveraging` or `PerPCA`: which one is the client's choice, not
the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import groupby
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from flwr.app import Context

from flwr_perdl._checks import (
    LARGE,
    Matrix,
    check_array,
    check_choice,
    check_count,
    check_kind,
    check_real,
)
from flwr_perdl._exposure import shown
from flwr_perdl._parallel import in_threads, n_threads
from flwr_perdl._random import spawn
from flwr_perdl._records import AFTER, ANEW, EVALUATE, LARGEST_INT, ROUND, RUN, SEED, Scalar
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients._cohort import Fitted, alike, stack, windows
from flwr_perdl.clients._requests import (
    TRAIN,
    admit,
    check_atoms,
    check_products,
    digest,
    rounded,
)
from flwr_perdl.clients._secure import MAX_WEIGHT
from flwr_perdl.clients.base import Member, PrivateState, private_shelf, step_of
from flwr_perdl.dictionary import (
    Learner,
    OrthogonalLearner,
    WarmStart,
    align_to_global,
    atom_support,
    local_statistics,
    reconstruct,
    refine_local,
    row_support,
    sparse_code,
    update_support,
    warm_start,
    warm_starts,
)
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.averaging import LocalDictionary, update_dictionary
from flwr_perdl.dictionary.learners import LEARNERS, limited
from flwr_perdl.dictionary.perpca import local_start, perpca_step
from flwr_perdl.dictionary.stacks import Updates, update_stack

#: The protocols' steps, PerMA's two first, and the keys of their requests' config.
START = "start"
UPDATE = "update"
AVERAGE = "average"
COMPONENTS = "components"
SENDS = "perdl.sends"
ATOMS = "atoms"
STATISTICS = "statistics"
ORTHOGONAL = "perdl.orthogonal"
#: Instead of 1 or 0, where the server does not know yet: every client replies as its learner does.
OWN = -1
LOCAL_STEPS = "perdl.local-steps"
REFINE_STEPS = "perdl.refine-steps"
STEP_LENGTH = "perdl.step-length"
#: Evaluation: numbers of atoms per sample, such as "5,10,20" (orthogonal matching pursuit).
N_NONZERO = "perdl.n-nonzero"

#: Which steps a client of a protocol takes.
PROTOCOLS = {"perma": (START, UPDATE), "averaging": (AVERAGE,), "perpca": (COMPONENTS,)}
#: The most local steps, refinement steps and atoms per sample that a request may ask for.
_MOST_STEPS = 10_000

#: Numbers of samples' features of the clients that are updated at once: eight megabytes.
_WINDOW = 2**20

#: One by one, clients with fewer numbers are computed in one thread: several would wait for
#: Python's lock most of the time.
_LARGE = 2**16

#: Numbers of samples' features times atoms with which a start is not made a second time.
_LONG = 2**22

_DICTIONARY = "dictionary"
_LOCAL_ATOMS = "local_atoms"


class Start(Protocol):
    """How a client makes its first dictionary."""

    def __call__(self, X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
        """Return a dictionary learned from ``X`` alone."""


class _Asked(NamedTuple):
    """What a request says, checked; nothing in it depends on a client's samples."""

    step: str
    round: int
    seed: int
    run: str
    #: Whether nothing is given: a protocol's first step, answered with a whole dictionary.
    first: bool
    #: Whether sums over samples are asked for, and not the atoms that follow from them.
    statistics: bool
    #: What tells this request from every other one.
    digest: str


class DictionaryClient(Member):
    """A client that learns a dictionary of which the *global* atoms are everybody's.

    It serves one protocol, and refuses a request that this protocol does not send before it touches
    the samples. What leaves the client under PerMA (the other strategies' docstrings say what they
    ask for): in the ``"start"`` round its whole dictionary (without atoms that fewer than
    ``min_support`` samples stand behind); afterwards, per global atom, either the updated atom
    or a row of the update's statistics, and never for an atom that fewer than ``min_support``
    samples stand behind. With ``min_support`` above 1 an atom is also withheld where one sample
    dominates it: where the sum that it is made of, without that sample, is shorter than 0.7 times
    the sample's own term (`flwr_perdl.dictionary.row_support`, and of a general learner
    `made_by_one`); and, of several iterations (the start, or ``local_steps`` above 1), where an
    atom is near fewer than ``min_support`` samples and would not be near one of them had it not
    been there (a long start is not made again to find that out: such atoms are withheld). Samples,
    codes and local atoms stay: the latter in ``context.state`` and, with ``state_dir``, on this
    client's disk. Metrics are means over at least ``min_support`` samples, with six significant
    digits; of fewer samples there are none.

    The promise holds for every row of one reply, also against a server that sends what it likes.
    Differences of several replies, and combinations of rows, can show single samples
    (docs/security.md), so ``max_requests`` limits the number of replies.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        The client's samples, float64 or float32.
    learner : Learner
        The local algorithm A_i (P0, Algorithm 4 or 5, or any other).
    context : Context
        What Flower hands to the client's factory; says who the client is and keeps its state.
    evaluation : mapping of str to ndarray, optional
        Named sets of samples for `evaluate`; by default ``X`` under the name ``""``.
    start : callable, default `warm_start`
        ``(X, learner, rng=rng) -> WarmStart``: makes the client's first dictionary.
    protocol : {"perma", "averaging", "perpca"}, default "perma"
        Whose requests the client answers: those of `PerMA`, `DictionaryAveraging` or `PerPCA`.
    min_support : int, default 3
        See above; 0 sends everything, 1 all atoms that a sample uses. More hides better what single
        samples look like, and costs accuracy where clients have few samples.
    digits : int, optional
        An update is rounded to so many digits of its largest entry before it leaves; by default it
        is not rounded. With two digits, differences between replies of several rounds show far
        fewer samples, at a small cost in accuracy (docs/security.md, SecAgg+); this guarantees
        nothing.
    state_dir : str or Path, optional
        Folder for the private state; by default ``state-dir`` of the node config, then of the run
        config, and nothing is kept on disk where both are missing.
    max_runs : int, default 8
        Runs of a strategy (their tokens ``perdl.run``) within one run of Flower that the client
        takes part in.
    max_requests : int, default 1000
        Training requests within one run of Flower that the client answers, and as many evaluations.

    Raises
    ------
    ValueError
        If ``X`` is empty, has another dtype, or is not finite, or who the client is is not known.
    """

    def __init__(
        self,
        X: Matrix,
        learner: Learner,
        context: Context,
        *,
        evaluation: Mapping[str, Matrix] | None = None,
        start: Start = warm_start,
        protocol: str = "perma",
        min_support: int = 3,
        digits: int | None = None,
        state_dir: str | Path | None = None,
        max_runs: int = 8,
        max_requests: int = 1000,
    ) -> None:
        super().__init__(context)
        self.X = check_array("X", X, min_rows=1, squares=True)
        for method in ("code", "update"):
            if not callable(getattr(learner, method, None)) or isinstance(learner, type):
                raise TypeError(
                    f"learner must be a Learner with a method {method}, got {learner!r}."
                )
        if not callable(start):
            raise TypeError(f"start must be a function, got {start!r}.")
        check_kind("evaluation", evaluation, (type(None), Mapping), "a mapping or None")
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        self.learner = learner
        self.context = context
        self.evaluation = {
            name: check_array(f"evaluation[{name!r}]", samples, columns=self.X.shape[1])
            for name, samples in (evaluation or {}).items()
        } or {"": self.X}
        self.start = start
        self.protocol = check_choice("protocol", protocol, PROTOCOLS)
        self.min_support = check_count("min_support", min_support)
        self.digits = None if digits is None else check_count("digits", digits, 1, 15)
        self.max_runs = check_count("max_runs", max_runs, 1)
        self.max_requests = check_count("max_requests", max_requests, 1)
        algorithm = f"dictionary, {type(learner).__name__}"
        self._shelf = private_shelf(context, algorithm, state_dir)

    # Training --------------------------------------------------------------------------------

    @one_blas_thread()
    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Take the step that ``config`` asks for.

        Parameters
        ----------
        parameters : list of ndarray
            Nothing in a protocol's first round; then ``[global atoms (n_global, n_features)]``.
        config : dict
            The request's config.

        Returns
        -------
        parameters : list of ndarray
            One array: the dictionary's supported atoms; or the updated global atoms; or their
            statistics; or what the other strategies ask for. Withheld rows are zero.
        num_examples : int
            Number of samples.
        metrics : dict
            ``"mse"`` of the client's dictionary on its own samples with its learner's codes, where
            there are ``min_support`` of them (for an update: before the step, of the received
            global atoms together with its own local ones;
            for ``"components"`` likewise, by projection), ``"n_atoms"``, ``"orthogonal"``
            (1 or 0), and ``"anew"``: 1 if an update of PerMA or PerPCA found no private state, and
            the client made its local atoms anew, else 0.
        """
        return self._fit(parameters, config, _read(parameters, config))

    def _fit(
        self,
        parameters: list[Matrix],
        config: dict[str, Scalar],
        asked: _Asked,
        begun: Matrix | None = None,
    ) -> Fitted:
        """Take the step of a request that `_read` has read; ``begun`` is the start, where known."""
        self._check_training(parameters, asked)
        if MAX_WEIGHT in config:  # what is summed must be of one kind
            own, said = int(self.learner.orthogonal), config.get(ORTHOGONAL)
            if said != own:
                raise ValueError(
                    f"{ORTHOGONAL} must be {own} in a secure round with this client's learner, got "
                    f"{said!r}."
                )
        self._admit(TRAIN, asked)
        state = PrivateState(self.context, asked.run, self._shelf)
        anew = False
        if asked.step == COMPONENTS:
            sent, error, anew = self._components(parameters, asked, state, config)
            n_atoms = self.learner.n_atoms
        else:
            if asked.step == UPDATE:
                G = self._global_atoms(parameters)
                sent, D, error, anew = self._update(G, asked, state, config)
                sent = _coarse(sent, self.digits)
                if MAX_WEIGHT in config:
                    sent = self._scaled(sent, asked)
            elif asked.step == AVERAGE:
                sent, D, error = self._average(parameters, asked, state, config)
            else:
                sent, D, error = self._start(asked, state, begun)
            n_atoms = len(D)
        return [sent], len(self.X), self._metrics(error, n_atoms, anew)

    def _metrics(self, error: float, n_atoms: int, anew: bool) -> dict[str, Scalar]:
        """Return what a training reply says besides its array."""
        mse = {} if len(self.X) < self.min_support else {"mse": rounded(error)}
        orthogonal = int(self.learner.orthogonal)
        return {**mse, "n_atoms": n_atoms, "orthogonal": orthogonal, ANEW: int(anew)}

    # What is asked ---------------------------------------------------------------------------

    def _check_training(self, parameters: list[Matrix], asked: _Asked) -> None:
        """Refuse what the client's protocol does not ask for."""
        check_choice("step", asked.step, PROTOCOLS[self.protocol])
        if asked.step == START and parameters:
            raise ValueError(f"parameters must be none in the start, got {len(parameters)} arrays.")
        if asked.step == UPDATE or parameters:
            G = self._global_atoms(parameters)
            if asked.step != AVERAGE:  # answered with a dictionary of norm 1, and not with sums
                sums = asked.statistics and self.learner.orthogonal
                check_products(G, orthogonal=sums or asked.step == COMPONENTS)

    def _admit(self, kind: str, asked: _Asked) -> None:
        """Note the request, or refuse it: one too many, or not after the last one."""
        admit(
            self.context,
            kind,
            asked.digest,
            asked.run,
            asked.round,
            first=asked.first,
            max_runs=self.max_runs,
            max_requests=self.max_requests,
        )

    @classmethod
    def fit_cohort(
        cls,
        clients: Iterable[DictionaryClient],
        parameters: list[Matrix],
        config: dict[str, Scalar],
    ) -> Iterator[Fitted]:
        """Yield what `fit` of each client returns.

        Starts and updates of orthogonal learners with a threshold are computed many at once, of
        clients of one size; everything else one by one. Clients with this library's learners and
        start go on as many cores as there are, where that is faster: many at once, or one by one
        with many samples.
        """
        asked = _read(parameters, config)
        updates = asked.step == UPDATE and not int(config.get(REFINE_STEPS, 0))
        updates = updates and MAX_WEIGHT not in config
        stacked = updates and len(parameters) == 1 and parameters[0].size > 0

        def how(client: DictionaryClient) -> tuple[bool, bool]:
            at_once = stacked and _kind(client, config) is not None
            return at_once, client._is_ours() and (at_once or client.X.size >= _LARGE)

        def one_by_one(window: list[DictionaryClient]) -> list[Fitted]:
            starts: list[Matrix | None] = [None] * len(window)
            if asked.step == START and not parameters:
                starts = _started_together(window, asked)
            return [
                client._fit(parameters, config, asked, begun)
                for client, begun in zip(window, starts, strict=True)
            ]

        def together(window: list[DictionaryClient]) -> list[Fitted]:
            return _update_together(window, parameters, config, asked)

        for (at_once, threads), some in groupby(clients, how):
            parts = n_threads() if threads else 1
            held = windows(some, lambda one: one.X.size, _WINDOW, parts)
            step = together if at_once else one_by_one
            for fitted in in_threads(step, held) if threads else map(step, held):
                yield from fitted

    def _is_ours(self) -> bool:
        """Return whether nothing but this library's code computes, which threads may run."""
        start = getattr(self.start, "func", self.start)  # of a partial
        return type(self.learner) in LEARNERS and start is warm_start

    def _start(
        self, asked: _Asked, state: PrivateState, begun: Matrix | None
    ) -> tuple[Matrix, Matrix, float]:
        """Local initialisation (P0, Algorithm 1, lines 2-5)."""
        D = self._warm_start(asked) if begun is None else begun
        state.save(asked.round, {_DICTIONARY: D})
        codes, again = self.learner.code(self.X, D), self._started_without(asked)
        sent = D[self._supported(codes, D) & ~shown(D, self.X, again, self.min_support)]
        return sent, D, _mse(self.X, reconstruct(codes, D))

    def _started_without(self, asked: _Asked) -> Callable[[int], Matrix] | None:
        """Return how to start without a sample, None where that takes long.

        The atom that is nearest to the sample stands for all: atoms have no order in a start.
        """
        if len(self.X) == 1 or self.X.size * self.learner.n_atoms > _LONG:
            return None

        def without(i: int) -> Matrix:
            others = self._warm_start(asked, np.delete(self.X, i, axis=0))
            nearest = np.abs(others @ self.X[i]).argsort()[-1:]
            return others[nearest] if len(others) else np.zeros_like(self.X[:1])

        return without

    def _update(
        self, G: Matrix, asked: _Asked, state: PrivateState, config: Mapping[str, Scalar]
    ) -> tuple[Matrix, Matrix, float, bool]:
        """Local update (P0, Algorithm 3), after local refinement (Algorithm 6) where asked for."""
        n_global = len(G)
        local_atoms, anew = self._local_atoms(G, asked, state)
        D = np.vstack([G, local_atoms])
        refine_steps = int(config.get(REFINE_STEPS, 0))
        if refine_steps:
            D = refine_local(self.X, D, n_global, self.learner, n_iter=refine_steps)
        begun = D
        D, sent, error = self._updated(self.X, begun, G, config, self.min_support)
        state.save(asked.round, {_LOCAL_ATOMS: D[n_global:]})
        return self._unexposed(sent, begun, G, config), D, float(error), anew

    def _updated(
        self, X: Matrix, D: Matrix, G: Matrix, config: Mapping[str, Scalar], min_support: int
    ) -> tuple[Matrix, Matrix, float]:
        """Return the dictionary after an update's steps, what is sent of it, and the error."""
        if _kind(self, config) is None:
            return self._steps(X, D, G, config, min_support)
        updates = _stacked(X[None], D[None], G, self, config, min_support)
        return updates.dictionaries[0], updates.sent[0], float(updates.errors[0])

    def _unexposed(
        self, sent: Matrix, D: Matrix, G: Matrix, config: Mapping[str, Scalar]
    ) -> Matrix:
        """Return what is sent after several steps from ``D``, but for rows that show a sample.

        Each step turns an atom towards a sample that the last one gave it, until other samples are
        coded with it as well, and the last step alone does not tell. Sums are one whole: they are
        all withheld.
        """
        if int(config.get(LOCAL_STEPS, 1)) == 1:
            return sent
        d = self.X.shape[1]

        def without(i: int) -> Matrix:
            return self._updated(np.delete(self.X, i, axis=0), D, G, config, 0)[1][:, -d:]

        shows = shown(sent[:, -d:], self.X, without, self.min_support)
        if config.get(SENDS) == STATISTICS:
            shows |= shows.any()
        return np.where(shows[:, None], 0, sent)

    def _scaled(self, sent: Matrix, asked: _Asked) -> Matrix:
        """Return an update at the scale that all clients of a secure round share.

        Statistics are those of samples of mean norm 1, divided by the number of samples. For
        orthonormal atoms their norm is then 1 at most: neither codes nor residuals are longer than
        samples. Atoms of norm 1 are divided by the square root of their number.
        """
        scale = float(np.vdot(self.X, self.X)) if asked.statistics else len(sent) ** 0.5
        return sent / sent.dtype.type(scale) if scale else sent

    def _steps(
        self, X: Matrix, D: Matrix, G: Matrix, config: Mapping[str, Scalar], min_support: int
    ) -> tuple[Matrix, Matrix, float]:
        """Take an update's steps with any learner."""
        n_global, n_steps = len(G), int(config.get(LOCAL_STEPS, 1))
        sums = config.get(SENDS) == STATISTICS
        for step in range(n_steps):
            before, codes = D, self.learner.code(X, D)
            if not step:
                error = _mse(X, reconstruct(codes, D))
            if sums and len(D) == n_global and step == n_steps - 1:
                break  # of the last update only the local atoms are kept
            aligned = align_to_global(self.learner.update(X, codes, D), G)
            D = np.vstack([aligned.global_atoms, aligned.local_atoms])
        if not sums:
            order = [*aligned.indices, *np.delete(np.arange(len(D)), aligned.indices)]
            codes = codes[:, order]
            codes[:, :n_global] *= aligned.signs
            supported = update_support(X, codes, D, self.learner) >= min_support
            return D, np.where(supported[:n_global, None], D[:n_global], 0), error
        sent = local_statistics(
            X,
            codes,
            before,
            n_global,
            orthogonal=_sends_orthogonal(self, config),
            min_support=min_support,
        )
        return D, sent, error

    def _average(
        self,
        parameters: list[Matrix],
        asked: _Asked,
        state: PrivateState,
        config: Mapping[str, Scalar],
    ) -> tuple[Matrix, Matrix, float]:
        """Take a round of `DictionaryAveraging`: the own start, or the dictionary of all."""
        steps = int(config.get(LOCAL_STEPS, 1)) if parameters else 0

        begun = self._global_atoms(parameters) if parameters else self._warm_start(asked)

        def learned(X: Matrix) -> LocalDictionary:
            return update_dictionary(
                X, begun, self.learner, n_steps=steps, min_support=self.min_support
            )

        D, sent, error = learned(self.X)
        if steps != 1:  # else the one step has been judged

            def without(i: int) -> Matrix:
                return learned(np.delete(self.X, i, axis=0)).dictionary

            judge = without if steps else self._started_without(asked)
            sent[:-1][shown(D, self.X, judge, self.min_support)] = 0
        state.save(asked.round, {_LOCAL_ATOMS: D[:0]})
        return sent, D, error

    def _components(
        self,
        parameters: list[Matrix],
        asked: _Asked,
        state: PrivateState,
        config: Mapping[str, Scalar],
    ) -> tuple[Matrix, float, bool]:
        """Take a round of `PerPCA`: the principal directions, or a step from the shared ones."""
        n_atoms = min(self.learner.n_atoms, self.X.shape[1])
        if not parameters:
            D = principal_directions(self.X, n_atoms)
            codes = self.X @ D.T
            supported = row_support(self.X, codes) >= self.min_support
            state.save(asked.round, {_LOCAL_ATOMS: D[:0]})  # says that this client has taken part
            return D[supported], _mse(self.X, codes @ D), False
        U, saved = self._global_atoms(parameters), state.before(asked.round)
        V = U[:0] if saved is None else saved[_LOCAL_ATOMS]
        if not len(V):  # the first step
            V = self._local_components(U)
        found = perpca_step(self.X, U, V, float(config[STEP_LENGTH]))
        state.save(asked.round, {_LOCAL_ATOMS: found.local_components})
        codes = self.X @ found.global_components.T
        supported = limited(atom_support(codes), found.dominated) >= self.min_support
        sent = np.where(supported[:, None], found.global_components, 0)
        return sent, found.loss / self.X.size, saved is None

    def _local_components(self, U: Matrix) -> Matrix:
        """Return the components that a client of `PerPCA` begins with beside the shared ones."""
        n_atoms = min(self.learner.n_atoms, self.X.shape[1])
        return local_start(self.X, U, max(n_atoms - len(U), 0))

    def _local_atoms(self, G: Matrix, asked: _Asked, state: PrivateState) -> tuple[Matrix, bool]:
        """Return the local atoms before this round, and whether they had to be made anew.

        After the start round they are what the global atoms leave of the dictionary. A client that
        joins late, or has lost its state, makes its own start and aligns it in the same way.
        """
        saved = state.before(asked.round)
        if saved is not None and _LOCAL_ATOMS in saved:
            return saved[_LOCAL_ATOMS], False
        D = self._warm_start(asked) if saved is None else saved[_DICTIONARY]
        return align_to_global(D, G).local_atoms, saved is None

    def _warm_start(self, asked: _Asked, X: Matrix | None = None) -> Matrix:
        rng = spawn(asked.seed, self.partition)
        return self.start(self.X if X is None else X, self.learner, rng=rng).dictionary

    def _supported(self, C: Matrix, D: Matrix) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which atoms, updated from these codes, may leave the client."""
        if self.min_support == 0:
            return np.ones(len(D), dtype=bool)
        return update_support(self.X, C, D, self.learner) >= self.min_support

    def _global_atoms(self, parameters: list[Matrix]) -> Matrix:
        """Return the atoms of a request, which are such as the protocol sends."""
        if len(parameters) != 1:
            raise ValueError(f"parameters must be [global atoms], got {len(parameters)} arrays.")
        G = check_array("global atoms", parameters[0], columns=self.X.shape[1])
        return check_atoms(G, most=self.learner.n_atoms)

    # Evaluation ------------------------------------------------------------------------------

    @one_blas_thread()
    def evaluate(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Measure the reconstruction with the global atoms alone and with global + local atoms.

        Parameters
        ----------
        parameters : list of ndarray
            ``[global atoms]``.
        config : dict
            With ``"perdl.n-nonzero"`` such as ``"5,10,20"``, samples are coded by orthogonal
            matching pursuit with so many atoms; without it by the learner's own coder.

        Returns
        -------
        loss : float
            The first set's mean squared error with global + local atoms (the last number of atoms);
            NaN, which `client_app` leaves out, where that set has fewer than ``min_support``
            samples.
        num_examples : int
            Number of samples in that set.
        metrics : dict
            ``mse_global[_k][_set]`` and ``mse_full[_k][_set]`` of the sets with ``min_support``
            samples, what `extra_metrics` adds where all sets have as many, and ``"anew": 1`` where
            there was no private state to measure with.
        """
        asked = _read(parameters, config)
        if AFTER in config:
            check_choice(AFTER, config[AFTER], PROTOCOLS[self.protocol])
        counts = _counts(str(config.get(N_NONZERO, "")))
        G = self._global_atoms(parameters)
        self._admit(EVALUATE, asked)
        state = PrivateState(self.context, asked.run, self._shelf)
        saved, after = state.after(asked.round), config.get(AFTER)
        metrics: dict[str, Scalar] = {}
        kept = None if saved is None else saved.get(_LOCAL_ATOMS)
        if kept is not None and (len(kept) or after != COMPONENTS):
            local_atoms = kept
        elif after == AVERAGE:
            local_atoms = G[:0]
        elif after == COMPONENTS:
            local_atoms = self._local_components(G)
            metrics.update({ANEW: 1} if saved is None else {})
        else:
            local_atoms, anew = self._local_atoms(G, asked._replace(round=asked.round + 1), state)
            metrics.update({ANEW: 1} if anew else {})
        D = np.vstack([G, local_atoms])
        losses: list[float] = []
        for name, samples in self.evaluation.items():
            error = nan
            for k in counts if len(samples) >= self.min_support else ():
                tail = "".join(f"_{part}" for part in (k, name) if part)
                metrics[f"mse_global{tail}"] = error = rounded(self._error(samples, G, k))
                if len(local_atoms):
                    error = rounded(self._error(samples, D, k))
                metrics[f"mse_full{tail}"] = error
            losses.append(error)
        if min(map(len, [self.X, *self.evaluation.values()])) >= self.min_support:
            extra = self.extra_metrics(G, local_atoms)
            metrics.update({name: rounded(value) for name, value in extra.items()})
        return losses[0], len(next(iter(self.evaluation.values()))), metrics

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return further metrics of an evaluation; a subclass's to add.

        Parameters
        ----------
        global_atoms : ndarray of shape (n_global, n_features)
            The server's atoms.
        local_atoms : ndarray of shape (n_local, n_features)
            This client's own.
        """
        return {}

    def _error(self, samples: Matrix, D: Matrix, k: str) -> float:
        """Return the mean squared error of ``samples`` coded with ``k`` atoms of ``D``."""
        if not len(D):
            return _mse(samples, np.zeros_like(samples))
        codes = sparse_code(samples, D, n_nonzero=int(k)) if k else self.learner.code(samples, D)
        return _mse(samples, reconstruct(codes, D))


def _coarse(sent: Matrix, digits: int | None) -> Matrix:
    """Return ``sent`` rounded to so many digits of its largest entry; None: as it is."""
    if digits is None:
        return sent
    unit = sent.dtype.type(np.abs(sent).max(initial=0) * 10.0**-digits)
    return np.round(sent / unit) * unit if unit else sent


def _kind(client: DictionaryClient, config: Mapping[str, Scalar]) -> Hashable:
    """Return what clients must share to be updated at once, None if they cannot be."""
    learner = client.learner
    if type(learner) is not OrthogonalLearner or learner.n_nonzero is not None:
        return None
    if config.get(SENDS) == STATISTICS and not _sends_orthogonal(client, config):
        return None
    return client.X.shape, client.X.dtype, learner, client.min_support


def _started_together(clients: list[DictionaryClient], asked: _Asked) -> list[Matrix | None]:
    """Return the starts that clients of one kind make at once; None: the client makes its own."""
    starts: list[Matrix | None] = [None] * len(clients)

    def how(one: DictionaryClient) -> Hashable:
        kind = _kind(one, {}) if one._is_ours() and not getattr(one.start, "args", None) else None
        return None if kind is None else (kind, tuple(_options(one).items()))

    kinds = [how(one) for one in clients]
    for same in alike(kinds, lambda kind: kind):
        if kinds[same[0]] is None:
            continue
        first = clients[same[0]]
        first._check_training([], asked)
        rngs = [spawn(asked.seed, clients[i].partition) for i in same]
        X = [clients[i].X for i in same]
        begun = warm_starts(X, first.learner, rngs=rngs, **_options(first))
        for i, start in zip(same, begun, strict=True):
            starts[i] = start.dictionary
    return starts


def _options(client: DictionaryClient) -> dict[str, Any]:
    """Return the options of a start that is a partial `warm_start`."""
    return dict(getattr(client.start, "keywords", {}))


def _stacked(
    X: Matrix,
    D: Matrix,
    G: Matrix,
    first: DictionaryClient,
    config: Mapping[str, Scalar],
    min_support: int,
) -> Updates:
    """Take an update's steps at clients of one kind (`_kind`), such as the first."""
    return update_stack(
        X,
        D,
        G,
        cast(OrthogonalLearner, first.learner),
        n_steps=int(config.get(LOCAL_STEPS, 1)),
        statistics=config.get(SENDS) == STATISTICS,
        min_support=min_support,
    )


def _sends_orthogonal(client: DictionaryClient, config: Mapping[str, Scalar]) -> bool:
    """Return whether an update's statistics are those of orthonormal atoms."""
    asked = int(config.get(ORTHOGONAL, OWN))
    return client.learner.orthogonal if asked == OWN else bool(asked)


def _update_together(
    clients: list[DictionaryClient],
    parameters: list[Matrix],
    config: Mapping[str, Scalar],
    asked: _Asked,
) -> list[Fitted]:
    """Return what ``fit`` of these clients returns, for an update."""
    kinds = {(one.learner, one.protocol, one.X.shape[1]): one for one in clients}
    for one in kinds.values():  # the others are given the same, and would say the same
        one._check_training(parameters, asked)
    for one in clients:
        one._admit(TRAIN, asked)
    G = clients[0]._global_atoms(parameters)
    states = [PrivateState(one.context, asked.run, one._shelf) for one in clients]
    found = [one._local_atoms(G, asked, state) for one, state in zip(clients, states, strict=True)]
    fitted: dict[int, Fitted] = {}
    for same in alike(
        range(len(clients)), lambda i: (_kind(clients[i], config), found[i][0].shape)
    ):
        D = np.stack([np.vstack([G, found[i][0]]) for i in same])
        X, first = stack([clients[i].X for i in same]), clients[same[0]]
        updates = _stacked(X, D, G, first, config, first.min_support)
        for i, before, after, sent, error in zip(same, D, *updates, strict=True):
            states[i].save(asked.round, {_LOCAL_ATOMS: after[len(G) :]})
            metrics = clients[i]._metrics(float(error), len(after), found[i][1])
            sent = clients[i]._unexposed(sent, before, G, config)
            fitted[i] = [_coarse(sent, clients[i].digits)], len(clients[i].X), metrics
    return [fitted[i] for i in range(len(clients))]


def _read(parameters: list[Matrix], config: Mapping[str, Scalar]) -> _Asked:
    """Return what the request says; a missing key, or one out of its range, is named."""
    try:
        step, run = step_of(config), str(config.get(RUN, ""))
        round_ = check_count(ROUND, config[ROUND], 0, LARGEST_INT)
        seed = check_count(SEED, config[SEED], 0, LARGEST_INT)
    except KeyError as error:
        raise ValueError(f"config must have {error}, got {sorted(config)}.") from None
    check_count(LOCAL_STEPS, config.get(LOCAL_STEPS, 1), 1, _MOST_STEPS)
    check_count(REFINE_STEPS, config.get(REFINE_STEPS, 0), 0, _MOST_STEPS)
    check_count(ORTHOGONAL, config.get(ORTHOGONAL, OWN), OWN, 1)
    check_choice(SENDS, config.get(SENDS, ATOMS), (ATOMS, STATISTICS))
    if step == COMPONENTS and parameters:
        check_real(STEP_LENGTH, config.get(STEP_LENGTH), 0, LARGE, open_low=True)
    sums = step == UPDATE and config.get(SENDS) == STATISTICS
    return _Asked(step, round_, seed, run, not parameters, sums, digest(parameters, config))


def _counts(wanted: str) -> list[str]:
    """Return the numbers of atoms per sample that an evaluation asks for, as texts."""
    counts = [part.strip() for part in wanted.split(",")]
    for count in counts if wanted else ():
        if not count.isdecimal() or not 1 <= int(count) <= _MOST_STEPS:
            raise ValueError(
                f"{N_NONZERO} must be integers between 1 and {_MOST_STEPS}, got {wanted!r}."
            )
    return counts


def _mse(X: Matrix, approximation: Matrix) -> float:
    return float(np.mean((X - approximation) ** 2))
