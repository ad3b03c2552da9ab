"""FedMD and FedX + clustering: clustered mixed regression.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022.
`flwr_perdl.regression.two_phases` has the algorithm; its modules ``fedmd.py`` and ``fedx.py``
follow the paper's listings. This module sends it as messages, one request per communication round.

What each party receives:

- *The server*: in round one, each client's curvature bound and the mean squares of its features; in
  Phase 1, its part of the products with the residual moment (a d x w matrix, a sum over pairs of
  points), and the estimates of clients with enough points; in Phase 2, its cluster, loss and
  update of one model. In every round: numbers of samples. No message contains a sample or response
  as such, but for a client with one point the mean squares, the loss and the update reveal both:
  clients with fewer than ``min_support`` points don't train. Clients reject models that
  are too long, and send zeros instead of a row that shows a point.
- *A client*: the models of all clusters; the step size, which depends on one client's curvature;
  from the second product on, the basis that the sums over all clients span. In the paper's variant,
  every anchor's last estimate, without names.
- *Evaluations*: the cluster and mean losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from logging import WARNING
from math import prod
from typing import ClassVar, Unpack

import numpy as np

from flwr_perdl.clients.mixed_regression import (
    CLUSTER_COEFFICIENTS,
    MIXED_REGRESSION,
    OPTION,
    RegressionClient,
)
from flwr_perdl.core.aggregate import OUTLIER, RULES
from flwr_perdl.core.checks import Matrix, check_array, check_choice, check_robust
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import (
    NO_MODEL,
    OLD,
    SECURE,
    ServerOptions,
    spell_fields,
)
from flwr_perdl.protocol.records import CLUSTER, Replies, Reply
from flwr_perdl.protocol.report import Models
from flwr_perdl.protocol.request import Protocol, Request, State
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import Refinement, TwoPhase, two_phases
from flwr_perdl.regression.phases import (
    DESCENT,
    REFINEMENT,
    Answers,
    Ask,
    MomentDescent,
    Stage,
    reject_unused,
)
from flwr_perdl.strategies._own_models import EndsWithModels

_COUNT = "rounds"

_PHASE_1 = spell_fields("phase_1", MomentDescent)
_PHASE_2 = spell_fields("phase_2", Refinement)


class _MixedRegression(EndsWithModels):
    """What the three strategies share: `two_phases` as a protocol."""

    protocol_name = after_protocol = MIXED_REGRESSION
    unsupported: ClassVar[Mapping[str, str]] = {
        "secure": SECURE,
        "privacy": "the models begin with estimates of single clients",
        "reuse_last_reply": OLD,
        "missing": "a linear model has no prediction without all features",
        "private": "a linear model is one array",
        "parts": NO_MODEL,
    }
    _called_as: ClassVar = {"two_phase": "*"}
    labels = (CLUSTER,)
    _reads = Models(names=(CLUSTER_COEFFICIENTS,), stack=0)
    _inside: ClassVar[Mapping[str, str]] = {**_PHASE_1, **_PHASE_2}

    #: Whether the run is over where Phase 2 would begin.
    _phase_1_only = False
    #: Whether models may be given as initial arrays.
    _takes_models = False

    def __init__(self, two_phase: TwoPhase, options: ServerOptions) -> None:
        super().__init__(**options)
        self.two_phase, how = two_phase, two_phase.phase_1
        descent = 1 + how.n_iterations * (how.n_products + 1)
        # One-shot: each client's estimate is the second answer.
        self._least_rounds = {"random": 1, "one-shot": 2, "fedmd": descent}[two_phase.start]

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Ask, and go on from the answers; one request per communication round."""
        settings, options, count = self.two_phase, self._options, 0
        if state is None:
            begin = settings.begin(self._given(initial))
        else:
            begin, count = Stage.unpack(state), int(state[_COUNT])
        run = two_phases(settings, begin)
        ask = next(run)
        if not ask.state.centers.size and options.num_clients is not None:
            self._check_clusters(options.num_clients, f"num_clients={options.num_clients}")
        # FedX stays in this loop: the driver ends it, and the next request's model is the result.
        while not (self._phase_1_only and ask.step == "update"):
            rng, before = spawn(options.seed, SERVER, count + 1), ask.state
            replies = yield _request(ask, count)
            count += 1
            answers = _collect(replies)
            if not before.centers.size:
                answered = replies if settings.start == "one-shot" else self._running().roster.names
                self._check_clusters(len(answered), f"{len(answered)} clients")
            ask = run.send((answers, rng))
            outliers = {int(partition): share for partition, share in ask.state.outliers}
            replies.note(RULES[str(settings.robust)].effect, outliers)
            if before.step == "describe":
                self._note_steep(replies, ask.state)
        return [ask.state.centers]

    def _note_steep(self, replies: Replies, state: Stage) -> None:
        """Say in report and log which clients the models are learned without."""
        if len(state.steep):
            replies.note(OUTLIER, dict.fromkeys(state.steep.tolist(), 1.0))
            log(
                WARNING,
                "Left out of the models: clients [%s], whose curvature is more than ten times the "
                "median and would decide the step size. With a given step_size they take part.",
                ", ".join(self.client_names.get(p, str(p)) for p in state.steep.tolist()),
            )

    def _given(self, initial: list[Matrix]) -> Matrix | None:
        """Return the models to start from, None if there are none."""
        if not initial:
            return None
        if not self.two_phase.phase_2.check_every:
            reject_unused(self.two_phase, "from given models with check_every=0", "phase_1")
        if len(initial) > self._takes_models:
            wanted = "[models]" if self._takes_models else "left out"
            raise ValueError(f"initial_arrays must be {wanted}, got {len(initial)} arrays.")
        k = self.two_phase.n_clusters
        rows = None if k == "auto" else int(k)
        name = f"initial_arrays with n_clusters={k}"
        return check_array(name, initial[0], min_rows=1, rows=rows)

    def _check_clusters(self, n_clients: int, found: str) -> None:
        """Reject more clusters than there are clients."""
        k = self.two_phase.n_clusters
        if k != "auto" and int(k) > n_clients:
            raise ValueError(
                f"n_clusters must be at most the number of clients, got {k} with {found}."
            )


