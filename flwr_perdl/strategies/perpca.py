"""PerPCA: components that all clients share, and each client's own (Shi and Kontar, 2022).

What P0 (Liang et al., NeurIPS 2023, B.1, Fig. 6 and Table 1) compares PerMA with; see
`flwr_perdl.dictionary.perpca` for the maths and the deviations.

What each party receives:

- *The server*, in round one: the principal directions of every client's samples, as many as it will
  have components, without those that too few samples make up. Later: per client the shared
  components after its step (a zero row for one that too few samples make up). In every round:
  numbers of samples and components, mean errors, and whether the client had lost its state. Never:
  samples, codes, or, after round one, a client's own components.
- *A client*: the shared components, the step, the seed and the options; nothing of any other
  client.
- *Evaluations* return mean errors only.

The clients are made with `PerPCAClient`, which says what leaves them.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Unpack

import numpy as np

from flwr_perdl.clients.perpca import COMPONENTS, STEP_LENGTH
from flwr_perdl.core.checks import Matrix, check_count, check_real
from flwr_perdl.dictionary.aggregation import aggregate_atoms
from flwr_perdl.dictionary.perpca import STEP, next_step, shared_start
from flwr_perdl.protocol.combine import sizes_of
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import ANEW, Reply
from flwr_perdl.protocol.request import Protocol, Replies, Request, State
from flwr_perdl.strategies._dictionaries import (
    DictionaryStrategy,
    alike,
    are_orthonormal,
    check_shape,
    given_atoms,
)


class PerPCA(DictionaryStrategy):
    """Learn orthonormal components that all clients share, and others that are each client's own.

    Round one asks for the clients' principal directions, every further one for a step;
    ``num_rounds`` of `start` counts both. Started with ``[shared components]`` as initial arrays it
    skips round one. After round one alone (``num_rounds=1``: the authors' two-shot form) the shared
    components are what the clients' principal directions have in common, and each client's own the
    principal directions of what these leave of its samples. A client has ``learner.n_atoms``
    components in all; its learner does nothing but code in evaluations
    (``OrthogonalLearner(n, threshold=0.0)`` projects).

    Parameters
    ----------
    n_global : int
        Number of shared components.
    step : float, default 1.0
        The first step, as a multiple of ``1 / ||X_i W'||_2^2`` at every client, with its components
        ``W``; halved whenever the clients' mean error has risen.
    max_atoms : int, optional
        Maximum number of components in a client's first reply; by default ten times the median
        over the clients, and at most 4,096. A client with more is left out of round one and named.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule; in round one, if half of the clients or more have fewer
        components than ``n_global``. (Fewer such clients, and those that differ from most in
        features or whose components are not orthonormal, are left out and noted.)

    Notes
    -----
    Result: ``strategy.start(...).arrays.to_numpy_ndarrays()`` is ``[shared components]`` of shape
    (n_global, n_features), orthonormal rows. Floats per client: n_atoms x n_features up once; then
    n_global x n_features down and as many up.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import PerPCAClient, client_app
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerPCA
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return PerPCAClient(own, OrthogonalLearner(3), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = PerPCA(n_global=2).start(grid, num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()[0].shape
    (2, 6)
    """

    flags = (ANEW, "orthogonal")

    def __init__(
        self,
        n_global: int,
        *,
        step: float = STEP,
        max_atoms: int | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(max_atoms, **options)
        self.n_global = check_count("n_global", n_global, 1)
        self.step = check_real("step", step, 0, open_low=True)
        if not isfinite(self.step):
            raise ValueError(f"step must be finite, got {self.step}.")

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """One request per communication round."""
        if state is None and initial:
            state = self._state(self._given(initial))
        if state is None:
            replies = yield Request(COMPONENTS, check=self.check_dictionary, max_weight=None)
            state = self._state(self._start(replies))
        while True:
            U, step, errors = state["global_components"], float(state["step"]), state["errors"]
            replies = yield Request(
                COMPONENTS,
                [U],
                {STEP_LENGTH: step},
                state,
                partial(_check_step, U.shape),
                max_weight=None,
            )
            stack = np.stack([reply.arrays[0] for reply in replies.values()])
            before = [reply.metrics["mse"] for reply in replies.values()]
            errors = np.append(errors, np.average(before, weights=sizes_of(replies)))[-2:]
            state = {
                "global_components": aggregate_atoms(stack, U, orthogonal=True).global_atoms,
                "step": np.array(next_step(step, errors.tolist())),
                "errors": errors,
            }

    def _state(self, U: Matrix) -> State:
        return {"global_components": U, "step": np.array(self.step), "errors": np.zeros(0)}

    def _given(self, initial: list[Matrix]) -> Matrix:
        U = given_atoms(initial)
        if len(U) != self.n_global or not are_orthonormal(U):
            raise ValueError(
                f"initial_arrays must be {self.n_global} orthonormal components, got {len(U)} rows."
            )
        return U

    def _start(self, replies: Replies) -> Matrix:
        """Return what the clients' principal directions have in common."""
        replies = self.with_enough(replies, self.n_global, "components")
        replies = alike(replies, lambda reply: reply.arrays[0].shape[1], "{} features".format)
        replies = self.within_bounds(replies)
        replies = orthonormal(replies)
        directions = [reply.arrays[0] for reply in replies.values() if len(reply.arrays[0])]
        if not directions:
            raise ValueError(
                "min_support must leave components to start from, got none from any client: the "
                "clients have too few samples."
            )
        return shared_start(directions, self.n_global)


def orthonormal(replies: Replies) -> Replies:
    """Return the replies whose components are orthonormal; the others are left out.

    A client that sent one direction many times would decide the start alone.
    """
    odd = []
    for who, reply in replies.items():
        rows = reply.arrays[0]
        if len(rows) > rows.shape[1] or not are_orthonormal(rows, tol=1e-3):
            odd.append(who)
    return replies.leave_out(dict.fromkeys(odd, "its components are not orthonormal"))


def _check_step(shape: tuple[int, int], reply: Reply) -> None:
    """Accept one matrix of this shape, and the error that the step's length depends on."""
    check_shape(shape, reply)
    if not np.isfinite(reply.metrics.get("mse", np.nan)):
        raise ValueError("metrics must have a finite mse")
