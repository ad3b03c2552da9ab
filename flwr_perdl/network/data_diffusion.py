"""Data diffusion: nodes with their own data learn one dictionary with their neighbors.

Chainais and Richard, "A diffusion strategy for distributed dictionary learning", iTWIST 2014.

==========================================  =====================================================
paper, Algorithm 1 (columns)                here (rows)
==========================================  =====================================================
data ``Y_n`` of node n (d x q_n)            ``data[n]``, (n_samples, n_features)
dictionary ``D_{n,i}`` (d x K)              ``state.dictionaries``, (m, n_atoms, n_features)
1) ``X_{n,i}``: BP, OMP, FOCUSS             ``coder``: "lasso" (eq. 4), "omp", "focuss"
2) ``psi = D + mu (Y - D X) X'``            ``update="gradient"``; or "mod", "ksvd"
``D_{i+1} = sum_l a_{l,n} psi_l``           ``Inbox.mean()``; weights ``a_{l,n}`` are the network's
eq. (5), relative degree-variance           `relative_degree_variance_weights`
observations "shared" (section 2)           ``shared`` samples per round
``d_k <- d_k / ||d_k||``                    :func:`flwr_perdl.dictionary.normalize_atoms`
==========================================  =====================================================

Shared observations are in the paper a generalization without equations. Here a node takes step 2
with its own samples and those that its neighbors have sent, as if it had observed them itself.

Deviations. The combination takes the psi of the same round (printed: of the last). MOD and K-SVD
send unit atoms. An atom to which fewer than two samples contribute is not updated, so
that no update shows a raw sample. Dead and double atoms are replaced: the paper does not do this,
and then rarely finds all atoms; see :class:`DataDiffusion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    as_array,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_list,
    check_magnitude,
    check_real,
    own_numbers,
)
from flwr_perdl.dictionary import (
    KSVDLearner,
    MODLearner,
    dictionary_distance,
    lasso,
    normalize_atoms,
    omp,
)
from flwr_perdl.dictionary.coding import focuss, nonnegative_from_gram
from flwr_perdl.dictionary.learners import atom_support
from flwr_perdl.network._replacement import (
    SLOTS,
    TIE,
    is_double,
    key_of,
    propose,
    replace,
    shares_of,
    unit_rows,
    value_of,
)
from flwr_perdl.network.combine import Inbox
from flwr_perdl.network.exchange import resolve_weights, run_program
from flwr_perdl.network.objectives import check_positive
from flwr_perdl.network.schedule import rounds_to_all, schedule_of
from flwr_perdl.random import spawn

#: A node's data: all of it, or a function of the round that returns a batch.
Data = Matrix | Callable[[int], Matrix]
#: ``coder(X, D)`` returns codes (n_samples, n_atoms).
Coder = Callable[[Matrix, Matrix], Matrix]
#: One dictionary for all, one per node (stacked, or by id), or ``start(X, rng)`` for each node.
Starts = str | Matrix | Mapping[int, Matrix] | Callable[[Matrix, np.random.Generator], Matrix]

CODERS = ("omp", "lasso", "focuss", "nonnegative")
UPDATES = ("mod", "ksvd", "gradient")
ALIGNMENTS = ("none", "assignment")
REPLACEMENTS = ("private", "samples")
NAMED_STARTS = ("samples", "common")
#: The least number of rounds between replacements: a new atom needs some to become useful.
_EVERY = 10


class DictionaryState(NamedTuple):
    """The state of the m nodes hosted here; from ``use`` on it serves the replacement of atoms.

    Attributes
    ----------
    nodes : ndarray of shape (m,)
        Their ids.
    dictionaries : ndarray of shape (m, n_atoms, n_features)
        Unit atoms; after ``adapt`` what is sent (psi).
    error : ndarray of shape (m,)
        Share of the last batch's energy that its codes do not explain.
    use, counted : ndarrays of shape (m, n_atoms) and (m,)
        An atom's share of a sample's code, mean over samples, summed over the rounds since the last
        replacement; how many these are.
    worth : ndarray of shape (m, n_atoms)
        The largest use of an atom at any node, as far as known here (see `key_of`).
    score, candidates : ndarrays of shape (m, n_slots) and (m, n_slots, n_features)
        Scores of the best candidates known here, and these, unit vectors.
    shared, psi : ndarrays of shape (m, n_shared, n_features) and (m, n_atoms, n_features)
        With ``shared``: the samples that neighbors receive in this round, zeros after fewer, and
        the updated dictionary, which is sent in the next.
    """

    nodes: NDArray[np.intp]
    dictionaries: Matrix
    error: Matrix
    use: Matrix
    counted: Matrix
    worth: Matrix
    score: Matrix
    candidates: Matrix
    shared: Matrix
    psi: Matrix


class Diffused(NamedTuple):
    """What the nodes have learned.

    Attributes
    ----------
    dictionaries : ndarray of shape (n_nodes, n_atoms, n_features)
        Every node's dictionary, unit atoms.
    error : ndarray of shape (n_nodes,)
        Share of the energy of a node's last batch that its codes do not explain.
    disagreement : float
        The largest distance of an atom from the same atom of node 0, over atoms and nodes.
    rounds : int
        Communication rounds.
    floats_sent : float
        Floats that reached a neighbor, counted once per link, all nodes and rounds.
    """

    dictionaries: Matrix
    error: Matrix
    disagreement: float
    rounds: int
    floats_sent: float


@dataclass(frozen=True)
class DataDiffusion:
    """Learn one dictionary at many nodes with their own data (Chainais and Richard, Algorithm 1).

    In every round a node codes its data with its dictionary, updates the dictionary from the codes,
    sends it to its neighbors, and takes the weighted mean of what it receives, with atoms scaled
    back to unit norm.

    **What a neighbor receives**: the updated dictionary; with ``replacement``, the usage of each
    atom (the largest over all nodes) and up to eight candidates, which nodes forward. Never codes.
    By default everything that leaves a node is made from sums over at least two of its samples; a
    malicious neighbor can compute samples from the answers to dictionaries of its choice
    (docs/security.md). Three choices do reveal samples: with ``start="samples"``, the paper's, a
    node's first dictionary is ``n_atoms`` of them, normalized; with ``replacement="samples"`` the
    worst represented ones go to everyone in the network; with ``shared`` neighbors receive them.

    Parameters
    ----------
    n_atoms : int
        Atoms of the dictionary.
    coder : str or callable, default "omp"
        "omp": orthogonal matching pursuit with ``n_nonzero`` atoms per sample; "lasso" or "focuss"
        with penalty ``alpha``; "nonnegative": nonnegative least squares (at most as many atoms as
        features); or ``coder(X, D)`` that returns codes (sparse coefficients).
    n_nonzero : int, default 3
        Atoms per sample of "omp".
    alpha : float, default 0.1
        Penalty of "lasso", in units of the data, and of "focuss", in units of the data to the power
        of 1.5.
    update : {"mod", "ksvd", "gradient"}, default "mod"
        Least squares, approximate K-SVD, or the paper's gradient steps.
    step : float or None, default None
        Learning rate of "gradient"; None is one over the largest eigenvalue of ``C.T @ C``.
    nonnegative : bool, default False
        Set negative entries of updated atoms to zero.
    alignment : {"none", "assignment"}, default "none"
        How a neighbor's atoms are combined with a node's own. "none": atom j with atom j, for equal
        or random starts: the nodes agree before they have learned. "assignment": matched one to one
        up to sign, for nodes that have already learned, each with its own order of atoms.
    replacement : {"private", "samples", None}, default "private"
        What replaces an atom that every node uses less than half as much as an average atom, or
        that nearly duplicates another one. "samples": the worst represented samples. "private": the
        leading direction of half of the samples that use another, badly fitting atom, as if it
        stood for two. None with ``alignment="assignment"``, where atom j is not the same atom
        everywhere.
    shared : int, default 0
        Samples that a node sends its neighbors in every round, in turn; all of its data if it has
        no more. A node codes what it receives with its own dictionary, and updates this from all
        samples together. In the first round only samples are sent.

    Notes
    -----
    *Replacement without a coordinator.* Every ten rounds, or the network's diameter if that is
    more, each node computes the usage of its atoms (the mean share ``|c_j| / sum |c|`` of a
    sample's code; 0 if an earlier atom is nearly equal) and its candidates, with scores relative to
    its other residuals so that a noisy node's do not always win. These travel with the dictionaries
    for as many rounds as the diameter, and every node keeps the largest values. Then all nodes
    replace the same atoms, least used first, by the same candidates in the same round. If messages
    are lost, some nodes may miss a replacement, which the combination then averages in.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import DataDiffusion, Topology
    >>> rng = np.random.default_rng(0)
    >>> data = [rng.standard_normal((30, 5)) for node in range(4)]
    >>> learned = DataDiffusion(n_atoms=3, n_nonzero=1).fit(data, Topology.ring(4), n_rounds=5)
    >>> learned.dictionaries.shape
    (4, 3, 5)
    """

    n_atoms: int
    coder: str | Coder = "omp"
    n_nonzero: int = 3
    alpha: float = 0.1
    update: str = "mod"
    step: float | None = None
    nonnegative: bool = False
    alignment: str = "none"
    replacement: str | None = "private"
    shared: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        check_count("n_atoms", self.n_atoms, 1)
        if not callable(self.coder):
            check_choice("coder", self.coder, CODERS)
        check_count("n_nonzero", self.n_nonzero, 1)
        check_real("alpha", self.alpha, 0, LARGE, open_low=True)
        check_choice("update", self.update, UPDATES)
        if self.step is not None:
            check_real("step", self.step, 0, LARGE, open_low=True)
        check_flag("nonnegative", self.nonnegative)
        check_choice("alignment", self.alignment, ALIGNMENTS)
        if self.replacement is not None:
            check_choice("replacement", self.replacement, REPLACEMENTS)
            if self.alignment == "assignment":
                raise ValueError(
                    "replacement must be None with alignment='assignment', "
                    f"got {self.replacement!r}."
                )
        check_count("shared", self.shared)

    def fit(
        self,
        data: Sequence[Data],
        network: Any,
        n_rounds: int = 100,
        *,
        start: Starts = "common",
        seed: int = 0,
        callback: Callable[[int, DictionaryState], Any] | None = None,
    ) -> Diffused:
        """Learn over a network.

        Parameters
        ----------
        data : sequence of ndarray of shape (n_samples, n_features), or of callables
            Every node's data, of any number of samples; or a function of the round (from 1) that
            returns a new batch, the same for every call with that round.
        network : Topology, CombinationMatrix or InMemoryNetwork
            Which nodes are neighbors: connected, or without any link, for local training. A
            topology has Metropolis weights in memory, without faults.
        n_rounds : int, default 100
            Communication rounds.
        start : str, ndarray, mapping or callable, default "common"
            "common": random atoms from the seed, the same at all nodes. "samples": a random subset
            of each node's own data (the paper's). Or an array (n_atoms, n_features), or (n_nodes,
            n_atoms, n_features); a mapping from node to its array; or ``start(X, rng)``, called
            with each node's own data.
        seed : int, default 0
            Seed of all random draws.
        callback : callable, optional
            Called with round and state after every round, in memory only.

        Returns
        -------
        Diffused
        """
        check_count("n_rounds", n_rounds)
        network = resolve_weights(network)
        for matrix in schedule_of(network).matrices:
            if not matrix.row_stochastic:
                raise ValueError(f"network must have row-stochastic weights, got {matrix}.")
        agreement, n_nodes = rounds_to_all(network), network.topology.n_nodes
        if len(check_list("data", data)) != n_nodes:
            raise ValueError(f"data must be of {n_nodes} nodes, got {len(data)}.")
        program = self.program(dict(enumerate(data)), agreement=agreement, start=start, seed=seed)
        run = run_program(program, network, n_rounds, callback)
        dictionaries = run.observed["dictionaries"]
        apart = self._disagreement(dictionaries)
        costs = run.rounds, run.floats_sent
        return Diffused(dictionaries, run.observed["error"], apart, *costs)

    def program(
        self, data: Mapping[int, Data], *, agreement: int, start: Starts = "common", seed: int = 0
    ) -> DictionaryProgram:
        """Return the `Program` that a network runs.

        Parameters
        ----------
        data : mapping of int to ndarray or callable
            Data of the nodes hosted here.
        agreement : int
            Rounds that a value takes to reach every node: the diameter.
        start, seed
            As in `fit`.

        Returns
        -------
        Program
        """
        return DictionaryProgram(self, data, agreement, start, seed)

    def code(self, X: Matrix, D: Matrix) -> Matrix:
        """Return the codes of ``X``.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
        D : ndarray of shape (n_atoms, n_features)

        Returns
        -------
        ndarray of shape (n_samples, n_atoms)
        """
        if callable(self.coder):
            return self.coder(X, D)
        if self.coder == "omp":
            return omp(X, D, self.n_nonzero)
        if self.coder == "lasso":
            return lasso(X, D, self.alpha).codes
        if self.coder == "focuss":
            return focuss(X, D, self.alpha, tol=1e-3)
        return _nonnegative_codes(X, D)

    def adapted(self, X: Matrix, C: Matrix, D: Matrix) -> Matrix:
        """Return the dictionary that a node sends (psi), from its data, codes and dictionary."""
        if self.update == "gradient":
            psi = _gradient_step(X, C, D, self.step)
        else:
            learner = MODLearner if self.update == "mod" else KSVDLearner
            psi = learner(self.n_atoms).update(X, C, D)
        return _clip(psi, D) if self.nonnegative else psi

    def _disagreement(self, dictionaries: Matrix) -> float:
        first = dictionaries[0]
        if self.alignment == "assignment":
            return max(dictionary_distance(D, first) for D in dictionaries)
        apart = np.minimum(
            np.linalg.norm(dictionaries - first, axis=2),
            np.linalg.norm(dictionaries + first, axis=2),
        )
        return float(apart.max())


class DictionaryProgram:
    """`DataDiffusion` as a `flwr_perdl.network.Program`: see :meth:`DataDiffusion.program`."""

    def __init__(
        self,
        learner: DataDiffusion,
        data: Mapping[int, Data],
        agreement: int,
        start: Starts,
        seed: int,
    ) -> None:
        if isinstance(start, str):
            check_choice("start", start, NAMED_STARTS)
        elif not (callable(start) or isinstance(start, Mapping)):
            start = as_array("start", start)
            if start.ndim not in (2, 3):
                raise ValueError(f"start must have two or three axes, got shape {start.shape}.")
        self.learner = learner
        self.data = {
            node: own if callable(own) else self._check(node, own) for node, own in data.items()
        }
        self.agreement = max(check_count("agreement", agreement), 1)
        self.every = max(_EVERY, self.agreement)
        self.first = start
        self.seed = check_count("seed", seed)

    def start(self, nodes: NDArray[np.intp]) -> DictionaryState:
        """Return the state before the first round."""
        batches = self._batches(nodes, 1)
        D = np.stack([self._first(*own) for own in zip(nodes.tolist(), batches, strict=True)])
        d = D.shape[2]
        m, atoms = D.shape[:2] if self.learner.replacement is not None else (len(D), 0)
        slots = min(SLOTS, atoms)
        return DictionaryState(
            nodes,
            D,
            error=np.ones(m),
            use=np.zeros((m, atoms)),
            counted=np.zeros(m),
            worth=np.zeros((m, atoms)),
            score=np.zeros((m, slots)),
            candidates=np.zeros((m, slots, d), dtype=D.dtype),
            shared=np.zeros((m, self.learner.shared, d), dtype=D.dtype),
            psi=D if self.learner.shared else D[:, :0],
        )

    def adapt(self, state: DictionaryState, round_: int) -> DictionaryState:
        """Code and update at every node, or with shared observations choose which to send."""
        batches = self._batches(state.nodes, round_, state.dictionaries.shape[2])
        if not self.learner.shared:
            return self._learn(state, batches, round_)
        shared = np.zeros_like(state.shared)
        for own, X in zip(shared, batches, strict=True):
            n = min(len(own), len(X))
            own[:n] = X[((round_ - 1) * n + np.arange(n)) % max(len(X), 1)]
        return state._replace(dictionaries=state.psi, shared=shared)

    def _learn(self, state: DictionaryState, data: list[Matrix], round_: int) -> DictionaryState:
        """Return the state to send in a round; every ``every`` rounds, propose replacements."""
        learner, copies = self.learner, {name: a.copy() for name, a in state._asdict().items()}
        after = DictionaryState(**copies)
        for i, (node, X) in enumerate(zip(map(int, state.nodes), data, strict=True)):
            D = state.dictionaries[i]
            if not len(X):
                continue
            C = learner.code(X, D)
            energy = float(np.sum(X * X))
            after.error[i] = float(np.sum((X - C @ D) ** 2)) / energy if energy else 0.0
            after.dictionaries[i] = learner.adapted(X, C, D)
            if learner.replacement is None:
                continue
            after.use[i] += shares_of(C)
            after.counted[i] += 1
            epoch, within = divmod(round_, self.every)
            if within == 0:
                worth = np.where(is_double(D), 0, after.use[i] / after.counted[i])
                score, after.candidates[i] = propose(
                    learner.replacement, X, C, D, state.score.shape[1], learner.nonnegative
                )
                after.worth[i] = key_of(epoch, worth)
                after.score[i] = key_of(epoch, score * (1 - TIE * node))
        return after

    def message(self, state: DictionaryState) -> tuple[Matrix, ...]:
        """Return the dictionary, and what is known about atoms to replace."""
        shared = (state.shared,) if self.learner.shared else ()
        if self.learner.replacement is None:
            return (state.dictionaries, *shared)
        return (state.dictionaries, state.worth, state.score, state.candidates, *shared)

    def combine(self, state: DictionaryState, inbox: Inbox) -> DictionaryState:
        """Average the dictionaries; with shared observations, update for the next round."""
        state = self._average(state, inbox)
        if not self.learner.shared:
            return state
        batches = self._batches(state.nodes, inbox.round, state.dictionaries.shape[2])
        for k, (own, X) in enumerate(zip(inbox.own, batches, strict=True)):
            others = (inbox.arrays[-1][j] for j, _ in inbox.neighbor_terms(k) if j != own)
            batches[k] = np.concatenate([X, *(Y[Y.any(axis=1)] for Y in others)])
        after = self._learn(state, batches, inbox.round + 1)
        return after._replace(dictionaries=state.dictionaries, psi=after.dictionaries)

    def _average(self, state: DictionaryState, inbox: Inbox) -> DictionaryState:
        """Average the dictionaries; replace atoms when all nodes know which."""
        sent = state.dictionaries
        mean = inbox.mean() if self.learner.alignment == "none" else self._aligned_mean(inbox)
        combined = np.stack(
            [normalize_atoms(*pair) for pair in zip(mean, unit_rows(sent), strict=True)]
        )
        state = state._replace(dictionaries=combined)
        news = inbox.round % self.every
        idle = inbox.round < self.every or news >= self.agreement
        if self.learner.replacement is None or idle:
            return state
        most, best = inbox.argmax(inbox.arrays[1]), inbox.argmax(inbox.arrays[2])
        state = state._replace(
            worth=np.take_along_axis(inbox.arrays[1], most, axis=0),
            score=np.take_along_axis(inbox.arrays[2], best, axis=0),
            candidates=inbox.arrays[3][best, np.arange(best.shape[1])],
        )
        return self._replace_atoms(state, inbox.round) if news == self.agreement - 1 else state

    def observe(self, state: DictionaryState) -> dict[str, Matrix]:
        """Return dictionaries and errors."""
        return {"dictionaries": state.dictionaries, "error": state.error}

    def _replace_atoms(self, state: DictionaryState, round_: int) -> DictionaryState:
        """Put the candidates in the place of the atoms that no node finds worth keeping."""
        D, epoch = state.dictionaries.copy(), round_ // self.every
        for i in range(len(D)):
            worth, score = value_of(epoch, state.worth[i]), value_of(epoch, state.score[i])
            if np.isnan(worth).any():  # not all values have arrived
                continue
            D[i] = replace(D[i], worth, score, state.candidates[i])
        return state._replace(dictionaries=D, use=0 * state.use, counted=0 * state.counted)

    def _aligned_mean(self, inbox: Inbox) -> Matrix:
        sent = inbox.arrays[0]
        mean = np.zeros((len(inbox.nodes), *sent.shape[1:]), dtype=sent.dtype)
        for k, own in enumerate(inbox.own):
            for j, weight in inbox.neighbor_terms(k):
                other = sent[j] if j == own else _align(sent[j], sent[own])
                mean[k] += sent.dtype.type(weight) * other
        return mean

    def _batches(self, nodes: NDArray[np.intp], round_: int, d: int | None = None) -> list[Matrix]:
        """Return the nodes' data of a round, of ``d`` columns, by default as many as the first."""
        batches = []
        for node in nodes.tolist():
            own = self.data[node]
            X = self._check(node, own(round_)) if callable(own) else own
            d = X.shape[1] if d is None else d
            if X.shape[1] != d:
                raise ValueError(f"data of node {node} must have {d} columns, got shape {X.shape}.")
            batches.append(X)
        return batches

    def _check(self, node: int, own: Matrix) -> Matrix:
        """Return a node's data, checked."""
        name = f"data of node {node}"
        X = check_magnitude(name, check_array(name, own))
        if self.learner.nonnegative and self.learner.coder == "nonnegative":
            check_positive(name, X)
        return X

    def _first(self, node: int, X: Matrix) -> Matrix:
        """Return a node's first dictionary."""
        given, r = self.first, self.learner.n_atoms
        if callable(given):
            D = given(X, spawn(self.seed, node))
        elif isinstance(given, Mapping):
            if node not in given:
                raise ValueError(f"start must have an array for node {node}, got none.")
            D = given[node]
        elif not isinstance(given, str):
            D = given if np.ndim(given) == 2 else given[node]
        else:
            D = normalize_atoms(spawn(self.seed).standard_normal((r, X.shape[1]))).astype(X.dtype)
            if given == "samples":
                chosen = X[spawn(self.seed, node).permutation(len(X))[:r]]
                D[: len(chosen)] = normalize_atoms(chosen, D[: len(chosen)])
        D = check_array(f"start of node {node}", D, columns=X.shape[1])
        if len(D) != r:
            raise ValueError(f"start of node {node} must have {r} rows, got {len(D)}.")
        return normalize_atoms(D).astype(X.dtype)


