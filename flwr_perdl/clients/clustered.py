"""What a client does in clustered learning, by nothing but its own ``fit`` and ``evaluate``.

The client is any NumPyClient, or any ClientApp with train and evaluate handlers. Three steps of
`flwr_perdl.strategies.ClusteredFedAvg` are taken for it:

- ``train-alone``: train the model that came, several times in a row, and evaluate what comes of it:
  who has no finite loss can choose no model later;
- ``measure-models``: evaluate every model that came, and send the losses;
- ``cluster``: evaluate every model that came, train the one with the least loss, and send it.

The arrays of models of clusters are called by the number of the cluster and their name, as
``"2/conv1.weight"``; the app sees their names, one model at a time. An evaluation of several
models is that of the one with the least loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import Array

from flwr_perdl.clients.dispatch import step
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.protocol.local import Local, Measured, StepRequest, StepResult
from flwr_perdl.protocol.records import CLUSTER, EVALUATE, OURS, Scalar, with_loss

CLUSTERED = "clustered"
ALONE, MEASURE, CHOOSE = "train-alone", "measure-models", "cluster"

#: How often a client trains in the step "train-alone".
N_FITS = "perdl.n-fits"
#: Maximum number of times that a client trains, and of models that it evaluates, for one request.
MOST_FITS, MOST_MODELS = 1000, 10_000

#: A metric of a reply: the chosen model's loss before training.
CLUSTER_LOSS = "cluster-loss"
#: In a reply: that all models have the same loss at this client.
ALL_ALIKE = f"{OURS}models-alike"


@step(CLUSTERED, ALONE)
def train_alone(local: Local, request: StepRequest) -> StepResult:
    """Train the model that came several times in a row."""
    model, names = request.received, request.names
    for _ in range(check_count(N_FITS, request.config.get(N_FITS), 1, MOST_FITS)):
        trained = local.fit(model, names)
        model, names = trained.sent, trained.names
    # An evaluation that fails would be noticed rounds later, when models are to be chosen.
    _evaluations(local, [Candidate(0, names, model)])
    return StepResult(model, trained.num_examples, trained.metrics, names=names)


@step(CLUSTERED, MEASURE)
def measure(local: Local, request: StepRequest) -> StepResult:
    """Send the losses of all models."""
    measured = _evaluations(local, _models(request))
    losses = np.array([one.cost for one in measured])
    return StepResult([_finite(losses)], measured[0].num_examples)


@step(CLUSTERED, CHOOSE)
def train_best(local: Local, request: StepRequest) -> StepResult:
    """Train the model with the least loss (equation 8), and send it; a single one has none."""
    models, chosen, choice = _models(request), 0, dict[str, Scalar]()
    if len(models) > 1:
        costs = [one.cost for one in _evaluations(local, models)]
        chosen = costs.index(min(costs))
        choice = {CLUSTER_LOSS: costs[chosen]}
        choice |= {ALL_ALIKE: 1} if len({*costs}) == 1 else {}
    number, names, arrays = models[chosen]
    trained = local.fit(arrays, names)
    metrics = {**trained.metrics, CLUSTER: number, **choice}
    given = dict(zip(names, arrays, strict=True))
    start = [given[name] for name in trained.names]
    sent, n = trained.sent, trained.num_examples
    return StepResult(sent, n, metrics, names=trained.names, start=start)


@step(CLUSTERED, EVALUATE, kind=EVALUATE)
def evaluate_best(local: Local, request: StepRequest) -> StepResult:
    """Evaluate the model with the least loss, with its number as ``"cluster"``.

    A single model is evaluated without a loss, too.
    """
    models = _models(request)
    if len(models) == 1:
        loss, n, metrics = local.evaluate(models[0].arrays, models[0].names)
        return StepResult([], n, {**with_loss(loss, metrics), CLUSTER: models[0].number})
    measured = _evaluations(local, models)
    chosen = min(range(len(models)), key=lambda j: measured[j].cost)
    best = measured[chosen]
    best.keep_records(local.context)  # this evaluation is the report
    return StepResult([], best.num_examples, {**best.metrics, CLUSTER: models[chosen].number})


class Candidate(NamedTuple):
    """A cluster's model as it came: its number, and its arrays with their names."""

    number: int
    names: Sequence[str]
    arrays: Sequence[Array]


def _models(request: StepRequest) -> list[Candidate]:
    """Return the models of clusters that came."""
    found = request.models
    invalid = [name for name in found if not (name.isascii() and name.isdigit())]
    if invalid or not all("/" in name for name in request.names):
        raise ValueError(f"arrays must be named '0/NAME', by cluster, got {[*request.names][:3]}.")
    if not 1 <= len(found) <= MOST_MODELS or len({tuple(own) for own in found.values()}) > 1:
        raise ValueError(
            f"models must be 1 to {MOST_MODELS}, of arrays with the same names, got {len(found)}."
        )
    return [Candidate(int(number), [*own], [*own.values()]) for number, own in found.items()]


def _evaluations(local: Local, models: Sequence[Candidate]) -> list[Measured]:
    """Return what the client measures of each model, one of which has a finite loss."""
    measured = [local.select(model.arrays, model.names) for model in models]
    local.check_cost(measured)
    return measured


def _finite(losses: Matrix) -> Matrix:
    """Return the losses, with a clearly larger one than all others where one is not finite.

    Replies hold finite numbers only. The client's largest finite loss itself would not do: where
    it has a single one, all models would look alike.
    """
    largest = float(losses[np.isfinite(losses)].max())
    finite: Matrix = np.where(np.isfinite(losses), losses, largest + max(abs(largest), 1.0))
    return finite
