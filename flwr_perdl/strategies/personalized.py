"""PersonalizedFedAvg: a part of the model is shared, the rest is each client's own.

Which part is shared makes the method: all but the head (FedPer: Arivazhagan et al., "Federated
Learning with Personalization Layers", 2019), all but the body (LG-FedAvg: Liang et al., "Think
Locally, Act Globally", 2020), all but the normalization (FedBN: Li et al., "FedBN: Federated
Learning on Non-IID Features via Local Batch Normalization", ICLR 2021). With ``alternate`` it is
FedRep (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1). The server's optimizers are those of Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2:

================================ ===========================================================
paper (Reddi et al.)             here
================================ ===========================================================
``x_t``, ``Delta_t``             the shared arrays; the mean of the clients', minus them
``m_t``, ``v_t``                 the optimizer's memory
``eta``, ``beta_1``, ``tau``, …  ``learning_rate``, ``beta_1``, ``tau``, …
================================ ===========================================================

What each party receives:

- *The server*: per client and round the shared arrays after training, how many numbers stayed at
  the client, whether these began anew, its number of samples, and the metrics of its own training.
  Never a private array, nor a sample; what the shared arrays say of both is not hidden.
- *A client*: the shared arrays, and once the private arrays' start, which is the same for all.
- *Evaluations* are each client's of its own model, and return what its own evaluation does.

The clients keep their part by `keep_private`, whose patterns are theirs: a client that keeps less
than the server leaves out refuses to train. A client of `client_app` without patterns keeps what
the server leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from flwr_perdl.core.checks import Matrix, check_flag
from flwr_perdl.network.compression import TopK
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import ALTERNATE
from flwr_perdl.protocol.request import Combine, Protocol, Request, State
from flwr_perdl.strategies._models import (
    MEMORY,
    TRAIN,
    Adam,
    ModelStrategy,
    Momentum,
    check_initial,
    pack_model,
    unpack_model,
)
from flwr_perdl.strategies._own_models import Learned


class PersonalizedFedAvg(ModelStrategy):
    """Average a part of the model; the arrays with the given names stay at the clients.

    The clients are any ClientApp around which `keep_private` stands, with the same patterns or
    more: ``client_app(ClientApp(mods=[keep_private("head.*")]))``, or
    ``client_app(make_client, private=["head.*"])``. With Flower's own strategies, private arrays
    travel as the server's values; here they do not travel.

    Parameters
    ----------
    private : str or sequence of str
        Names of the private arrays, or patterns of them as in ``fnmatch``.
    share : str or sequence of str
        Instead, names or patterns of the shared arrays: ``share=["*lora*"]``, and all others are
        private.
    alternate : bool, default False
        FedRep: in each round a client trains its private arrays while the shared ones are fixed,
        then the shared ones while its own are fixed. See Notes.
    optimizer : Momentum, Adam or Yogi, optional
        The server's step along the mean change. By default the mean is the next model, as in
        FedAvg.
    robust : bool or str, default False
        How to average if clients may lie: True stands for "filtered", False for "mean"; other
        rules: see `flwr_perdl.core.aggregate`.
    transport : {"float16"}, optional
        How floats travel, both ways: in half floats (`flwr_perdl.clients.transport`). By default
        every array has its own dtype on the wire.
    compression : TopK, optional
        Clients send the largest entries of their changes, and the rest in later rounds; not with
        ``robust``.
    fine_tune : int, default 0
        After the last round each client trains its own model up to so many times further, and keeps
        the best by the loss of its ``evaluate``, also for later evaluations.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule; from `start`, if the initial arrays are none, or the patterns
        match none of them (one of several is a warning) or all.

    Notes
    -----
    Result: ``strategy.start(...).arrays``, and what ``evaluate_fn`` gets, has the initial arrays'
    names; the private ones are as they were. ``strategy.history`` has each client's evaluation of
    its own model, in its last report.

    Floats per client and round: the shared arrays down and up, in evaluations down. The private
    arrays' start travels to a client of which the server does not know that it has its own: in its
    first round, after one that it failed in, and after a resume. The client uses it only if it has
    nothing else.

    With ``alternate`` the app's training runs twice in a round. Its config has ``"train-names"``,
    the names to train as a JSON list: ``names = json.loads(config["train-names"])`` and, in
    PyTorch, ``parameter.requires_grad = name in names`` for each of ``net.named_parameters()``. It
    may take more epochs where the names are those of its head, as the paper does. Of each step only
    these arrays count, so that an app that reads nothing of it is right, too. Metrics and number of
    samples are the second step's. What the app keeps in ``context.state``, such as an optimizer's
    state, it finds again in the same step; evaluations see that of the second one.

    Every array keeps its dtype (docs/from-fedavg.md). Numbers of samples weigh, those above ten
    times the round's median as that.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PersonalizedFedAvg
    >>> class Adds(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [array + 1 for array in parameters], 1, {}
    >>> grid = InProcessGrid(client_app(lambda context: Adds(), private=["1"]), 2)
    >>> strategy = PersonalizedFedAvg(["1"])
    >>> start = ArrayRecord([np.zeros(2), np.zeros(1)])
    >>> strategy.start(grid, start, num_rounds=3).arrays.to_numpy_ndarrays()
    [array([3., 3.]), array([0.])]
    >>> [(report.floats_down, report.floats_up) for report in strategy.history]
    [(3.0, 2.0), (2.0, 2.0), (2.0, 2.0)]
    """

    _wrappable = False  # its messages have not all of the model's arrays

    def __init__(
        self,
        private: str | Sequence[str] = (),
        *,
        share: str | Sequence[str] = (),
        alternate: bool = False,
        optimizer: Momentum | Adam | None = None,
        robust: str | bool = False,
        transport: str | None = None,
        compression: TopK | None = None,
        fine_tune: int = 0,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            robust=robust,
            transport=transport,
            compression=compression,
            fine_tune=fine_tune,
            private=private,
            share=share,
            **options,
        )
        if self._part is None:
            raise ValueError("private, or share, must name at least one array, got none.")
        self.alternate = check_flag("alternate", alternate)

    @property
    def result(self) -> Learned:
        """What the run has learned so far."""
        return Learned(self._presented(), self.own)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train everywhere, and average what is shared."""
        if state is None:
            state = pack_model(check_initial(initial, self._names))
        config = {ALTERNATE: True} if self.alternate else {}
        while True:
            model, memory = unpack_model(state), unpack_model(state, MEMORY)
            shared = self.shared(model)
            combine = Combine(start=shared, rule=self.robust)
            replies = yield Request(
                TRAIN, model, config, state, metrics=self.needed, combine=combine
            )
            self.trained_by(replies)
            names = self.shared(self._array_names())
            moved, memory = self.take_step(shared, replies.combined, memory, names)
            state = pack_model(self.whole(model, moved), memory)
