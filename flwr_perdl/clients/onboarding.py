"""A client's own model from a finished run, at its site, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients.app import AnsweringApp
from flwr_perdl.clients.mixed_regression import COEFFICIENTS, MIXED_REGRESSION
from flwr_perdl.clients.own_models import (
    ADAPT,
    FROZEN,
    MOST_FITS,
    N_FITS,
    OWN_MODELS,
    own_state,
)
from flwr_perdl.clients.perma import GLOBAL_ATOMS, PERMA
from flwr_perdl.core.checks import check_count, check_kind, check_list
from flwr_perdl.protocol.compat import become_server, stamp
from flwr_perdl.protocol.records import (
    ANSWERED,
    ARRAYS,
    CONFIG,
    PROTOCOL,
    ROUND,
    RUN,
    SEED,
    STEP,
    error_of,
    named,
    to_record,
)

#: Whose steps adapt a model of one array, by its name; those of others train by the user's app.
_PROTOCOLS = {(GLOBAL_ATOMS,): PERMA, (COEFFICIENTS,): MIXED_REGRESSION}
#: What the run is called in the client's state.
_RUN = "adapted"


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
    config = check_kind("train_config", train_config or {}, Mapping, "a mapping")
    shared = getattr(result, "shared", result)
    models = [shared] if isinstance(shared, ArrayRecord) else list(check_list("result", shared))
    for model in models:
        check_kind("result", model, ArrayRecord, "ArrayRecords, or what has them as shared")
    if not models:
        raise ValueError("result must have a model, got none.")
    arrays = {f"{j}/{name}": own for j, model in enumerate(models) for name, own in model.items()}
    round_ = own_state(context, _RUN).last_round + 1
    protocol = _PROTOCOLS.get((*models[0],), OWN_MODELS)
    told = {**config, PROTOCOL: protocol, STEP: ADAPT, ROUND: round_, SEED: seed, RUN: _RUN}
    told |= {N_FITS: fits, FROZEN: answering.keeps_private}
    content = RecordDict({ARRAYS: named([*arrays.values()], [*arrays]), CONFIG: ConfigRecord(told)})
    become_server(context.run_id)  # a message is made by a server's process alone
    message = Message(content, context.node_id, MessageType.TRAIN)
    stamp(message, context.run_id, f"adapt-{round_}")
    answered = context.state.pop(ANSWERED, None)  # it counts what servers ask, and none does here
    failed = f"result must have a model that the client can train, got {[*models[0]]}"
    try:
        reply = app(message, context)
    except Exception as error:
        raise ValueError(f"{failed}: {error}") from error
    finally:
        context.state.pop(ANSWERED, None)
        if answered is not None:
            context.state[ANSWERED] = answered
    if (why := error_of(reply)) is not None:
        raise ValueError(f"{failed}: {why}.")
    own = own_state(context, _RUN).newest() or {}
    return to_record([*own.values()], [*own])
