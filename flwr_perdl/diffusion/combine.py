"""The combine step: what a distributed algorithm is, and what a node has heard in a round.

A `Program` is one distributed algorithm, told as adapt, message, combine (P1 eq. 31, P3
Algorithm 1). A network carries its messages: see `flwr_perdl.network`. Every part of a program's
state has a leading axis over the nodes that are hosted together: all of them in memory, some in
a worker process, one on a real node. The program need not know which.

==================================  ===================================================
paper                               here
==================================  ===================================================
psi_{k,i}, what k sends             ``Program.message(state)``
sum_{l in N_k} a_{lk} psi_{l,i}     ``Inbox.mean()``
a_{lk}                              ``Inbox.weights[k, l]``
N_k without k                       ``Inbox.links[k]``: those who were heard this round
==================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Csr = Any  # scipy.sparse.csr_array; SciPy ships no types

#: Share of non-zero weights above which the combination is a dense product.
DENSE_SHARE = 0.2

State = TypeVar("State", bound=tuple[Any, ...])


class Program(Protocol[State]):
    """One distributed algorithm, for however many nodes are hosted together.

    A state is a NamedTuple of arrays with a leading axis over the hosted nodes; its first field
    is ``nodes``, their ids. Nothing is kept outside it but parameters and the nodes' own data.
    """

    def start(self, nodes: NDArray[np.intp]) -> State:
        """Return the state of ``nodes`` before the first round."""
        ...

    def adapt(self, state: State, round_: int) -> State:
        """Do the local work before the exchange of round ``round_``, counted from 1."""
        ...

    def message(self, state: State) -> tuple[Array, ...]:
        """Return what every neighbour receives: float arrays with a leading axis over the nodes."""
        ...

    def combine(self, state: State, inbox: Inbox) -> State:
        """Take in what was heard."""
        ...

    def observe(self, state: State) -> dict[str, Array]:
        """Return what the nodes show to whoever runs the network; never raw data."""
        ...


@dataclass(frozen=True, eq=False)
class Inbox:
    """What the hosted nodes have heard in one round.

    Attributes
    ----------
    round : int
        The round, from 1.
    nodes : ndarray of shape (m,)
        Ids of the receivers: the nodes that are hosted together.
    senders : ndarray of shape (s,)
        Ids of the nodes whose messages are at hand, ascending; the receivers are among them. A
        message that came late is a sender of its own: ids may repeat.
    arrays : tuple of ndarray of shape (s, ...)
        The messages, by sender.
    weights : sparse array of shape (m, s)
        The round's combination weights, a node's own included; rows sum to one.
    links : sparse array of shape (m, s)
        One where a neighbour was heard, a node itself excluded.
    own : ndarray of shape (m,)
        Where each receiver stands among the senders.
    """

    round: int
    nodes: NDArray[np.intp]
    senders: NDArray[np.intp]
    arrays: tuple[Array, ...]
    weights: Csr
    links: Csr
    own: NDArray[np.intp]

    def mean(self, i: int = 0) -> Array:
        """Return the weighted mean of the ``i``-th array, a node's own included: (m, ...)."""
        return product(self.weights, self.arrays[i])

    def total(self, i: int = 0) -> Array:
        """Return the sum of the ``i``-th array over the neighbours heard: (m, ...)."""
        return product(self.links, self.arrays[i])

    @cached_property
    def degrees(self) -> NDArray[np.intp]:
        """How many neighbours each node has heard: (m,)."""
        degrees: NDArray[np.intp] = np.diff(self.links.indptr).astype(np.intp)
        return degrees

    def argmax(self, values: Array) -> NDArray[np.intp]:
        """Return which sender has the largest value, among a node itself and those it has heard.

        Parameters
        ----------
        values : ndarray of shape (s, q)
            Values by sender, NaN-free.

        Returns
        -------
        ndarray of shape (m, q)
            Indices into the senders; of equal values the lowest id wins.
        """
        best = np.empty((len(self.nodes), values.shape[1]), dtype=np.intp)
        for k, own in enumerate(self.own):
            heard = self.links.indices[self.links.indptr[k] : self.links.indptr[k + 1]]
            candidates = np.append(heard, own)
            candidates = candidates[np.argsort(self.senders[candidates], kind="stable")]
            best[k] = candidates[values[candidates].argmax(axis=0)]
        return best


def shown(observed: Mapping[str, Array], *names: str) -> list[Array]:
    """Return what the nodes of a network have shown under these names.

    Raises
    ------
    ValueError
        If they have not: nodes of a federation choose what they show.
    """
    missing = [name for name in names if name not in observed]
    if missing:
        raise ValueError(
            f"network must be of nodes that show what they observe, got no {missing[0]!r} "
            '(a DiffusionClient with shows="nothing" keeps it).'
        )
    return [observed[name] for name in names]


def product(weights: Csr, array: Array) -> Array:
    """Return ``weights @ array`` over the leading axis, in the array's dtype.

    Dense or sparse, whichever is faster at the weights' density.

    Parameters
    ----------
    weights : sparse array of shape (m, s)
        The weights.
    array : ndarray of shape (s, ...)
        Stacked arrays.

    Raises
    ------
    ValueError
        If the array is not of floats: the weights would all be rounded down to 0.
    """
    if array.dtype.kind != "f":
        raise ValueError(f"messages must be arrays of floats, got {array.dtype}.")
    flat = array.reshape(len(array), -1)
    matrix: Any = weights.astype(array.dtype, copy=False)
    if weights.nnz > DENSE_SHARE * weights.shape[0] * weights.shape[1]:
        matrix = matrix.toarray()
    combined: Array = matrix @ flat
    return combined.reshape(weights.shape[0], *array.shape[1:])


def hear_all(
    program: Program[State], state: State, round_: int, weights: Csr, links: Csr
) -> tuple[State, tuple[Array, ...]]:
    """Return the state after a round, and what was sent: all nodes here, every message heard.

    What a network without faults does in memory, for algorithms that need no more than that.

    Parameters
    ----------
    program : Program
        The algorithm, with the data of all nodes.
    state : NamedTuple of arrays
        All nodes' state before the round.
    round_ : int
        The round, from 1.
    weights, links : sparse array of shape (n, n)
        Combination weights, and one where k hears l.
    """
    nodes = state[0]
    adapted = program.adapt(state, round_)
    sent = program.message(adapted)
    return program.combine(adapted, Inbox(round_, nodes, nodes, sent, weights, links, nodes)), sent


def step_back(state: State, before: State, rows: NDArray[np.bool_]) -> State:
    """Return ``state`` with the given rows as they were ``before``."""
    if not rows.any():
        return state

    def chosen(new: Array, old: Array) -> Array:
        mixed = new.copy()
        mixed[rows] = old[rows]
        return mixed

    return type(state)(*(chosen(new, old) for new, old in zip(state, before, strict=True)))