def _align(D: Matrix, reference: Matrix) -> Matrix:
    """Return atoms in the order, by the largest sum of cosines, and with the signs of others."""
    cosines = np.abs(unit_rows(reference) @ unit_rows(D).T)
    D = D[linear_sum_assignment(cosines, maximize=True)[1]]
    return np.where(np.sum(D * reference, axis=1, keepdims=True) < 0, -D, D)


def _nonnegative_codes(X: Matrix, D: Matrix) -> Matrix:
    """Non-negative codes; atoms that are nearly equal get a ridge of the size of rounding."""
    if len(D) > D.shape[1]:
        raise ValueError(
            f"n_atoms must be at most {D.shape[1]}, the number of features, with "
            f"coder='nonnegative', got {len(D)}."
        )
    gram = D @ D.T
    ridge = D.dtype.type(len(D) * 1e3 * np.finfo(D.dtype).eps)
    return nonnegative_from_gram(X @ D.T, gram + ridge * np.eye(len(D), dtype=D.dtype))


def _clip(D: Matrix, fallback: Matrix) -> Matrix:
    """Set negative entries to zero; an atom without positive entries stays as it was."""
    clipped = np.maximum(D, 0)
    return np.where(clipped.any(axis=1, keepdims=True), clipped, fallback)


def _gradient_step(X: Matrix, C: Matrix, D: Matrix, step: float | None) -> Matrix:
    """Step 2 of Algorithm 1, for the atoms to which at least two samples contribute."""
    kept = np.where(atom_support(C) >= 2 * (1 - 1e-9), C, 0).astype(C.dtype)
    if step is None:
        curvature = float(np.linalg.norm(kept.T @ kept, 2))
        step = 1 / curvature if curvature else 0.0
    moved: Matrix = D + D.dtype.type(step) * (kept.T @ X - (kept.T @ C) @ D)
    return moved
