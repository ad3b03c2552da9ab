"""The client of the dictionary protocols: `PerMA`, and what P0 compares it with.

One client serves `PerMA`, `DictionaryAveraging` or `PerPCA`: which one is the client's choice, not
the server's. The steps of each are in a file of their own beside this one: `perma`, `averaging`,
`perpca`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import nan
from pathlib import Path

import numpy as np
from flwr.app import Context

from flwr_perdl._checks import Matrix, check_array, check_choice, check_count, check_kind
from flwr_perdl._parallel import in_threads, n_threads
from flwr_perdl._records import AFTER, ANEW, EVALUATE, Scalar
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.clients._cohort import Fitted, windows
from flwr_perdl.clients._requests import TRAIN, admit, rounded
from flwr_perdl.clients._steps import (
    MOST_STEPS,
    Asked,
    DictionaryMember,
    Participant,
    Start,
    Steps,
    Taken,
    global_atoms,
    is_ours,
    mean_square,
    read,
)
from flwr_perdl.clients.averaging import AveragingSteps
from flwr_perdl.clients.base import PrivateState, private_shelf
from flwr_perdl.clients.perma import PerMASteps
from flwr_perdl.clients.perpca import PerPCASteps
from flwr_perdl.dictionary import Learner, reconstruct, sparse_code, warm_start

__all__ = ["PROTOCOLS", "DictionaryClient", "Start"]

#: Evaluation: numbers of atoms per sample, such as "5,10,20" (orthogonal matching pursuit).
N_NONZERO = "perdl.n-nonzero"

#: The steps that a client of a protocol takes.
PROTOCOLS: Mapping[str, Steps] = {
    "perma": PerMASteps(),
    "averaging": AveragingSteps(),
    "perpca": PerPCASteps(),
}

#: Samples times features of the clients that are updated at once: eight megabytes.
_WINDOW = 2**20

#: Clients that are computed one by one, and have fewer numbers than this, share one thread:
#: several threads would wait for the GIL most of the time.
_LARGE = 2**16


class DictionaryClient(DictionaryMember):
    """A client that learns a dictionary of which the *global* atoms are everybody's.

    It serves one protocol, and refuses a request that this protocol does not send before it touches
    the samples. What leaves the client under PerMA (the other strategies' docstrings say what they
    ask for): in the ``"start"`` round its whole dictionary (without atoms that fewer than
    ``min_support`` samples stand behind); afterwards, per global atom, either the updated atom
    or a row of the update's statistics, and never for an atom that fewer than ``min_support``
    samples stand behind. With ``min_support`` above 1 an atom is also withheld where one sample
    dominates it: where the sum that it is made of, without that sample, is shorter than 0.7 times
    the sample's own term (`flwr_perdl.dictionary.row_support`, and for a general learner
    `made_by_one`). After several iterations (the start, or ``local_steps`` above 1) an atom is also
    withheld where it is near fewer than ``min_support`` samples, and the same computation without
    one of these gives no atom near that sample. (A long start is not repeated to find that out: all
    atoms near few samples are withheld.) Samples, codes and local atoms stay: the latter in
    ``context.state`` and, with ``state_dir``, on this client's disk. Metrics are means over at
    least ``min_support`` samples, with six significant digits; with fewer samples none are sent.

    This holds for every row of a single reply, whatever the server sends. Differences of several
    replies, and combinations of rows, can show single samples (docs/security.md), so
    ``max_requests`` limits the number of replies.

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
        An update is rounded to this number of digits of its largest entry before it leaves; by
        default it is not rounded. With two digits, differences between replies of several rounds
        show far fewer samples, at a small cost in accuracy (docs/security.md, SecAgg+); this
        guarantees nothing.
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
        methods = getattr(learner, "code", None), getattr(learner, "update", None)
        if isinstance(learner, type) or not all(map(callable, methods)):
            raise TypeError(f"learner must be a Learner with code and update, got {learner!r}.")
        missing = [name for name in ("n_atoms", "orthogonal") if not hasattr(learner, name)]
        if missing:
            raise TypeError(f"learner must be a Learner with {missing[0]}, got {learner!r}.")
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
        self._steps = PROTOCOLS[protocol]
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
        (fitted,) = _fit([self], read(parameters, config))
        return fitted

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
        start are computed on as many cores as there are, where that is faster: many at once, or one
        by one with many samples.
        """
        asked = read(parameters, config)
        step = partial(_fit, asked=asked)

        def threaded(one: DictionaryClient) -> bool:
            return is_ours(one) and (one.X.size >= _LARGE or one._steps.at_once(one, asked))

        for threads, some in groupby(clients, threaded):
            held = windows(some, lambda one: one.X.size, _WINDOW, n_threads() if threads else 1)
            for fitted in in_threads(step, held) if threads else map(step, held):
                yield from fitted

    def _metrics(self, taken: Taken) -> dict[str, Scalar]:
        """Return what a training reply says besides its array."""
        mse = {} if len(self.X) < self.min_support else {"mse": rounded(taken.error)}
        orthogonal = int(self.learner.orthogonal)
        return {**mse, "n_atoms": taken.n_atoms, "orthogonal": orthogonal, ANEW: int(taken.anew)}

    def _check_step(self, asked: Asked) -> Matrix | None:
        """Return the global atoms of a training request that the client's protocol sends."""
        check_choice("step", asked.step, self._steps.names)
        return self._steps.check(self, asked)

    def _admit(self, kind: str, asked: Asked) -> None:
        """Note the request, or refuse it: one too many, or not after the last one."""
        admit(
            self.context,
            kind,
            asked.digest,
            asked.run,
            asked.round,
            first=not asked.parameters,
            max_runs=self.max_runs,
            max_requests=self.max_requests,
        )

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
        asked = read(parameters, config)
        if AFTER in config:
            check_choice(AFTER, config[AFTER], self._steps.names)
        counts = _counts(str(config.get(N_NONZERO, "")))
        G = global_atoms(self, asked)
        self._admit(EVALUATE, asked)
        saved = PrivateState(self.context, asked.run, self._shelf).before(asked.round + 1)
        local_atoms, anew = self._steps.own_atoms(self, G, asked, saved)
        metrics: dict[str, Scalar] = {ANEW: 1} if anew else {}
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
            return mean_square(samples)
        codes = sparse_code(samples, D, n_nonzero=int(k)) if k else self.learner.code(samples, D)
        return mean_square(samples - reconstruct(codes, D))


