"""Distributed algorithms as programs, and the messages that a node receives.

A `Program` is a distributed algorithm in the form adapt, message, combine (Chen, Towfic, Sayed
2015, eq. 31; Chainais and Richard 2014, Algorithm 1). A network delivers its messages: see
`flwr_perdl.network`. Every part of a program's state has a leading axis over the nodes that are
hosted together: all of them in memory, one on a real node.

==================================  ===================================================
paper                               here
==================================  ===================================================
psi_{k,i}, what k sends             ``Program.message(state)``
sum_{l in N_k} a_{lk} psi_{l,i}     ``Inbox.mean()``
a_{lk}                              ``Inbox.weights[k, l]``
N_k without k                       ``Inbox.links[k]``: those whose messages were received
==================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core import html
from flwr_perdl.core.arrays import Array
from flwr_perdl.core.checks import FLOATS, brief_repr, check_list, check_real
from flwr_perdl.core.models import DTYPES
from flwr_perdl.core.repr import short_repr
from flwr_perdl.network.topology import Csr

#: Share of non-zero weights above which the combination is a dense product.
DENSE_SHARE = 0.2
#: Numbers in a row from which on compiled loops are faster than calls of NumPy and SciPy.
LONG = 128

StateT = TypeVar("StateT", bound=tuple[Any, ...])


class Program(Protocol[StateT]):
    """A distributed algorithm, for any number of nodes hosted together.

    A state is a NamedTuple of arrays with a leading axis over the hosted nodes; its first field is
    ``nodes``, their ids. It has everything but parameters and the nodes' own data.

    An optional method, ``report(state)``, returns what the operator learns after every round: a
    dict of float arrays of shape (m,), NaN where a node has nothing to report.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Program, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> program: Program = Averaging(np.arange(4.0)[:, None])
    >>> InMemoryNetwork(Topology.ring(4)).run(program, 30).state.estimate.ravel().round(6)
    array([1.5, 1.5, 1.5, 1.5])
    """

    def start(self, nodes: NDArray[np.intp]) -> StateT:
        """Return the state of ``nodes`` before the first round.

        Parameters
        ----------
        nodes : ndarray of shape (m,)
            Ids of the hosted nodes.

        Returns
        -------
        NamedTuple
        """
        ...

    def adapt(self, state: StateT, round_: int) -> StateT:
        """Do the local work before the exchange of a round.

        Parameters
        ----------
        state : NamedTuple
        round_ : int
            The round, from 1.

        Returns
        -------
        NamedTuple
        """
        ...

    def message(self, state: StateT) -> tuple[Array, ...]:
        """Return what every neighbor receives.

        Parameters
        ----------
        state : NamedTuple

        Returns
        -------
        tuple of ndarray
            Floats or integers, with a leading axis over the nodes.
        """
        ...

    def combine(self, state: StateT, inbox: Inbox) -> StateT:
        """Combine what the nodes received.

        Parameters
        ----------
        state : NamedTuple
        inbox : Inbox
            The messages of the round.

        Returns
        -------
        NamedTuple
        """
        ...

    def observe(self, state: StateT) -> dict[str, Array]:
        """Return what the nodes show to the operator of the network; never raw data.

        Parameters
        ----------
        state : NamedTuple

        Returns
        -------
        dict of str to ndarray
            With a leading axis over the nodes.
        """
        ...


@dataclass(frozen=True, eq=False)
class Inbox:
    """The messages that the hosted nodes have received in one round.

    Attributes
    ----------
    round : int
        The round, from 1.
    nodes : ndarray of shape (m,)
        Ids of the receivers: the nodes that are hosted together.
    senders, arrays : ndarray of shape (s,), tuple of ndarray of shape (s, ...)
        Ids of the senders, ascending, the receivers among them, and the messages: of each array a
        stack. Of several rounds, if some are late, there is an entry each: ids may repeat.
    weights : sparse array of shape (m, s)
        The round's combination weights, a node's own included; rows sum to one.
    links : sparse array of shape (m, s)
        One where a neighbor's message was received, a node itself excluded.
    own : ndarray of shape (m,)
        Where each receiver stands among the senders.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_array
    >>> from flwr_perdl.network import Inbox
    >>> own, links = np.array([0]), csr_array([[0.0, 1.0]])
    >>> weights, received = csr_array([[0.5, 0.5]]), np.array([[1.0], [3.0]])
    >>> inbox = Inbox(1, own, np.array([0, 1]), (received,), weights, links, own)
    >>> inbox.mean()
    array([[2.]])
    """

    round: int
    nodes: NDArray[np.intp]
    senders: NDArray[np.intp]
    arrays: tuple[Array, ...]
    weights: Csr
    links: Csr
    own: NDArray[np.intp]

    def mean(self, i: int = 0) -> Array:
        """Return the weighted mean of an array over a node and its neighbors.

        Parameters
        ----------
        i : int, default 0
            Which array of the messages.

        Returns
        -------
        ndarray of shape (m, ...)
        """
        rows = self.arrays[i]
        if rows.dtype not in FLOATS:  # half floats are averaged in float32, integers in float64
            rows = rows.astype(np.float32 if rows.dtype.kind == "f" else np.float64)
        return product(self.weights, rows)

    @cached_property
    def _by_sender(self) -> Csr:
        """The weights, every row's in the order of its senders."""
        w = self.weights
        rows = np.repeat(np.arange(w.shape[0]), np.diff(w.indptr))
        order = np.lexsort((self.senders[w.indices], rows))
        return sparse.csr_array((w.data[order], w.indices[order], w.indptr), shape=w.shape)

    def total(self, i: int = 0) -> Array:
        """Return the sum of an array over the neighbors' messages.

        Parameters
        ----------
        i : int, default 0
            Which array of the messages.

        Returns
        -------
        ndarray of shape (m, ...)
        """
        return product(self.links, self.arrays[i])

    @cached_property
    def degrees(self) -> NDArray[np.intp]:
        """How many neighbors' messages each node has received: (m,)."""
        degrees: NDArray[np.intp] = np.diff(self.links.indptr).astype(np.intp)
        return degrees

    def argmax(self, values: Array) -> NDArray[np.intp]:
        """Return which sender has the largest value, among a node and the neighbors received.

        ``values`` (s, q) are NaN-free. Of equal values the lowest id wins: (m, q) indices into the
        senders.
        """
        best = np.empty((len(self.nodes), values.shape[1]), dtype=np.intp)
        for k, own in enumerate(self.own):
            received = self.links.indices[self.links.indptr[k] : self.links.indptr[k + 1]]
            candidates = np.append(received, own)
            candidates = candidates[np.argsort(self.senders[candidates], kind="stable")]
            best[k] = candidates[values[candidates].argmax(axis=0)]
        return best

    def neighbor_terms(self, k: int) -> Iterable[tuple[int, np.floating[Any]]]:
        """Return place and weight of each message that receiver k combines, by sender's id.

        A mean that adds the messages in this order has the same bits wherever the nodes are hosted;
        a matrix product sums in an order that depends on how many are hosted together.
        """
        weights = self._by_sender
        row = slice(weights.indptr[k], weights.indptr[k + 1])
        return zip(weights.indices[row], weights.data[row], strict=True)


