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
``eta``, ``tau``                 ``learning_rate``, ``tau``
================================ ===========================================================

Deviations: a client counts for at most ten times the round's median number of samples; with
``alternate``, updates of frozen arrays are discarded instead of never computed.

What each party receives:

- *The server*: per client and round, the shared arrays after training, the number of private
  values, whether they were reinitialized, the number of samples, and the training metrics. Never a
  private array or a sample; what the shared arrays reveal of both is not hidden.
- *A client*: the shared arrays, and once the initial private arrays, the same for all.
- *Evaluations*: the metrics of each client's own ``evaluate`` of its own model.

Clients keep their part by `keep_private`. A client whose patterns keep less than the server leaves
out refuses to train. A client of `client_app` without patterns keeps what the server leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack

from flwr_perdl.core.checks import Matrix, check_flag
from flwr_perdl.network.compression import TopK
from flwr_perdl.parts import given
from flwr_perdl.privacy.noise import Noise
from flwr_perdl.protocol.options import JUDGED, Needs, ServerOptions, check_support
from flwr_perdl.protocol.records import ALTERNATE, TRAIN
from flwr_perdl.protocol.request import Combine, Protocol, Request, State, Summed
from flwr_perdl.strategies._models import (
    MEMORY,
    Adam,
    ModelStrategy,
    Momentum,
    check_initial,
    pack_model,
    unpack_model,
)


class PersonalizedFedAvg(ModelStrategy):
    """Average a part of the model; the arrays with the given names stay at the clients.

    FedPer, FedRep, LG-FedAvg and FedBN are choices of the private part. Any ClientApp of
    `client_app`, or with the mod `keep_private`, can be the client. Configuring the server is
    enough; patterns at the client, ``client_app(make_client, private=["head.*"])`` or
    ``ClientApp(mods=[keep_private("head.*")])``, enforce them whatever the server asks.

    Parameters
    ----------
    private : str or sequence of str
        Names of the private arrays, or ``fnmatch`` patterns of them.
    share : str or sequence of str
        Instead of ``private``: names or patterns of the shared arrays. ``share=["*lora*"]`` keeps
        all other arrays private; with ``share="*"`` nothing is private, as in FedAvg.
    alternate : bool, default False
        FedRep: in each round a client first trains its private arrays with the shared ones frozen,
        then the shared ones with the private ones frozen. See Notes.
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
    privacy : Noise, optional
        A guarantee of differential privacy for the whole run, with ``level="client"``: the change
        of the shared arrays is clipped, and their sum has noise. Private arrays stay at the
        clients, all of which have the same weight. No metric leaves them: measure by
        ``strategy.result.model_of``.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule; from `start`, if there are no initial arrays, or the patterns
        match none or all of them (one unused pattern of several is a warning).

    Notes
    -----
    Result: ``strategy.start(...).arrays``, and what ``evaluate_fn`` receives, has the names of the
    initial arrays; private ones keep their initial values. The last report of ``strategy.history``
    has each client's evaluation of its own model.

    Communication per client and round: the shared arrays, down and up; for an evaluation, down. The
    initial private arrays are sent only to a client that may not have its own yet: in its first
    round, after a failed round, and after a resume. A client that has its own ignores them.

    With ``alternate`` the app trains twice per round. ``config["train-names"]`` is a JSON list of
    the names to train: ``names = json.loads(config["train-names"])``, and in PyTorch
    ``parameter.requires_grad = name in names`` for each of ``net.named_parameters()``. Code that
    ignores it still works; its other updates are discarded. As in the paper, the head's training
    may take more epochs. Metrics and number of samples are those of the second training. Whatever
    the app keeps in ``context.state``, such as an optimizer's state, is kept separately for the two
    trainings; evaluations see that of the second.

    Every array keeps its dtype (docs/from-fedavg.md). Clients count by their number of samples, at
    most ten times the round's median.

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
    unsupported: ClassVar = {k: v for k, v in ModelStrategy.unsupported.items() if k != "privacy"}
    needs = (
        *ModelStrategy.needs,
        Needs(("privacy",), "transport", (None,), "noise is for sums of whole changes"),
        Needs(("privacy",), "compression", (None,), "noise is for sums of whole changes"),
        Needs(("privacy",), "parts", (None,), "noise is for sums of whole changes"),
        Needs(("privacy",), "fine_tune", (0,), "what clients say of it has no noise"),
        Needs(("privacy",), "robust", (False, "mean"), JUDGED),
    )

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
        metric: str = "loss",
        higher_is_better: bool | None = None,
        privacy: Noise | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(
            *given(privacy=privacy),
            optimizer=optimizer,
            robust=robust,
            transport=transport,
            compression=compression,
            fine_tune=fine_tune,
            metric=metric,
            higher_is_better=higher_is_better,
            private=private,
            share=share,
            **options,
        )
        if not (self.private or self.share):
            raise ValueError("private, or share, must name at least one array, got none.")
        self.alternate, self.privacy = check_flag("alternate", alternate), privacy
        if alternate and self._part is None:
            raise ValueError('alternate must be left out with share="*", where nothing is private.')
        check_support(self, self._options_with())

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train everywhere, and average what is shared."""
        if state is None:
            state = pack_model(check_initial(initial, self.model_names))
        config = {ALTERNATE: True} if self.alternate else {}
        while True:
            model, memory = unpack_model(state), unpack_model(state, MEMORY)
            combine, summed = Combine(start=model, rule=self.robust), Summed(model, "changes")
            replies = yield Request(TRAIN, model, config, state, combine=combine, summed=summed)
            state = pack_model(*self.take_step(model, replies.combined, memory))
