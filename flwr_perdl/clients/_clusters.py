"""What a client does in clustered learning, by nothing but its own ``fit`` and ``evaluate``.

The client is any NumPyClient, or any ClientApp with train and evaluate handlers. Three steps of
`flwr_perdl.strategies.ClusteredFedAvg` are taken for it:

- ``train-alone``: train the model that came, several times in a row;
- ``measure-models``: evaluate every model that came, and send the losses;
- ``cluster``: evaluate every model that came, train the one with the least loss, and send it. With
  a temperature, train every model that has a share of the weight.

A stack of models is one array per array of a model, whose first axis counts the models. An
evaluation of such a stack is the evaluation of the model with the least loss. Where there is
nothing to choose, one model comes, as FedAvg sends it, after the number of its cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isnan, nan
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient

from flwr_perdl._checks import FLOATS, Matrix
from flwr_perdl._compat import of_type
from flwr_perdl._records import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    STEP,
    Scalar,
    decode,
    error_of,
    reply_to,
    scalars,
    to_arrays,
)
from flwr_perdl._shortcuts import encode, filled
from flwr_perdl.regression.clustering import assign

ALONE, MEASURE, CHOOSE = "train-alone", "measure-models", "cluster"

#: Marks the requests of clustered learning, evaluations too.
CLUSTERED = "perdl.clustered"
#: How often a client trains in the step "train-alone".
N_FITS = "perdl.n-fits"
#: 0: train the model with the least loss; above: how soft the choice is.
TEMPERATURE = "perdl.temperature"
#: The names of a model's arrays, as a list in JSON.
ARRAY_NAMES = "perdl.array-names"
_OURS = (STEP, CLUSTERED, N_FITS, TEMPERATURE, ARRAY_NAMES)

#: Metrics of a reply: the chosen model, and its loss before training.
CLUSTER, CLUSTER_LOSS = "cluster", "cluster-loss"
#: The start of the metrics' names that say a model's share of the weight.
SHARE = "share_"
#: A model with a smaller share of the weight is not trained.
_LEAST_SHARE = 1e-3

#: Why a client cannot take part in an evaluation.
NO_EVALUATE = "the client must define evaluate to take part in evaluations, got none"
#: What ClientApps call the loss, the first of these that is there.
_LOSSES = ("loss", "eval_loss")

#: How Flower writes the dtypes that the server takes.
_FLOATS = tuple(map(str, FLOATS))

Fitted = tuple[list[Matrix], int, dict[str, Scalar]]
Evaluated = tuple[float, int, dict[str, Scalar]]
Fit = Callable[[list[Matrix], dict[str, Scalar]], Fitted]
Evaluate = Callable[[list[Matrix], dict[str, Scalar]], Evaluated]


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
        keys.
    """
    step = config[STEP]
    own = {key: value for key, value in config.items() if key not in _OURS}
    if step == ALONE:
        model = list(parameters)
        for _ in range(int(config[N_FITS])):
            model, n, metrics = fit(model, dict(own))
        return _floats(model), n, metrics
    if step == MEASURE:
        measured = _evaluations(evaluate, parameters, own)
        return [np.array([loss for loss, _, _ in measured])], measured[0][1], {}
    if step != CHOOSE:
        raise ValueError(f"{STEP} must be a step of clustered learning, got {step!r}.")
    labels, *stacks = parameters
    return _choose(fit, evaluate, labels, stacks, own, float(config[TEMPERATURE]))


def evaluate_clustered(
    evaluate: Evaluate, parameters: Sequence[Matrix], config: Mapping[str, Scalar]
) -> Evaluated:
    """Return the evaluation of the model with the least loss, with its number as ``"cluster"``."""
    own = {key: value for key, value in config.items() if key not in _OURS}
    measured = _evaluations(evaluate, parameters, own)
    chosen = _weights(measured, 0.0).argmax()
    loss, n, metrics = measured[chosen]
    return loss, n, {**metrics, CLUSTER: int(chosen)}


def _choose(
    fit: Fit,
    evaluate: Evaluate,
    labels: Matrix,
    stacks: Sequence[Matrix],
    config: dict[str, Scalar],
    temperature: float,
) -> Fitted:
    """Choose among the models, and train what is chosen."""
    if len(labels) == 1:
        model, n, metrics = fit(list(stacks), dict(config))
        return _floats(model), n, {**metrics, CLUSTER: int(labels[0])}
    weights, told = _weighed(evaluate, labels, stacks, config, temperature)
    chosen = int(weights.argmax())
    if not temperature:
        model, n, metrics = fit(_model(stacks, chosen), dict(config))
        return _floats(model), n, {**metrics, **told}
    trained = [stack.copy() for stack in stacks]
    for j in np.flatnonzero(weights >= _LEAST_SHARE).tolist():
        model, n, found = fit(_model(stacks, j), dict(config))
        if j == chosen:
            metrics = found
        for stack, array in zip(trained, model, strict=True):
            stack[j] = array
    shares = {f"{SHARE}{j}": float(w) for j, w in enumerate(weights)}
    return trained, n, {**metrics, **shares, **told}


def _weighed(
    evaluate: Evaluate,
    labels: Matrix,
    stacks: Sequence[Matrix],
    config: Mapping[str, Scalar],
    temperature: float,
) -> tuple[Matrix, dict[str, Scalar]]:
    """Return each model's share of the weight, and what the reply says of the choice."""
    measured = _evaluations(evaluate, stacks, config)
    weights = _weights(measured, temperature)
    chosen = int(weights.argmax())
    return weights, {CLUSTER: int(labels[chosen]), CLUSTER_LOSS: measured[chosen][0]}


