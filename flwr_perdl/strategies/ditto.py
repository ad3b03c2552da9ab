"""Ditto: a global model, and for every client a personal one close to it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021, Algorithm 1 with FedAvg as its solver:

============================================== ==================================================
paper                                          here
============================================== ==================================================
``w^t`` (global), ``v_k`` (personal)           the strategy's model; the client's private state
line 5: ``w_k`` by s steps from ``w^t``        the client's own training of ``w^t``
line 7: ``v_k - eta (grad F_k(v_k)             the client's own training of ``v_k``, to ``v'``; then
+ lambda (v_k - w^t))``                        ``v_k = v' + pull (w^t - v')``
line 9: aggregation                            the mean, by numbers of samples, or a robust rule
============================================== ==================================================

Deviation: the proximal pull is one step after the client's training, not a term of every gradient
step, so that any client works. It is the proximal step ``v_k = argmin |v - v'|^2 + c |v - w^t|^2``
with ``pull = c / (1 + c)``, where c stands for lambda times the sum of the learning rates. A
client's own model starts from the first global model it receives.

What each party receives:

- *The server*: per client and round, the global model after the client's training, the number of
  samples, the training metrics, and whether the client's own model was reinitialized. Never that
  model, nor a sample.
- *A client*: the global model and ``pull``.
- *Evaluations*: the metrics of each client's own ``evaluate`` of its own model.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from flwr_perdl.clients.ditto import DITTO, PULL
from flwr_perdl.core.checks import Matrix, check_real
from flwr_perdl.network.compression import TopK
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import NEW_STATE, TRAIN
from flwr_perdl.protocol.request import Combine, Protocol, Request, State
from flwr_perdl.strategies._models import (
    MEMORY,
    Adam,
    ModelStrategy,
    Momentum,
    check_initial,
    pack_model,
    unpack_model,
)


class Ditto(ModelStrategy):
    """Learn a global model, and for every client a personal model that stays close to it.

    In every round a client trains both: the global model, which the server averages, and its own,
    which never leaves it and is then pulled toward the global one. Clients need `client_app` and no
    other change.

    Parameters
    ----------
    pull : float, default 0.1
        How far a client's own model moves toward the global one after each training, as a share of
        the distance. 0: local training only; 1: the global model.
    optimizer : Momentum, Adam or Yogi, optional
        Server optimizer, applied to the mean change. By default plain averaging, as in FedAvg.
    robust : bool or str, default False
        Aggregation rule against malicious (Byzantine) clients: True is "filtered", False "mean";
        for other rules see `flwr_perdl.core.aggregate`.
    transport : "float16", optional
        Send floats in half precision, both ways (`flwr_perdl.parts.transport`). By default every
        array keeps its dtype.
    compression : TopK, optional
        Clients send only the largest entries of their changes and carry the rest over to later
        rounds. Not with ``robust``.
    fine_tune : int, default 0
        After the last round each client fine-tunes its model for up to this many trainings, and
        keeps the best by its ``evaluate``.
    metric : str, default "loss"
        The metric of ``evaluate`` by which clients choose among models; "loss" also matches
        "eval_loss".
    higher_is_better : bool, optional
        Whether a larger ``metric`` is better; by default inferred from its name.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule; from `start`, if there are no initial arrays, or if clients
        keep a part private (`keep_private`) and fewer than ``min_clients`` others are left.

    Notes
    -----
    Result: ``strategy.start(...).arrays`` is the global model; ``strategy.history`` has each
    client's evaluation of its own model.

    What the app keeps in ``context.state``, such as an optimizer's state, is kept separately for
    the global model and the client's own; evaluations see the latter.

    Communication per client and round: the model, down and up; for an evaluation, down. Clients
    keep their own model in ``context.state``, and on disk with ``state-dir`` in the node config.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import Ditto
    >>> class Adds(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [parameters[0] + 1], 1, {}
    ...     def evaluate(self, parameters, config):
    ...         return float(parameters[0][0]), 1, {}
    >>> strategy = Ditto(pull=0.5)
    >>> grid = InProcessGrid(client_app(lambda context: Adds()), 2)
    >>> strategy.start(grid, ArrayRecord([np.zeros(1)]), num_rounds=2).arrays.to_numpy_ndarrays()
    [array([2.])]
    >>> [report.aggregate["loss"] for report in strategy.history if report.step == "evaluate"]
    [0.5, 1.25]
    """

    protocol_name = after_protocol = DITTO
    unsupported: ClassVar = {
        **ModelStrategy.unsupported,
        "private": "each client has a whole model of its own: use PersonalizedFedAvg",
    }

    def __init__(
        self,
        pull: float = 0.1,
        *,
        optimizer: Momentum | Adam | None = None,
        robust: str | bool = False,
        transport: str | None = None,
        compression: TopK | None = None,
        fine_tune: int = 0,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            robust=robust,
            transport=transport,
            compression=compression,
            fine_tune=fine_tune,
            metric=metric,
            higher_is_better=higher_is_better,
            **options,
        )
        self.pull = check_real("pull", pull, 0, 1)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train both models everywhere, and average the global one."""
        if state is None:
            state = pack_model(check_initial(initial, self.model_names))
        while True:
            model = unpack_model(state)
            replies = yield Request(
                TRAIN,
                model,
                {PULL: self.pull},
                state,
                metrics=(NEW_STATE,),
                combine=Combine(start=model, rule=self.robust),
            )
            memory = unpack_model(state, MEMORY)
            state = pack_model(*self.take_step(model, replies.combined, memory))
