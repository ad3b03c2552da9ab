"""All methods of PerMA's Table 1 on clients' images, each tuned with the same budget.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023.

==============  =================================================================================
method          what it is
==============  =================================================================================
``perma``       PerMA as the run's options describe it
``averaging``   one dictionary, averaged in every round from a common start, with PerMA's learner
``gkillas``     after Gkillas et al. (2022): gradient steps, plain means, from a common start
``huang``       after Huang et al. (2022): K-SVD, means weighted by samples, from a common start
``naive``       the one-shot average of the clients' own dictionaries, without matching
``perpca``      PerPCA: shared and own orthonormal components, rotated to principal axes
``local``       local training, five times the iterations
``finetuned``   ``perma`` with all atoms shared, fine-tuned by each client
``pooled``      one dictionary of all clients' images, five times the iterations
``sklearn``     scikit-learn's dictionary of all clients' images
==============  =================================================================================

The shared dictionaries of ``perma``, ``perpca``, ``pooled`` and ``sklearn`` have ``n_global``
atoms; where clients have more, ``pooled_full`` and ``sklearn_full`` have as many as a client.

The budget is `TRIES` values of one parameter per method, of which the one that codes images best
that every client holds out of its own, by orthogonal matching pursuit with `CODED` atoms, is kept:
PerPCA's step, scikit-learn's penalty, and for all others the learner's threshold or penalty or,
where it codes by matching pursuit, its number of atoms per sample. ``finetuned`` has the setting of
``perma`` with all atoms shared, and each client's best number of further iterations. The images to
measure by are not seen. PerMA's federations run in this process, whatever the engine: they give the
same bits on all. Rivals are functions over the list of clients.

PerMA compares with Gkillas et al. and Huang et al. without their settings. From both, these rows
have the local algorithm and the mean; the start is the dictionary of one client for all, one
iteration per round, and matching pursuit codes. From starts that differ both fail as in the paper,
which ``naive`` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import (
    AUTO_PENALTY,
    AUTO_THRESHOLD,
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    Learner,
    OrthogonalLearner,
    iterate,
    reconstruct,
    sparse_code,
)
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.averaging import average, naive_average
from perdl_experiments.baselines import PENALTIES, Start, learn_each, sklearn_dictionary
from perdl_experiments.engine import federate
from perdl_experiments.perpca import personalized_pca
from perdl_experiments.studies._experiment import (
    GENERAL,
    GENERAL_N_NONZERO,
    Auto,
    LearnerConfig,
    reason,
    words,
)

#: Methods without a server that see all clients' images; with as many atoms as a client.
POOLED, POOLED_FULL = ("pooled", "sklearn"), ("pooled_full", "sklearn_full")
#: The learners of the averages that are not PerMA's.
AVERAGED: dict[str, type[GradientLearner | KSVDLearner]] = {
    "gkillas": GradientLearner,
    "huang": KSVDLearner,
}
_NAMES = (
    *("perma", "averaging", *AVERAGED, "naive", "perpca", "local", "finetuned"),
    *("pooled", "pooled_full", "sklearn", "sklearn_full"),
)
METHODS = {name: words("images")[f"tuned_{name}"] for name in _NAMES}
#: Methods without a server.
ALONE = ("local", *POOLED, *POOLED_FULL)
#: What the library's default of a parameter is multiplied by: as many values for every method.
_FACTORS = (0.5, 1.0, 2.0)
TRIES = len(_FACTORS)
#: Atoms per image by which settings are compared.
CODED = 10
_PENALTIES = (0.1, *PENALTIES)
#: A client holds out every so many-th of its images to choose by.
KEPT_OUT = 5
#: Iterations that fine-tuning is tried with.
FURTHER = (0, 1, 3, 10, 30, 100)


@dataclass(frozen=True, kw_only=True)
class Config(LearnerConfig):
    """What the methods need of an experiment: its options, and how many atoms are shared."""

    n_global: int | Auto

    @property
    def n_shared(self) -> int:
        """The number of shared atoms, once it is known."""
        return int(self.n_global)


class Learned(NamedTuple):
    """What a method comes to with its best setting.

    Attributes
    ----------
    shared : list of ndarray of shape (n_atoms, n_features)
        The dictionary that all clients have; empty where each has its own, alone or fine-tuned.
    full : list of ndarray of shape (n_atoms, n_features)
        Each client's, its own atoms included; empty where clients have no atoms of their own.
    setting : float
        The parameter that was chosen.
    seconds : float
        Learning time with that setting.
    rounds : float
        Communication rounds; 0 without a server.
    floats_up, floats_down : float
        What a client sent and received, the mean over clients; its images where data are pooled.
    """

    shared: list[Matrix]
    full: list[Matrix]
    setting: float
    seconds: float
    rounds: float
    floats_up: float
    floats_down: float


#: What a method costs, and the setting that it costs this with.
COSTS = Learned._fields[2:]


def learn_tuned(
    method: str, samples: Sequence[Matrix], config: Config, start: Start
) -> tuple[Learned | None, list[str]]:
    """Learn with every setting of a method; return the best on images that clients hold out.

    A setting that fails does not end the run: the others still compete.

    Parameters
    ----------
    method : str
        One of ``METHODS``.
    samples : sequence of ndarray of shape (n_samples, n_features)
        Each client's images; every `KEPT_OUT`-th is held out.
    config : Config
        Of the experiment.
    start : callable
        The clients' warm start.

    Returns
    -------
    best : Learned or None
        None if every setting failed.
    failures : list of str
        A sentence for every setting that failed.
    """
    row, further = METHODS[method], method == "finetuned"
    if further:
        method, config = "perma", replace(config, n_global=config.n_atoms)
    choose = [X[::KEPT_OUT] for X in samples]
    train = [np.delete(X, np.s_[::KEPT_OUT], axis=0) for X in samples]
    tried, failures = [], []
    for setting in settings(method, train, config):
        try:
            learned = learn(method, setting, train, config, start)
            each = learned.full or learned.shared * len(choose)
            tried.append((sum(map(_error, choose, each)), learned))
        except Exception as error:  # whatever stops one rival must not stop the run
            failures.append(f"{row} failed with the setting {setting:.3g}: {reason(error)}.")
    best = min(tried, key=lambda one: one[0])[1] if tried else None
    if best is not None and further:
        learner, started = make_learner(config, config.n_atoms, best.setting), time.perf_counter()
        try:
            found = finetuned(learner, best.shared[0], train, lambda i, D: _error(choose[i], D))
        except Exception as error:
            return None, [*failures, f"{row} failed: {reason(error)}."]
        seconds = best.seconds + time.perf_counter() - started
        best = best._replace(shared=[], full=[D for D, _ in found], seconds=seconds)
    return best, failures


def finetuned(
    learner: Learner, D: Matrix, samples: Sequence[Matrix], error: Callable[[int, Matrix], float]
) -> list[tuple[Matrix, int]]:
    """Return each client's dictionary, fine-tuned, and after how many of `FURTHER`.

    Parameters
    ----------
    learner : Learner
        Whose iterations these are.
    D : ndarray of shape (n_atoms, n_features)
        The dictionary that all clients have.
    samples : sequence of ndarray of shape (n_samples, n_features)
        What each client learns from.
    error : callable
        ``error(client, dictionary)`` on images to choose by.
    """
    found = []
    for i, X in enumerate(samples):
        tried = [D]
        for before, after in pairwise(FURTHER):
            tried.append(iterate(learner, X, tried[-1], [1.0] * (after - before)))
        at = int(np.argmin([error(i, one) for one in tried]))
        found.append((tried[at], FURTHER[at]))
    return found


def compared(config: Config) -> tuple[str, ...]:
    """Return the methods that differ: with all atoms shared, pooled data have one size only."""
    return tuple(m for m in METHODS if m not in POOLED_FULL or config.n_shared < config.n_atoms)


def settings(method: str, samples: Sequence[Matrix], config: Config) -> tuple[float, ...]:
    """Return the values of its parameter that a method is tuned over."""
    if method.startswith("sklearn"):
        return _PENALTIES
    default = 1.0
    if method != "perpca":
        default = float(GENERAL_N_NONZERO)
        if config.learner not in GENERAL and method not in AVERAGED:
            X = np.vstack(samples)
            share = AUTO_PENALTY if config.learner == "lasso" else AUTO_THRESHOLD
            default = share * float(np.sqrt((X**2).sum(axis=1).mean()))
    return tuple(factor * default for factor in _FACTORS)


def _error(X: Matrix, D: Matrix) -> float:
    """Return the squared error of images with a dictionary."""
    rebuilt = reconstruct(sparse_code(X, D, n_nonzero=min(CODED, len(D))), D)
    return float(np.sum((X - rebuilt) ** 2))


def learn(
    method: str, setting: float, samples: Sequence[Matrix], config: Config, start: Start
) -> Learned:
    """Learn with one setting of a method; the parameters are those of `learn_tuned`."""
    if method == "perma":
        return _Federation(setting, samples, config, start).learn()
    if method == "perpca":
        return _perpca(setting, samples, config)
    if method not in ALONE:
        return _averaged(method, setting, samples, config, start)
    seed, rounds = config.seed, config.rounds
    n_shared = config.n_atoms if method in POOLED_FULL else config.n_shared
    X, started = np.vstack(samples), time.perf_counter()
    shared: list[Matrix] = []
    full: list[Matrix] = []
    if method.startswith("sklearn"):
        shared = [sklearn_dictionary(X, n_shared, seed, (setting,))]
    elif method.startswith("pooled"):
        learner, rng = make_learner(config, n_shared, setting), spawn(seed, SERVER, 1)
        shared = learn_each([X], [learner], [rng], rounds, start)
    else:
        learners = [make_learner(config, config.n_atoms, setting)] * len(samples)
        rngs = [spawn(seed, i) for i in range(len(samples))]
        full = learn_each(samples, learners, rngs, rounds, start)
    seconds = time.perf_counter() - started
    floats_up = 0.0 if method == "local" else X.size / len(samples)
    return Learned(shared, full, setting, seconds, 0, floats_up, 0.0)


def make_learner(config: Config, n_atoms: int, setting: float) -> Learner:
    """Return the run's learner with so many atoms, and a method's setting."""
    if config.learner == "lasso":
        return LassoLearner(n_atoms, setting)
    general = GENERAL.get(config.learner)
    if general is None:
        return OrthogonalLearner(n_atoms, threshold=setting)
    return general(n_atoms, n_nonzero=min(round(setting), n_atoms))


class _Federation:
    """PerMA's federation in this process: what an engine needs of an experiment."""

    def __init__(
        self, setting: float, samples: Sequence[Matrix], config: Config, start: Start
    ) -> None:
        self.setting, self.samples, self.config, self.start = setting, samples, config, start
        self.found: dict[int, Matrix] = {}

    def client(self, context: Context, config: Config) -> DictionaryClient:
        """Return the client of ``context``'s partition."""
        partition = int(context.node_config[PARTITION_ID])
        learner = make_learner(config, config.n_atoms, self.setting)
        return DictionaryClient(
            self.samples[partition],
            learner,
            context,
            start=self.start,
            extra_metrics=partial(self._note, partition),
            **config.private,
        )

    def _note(self, partition: int, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Note a client's own atoms; nothing to add to the metrics."""
        self.found[partition] = local_atoms
        return {}

    def strategy(self, config: Config, **options: Any) -> PerMA:
        """Return PerMA as the options describe it."""
        return config.strategy(config.n_shared, **{"evaluate_every": config.rounds, **options})

    def learn(self) -> Learned:
        """Run the federation."""
        ran = federate(self, self.config)
        (shared,) = ran.arrays
        own = [self.found[i] for i in sorted(self.found)]
        cost = ran.seconds, ran.rounds, ran.floats_up, ran.floats_down
        return Learned([shared], _with_own(shared, own), self.setting, *cost)


def _with_own(shared: Matrix, own: Sequence[Matrix]) -> list[Matrix]:
    """Return each client's dictionary; none where clients have no atoms of their own."""
    return [np.vstack([shared, V]) for V in own] if len(own[0]) else []


def _perpca(setting: float, samples: Sequence[Matrix], config: Config) -> Learned:
    """Return PerPCA's components on principal axes; its setting is the step."""
    started, n_global = time.perf_counter(), config.n_shared
    found = personalized_pca(
        samples,
        n_global,
        min(config.n_atoms, samples[0].shape[1]) - n_global,
        n_rounds=config.rounds - 1,
        step=setting,
        min_support=config.min_support,
    )
    seconds = time.perf_counter() - started
    own = [principal_axes(X, V) for X, V in zip(samples, found.local_components, strict=True)]
    shared = principal_axes(np.vstack(samples), found.global_components)
    cost = seconds, config.rounds, found.floats_up, found.floats_down
    return Learned([shared], _with_own(shared, own), setting, *cost)


def _averaged(
    method: str, setting: float, samples: Sequence[Matrix], config: Config, start: Start
) -> Learned:
    """Return an average of dictionaries."""
    learner = make_learner(config, config.n_atoms, setting)
    if method in AVERAGED:
        learner = AVERAGED[method](config.n_atoms, n_nonzero=round(setting))
    started, rounds = time.perf_counter(), config.rounds
    given: dict[str, Any] = {"seed": config.seed, "start": start, "min_support": config.min_support}
    if method == "naive":
        rounds, found = 1, naive_average(samples, learner, **given)
    else:
        given |= {"weighted": method != "gkillas", "local_steps": config.local_steps}
        found = average(samples, learner, rounds, **given)
    seconds = time.perf_counter() - started
    return Learned([found.atoms], [], setting, seconds, rounds, found.floats_up, found.floats_down)


def principal_axes(X: Matrix, W: Matrix) -> Matrix:
    """Return the principal axes of samples within the subspace of orthonormal rows.

    PerPCA determines a subspace and no basis of it; sparse codes need one. The axes follow from
    the sum over clients of the codes' products, (n_components, n_components) floats each, once.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        Samples.
    W : ndarray of shape (n_components, n_features)
        Orthonormal rows.

    Returns
    -------
    ndarray of shape (n_components, n_features)
        Orthonormal rows that span the same subspace, the most important first.
    """
    codes = X @ W.T
    axes: Matrix = np.linalg.eigh(codes.T @ codes)[1][:, ::-1].T @ W
    return axes