def _fit(clients: list[DictionaryClient], asked: Asked) -> list[Fitted]:
    """Take a training step at each of these clients."""
    kinds = {_requirements(one): one for one in clients}
    for one in kinds.values():  # the others are given the same, and would say the same
        G = one._check_step(asked)
    for one in clients:
        one._admit(TRAIN, asked)
    participants = [
        Participant(one, PrivateState(one.context, asked.run, one._shelf)) for one in clients
    ]
    taken = clients[0]._steps.take(participants, G, asked)
    each = zip(clients, taken, strict=True)
    return [([own.sent], len(one.X), one._metrics(own)) for one, own in each]


def _requirements(client: DictionaryClient) -> tuple[str, int, bool, int]:
    """Return all that a client's check of a request depends on."""
    learner = client.learner
    return client.protocol, learner.n_atoms, learner.orthogonal, client.X.shape[1]


def _counts(wanted: str) -> list[str]:
    """Return the numbers of atoms per sample that an evaluation asks for, as texts."""
    counts = [part.strip() for part in wanted.split(",")]
    for count in counts if wanted else ():
        if not count.isdecimal() or not 1 <= int(count) <= MOST_STEPS:
            raise ValueError(
                f"{N_NONZERO} must be integers between 1 and {MOST_STEPS}, got {wanted!r}."
            )
    return counts
