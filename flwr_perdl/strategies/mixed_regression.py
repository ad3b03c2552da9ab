"""FedMD and FedX + clustering: clustered mixed regression (P2, Phase 1 and Phase 2).

P2 = Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022.
What is asked, and what follows from the answers, is `flwr_perdl.regression.TwoPhase`, which has the
table from the paper's symbols to ours; here it is only put into messages, one request per
communication round, all anchors' work in one message.

What each party receives:

- *The server*: in round one every client's bound on its curvature and its features' mean squares;
  in Phase 1 each client's part of the residual moment's products (a d x w matrix that sums over
  its pairs of points) and the estimates of the clients with enough points; in Phase 2 each
  client's cluster, loss and update of one model (with ``local="exact"``: its Gram matrix and
  moment, if the client allows it with ``allow_exact``). In every round: numbers of samples. No
  message holds a sample or a response as it is, but of a client with one point the mean squares,
  the loss and the update give both: clients with fewer than ``min_support`` points do not train.
  Clients refuse models above ``max_norm``. Among points of very different lengths, an update can
  still show the longest one (docs/security.md).
- *A client*: the models of all clusters; the step size, which one client's curvature decides; from
  the second product on the basis that the sums over all clients span. With ``n_iterations`` above
  1 every client receives every anchor's last estimate, without names, and perturbed where
  ``perturbation`` says so; without ``n_anchors`` every client with enough points is an anchor.
- *Evaluations* return the cluster and mean losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from logging import WARNING
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any, Unpack, cast

import numpy as np
from flwr.common import log

from flwr_perdl._checks import Matrix, check_array, check_choice, check_count, check_flag
from flwr_perdl._random import SERVER, spawn
from flwr_perdl._records import LARGEST_INT, Reply
from flwr_perdl._robust import DEEDS
from flwr_perdl.clients.regression import OPTION
from flwr_perdl.regression import Answers, Ask, State, TwoPhase
from flwr_perdl.regression.answers import DESCRIBE
from flwr_perdl.strategies import _protocol
from flwr_perdl.strategies._conversation import ServerOptions
from flwr_perdl.strategies._protocol import Protocol, Replies, Request
from flwr_perdl.strategies._strategy import ProtocolStrategy

_COUNT = "rounds"
#: What a client of another kind is told.
_LINEAR = (
    ": this strategy clusters linear models, which RegressionClient fits, with a feature map and a "
    "loss of one's own where wanted; it takes no models of other kinds"
)
STARTS = ("fedmd", "random")


class RegressionOptions(ServerOptions, total=False):
    """`ServerOptions` and the fields of `flwr_perdl.regression.TwoPhase`, all by keyword.

    ``robust=True`` stands for "filtered", the rule to take where clients may lie, and False for
    "mean". `PerMA` has the same argument.
    """

    max_clusters: int
    estimate: str
    anchor_step: str
    n_anchors: int | None
    n_iterations: int
    n_products: int
    separation: float | None
    random_start: bool
    perturbation: float
    one_shot: bool
    local: str
    n_steps: int
    step_size: float | None
    work: float
    softness: float
    normalise: str
    momentum: bool
    check_every: int
    robust: str | bool


class _MixedRegression(ProtocolStrategy):
    """What the three strategies share: `TwoPhase` as a protocol."""

    labels = ("cluster",)
    _option_names = tuple(RegressionOptions.__annotations__)

    #: Whether the run is over where Phase 2 would begin.
    _phase_1_only = False
    #: Whether models may be given as initial arrays.
    _takes_models = False
    #: Whether Phase 2 starts from random models.
    _random = False

    def __init__(
        self, n_clusters: int | str, options: Mapping[str, Any], *, one_shot: bool = False
    ) -> None:
        own = {key: v for key, v in options.items() if key in TwoPhase.__dataclass_fields__}
        server = {key: v for key, v in options.items() if key not in own}
        super().__init__(**cast(ServerOptions, server))
        if own.setdefault("one_shot", one_shot) != one_shot:
            name = type(self).__name__
            raise ValueError(f"one_shot must be {one_shot} in {name}, got {own['one_shot']!r}.")
        if not isinstance(n_clusters, str):
            n_clusters = check_count("n_clusters", n_clusters, 1)
        elif n_clusters != "auto":
            raise ValueError(f'n_clusters must be an integer or "auto", got {n_clusters!r}.')
        for name in ("random_start", "momentum", "one_shot"):
            own[name] = check_flag(name, own.get(name, getattr(TwoPhase, name)))
        if isinstance(own.get("robust"), bool):
            own["robust"] = "filtered" if own["robust"] else "mean"
        for name, value in own.items():
            if isinstance(value, Real) and not isinstance(value, Integral) and not isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}.")
            if isinstance(value, Integral) and int(value) > LARGEST_INT:
                raise ValueError(f"{name} must be at most 2**63 - 1, got {value}.")
        self.two_phase = TwoPhase(n_clusters, **own)

    def settings(self) -> dict[str, Any]:
        """Return the options of the two phases."""
        settings = super().settings()
        return {**vars(settings.pop("two_phase")), **settings}

    def protocol(self, initial: list[Matrix], state: _protocol.State | None) -> Protocol:
        """Ask, and go on from the answers; one request per communication round."""
        phases = self.two_phase
        now = phases.begin(self._given(initial)) if state is None else State.unpack(state)
        count = 0 if state is None else int(state[_COUNT])
        while not (self._phase_1_only and now.step == "update"):
            rng = spawn(self._options.seed, SERVER, count + 1)
            ask, shape = phases.ask(now, rng), phases.answer_shape(now)
            replies = yield Request(
                ask.step,
                ask.arrays,
                {OPTION + name: value for name, value in ask.options.items()},
                {**now.pack(), _COUNT: np.array(count)},
                _check(phases, now),
                own=_own(ask),
                model=[now.centers] if now.centers.size else (),
                most=None if shape is None else prod(shape),
            )
            count += 1
            answers = _collect(replies)
            self._check_clusters(len(replies), answers.stack.shape[-1])
            if self._random and not now.centers.size:
                now = phases.begin(random_models(self._n_models(), answers.stack.shape[1] - 1, rng))
            if now.step == ask.step:
                now = phases.advance(now, answers, rng)
                replies.note(DEEDS[phases.robust], {int(who): odd for who, odd in now.odd})
                if ask.step == DESCRIBE and len(now.steep):
                    replies.note(DEEDS["filtered"], dict.fromkeys(now.steep.tolist(), 1.0))
                    log(
                        WARNING,
                        "Left out of the models: clients %s, whose curvature is more than ten "
                        "times the median: the step size would have to follow theirs. With "
                        "step_size given they count.",
                        now.steep.tolist(),
                    )
        return [now.centers]

    def _given(self, initial: list[Matrix]) -> Matrix | None:
        """Return the models to start from, None if there are none."""
        if len(initial) > self._takes_models:
            wanted = "[models]" if self._takes_models else "left out"
            raise ValueError(f"initial_arrays must be {wanted}, got {len(initial)} arrays.")
        return check_array("initial_arrays", initial[0], min_rows=1) if initial else None

    def _check_clusters(self, n_clients: int, width: int) -> None:
        """Refuse more clusters than estimates to cluster, or than random models that can travel."""
        if self.two_phase.one_shot and self._n_models() > n_clients:
            raise ValueError(
                f"n_clusters must be at most the number of clients, got {self._n_models()} with "
                f"{n_clients} clients."
            )
        most = self._options.max_reply_bytes // (8 * width)
        if self._random and self._n_models() > most:
            raise ValueError(
                f"n_clusters must be at most {most}, whose models have max_reply_bytes, got "
                f"{self._n_models()}."
            )

    def _n_models(self) -> int:
        return int(self.two_phase.n_clusters)


class FedMD(_MixedRegression):
    """Phase 1: coarse models of all clusters from any start (federated moment descent).

    Ends by itself, with the models as its result.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    **options
        See `RegressionOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule.
    """

    _phase_1_only = True

    def __init__(
        self, n_clusters: int | str = "auto", **options: Unpack[RegressionOptions]
    ) -> None:
        super().__init__(n_clusters, options)


class FedX(_MixedRegression):
    """Phase 2: clients find their cluster while the clusters' models are refined.

    Started with ``[models]`` as initial arrays, it refines those: from the true ones it is the
    oracle, from one model FedAvg or FedProx. Otherwise ``start`` says where the models come from.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    start : {"fedmd", "random"}, default "fedmd"
        Phase 1 first, the two phases in one run; or random models ``N(0, I) / sqrt(d)``, which,
        with ``check_every=0``, is IFCA.
    **options
        See `RegressionOptions`: ``local="fedavg"`` with ``n_steps``, or ``"fedprox"``, …

    Raises
    ------
    ValueError
        If an option breaks its rule.

    Notes
    -----
    Result: ``strategy.start(...).arrays.to_numpy_ndarrays()`` is ``[models (k, d)]``; which cluster
    a client is in only its evaluations say (``history``). Floats per client and round of Phase 2:
    k d down and d + 2 up.
    """

    _takes_models = True

    def __init__(
        self,
        n_clusters: int | str = "auto",
        *,
        start: str = "fedmd",
        **options: Unpack[RegressionOptions],
    ) -> None:
        super().__init__(n_clusters, options)
        self.start_from = check_choice("start", start, STARTS)
        self._random = self.start_from == "random"
        if self._random and n_clusters == "auto":
            raise ValueError('n_clusters must be given with start="random", got "auto".')


class OneShotClustering(_MixedRegression):
    """Every client estimates alone, once; the estimates are clustered for good (baseline).

    Parameters
    ----------
    n_clusters : int
        Number of models k.
    **options
        See `RegressionOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule.
    """

    def __init__(self, n_clusters: int, **options: Unpack[RegressionOptions]) -> None:
        super().__init__(n_clusters, options, one_shot=True)


def random_models(n_clusters: int, n_features: int, rng: np.random.Generator) -> Matrix:
    """Return models drawn from ``N(0, I) / sqrt(n_features)``, as rows: where IFCA starts.

    Parameters
    ----------
    n_clusters, n_features : int
        The shape.
    rng : numpy.random.Generator
        Source of the draw.
    """
    models: Matrix = rng.standard_normal((n_clusters, n_features)) / np.sqrt(n_features)
    return models


def _own(ask: Ask) -> Callable[[int], list[Matrix]] | None:
    """Return what each client receives, where it is not the same for all."""
    if not ask.own and not ask.noise:
        return None
    return lambda partition: list(ask.to(partition).arrays)


def _collect(replies: Replies) -> Answers:
    """Return the answers of the shape that most have: in round one no other is known."""
    shapes = Counter(reply.arrays[0].shape for reply in replies.values())
    common = shapes.most_common(1)[0][0]
    odd = [who for who, reply in replies.items() if reply.arrays[0].shape != common]
    if odd:
        log(WARNING, "Left out clients %s: the others have %d features.", odd, common[-1] - 1)
    return Answers.collect(
        {who: (r.arrays[0], r.num_examples) for who, r in replies.items() if who not in odd}
    )


def _check(phases: TwoPhase, state: State) -> Callable[[Reply], None]:
    """Return the check of a reply to this state's request."""

    def check(reply: Reply) -> None:
        if len(reply.arrays) != 1:
            raise ValueError(
                f"wrong number of arrays: 1 is asked for, got {len(reply.arrays)}{_LINEAR}"
            )
        wanted = phases.answer_shape(state)
        given = reply.arrays[0].shape
        if given != wanted if wanted else len(given) != 1 or given[0] < 2:
            shape = "(n_features + 1,)" if wanted is None else wanted
            raise ValueError(f"wrong shape: {shape} is asked for, got {given}{_LINEAR}")
        phases.check(state, reply.arrays[0])

    return check