class FedMD(_MixedRegression):
    """Phase 1: coarse models of all clusters from any start (federated moment descent).

    The run ends by itself; the models are its result.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    phase_1 : optional
        Options of Phase 1: that of `TwoPhase.paper`.
    max_clusters : int, default 8
        See `flwr_perdl.regression.TwoPhase`.
    robust : bool or str, default False
        Aggregation rule against malicious (Byzantine) clients: True is "filtered" (recommended),
        False "mean"; "clip" bounds the influence of a client.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others.

    Examples
    --------
    >>> from flwr_perdl.strategies import FedMD
    >>> strategy = FedMD(3, num_clients=200)
    """

    _phase_1_only = True
    _inside = _PHASE_1

    def __init__(
        self,
        n_clusters: int | str = "auto",
        *,
        phase_1: MomentDescent = DESCENT,
        max_clusters: int = 8,
        robust: str | bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        rule = check_robust(robust, ("mean", "filtered", "clip"))
        unchecked = Refinement(check_every=0)
        super().__init__(TwoPhase(n_clusters, phase_1, unchecked, max_clusters, rule), options)


class FedX(_MixedRegression):
    """Phase 2: clients find their cluster while the clusters' models are refined.

    With ``[models]`` as initial arrays the run refines these (one model: FedAvg or FedProx; the
    true models: the oracle). Otherwise ``start`` says where the models come from.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    start : {"fedmd", "random"}, default "fedmd"
        "fedmd": Phase 1 first, in the same run. "random": draws from ``N(0, I) / sqrt(d)``; without
        checks of the models this is IFCA.
    phase_1 : optional
        How models are found, at the start and where the checks find too few: that of
        `TwoPhase.paper`.
    phase_2 : Refinement, optional
        How models are refined, such as ``Refinement(local="fedprox")``.
    max_clusters : int, default 8
        See `flwr_perdl.regression.TwoPhase`.
    robust : bool or str, default False
        Aggregation rule against malicious (Byzantine) clients: True is "filtered" (recommended),
        False "mean"; for other rules see `flwr_perdl.regression.TwoPhase`.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others.

    Notes
    -----
    Result: ``strategy.start(...).arrays.to_numpy_ndarrays()`` is ``[models (k, d)]``; a client's
    cluster is known from its evaluations only (``history``).

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import RegressionClient, client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FedX
    >>> slopes = np.array([[2.0, 0.0], [-2.0, 1.0]])
    >>> X = np.random.default_rng(0).standard_normal((20, 8, 2))
    >>> def make_client(context):
    ...     i = context.node_config["partition-id"]
    ...     return RegressionClient(X[i], X[i] @ slopes[i % 2], context)
    >>> grid = InProcessGrid(client_app(make_client), 20)
    >>> models = FedX(2).start(grid, num_rounds=40).arrays.to_numpy_ndarrays()[0]
    >>> sorted((models.round(3) + 0.0).tolist())
    [[-2.0, 1.0], [2.0, 0.0]]
    """

    _takes_models = True

    def __init__(
        self,
        n_clusters: int | str = "auto",
        *,
        start: str = "fedmd",
        phase_1: MomentDescent = DESCENT,
        phase_2: Refinement = REFINEMENT,
        max_clusters: int = 8,
        robust: str | bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        check_choice("start", start, ("fedmd", "random"))
        how = TwoPhase(n_clusters, phase_1, phase_2, max_clusters, robust, start)
        super().__init__(how, options)


class OneShotClustering(_MixedRegression):
    """Cluster the clients once, by their local least-squares estimates (baseline).

    Parameters
    ----------
    n_clusters : int
        Number of models k.
    phase_2 : Refinement, optional
        How models are refined.
    robust : bool or str, default False
        As in `FedX`.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others.

    Examples
    --------
    >>> from flwr_perdl.strategies import OneShotClustering
    >>> strategy = OneShotClustering(3, num_clients=200)
    """

    _inside = _PHASE_2

    def __init__(
        self,
        n_clusters: int,
        *,
        phase_2: Refinement = REFINEMENT,
        robust: str | bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        phases = TwoPhase(n_clusters, phase_2=phase_2, robust=robust, start="one-shot")
        super().__init__(phases, options)


def _request(ask: Ask, count: int) -> Request:
    """Return what is asked as a message."""
    models = ask.state.centers
    return Request(
        ask.step,
        ask.arrays,
        {OPTION + name: value for name, value in ask.options.items()},
        {**ask.state.pack(), _COUNT: np.array(count)},
        partial(_check, ask),
        per_client=(lambda partition: ask.to(partition).arrays) if ask.per_client else None,
        model=[models] if models.size else (),
        max_values=None if ask.shape is None else prod(ask.shape),
        max_weight=None,
    )


def _check(ask: Ask, reply: Reply) -> None:
    """Accept the one array that is asked for, of one of the models."""
    shapes, wanted = [array.shape for array in reply.arrays], ask.shape
    if wanted is None and [len(shape) for shape in shapes] == [1] and shapes[0][0] > 1:
        wanted = shapes[0]
    if shapes != [wanted]:
        raise ValueError(
            f"wrong shapes: [{ask.shape or '(n_features + 1,)'}] is asked for, got {shapes}: "
            f"{RegressionClient.only}"
        )
    k = len(ask.state.centers)  # an update is (loss, cluster, change): `fedx.update`
    if ask.step == "update" and reply.arrays[0][0, 1] not in range(k):
        raise ValueError(f"the answer names cluster {reply.arrays[0][0, 1]:g} of {k}")


def _collect(replies: Replies) -> Answers:
    """Return the answers of the width that most have: in round one no other is known."""
    same = replies.keep_majority(lambda r: r.arrays[0].shape[-1] - 1, "{} features".format)
    stack = np.stack([reply.arrays[0] for reply in same.values()])
    return Answers(np.array(list(same), dtype=np.intp), same.sizes, stack)
