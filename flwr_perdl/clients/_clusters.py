"""What a client does in clustered learning, by nothing but its own ``fit`` and ``evaluate``.

The client is any NumPyClient, or any ClientApp with train and evaluate handlers. Three steps of
`flwr_perdl.strategies.ClusteredFedAvg` are taken for it:

- ``train-alone``: train the model that came, several times in a row, and evaluate what comes of it:
  who has no finite loss can choose no model later;
- ``measure-models``: evaluate every model that came, and send the losses;
- ``cluster``: evaluate every model that came, train the one with the least loss, and send it.

A stack of models is one array per array of a model, whose first axis counts the models. An
evaluation of such a stack is the evaluation of the model with the least loss. Where there is
nothing to choose, one model comes, as FedAvg sends it, after the number of its cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import Array, Context, Message, MessageType

from flwr_perdl.clients._handlers import (
    Evaluated,
    Handlers,
    all_sendable,
    as_given,
    evaluation_reply,
    numbers_of,
)
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    STEP,
    Scalar,
    decode,
    encode,
    named,
    reply_to,
    route_of,
    scalars,
    to_arrays,
)

ALONE, MEASURE, CHOOSE = "train-alone", "measure-models", "cluster"

#: Marks the requests of clustered learning, evaluations too.
CLUSTERED = "perdl.clustered"
#: How often a client trains in the step "train-alone".
N_FITS = "perdl.n-fits"
#: The name of the array with the clusters' numbers, before those of a model.
LABELS = "perdl.clusters"
_OURS = (STEP, CLUSTERED, N_FITS)
#: Maximum number of times that a client trains, and of models that it evaluates, for one request.
MOST_FITS, MOST_MODELS = 1000, 10_000
#: The start of the keys of a training request's config that only ``evaluate`` receives.
MEASURING = "perdl.evaluate."

#: Metrics of a reply: the chosen model, and its loss before training.
CLUSTER, CLUSTER_LOSS = "cluster", "cluster-loss"
#: In a reply: that all models have the same loss at this client.
ALL_ALIKE = "models-alike"


def for_evaluations(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return a config of evaluations as a request to train carries it."""
    return {f"{MEASURING}{key}": value for key, value in config.items()}


class Configs(NamedTuple):
    """What the client's own ``fit`` and ``evaluate`` receive of a request's config."""

    fit: dict[str, Scalar]
    evaluate: dict[str, Scalar]


def configs_of(config: Mapping[str, Scalar], is_ours: Callable[[str], bool]) -> Configs:
    """Take a request's config apart; the client does not receive the keys that are ours."""
    own, more = {}, {}
    for key, value in config.items():
        if key.startswith(MEASURING):
            more[key.removeprefix(MEASURING)] = value
        elif not is_ours(key):
            own[key] = value
    return Configs(own, {**own, **more})


def answer_clustered(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Answer a message of clustered learning by an app that knows nothing of it.

    The app receives one model at a time (`Handlers`), and none of this protocol's keys.
    """
    record = message.content.array_records[ARRAYS]
    asked = scalars(message.content.config_records[CONFIG])
    config, step = configs_of(asked, _OURS.__contains__), asked.get(STEP)
    names = [name for name in record if name != LABELS]
    app = Handlers(message, context, call, names)
    if route_of(message)[0] == MessageType.EVALUATE:
        return evaluation_reply(message, *_evaluated(app, to_arrays(record), config.evaluate))
    if step == ALONE:
        model = given = to_arrays(record)
        for _ in range(check_count(N_FITS, asked[N_FITS], 1, MOST_FITS)):
            trained, n, metrics = app.fit(model, config.fit)
            model = as_given(trained, given)
        # An evaluation that fails would be noticed rounds later, when models are to be chosen.
        _evaluations(app, [array[None] for array in model], config.evaluate)
        return reply_to(message, model, n, metrics)
    if step == MEASURE:
        losses, measured = _evaluations(app, to_arrays(record), config.evaluate)
        return reply_to(message, [_finite(losses)], measured[0][1], {})
    if step != CHOOSE:
        raise ValueError(f"{STEP} must be a step of clustered learning, got {step!r}.")
    labels, *sent = record.values()
    # What FedAvg would send and receive passes as it is: large models are not copied here.
    chosen, choice = 0, dict[str, Scalar]()
    if labels.shape != (1,):
        chosen, sent, choice = _chosen(app, sent, config.evaluate)
    content, arrays = app.train(sent, config.fit)
    metrics, n = numbers_of(content)
    reply = reply_to(message, (), n, {**metrics, CLUSTER: int(decode(labels)[chosen]), **choice})
    reply.content[ARRAYS] = named(all_sendable(arrays, sent), names)
    return reply


def _chosen(
    app: Handlers, sent: Sequence[Array], config: dict[str, Scalar]
) -> tuple[int, list[Array], dict[str, Scalar]]:
    """Return which model has the least loss (equation 8), the model, and what is said of it."""
    stacks = [*map(decode, sent)]
    losses, _ = _evaluations(app, stacks, config)
    chosen = int(losses.argmin())
    alike: dict[str, Scalar] = {ALL_ALIKE: 1} if losses.min() == losses.max() else {}
    model = [encode(stack[chosen]) for stack in stacks]
    return chosen, model, {CLUSTER_LOSS: float(losses[chosen]), **alike}


def _evaluated(app: Handlers, stacks: Sequence[Matrix], config: dict[str, Scalar]) -> Evaluated:
    """Return the evaluation of the model with the least loss, with its number as ``"cluster"``.

    Of a single model it is taken without a loss, too.
    """
    if all(len(stack) == 1 for stack in stacks):
        chosen, (loss, n, metrics) = 0, app.evaluate([stack[0] for stack in stacks], config)
    else:
        losses, measured = _evaluations(app, stacks, config)
        chosen = int(losses.argmin())
        loss, n, metrics = measured[chosen]
    return loss, n, {**metrics, CLUSTER: chosen}


def _evaluations(
    app: Handlers, stacks: Sequence[Matrix], config: dict[str, Scalar]
) -> tuple[Matrix, list[Evaluated]]:
    """Return each model's loss, infinity where it is NaN, and the client's evaluation of each."""
    if len(stacks[0]) > MOST_MODELS:
        raise ValueError(f"models must be at most {MOST_MODELS}, got {len(stacks[0])}.")
    measured = [app.evaluate(list(model), config) for model in zip(*stacks, strict=True)]
    losses = np.array([loss for loss, _, _ in measured])
    losses[np.isnan(losses)] = np.inf
    if not np.isfinite(losses).any():
        names = ", ".join(sorted(measured[0][2])) or "none"
        raise ValueError(
            "evaluate must return a finite loss of at least one model (a ClientApp: as the metric "
            f'"loss" or "eval_loss"), got no finite loss; other metrics: {names}.'
        )
    return losses, measured


def _finite(losses: Matrix) -> Matrix:
    """Return the losses, with a clearly larger one than all others where one is not finite.

    Replies hold finite numbers only. The client's largest finite loss itself would not do: where
    it has a single one, all models would look alike.
    """
    largest = float(losses[np.isfinite(losses)].max())
    finite: Matrix = np.where(np.isfinite(losses), losses, largest + max(abs(largest), 1.0))
    return finite