def _model(stacks: Sequence[Matrix], j: int) -> list[Matrix]:
    """Return a model of its own, which the client may change."""
    return [np.array(stack[j]) for stack in stacks]


def _evaluations(
    evaluate: Evaluate, stacks: Sequence[Matrix], config: Mapping[str, Scalar]
) -> list[Evaluated]:
    """Return the client's evaluation of each model; a loss that is NaN is infinite."""
    measured = []
    for j in range(len(stacks[0])):
        loss, n, metrics = evaluate(_model(stacks, j), dict(config))
        measured.append((float("inf") if isnan(loss) else float(loss), int(n), dict(metrics)))
    if not any(np.isfinite(loss) for loss, _, _ in measured):
        raise ValueError(
            "evaluate must return a finite loss of at least one model (in messages the metric "
            '"loss" or "eval_loss"), got none.'
        )
    return measured


def _weights(measured: Sequence[Evaluated], temperature: float) -> Matrix:
    """Return each model's share of the weight (P2, equation 7)."""
    losses = np.array([loss for loss, _, _ in measured])
    weights: Matrix = assign(losses[None], np.array([measured[0][1]]), temperature)[0]
    return weights


def _floats(model: Sequence[Any]) -> list[Matrix]:
    """Return a model's arrays as the server takes them: counters and half floats are converted."""
    arrays = map(np.asarray, model)
    return [a if a.dtype in FLOATS else a.astype(np.float64) for a in arrays]


# For messages -------------------------------------------------------------------------------


def in_clustered_round(message: Message) -> bool:
    """Whether a message asks for a step, or an evaluation, of clustered learning."""
    record = message.content.get(CONFIG)
    return isinstance(record, ConfigRecord) and CLUSTERED in record


def answer_clustered(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Answer a message of clustered learning by an app that knows nothing of it.

    The app receives one model at a time, in the messages that FedAvg sends: mods around its
    handlers see those.
    """
    content = message.content
    record, config = content.array_records[ARRAYS], scalars(content.config_records[CONFIG])
    names = json.loads(str(config.get(ARRAY_NAMES, "null")))
    own = {key: value for key, value in config.items() if key not in _OURS}

    def ask(kind: str, model: Iterable[Array], own: Mapping[str, Scalar]) -> RecordDict:
        named = enumerate(model) if names is None else zip(names, model, strict=True)
        arrays = filled(ArrayRecord(), {str(name): array for name, array in named})
        content = RecordDict({ARRAYS: arrays, CONFIG: ConfigRecord({**own})})
        reply = call(of_type(message, content, kind), context)
        if reply.has_error():
            raise ValueError(error_of(reply))
        return reply.content

    def fitted(model: Iterable[Array], own: Mapping[str, Scalar]) -> tuple[RecordDict, list[Array]]:
        content = ask(MessageType.TRAIN, model, own)
        found = content.get(ARRAYS)
        if not isinstance(found, ArrayRecord):
            raise ValueError(f"a training reply must have an ArrayRecord {ARRAYS!r}, got none.")
        return content, list(found.values()) if names is None else [found[name] for name in names]

    def fit(model: list[Matrix], own: dict[str, Scalar]) -> Fitted:
        content, arrays = fitted(map(encode, model), own)
        numbers, n = _numbers(content)
        return [decode(array) for array in arrays], n, numbers

    def evaluate(model: list[Matrix], own: dict[str, Scalar]) -> Evaluated:
        numbers, n = _numbers(ask(MessageType.EVALUATE, map(encode, model), own))
        loss = next((float(numbers[name]) for name in _LOSSES if name in numbers), nan)
        return loss, n, numbers

    if message.metadata.message_type == MessageType.EVALUATE:
        loss, n, metrics = evaluate_clustered(evaluate, to_arrays(record), config)
        return reply_to(message, None, n, {"loss": loss, **metrics})
    if config[STEP] != CHOOSE or config[TEMPERATURE]:
        return reply_to(message, *fit_clustered(fit, evaluate, to_arrays(record), config))
    # What FedAvg would send and receive passes as it is: large models are not copied here.
    first, *rest = record.values()
    labels = decode(first)
    if len(labels) == 1:
        told: dict[str, Scalar] = {CLUSTER: int(labels[0])}
    else:
        stacks = [decode(array) for array in rest]
        weights, told = _weighed(evaluate, labels, stacks, own, 0.0)
        rest = [encode(array) for array in _model(stacks, int(weights.argmax()))]
    content, arrays = fitted(rest, own)
    numbers, n = _numbers(content)
    reply = reply_to(message, (), n, {**numbers, **told})
    floats = [a if a.dtype in _FLOATS else encode(*_floats([decode(a)])) for a in arrays]
    filled(reply.content[ARRAYS], {str(i): array for i, array in enumerate(floats)})
    return reply


def _numbers(content: RecordDict) -> tuple[dict[str, Scalar], int]:
    """Return a reply's metrics that are numbers, and the number of its examples."""
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord) or NUM_EXAMPLES not in record:
        raise ValueError(f"a reply must have a MetricRecord {METRICS!r} with {NUM_EXAMPLES!r}.")
    numbers = scalars(record)
    return numbers, int(numbers[NUM_EXAMPLES])


# For NumPyClients ----------------------------------------------------------------------------


def evaluation_of(client: NumPyClient) -> Evaluate:
    """Return the client's ``evaluate``; what raises a NotImplementedError if it has none."""
    if type(client).evaluate is NumPyClient.evaluate and "evaluate" not in vars(client):
        return _no_evaluate
    return client.evaluate


def _no_evaluate(parameters: list[Matrix], config: dict[str, Scalar]) -> Evaluated:
    raise NotImplementedError(f"{NO_EVALUATE}.")
