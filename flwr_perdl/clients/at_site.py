"""A client's own model from a finished run, at its site, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients.app import AnsweringApp
from flwr_perdl.clients.dispatch import Step
from flwr_perdl.clients.own_models import MOST_FITS, OWN_MODELS, choose_model, keep_best
from flwr_perdl.core.checks import brief_repr, check_count, check_kind, check_list
from flwr_perdl.protocol.compat import become_server, new_record, stamp
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    ROUND,
    RUN,
    SEED,
    to_record,
)


def adapt(
    app: ClientApp,
    result: Any,
    context: Context,
    *,
    fits: int = 20,
    seed: int = 0,
    train_config: Mapping[str, Any] | None = None,
) -> ArrayRecord:
    """Return a client's own model, starting from the result of a finished run.

    Of several models the client takes the one with the lowest ``evaluate`` loss. Then it trains up
    to ``fits`` times, only its private arrays if it has any, and keeps the best by that loss. A
    `DictionaryClient` learns its local atoms, a `RegressionClient` finds its cluster. Nothing
    leaves the client.

    Parameters
    ----------
    app : ClientApp
        One of `client_app`.
    result : ArrayRecord, sequence of ArrayRecord, or a strategy's ``result``
        The run's shared model, or the models of its clusters.
    context : Context
        The client's: its identity, and where its state is kept.
    fits : int, default 20
        Largest number of trainings.
    seed : int, default 0
        The seed in the training's config.
    train_config : ConfigRecord or mapping, optional
        Further config of the training, as for ``strategy.start``.

    Returns
    -------
    ArrayRecord
        With the names of the initial arrays.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the client cannot train or evaluate, as with another strategy's result.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord, Context, RecordDict
    >>> from flwr_perdl.clients import adapt, client_app
    >>> class Mean:
    ...     def fit(self, parameters, config):
    ...         return [parameters[0] + 0.5 * (1 - parameters[0])], 1, {}
    ...     def evaluate(self, parameters, config):
    ...         return float(abs(parameters[0][0] - 1)), 1, {}
    >>> context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    >>> own = adapt(client_app(lambda context: Mean()), ArrayRecord([np.zeros(1)]), context, fits=3)
    >>> own.to_numpy_ndarrays()
    [array([0.875])]
    """
    answering: AnsweringApp = check_kind("app", app, AnsweringApp, "a ClientApp of client_app")
    check_kind("context", context, Context, "a Context")
    check_count("fits", fits, 0, MOST_FITS)
    check_count("seed", seed)
    config = check_kind("train_config", train_config, (Mapping, type(None)), "a mapping or None")
    shared = getattr(result, "shared", result)
    models = [shared] if isinstance(shared, ArrayRecord) else list(check_list("result", shared))
    for model in models:
        check_kind("result", model, ArrayRecord, "ArrayRecords, or what has them as shared")
    if not models:
        raise ValueError("result must have a model, got none.")
    arrays = {f"{j}/{name}": own for j, model in enumerate(models) for name, own in model.items()}
    record = new_record(ArrayRecord, arrays)
    try:
        told = ConfigRecord({**(config or {}), ROUND: 1, SEED: seed, RUN: "adapted"})
    except (TypeError, ValueError):
        raise TypeError(
            "train_config must have names with numbers, texts, bytes or lists of them, got "
            f"{brief_repr(config)}."
        ) from None
    become_server(context.run_id)  # a message is made by a server's process alone
    content = RecordDict({ARRAYS: record, CONFIG: told})
    message = Message(content, context.node_id, MessageType.TRAIN)
    stamp(message, context.run_id, "adapt")
    found: dict[str, Array] = {}

    handlers = answering.handlers(context)

    def adapt_model(local: Local, request: StepRequest) -> StepResult:
        if (adapted := getattr(handlers.client, "adapted", None)) is not None:  # one of ours
            own = adapted(request, fits)
            found.update(to_record([*own.values()], [*own]))
            return StepResult([], 1)
        model, _ = choose_model(local, request.models)
        part = answering.kept_part
        best, tuned = keep_best(
            local, model, fits, None if part is None else part.private([*model])
        )
        found.update(best)
        return tuned

    own_step = Step(OWN_MODELS, "adapt", MessageType.TRAIN, adapt_model, None, False, True)
    try:
        answering.take_step(own_step, handlers, message, context)
    except Exception as error:
        raise ValueError(
            f"result must have a model that the client can train, got {[*models[0]]}: {error}"
        ) from error
    return new_record(ArrayRecord, found)