def product(weights: Csr, array: Array) -> Array:
    """Return ``weights @ array``, (m, s) by (s, ...), in the array's dtype, the fastest way.

    Over long rows it is compiled, which takes half the time of SciPy's product.
    """
    # The weights would be rounded to integers.
    if array.dtype.kind != "f":
        raise ValueError(f"messages must be arrays of floats, got {array.dtype}.")
    flat = array.reshape(len(array), -1)
    combined: Array
    if not is_sparse(weights):
        combined = weights.astype(array.dtype, copy=False).toarray() @ flat
    elif is_long(flat):
        from flwr_perdl.network import _kernels  # compiled: Numba is imported where it is needed

        combined = np.empty((weights.shape[0], flat.shape[1]), dtype=array.dtype)
        first, senders = (a.astype(np.intp, copy=False) for a in (weights.indptr, weights.indices))
        values = weights.data.astype(array.dtype, copy=False)
        _kernels.weighted_sums(first, senders, values, np.ascontiguousarray(flat), combined)
    else:
        combined = weights.astype(array.dtype, copy=False) @ flat
    return combined.reshape(weights.shape[0], *array.shape[1:])


def is_sparse(weights: Csr) -> bool:
    """Whether a sparse product is faster than a dense one."""
    return bool(weights.nnz <= DENSE_SHARE * weights.shape[0] * weights.shape[1])


