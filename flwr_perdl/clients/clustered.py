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

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_perdl.clients.dispatch import step
from flwr_perdl.clients.local import Evaluated, Local, StepRequest, StepResult
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.protocol.records import AGAIN, EVALUATE, Scalar, with_loss

CLUSTERED = "clustered"
ALONE, MEASURE, CHOOSE = "train-alone", "measure-models", "cluster"

#: How often a client trains in the step "train-alone".
N_FITS = "perdl.n-fits"
#: The name of the array with the clusters' numbers, before those of a model.
LABELS = "perdl.clusters"
#: Maximum number of times that a client trains, and of models that it evaluates, for one request.
MOST_FITS, MOST_MODELS = 1000, 10_000

#: Metrics of a reply: the chosen model, and its loss before training.
CLUSTER, CLUSTER_LOSS = "cluster", "cluster-loss"
#: In a reply: that all models have the same loss at this client.
ALL_ALIKE = "models-alike"


@step(CLUSTERED, ALONE)
def train_alone(local: Local, request: StepRequest) -> StepResult:
    """Train the model that came several times in a row."""
    model = request.received
    for i in range(check_count(N_FITS, request.config.get(N_FITS), 1, MOST_FITS)):
        again: dict[str, Any] = {AGAIN: True} if i else {}  # private arrays go on, too
        trained = local.fit(model, **again)
        model = trained.sent
    # An evaluation that fails would be noticed rounds later, when models are to be chosen.
    _evaluations(local, request.names, [array[None] for array in trained.arrays])
    return StepResult(model, trained.num_examples, trained.metrics)


@step(CLUSTERED, MEASURE)
def measure(local: Local, request: StepRequest) -> StepResult:
    """Send the losses of all models."""
    losses, measured = _evaluations(local, request.names, request.arrays)
    return StepResult([_finite(losses)], measured[0][1])


@step(CLUSTERED, CHOOSE)
def choose(local: Local, request: StepRequest) -> StepResult:
    """Train the model with the least loss (equation 8), and send it."""
    (labels, *stacks), names = request.arrays, request.names[1:]
    chosen, model, choice = 0, request.received[1:], dict[str, Scalar]()
    if labels.shape != (1,):
        losses, _ = _evaluations(local, names, stacks)
        chosen = int(losses.argmin())
        choice = {CLUSTER_LOSS: float(losses[chosen])}
        choice |= {ALL_ALIKE: 1} if losses.min() == losses.max() else {}
        trained = local.fit([stack[chosen] for stack in stacks], names)
    else:  # what FedAvg would send and receive passes as it is: large models are not copied here
        trained = local.fit(model, names)
    metrics = {**trained.metrics, CLUSTER: int(labels[chosen]), **choice}
    return StepResult(trained.sent, trained.num_examples, metrics, names=names)


@step(CLUSTERED, EVALUATE, kind=EVALUATE)
def evaluate(local: Local, request: StepRequest) -> StepResult:
    """Evaluate the model with the least loss, with its number as ``"cluster"``.

    A single model is evaluated without a loss, too.
    """
    stacks = request.arrays
    if all(len(stack) == 1 for stack in stacks):
        chosen, (loss, n, metrics) = 0, local.evaluate([stack[0] for stack in stacks])
    else:
        losses, measured = _evaluations(local, request.names, stacks)
        chosen = int(losses.argmin())
        loss, n, metrics = measured[chosen]
    return StepResult([], n, with_loss(loss, {**metrics, CLUSTER: chosen}))


def _evaluations(
    local: Local, names: Sequence[str], stacks: Sequence[Matrix]
) -> tuple[Matrix, list[Evaluated]]:
    """Return each model's loss, infinity where it is NaN, and the client's evaluation of each."""
    if len(stacks[0]) > MOST_MODELS:
        raise ValueError(f"models must be at most {MOST_MODELS}, got {len(stacks[0])}.")
    measured = [local.evaluate(model, names) for model in zip(*stacks, strict=True)]
    losses = np.array([loss for loss, _, _ in measured])
    losses[np.isnan(losses)] = np.inf
    if not np.isfinite(losses).any():
        others = ", ".join(sorted(measured[0][2])) or "none"
        raise ValueError(
            "evaluate must return a finite loss of at least one model (a ClientApp: as the metric "
            f'"loss" or "eval_loss"), got no finite loss; other metrics: {others}.'
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
