"""What a client does in clustered learning, by nothing but its own ``fit`` and ``evaluate``.

The client is any NumPyClient, or any ClientApp with train and evaluate handlers. Three steps of
`flwr_perdl.strategies.ClusteredFedAvg` are taken for it:

- ``train-alone``: train the model that came, several times in a row, and evaluate what comes of it:
  who has no finite loss can choose no model later;
- ``measure-models``: evaluate every model that came, and send the losses;
- ``cluster``: evaluate every model that came, train the one with the least loss, and send it. With
  a temperature, train every model that has a share of the weight.

A stack of models is one array per array of a model, whose first axis counts the models. An
evaluation of such a stack is the evaluation of the model with the least loss. Where there is
nothing to choose, one model comes, as FedAvg sends it, after the number of its cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import Context, Message, MessageType

from flwr_perdl.clients._handlers import (
    Evaluate,
    Evaluated,
    Fit,
    Fitted,
    Handlers,
    evaluation_reply,
    floats,
    numbers_of,
    sendable,
)
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import (
    ARRAYS,
    CONFIG,
    STEP,
    Scalar,
    decode,
    named,
    reply_to,
    scalars,
    to_arrays,
)
from flwr_perdl.regression.clustering import assign

ALONE, MEASURE, CHOOSE = "train-alone", "measure-models", "cluster"

#: Marks the requests of clustered learning, evaluations too.
CLUSTERED = "perdl.clustered"
#: How often a client trains in the step "train-alone".
N_FITS = "perdl.n-fits"
#: 0: train the model with the least loss; above: how soft the choice is.
TEMPERATURE = "perdl.temperature"
#: The name of the array with the clusters' numbers, before those of a model.
LABELS = "perdl.clusters"
_OURS = (STEP, CLUSTERED, N_FITS, TEMPERATURE)
#: The start of the keys of a training request's config that only ``evaluate`` receives.
MEASURING = "perdl.evaluate."

#: Metrics of a reply: the chosen model, and its loss before training.
CLUSTER, CLUSTER_LOSS = "cluster", "cluster-loss"
#: In a reply: that all models have the same loss at this client.
ALL_ALIKE = "models-alike"
#: The start of the metrics' names that say a model's share of the weight.
SHARE = "share_"
#: A model with a smaller share of the weight is not trained.
_LEAST_SHARE = 1e-3


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


def fit_clustered(
    fit: Fit, evaluate: Evaluate, parameters: Sequence[Matrix], config: Mapping[str, Scalar]
) -> Fitted:
    """Take a step of clustered learning.

    Parameters
    ----------
    fit, evaluate : callable
        The client's own.
    parameters : sequence of ndarray
        One model (``train-alone``); a stack of models (``measure-models``); the numbers of the
        clusters, (k,), and the stack of their models, or (1,) and one model (``cluster``).
    config : mapping
        The request's; the client's own ``fit`` and ``evaluate`` receive it without this protocol's
        keys, and ``evaluate`` with the server's ``evaluate_config`` besides.
    """
    step = config[STEP]
    own = configs_of(config, _OURS.__contains__)
    if step == ALONE:
        model = list(parameters)
        for _ in range(int(config[N_FITS])):
            model, n, metrics = fit(model, dict(own.fit))
        # An evaluation that fails would be noticed rounds later, when models are to be chosen.
        _evaluations(evaluate, [np.asarray(array)[None] for array in model], own.evaluate)
        return floats(model), n, metrics
    if step == MEASURE:
        losses, measured = _evaluations(evaluate, parameters, own.evaluate)
        return [_finite(losses)], measured[0][1], {}
    if step != CHOOSE:
        raise ValueError(f"{STEP} must be a step of clustered learning, got {step!r}.")
    labels, *stacks = parameters
    return _choose(fit, evaluate, labels, stacks, own, float(config[TEMPERATURE]))


def evaluate_clustered(
    evaluate: Evaluate, parameters: Sequence[Matrix], config: Mapping[str, Scalar]
) -> Evaluated:
    """Return the evaluation of the model with the least loss, with its number as ``"cluster"``.

    Of a single model it is taken without a loss, too.
    """
    own = configs_of(config, _OURS.__contains__).evaluate
    if all(len(stack) == 1 for stack in parameters):
        chosen, (loss, n, metrics) = 0, evaluate(_model(parameters, 0), own)
    else:
        losses, measured = _evaluations(evaluate, parameters, own)
        chosen = int(losses.argmin())
        loss, n, metrics = measured[chosen]
    return loss, n, {**metrics, CLUSTER: chosen}


def _choose(
    fit: Fit,
    evaluate: Evaluate,
    labels: Matrix,
    stacks: Sequence[Matrix],
    config: Configs,
    temperature: float,
) -> Fitted:
    """Choose among the models, and train what is chosen."""
    losses, measured = _evaluations(evaluate, stacks, config.evaluate)
    weights = assign(losses[None], np.array([measured[0][1]]), temperature)[0]  # equation 7
    chosen = int(weights.argmax())
    choice: dict[str, Scalar] = {
        CLUSTER: int(labels[chosen]),
        CLUSTER_LOSS: float(losses[chosen]),
    }
    if losses.min() == losses.max():
        choice[ALL_ALIKE] = 1
    if not temperature:
        model, n, metrics = fit(_model(stacks, chosen), dict(config.fit))
        return floats(model), n, {**metrics, **choice}
    trained, shapes = [stack.copy() for stack in stacks], [stack.shape[1:] for stack in stacks]
    # A model whose change would be weighted by almost nothing is not worth a training.
    for j in np.flatnonzero(weights >= _LEAST_SHARE).tolist():
        model, n, found = fit(_model(stacks, j), dict(config.fit))
        if (own := [np.shape(array) for array in model]) != shapes:
            raise ValueError(f"fit must return arrays of shapes {shapes}, got {own}.")
        if j == chosen:
            metrics = found
        for stack, array in zip(trained, model, strict=True):
            stack[j] = array
    shares = {f"{SHARE}{j}": float(w) for j, w in enumerate(weights)}
    return trained, n, {**metrics, **shares, **choice}


def _model(stacks: Sequence[Matrix], j: int) -> list[Matrix]:
    """Return a model of its own, which the client may change."""
    return [np.array(stack[j]) for stack in stacks]


def _evaluations(
    evaluate: Evaluate, stacks: Sequence[Matrix], config: Mapping[str, Scalar]
) -> tuple[Matrix, list[Evaluated]]:
    """Return each model's loss, infinity where it is NaN, and the client's evaluation of each."""
    measured = []
    for j in range(len(stacks[0])):
        loss, n, metrics = evaluate(_model(stacks, j), dict(config))
        measured.append((float(loss), int(n), dict(metrics)))
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


# For messages -------------------------------------------------------------------------------


def answer_clustered(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Answer a message of clustered learning by an app that knows nothing of it.

    The app receives one model at a time (`Handlers`).
    """
    record = message.content.array_records[ARRAYS]
    asked = scalars(message.content.config_records[CONFIG])
    names = [name for name in record if name != LABELS]
    app = Handlers(message, context, call, names)
    if message.metadata.message_type == MessageType.EVALUATE:
        measured = evaluate_clustered(app.evaluate, to_arrays(record), asked)
        return evaluation_reply(message, *measured)
    labels, *model = record.values()
    if asked[STEP] != CHOOSE or labels.shape != (1,):
        return reply_to(message, *fit_clustered(app.fit, app.evaluate, to_arrays(record), asked))
    # What FedAvg would send and receive passes as it is: large models are not copied here.
    content, arrays = app.train(model, configs_of(asked, _OURS.__contains__).fit)
    metrics, n = numbers_of(content)
    reply = reply_to(message, (), n, {**metrics, CLUSTER: int(decode(labels)[0])})
    reply.content[ARRAYS] = named([*map(sendable, arrays)], names)
    return reply