def is_long(rows: Array) -> bool:
    """Whether compiled loops over rows are faster; they know single and double precision."""
    return rows.shape[-1] >= LONG and rows.dtype in (np.float32, np.float64)


def begin_round(
    program: Program[StateT], state: StateT, round_: int
) -> tuple[StateT, tuple[Array, ...]]:
    """Do a round's work before the exchange; return the state after it, and the messages."""
    n = len(state[0])
    adapted: StateT = check_state("adapt", program.adapt(state, round_), n)
    return adapted, check_message(program.message(adapted), n)


def run_round(
    program: Program[StateT], state: StateT, round_: int, weights: Csr, links: Csr
) -> StateT:
    """Run a round of all nodes in this process in which every message is received."""
    nodes = np.arange(links.shape[0])
    adapted, message = begin_round(program, state, round_)
    inbox = Inbox(round_, nodes, nodes, message, weights, links, nodes)
    combined: StateT = check_state("combine", program.combine(adapted, inbox), len(nodes))
    return combined


class Run(NamedTuple):
    """The result of a distributed algorithm.

    Attributes
    ----------
    state : NamedTuple of arrays, or None
        The program's state of all nodes, in order; None if the nodes do not show it.
    observed : dict of str to ndarray
        What the nodes showed at the end (`Program.observe`), in order, shape (n_nodes, ...).
    rounds : int
        Communication rounds.
    floats_sent : float
        Total number of values that reached a neighbor, counted once per link.
    traffic : sparse array of shape (n_nodes, n_nodes)
        Number of values that node k received from node j.
    dropped_messages : dict of int to int
        Node -> number of rounds in which its message was left out: for NaN or infinite values, or
        because a receiver reported that it rejected it (`Program`).
    alive : ndarray of shape (n_nodes,)
        Which nodes took part in the last round.
    curves : dict of str to ndarray of shape (rounds, n_nodes)
        The nodes' reports after every round (``report`` of a `Program`), NaN without one.
    dropped_by : dict of int to list of int
        Node -> the receivers that reported it; a malicious one may report anybody.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(4)).run(Averaging(np.arange(4.0)[:, None]), 30)
    >>> run.rounds, run.floats_sent
    (30, 240.0)
    """

    state: Any
    observed: dict[str, Array]
    rounds: int
    floats_sent: float
    traffic: Csr
    dropped_messages: dict[int, int]
    alive: NDArray[np.bool_]
    curves: dict[str, Array]
    dropped_by: dict[int, list[int]]

    def __repr__(self) -> str:
        """Return the fields in one line; what is large is only described."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        """Return the fields as a table, for a notebook."""
        return html.record(self)


def reported(
    program: Program[StateT], state: StateT, taking_part: NDArray[np.bool_] | None = None
) -> dict[str, Array]:
    """Return what the hosted nodes report after a round, NaN for those that took no part in it."""
    report = getattr(program, "report", None)
    rows: dict[str, Array] = {} if report is None else report(state)
    if taking_part is None or taking_part.all():
        return rows
    return {name: np.where(taking_part, values, np.nan) for name, values in rows.items()}


def check_message(message: Any, n_nodes: int) -> tuple[Array, ...]:
    """Return what a program's ``message`` returned, or say what is wrong with it."""
    if not isinstance(message, tuple | list) or not message:
        raise ValueError(
            f"message must return a tuple of arrays, (array,) for one, got {brief_repr(message)}."
        )
    _check_rows("message", message, n_nodes)
    for position, array in enumerate(message):
        if array.dtype not in DTYPES or array.dtype.kind == "b":
            raise ValueError(
                f"message must return arrays of floats or integers, got {array.dtype} at position "
                f"{position}."
            )
    return tuple(message)


