r"""Learning over distributed models: Sections III-F, III-G and Algorithm 1.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. Every agent
keeps some atoms of one large dictionary. For each sample of a stream the agents find its dual
variables together (`flwr_perdl.network.inference`); these are the gradient of the loss at the
residual (55), and all that an agent needs to update its own atoms.

============================================ =====================================================
paper (columns)                              here (rows)
============================================ =====================================================
sub-dictionary ``W_k`` (M, N_k)              ``model.dictionaries[k]``, (n_atoms, n_features): the
                                             most N_k of any agent, and zeros after an agent's own
``N_k``; ``h_{y_k}``                         ``n_atoms_per_agent[k]``; ``objective.at(k)``
``nu_t^o``, ``y_{k,t}^o`` (42)               ``Inference.nu[k]``, ``Inference.codes[k]``
update (56), then (50) or (52)               :func:`update_dictionary`
``mu_w``                                     ``step``, falling as ``t**-decay``
Algorithm 1                                  `ModelDiffusion.partial_fit` in memory,
                                             :class:`Learning` on any network
"add nodes to network" (Algorithm 2)         `ModelDiffusion.grow`, then another topology
============================================ =====================================================

Deviations. The duals of a batch travel together; a batch of B samples takes one step, the sum
of the samples' steps, where the paper takes B steps. The default inference is the consensus ADMM
(the paper's is ``method="atc"``).

**What each party receives.** What `flwr_perdl.network.inference` says; in the beginning, when
the atoms explain nothing, an agent's neighbors see the sample itself. Who runs the network sees
estimates of the duals' errors, and the dictionary only with ``show``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.checks import (
    FLOATS,
    LARGE,
    Matrix,
    brief_repr,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_list,
    check_real,
    own_numbers,
)
from flwr_perdl.network._minimize import correlate
from flwr_perdl.network.combine import Inbox, step_back
from flwr_perdl.network.exchange import resolve_weights, run_program
from flwr_perdl.network.inference import (
    DUAL_METHODS,
    DualInference,
    DualState,
    Inference,
    check_carrier,
    exact_dual,
    infer,
)
from flwr_perdl.network.objectives import Objective, check_agents, check_field, check_positive
from flwr_perdl.network.schedule import links_of
from flwr_perdl.network.topology import MOST_NODES, CombinationMatrix, Topology
from flwr_perdl.random import spawn

#: The method that needs all atoms in one place.
EXACT = "exact"
#: Relative error of the dual variables that the default number of iterations aims at: 40 dB.
_ACCURACY = 1e-2
#: The most numbers of an atom, over all agents, that are drawn.
_MOST_NUMBERS = 2**31


class Model(NamedTuple):
    """What the agents have learned so far.

    Attributes
    ----------
    dictionaries : ndarray of shape (n_agents, n_atoms, n_features)
        Every agent's atoms, of norm at most 1; agent k keeps the k-th to itself. Agents with fewer
        atoms than others have zeros at the end.
    n_samples : int
        Samples seen.
    n_updates : int
        Updates of the dictionary: batches seen.
    rounds : int
        Communication rounds.
    residual : float
        The largest of the agents' own estimates of their duals' relative error, over the batches
        of the last call; 0 before the first.
    """

    dictionaries: Matrix
    n_samples: int = 0
    n_updates: int = 0
    rounds: int = 0
    residual: float = 0.0


@dataclass(frozen=True)
class ModelDiffusion:
    r"""Online dictionary learning over distributed models (Algorithm 1).

    Parameters
    ----------
    objective : Objective
        A row of Table I, with ``gamma`` and ``delta`` the same for all agents, or one each.
    n_atoms_per_agent : int, or sequence of int, default 1
        Number of atoms of each agent, N_k.
    step : float, default 0.1
        The learning rate ``mu_w`` of (56), per sample.
    decay : float, default 0.0
        The learning rate of the t-th batch is ``step / t**decay``; 0: constant, for streams that
        change.
    batch_size : int, default 10
        Samples whose duals travel together.
    method : str, default "admm"
        How the duals are found: a method of `infer`; or ``"exact"``: in one place by `exact_dual`,
        the limit of the others but ATC, in memory only.
    n_iterations : int, optional
        Communication rounds per batch; by default as many as the method needs for a relative error
        of ``tolerance``, or of 1e-2 (40 dB), on the given topology, and at most 100,000.
    tolerance : float, default 0.0
        In memory, where all agents' residuals are known, a batch ends when they are within this; 0:
        never, as on a network.
    informed : sequence of int, optional
        The agents N_I that see the samples; all by default.
    compress : bool, optional
        Whether to iterate in fewer coordinates in memory, see `infer`.
    seed : int, default 0
        Seed of the agents' first atoms.
    options : mapping of str to float, optional
        Options of the method, see `infer`: ``step`` is the paper's mu. For ``"exact"``:
        ``tolerance``, see `exact_dual`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import ModelDiffusion, SparseSVD, Topology
    >>> X = np.random.default_rng(0).standard_normal((20, 5))
    >>> objective = SparseSVD(gamma=0.1, delta=0.1)
    >>> learner = ModelDiffusion(objective, n_atoms_per_agent=2, n_iterations=20)
    >>> model = learner.fit(X, Topology.ring(4))
    >>> np.shape(model.dictionaries)
    (4, 2, 5)
    """

    objective: Objective
    n_atoms_per_agent: int | Sequence[int] = 1
    step: float = 0.1
    decay: float = 0.0
    batch_size: int = 10
    method: str = "admm"
    n_iterations: int | None = None
    tolerance: float = 0.0
    informed: Sequence[int] | None = None
    compress: bool | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the arguments."""
        own_numbers(self)
        check_kind("objective", self.objective, Objective, "an Objective")
        check_field(self, "n_atoms_per_agent", partial(check_count, "n_atoms_per_agent", low=1))
        check_real("step", self.step, 0, LARGE)
        check_real("decay", self.decay, 0, LARGE)
        check_count("batch_size", self.batch_size, 1)
        check_choice("method", self.method, (*DUAL_METHODS, EXACT))
        if self.n_iterations is not None:
            check_count("n_iterations", self.n_iterations, 1)
        check_real("tolerance", self.tolerance, 0)
        if self.informed is not None:
            check_list("informed", self.informed)
        if self.compress is not None:
            check_flag("compress", self.compress)
        check_kind("options", self.options, Mapping, "a mapping")
        check_count("seed", self.seed)

    def start(self, n_agents: int, n_features: int, dtype: Any = np.float64) -> Model:
        """Return random atoms of norm 1, which agents draw on their own.

        Parameters
        ----------
        n_agents, n_features : int
            Numbers of agents and features.
        dtype : dtype, default float64
            float64 or float32.

        Returns
        -------
        Model
        """
        agents = range(check_count("n_agents", n_agents, 1, MOST_NODES))
        check_count("n_features", n_features, 1, _MOST_NUMBERS // n_agents)
        kind = _float("dtype", dtype)
        return Model(self._first_atoms(agents, n_features, n_agents).astype(kind))

    def grow(self, model: Model, n_agents: int) -> Model:
        """Return the model with ``n_agents`` more agents, whose atoms are random.

        The others keep their atoms and numbers. A learner with per-agent weights or numbers of
        atoms must have those of the new agents too.

        Parameters
        ----------
        model : Model
        n_agents : int
            Number of new agents.

        Returns
        -------
        Model
        """
        have, n_atoms, n_features = _atoms(model).shape
        total = have + check_count("n_agents", n_agents, 1, MOST_NODES)
        most = max(self._counts(total)[:have])
        if n_atoms != most:
            raise ValueError(f"model must have {most} atoms per agent, got {n_atoms}.")
        new = self._first_atoms(range(have, total), n_features, total)
        old = np.pad(model.dictionaries, ((0, 0), (0, new.shape[1] - n_atoms), (0, 0)))
        return model._replace(dictionaries=np.concatenate([old, new.astype(old.dtype)]))

    def fit(self, X: Matrix, network: Any, n_rounds: int | None = None) -> Model:
        """Learn from random atoms: `start`, then `partial_fit`.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
            Samples.
        network : Topology, CombinationMatrix or InMemoryNetwork
            See `partial_fit`.
        n_rounds : int, optional
            See `partial_fit`.

        Returns
        -------
        Model
        """
        X, network = check_array("X", X), resolve_weights(network)
        first = self.start(network.topology.n_nodes, X.shape[1], X.dtype)
        return self.partial_fit(first, X, network, n_rounds)

    def partial_fit(
        self, model: Model, X: Matrix, network: Any, n_rounds: int | None = None
    ) -> Model:
        """Continue learning: every sample is seen once, in order.

        Parameters
        ----------
        model : Model
            The model to continue from; not modified.
        X : ndarray of shape (n_samples, n_features)
            The next samples, of the model's dtype.
        network : Topology, CombinationMatrix or InMemoryNetwork
            Which agents are neighbors: connected, undirected. A topology has Metropolis
            weights, without faults. On an InMemoryNetwork the agents run `Learning`.
        n_rounds : int, optional
            Communication rounds at most; by default as many as the samples take. A batch is learned
            only if its `n_iterations` fit.

        Returns
        -------
        Model

        Raises
        ------
        ValueError
            If shapes do not fit, the network is not as described, or the objective is nonnegative
            and no value of X is positive.
        """
        X = check_array("X", X, columns=_atoms(model).shape[2])
        if n_rounds is not None:
            check_count("n_rounds", n_rounds)
        if self.objective.nonnegative:
            check_positive("X", X)
        network = self._carrier(model, network)
        if not isinstance(network, CombinationMatrix):
            return self._on_network(model, X, network, n_rounds)
        W, given = model.dictionaries.copy(), self._options_for(model, X, network)
        rounds, worst, t, seen = 0, 0.0, model.n_updates, 0
        for at in range(0, len(X), self.batch_size):
            if n_rounds is not None and rounds + given.get("n_rounds", 0) > n_rounds:
                break
            batch = X[at : at + self.batch_size]
            found = self._infer(W, batch, network, given)
            t, seen = t + 1, seen + len(batch)  # the first step is step / 1**decay
            W = self._update_atoms(W, found.nu, np.stack(found.codes), t)
            rounds += found.rounds
            worst = max(worst, float(found.residual.max(initial=0)))
        return Model(W, model.n_samples + seen, t, model.rounds + rounds, worst)

    def _on_network(self, model: Model, X: Matrix, network: Any, n_rounds: int | None) -> Model:
        program = self.program(X, links_of(network), model=model, show=True)
        check_carrier(network, program.inference)
        most = program.n_rounds if n_rounds is None else min(n_rounds, program.n_rounds)
        run = run_program(program, network, most)
        n_batches = run.rounds // program.n_iterations
        return Model(
            run.observed["dictionary"],
            model.n_samples + min(len(X), n_batches * self.batch_size),
            model.n_updates + n_batches,
            model.rounds + run.rounds,
            float(run.observed["residual"].max(initial=0)) if n_batches else 0.0,
        )

    def infer(self, model: Model, X: Matrix, network: Any) -> Inference:
        """Find the duals and codes of samples as in learning, without learning from them.

        Parameters
        ----------
        model : Model
        X : ndarray of shape (n_samples, n_features)
            Samples.
        network : Topology, CombinationMatrix or InMemoryNetwork
            See `partial_fit`.

        Returns
        -------
        Inference
            Its ``nu`` is large: (n_agents, n_samples, n_features).
        """
        X = check_array("X", X, columns=_atoms(model).shape[2])
        network = self._carrier(model, network)
        found = self._infer(model.dictionaries, X, network, self._options_for(model, X, network))
        if isinstance(self.n_atoms_per_agent, int):
            return found
        own = tuple(C[:, :n] for C, n in zip(found.codes, self.n_atoms_per_agent, strict=True))
        return found._replace(codes=own)

    def program(
        self, X: Matrix | Mapping[int, Matrix], topology: Topology, **options: Any
    ) -> Learning:
        """Return the learner as a `Program`, for any network.

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)
            Samples.
        topology : Topology
            Which agents are neighbors.
        **options
            See `Learning`.

        Returns
        -------
        Program
        """
        return Learning(self, X, topology, **options)

    def _update_atoms(self, W: Matrix, nu: Matrix, codes: Matrix, t: int) -> Matrix:
        """Return the atoms after the update of the t-th batch."""
        return update_dictionary(self.objective, W, nu, codes, self.step / t**self.decay)

    def _counts(self, n_agents: int) -> tuple[int, ...]:
        """Return every agent's number of atoms."""
        n = self.n_atoms_per_agent
        check_agents(self, n_agents, "n_atoms_per_agent")
        return (n,) * n_agents if isinstance(n, int) else tuple(n)

    def _first_atoms(self, agents: Sequence[int], n_features: int, n_agents: int) -> Matrix:
        counts = self._counts(n_agents)
        atoms = np.zeros((len(agents), max(counts), n_features))
        for i, k in enumerate(agents):
            drawn = spawn(self.seed, k).standard_normal((counts[k], n_features))
            atoms[i, : counts[k]] = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
        return np.abs(atoms) if self.objective.nonnegative else atoms

    def _carrier(self, model: Model, network: Any) -> Any:
        """Return what carries the messages, checked."""
        network = resolve_weights(network)
        agents, nodes = len(model.dictionaries), network.topology.n_nodes
        if agents != nodes:
            raise ValueError(f"network must have {agents} nodes, one per agent, got {nodes}.")
        self._counts(agents)
        if self.method == EXACT and not isinstance(network, CombinationMatrix):
            raise ValueError("network must be in memory with method='exact', got one of messages.")
        return network

    def _options_for(self, model: Model, X: Matrix, network: Any) -> dict[str, Any]:
        """Return what all batches have in common, checked: the arguments of `infer`."""
        exact = self.method == EXACT
        kind, options = DUAL_METHODS["admm" if exact else self.method], dict(self.options)
        atoms = list(model.dictionaries)
        probe = kind(
            self.objective, links_of(network), atoms, X, self.informed, **({} if exact else options)
        )
        if exact:
            return {}
        # The penalty depends on the graph's spectrum: it is found once, not for every batch.
        if hasattr(probe, "strength"):
            options["penalty"] = probe.strength
        return {
            "method": self.method,
            "n_rounds": self.n_iterations or probe.rounds(self.tolerance or _ACCURACY),
            "tolerance": self.tolerance,
            "informed": self.informed,
            "compress": self.compress,
            **options,
        }

    def _infer(self, W: Matrix, X: Matrix, network: Any, given: Mapping[str, Any]) -> Inference:
        if self.method != EXACT:
            return infer(self.objective, X, list(W), network, **given)
        exact = exact_dual(self.objective, X, list(W), **self.options)
        nu = np.broadcast_to(exact.nu, (len(W), *X.shape))
        error = np.broadcast_to(exact.error, (len(W), len(X)))
        return Inference(exact.codes, nu, 0, error, True)


def _atoms(model: Model) -> Matrix:
    """Return a model's dictionaries, checked."""
    check_kind("model", model, Model, "a Model")
    return check_array("model.dictionaries", model.dictionaries, ndim=3, min_rows=1)


def _float(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        kind: np.dtype[Any] | None = np.dtype(dtype)
    except (TypeError, ValueError):
        kind = None
    if kind is None or kind not in FLOATS:
        raise ValueError(f"{name} must be float64 or float32, got {brief_repr(dtype)}.")
    return kind


def update_dictionary(
    objective: Objective, dictionaries: Matrix, nu: Matrix, codes: Matrix, step: float
) -> Matrix:
    """Return the atoms after a proximal gradient step (56) and the projection (50) or (52).

    Parameters
    ----------
    objective : Objective
        h_W and the set that atoms must be in.
    dictionaries : ndarray of shape (m, n_atoms, n_features)
        Agents' atoms.
    nu, codes : ndarrays of shape (m, n_samples, n_features) and (m, n_samples, n_atoms)
        Their estimates of the samples' dual variables, and codes.
    step : float
        ``mu_w`` per sample: the proximal point is taken with ``n_samples`` times that.
    """
    moved = dictionaries + step * np.matmul(codes.swapaxes(1, 2), nu)
    return objective.project_dictionary(objective.prox_dictionary(moved, step * nu.shape[1]))


class Learning:
    """Algorithm 1 as a `Program`: the agents infer, then update, batch after batch.

    Every batch takes `n_iterations` rounds. The round determines the batch: an agent that was
    asleep continues with the others' batch, and does not learn from what it has missed.

    Parameters
    ----------
    learner : ModelDiffusion
        The options. ``tolerance`` and ``compress`` have no effect here.
    X : ndarray of shape (n_samples, n_features), or mapping of int to such
        The stream; in a mapping, as the informed agents that are hosted here see it.
    topology : Topology
        Which agents are neighbors.
    model : Model, optional
        The model to continue from; by default each agent draws its own atoms. Only the dictionaries
        of hosted agents are read.
    shape : tuple of int, optional
        ``(n_samples, n_features)``; needed where X is a mapping and may be empty.
    dtype : data-type, optional
        float64 or float32: the dtype in which all agents of the network compute, since a message of
        another dtype is left out. By default that of X and of the model; float64 if neither is
        given, so that a host without either must say float32 if X is float32 elsewhere.
    show : bool, default False
        Whether `observe` shows the dictionaries to whoever runs the network.

    Attributes
    ----------
    n_iterations, n_rounds : int
        Communication rounds per batch, and in all.
    """

    def __init__(
        self,
        learner: ModelDiffusion,
        X: Matrix | Mapping[int, Matrix],
        topology: Topology,
        *,
        model: Model | None = None,
        shape: tuple[int, int] | None = None,
        dtype: Any = None,
        show: bool = False,
    ) -> None:
        check_choice("method", learner.method, DUAL_METHODS)
        streams = X if isinstance(X, Mapping) else dict.fromkeys(range(topology.n_nodes), X)
        self.streams = {k: check_array("X", stream, floor=0.8) for k, stream in streams.items()}
        for stream in self.streams.values() if learner.objective.nonnegative else ():
            check_positive("X", stream)
        shapes = {stream.shape for stream in self.streams.values()} | ({shape} if shape else set())
        if len(shapes) != 1:
            raise ValueError(f"X must be one stream of a known shape, got {sorted(shapes)}.")
        self.learner, self.model, self.show = learner, model, show
        self.n_samples, self.n_features = map(int, shapes.pop())
        dtypes = {stream.dtype for stream in self.streams.values()}
        dtypes |= set() if model is None else {np.dtype(model.dictionaries.dtype)}
        dtypes |= set() if dtype is None else {_float("dtype", dtype)}
        if len(dtypes) > 1:
            raise ValueError(
                f"X must be of one dtype, that of model and dtype, got {sorted(map(str, dtypes))}."
            )
        self.dtype = dtypes.pop() if dtypes else np.dtype(np.float64)
        n_atoms = max(learner._counts(topology.n_nodes))
        blank = np.zeros((n_atoms, self.n_features), dtype=self.dtype)
        given = learner.objective, topology, {0: blank}, blank[:1], learner.informed
        self.inference: DualInference = DUAL_METHODS[learner.method](*given, **learner.options)
        accuracy = learner.tolerance or _ACCURACY
        self.n_iterations = learner.n_iterations or self.inference.rounds(accuracy)
        self.n_batches = -(-self.n_samples // learner.batch_size)
        self.n_rounds = self.n_batches * self.n_iterations

    def start(self, nodes: NDArray[np.intp]) -> DualState:
        """Return the state before the first round."""
        if self.model is not None:
            atoms = self.model.dictionaries[nodes]
        else:
            n_agents = self.inference.topology.n_nodes
            atoms = self.learner._first_atoms(nodes.tolist(), self.n_features, n_agents)
        return self._begin(nodes, atoms.astype(self.dtype), 0)

    def adapt(self, state: DualState, round_: int) -> DualState:
        """Begin the round's batch where it is a new one, and do the inference's local work."""
        batch, within = self._place(round_)
        if batch >= self.n_batches:
            return state
        new = state.batch != batch + 1
        if new.any():
            begun = self._begin(state.nodes, state.atoms, batch)
            begun = begun._replace(batch=np.full_like(state.batch, batch + 1))
            state = step_back(begun, state, ~new)
        return self.inference.adapt(state, within)

    def message(self, state: DualState) -> tuple[Array, ...]:
        """Return the inference's message."""
        return self.inference.message(state)

    def combine(self, state: DualState, inbox: Inbox) -> DualState:
        """Take in what was received; at the end of a batch, update the atoms (56)."""
        batch, within = self._place(inbox.round)
        if batch >= self.n_batches:
            return state
        state = self.inference.combine(state, replace(inbox, round=within))
        if within < self.n_iterations:
            return state
        count = len(self._rows(batch))
        codes = self.learner.objective.at(state.nodes).code(correlate(state.nu, state.atoms))
        t = batch + 1 + (self.model.n_updates if self.model else 0)
        atoms = self.learner._update_atoms(state.atoms, state.nu[:, :count], codes[:, :count], t)
        return state._replace(atoms=atoms, codes=codes)

    def observe(self, state: DualState) -> dict[str, Array]:
        """Return the batch and the residuals, and with ``show`` the dictionaries."""
        seen: dict[str, Array] = {"batch": state.batch, "residual": state.residual}
        return {**seen, "dictionary": state.atoms} if self.show else seen

    def _place(self, round_: int) -> tuple[int, int]:
        """Return which batch a round belongs to, from 0, and which of its rounds it is, from 1."""
        batch, before = divmod(round_ - 1, self.n_iterations)
        return batch, before + 1

    def _rows(self, batch: int) -> range:
        size = self.learner.batch_size
        return range(batch * size, min((batch + 1) * size, self.n_samples))

    def _begin(self, nodes: NDArray[np.intp], atoms: Matrix, batch: int) -> DualState:
        """Return the inference's start on a batch; a short last one is filled up with zeros."""
        X = np.zeros((self.learner.batch_size, self.n_features), dtype=self.dtype)
        informed = set(self.inference.informed or ())
        seen = [k for k in nodes.tolist() if k in informed]
        unseen = [k for k in seen if k not in self.streams]
        if unseen:
            raise ValueError(f"X must have the stream of informed agent {unseen[0]}.")
        if seen:
            rows = self._rows(batch)
            X[: len(rows)] = self.streams[seen[0]][rows.start : rows.stop]
        return self.inference.begin(nodes, atoms, X)