def check_state(method: str, state: Any, n_nodes: int) -> Any:
    """Return what a program's ``method`` returned as its state, or say what is wrong with it."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields"):
        raise ValueError(f"{method} must return a NamedTuple of arrays, got {brief_repr(state)}.")
    _check_rows(method, state, n_nodes)
    return state


def _check_rows(method: str, arrays: Sequence[Any], n_nodes: int) -> None:
    """Raise a ValueError unless these are arrays with a row per node."""
    for position, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise ValueError(
                f"{method} must return arrays of numbers, got {brief_repr(array)} at position "
                f"{position}."
            )
        if array.shape[:1] != (n_nodes,):
            raise ValueError(
                f"{method} must return arrays whose first axis has the {n_nodes} nodes, got shape "
                f"{array.shape} at position {position}."
            )


def step_back(state: StateT, before: StateT, rows: NDArray[np.bool_]) -> StateT:
    """Return ``state`` with the given rows as they were ``before``."""
    if not rows.any():
        return state

    def chosen(new: Array, old: Array) -> Array:
        mixed = new.copy()
        mixed[rows] = old[rows]
        return mixed

    return type(state)(*(chosen(new, old) for new, old in zip(state, before, strict=True)))


class MeanState(NamedTuple):
    """State of `Averaging`: ids (m,), what each node contributes and its estimate, (m, ...)."""

    nodes: NDArray[np.intp]
    own: Array
    estimate: Array


class Averaging:
    """Every node finds the mean of all nodes' values: scalar diffusion (68), as a `Program`.

    The combination matrix must be doubly stochastic, which preserves the mean. A node's first
    message is its own value: its neighbors learn it.

    Parameters
    ----------
    values : sequence of ndarray, or mapping of int to ndarray
        Each node's own, all of one shape; only those of hosted nodes are read.
    step : float, optional
        ``mu_g`` of (68): the estimate starts at 0 and moves by this share toward the node's own
        value in every round; it converges only near the mean. By default it starts at the node's
        own value and is averaged plainly, which converges to the mean.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Averaging, Topology
    >>> from flwr_perdl.network import InMemoryNetwork
    >>> run = InMemoryNetwork(Topology.ring(3)).run(Averaging(np.array([0.0, 1.0, 5.0])), 30)
    >>> run.observed["estimate"].round(6)
    array([2., 2., 2.])
    """

    def __init__(
        self, values: Array | Sequence[Array] | Mapping[int, Array], step: float | None = None
    ) -> None:
        self.values = values if isinstance(values, Mapping) else check_list("values", values)
        self.step = step if step is None else check_real("step", step, 0, 1, open_low=True)

    def start(self, nodes: NDArray[np.intp]) -> MeanState:
        """Return the state before the first round."""
        values = self.values
        if not isinstance(values, Mapping) and not len(values) > max(nodes):
            raise ValueError(f"values must be one per node, got {len(values)}.")
        own = np.stack([values[k] for k in nodes])
        if own.dtype not in FLOATS:
            raise ValueError(f"values must be float64 or float32, got {own.dtype}.")
        return MeanState(nodes, own, own if self.step is None else np.zeros_like(own))

    def adapt(self, state: MeanState, round_: int) -> MeanState:
        """Move the estimate towards the node's own value (68), or keep it."""
        if self.step is None:
            return state
        estimate = state.estimate - self.step * (state.estimate - state.own)
        return state._replace(estimate=estimate)

    def message(self, state: MeanState) -> tuple[Array, ...]:
        """Return the estimate."""
        return (state.estimate,)

    def combine(self, state: MeanState, inbox: Inbox) -> MeanState:
        """Average over the neighborhood."""
        return state._replace(estimate=inbox.mean())

    def observe(self, state: MeanState) -> dict[str, Array]:
        """Return the estimates."""
        return {"estimate": state.estimate}
