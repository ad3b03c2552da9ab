"""What a client does with a finished run's model: choose, fine-tune and compare.

The client's *own model* is, of the models that came, the one with the least loss, with the arrays
that the client keeps private in their place; in a protocol whose clients have whole models of their
own it is that one; and after `adapt` what that has kept.

These steps see the whole model, by handlers around which no `keep_private` stands. So nothing but
numbers leaves the client: the dispatcher refuses arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isnan
from typing import TypeVar

from flwr.app import Array, Context

from flwr_perdl.clients.base import OWN, PrivateState, private_store
from flwr_perdl.clients.dispatch import step
from flwr_perdl.clients.local import Local, StepRequest, StepResult
from flwr_perdl.clients.personalized import TRAIN_NAMES, kept_private
from flwr_perdl.core import files
from flwr_perdl.core.checks import check_count
from flwr_perdl.protocol.records import LOSSES, Scalar, encode, view, with_loss

OWN_MODELS, ADAPT, COMPARE = "own_models", "adapt", "compare"
#: How often a client trains at most, and whether its private arrays alone.
N_FITS, FROZEN = "perdl.n-fits", "perdl.frozen"
#: What precedes the names of arrays in a request to compare: those of the run's initial model, and
#: the number of a cluster for all others; and metrics of these models in a reply.
INITIAL, SHARED = "initial", "shared"
#: Maximum number of times that a client trains for one request.
MOST_FITS = 1000
#: Metrics of a reply: the losses before and after, how many trainings are kept, and the cluster.
BEFORE, AFTER, KEPT_FITS, CLUSTER = "loss-before", "loss-after", "fits-kept", "cluster"

Model = dict[str, Array]
#: What is trained: a model, or a client's own part of one.
Trained = TypeVar("Trained")
#: ``(context, run, names) -> model``: the whole model that a client has of a protocol, or None.
Find = Callable[[Context, str, Sequence[str]], Model | None]


@step(OWN_MODELS, ADAPT, whole=True)
def adapt(local: Local, request: StepRequest, find: Find | None = None) -> StepResult:
    """Train the client's own model up to so many times, and keep the best by its ``evaluate``."""
    model, numbers = own_model(local, request, request.round - 1, find)
    names, told = [*model], dict[str, Scalar]()
    if request.config.get(FROZEN):
        names = [] if local.keeps is None else local.keeps.part.private(names)
        told[TRAIN_NAMES] = json.dumps(names)

    def train(model: Model) -> Model:
        trained = local.fit([*model.values()], [*model], state="own", **told)
        moved = dict(zip(model, trained.sent, strict=True))
        return {**model, **{name: moved[name] for name in names}}

    best, result = keep_best(request, model, partial(_measured, local), train)
    state = own_state(local.context, request.run)
    state.save(request.round, {name: view(array) for name, array in best.items()})
    return result._replace(metrics={**numbers, **result.metrics})


@step(OWN_MODELS, COMPARE, whole=True)
def compare(local: Local, request: StepRequest, find: Find | None = None) -> StepResult:
    """Evaluate the client's own model, the shared one that it began with, and the initial one."""
    own, numbers = own_model(local, request, request.round, find)
    models = request.models
    initial = models.pop(INITIAL, None)
    shared = models.get(str(numbers.get(CLUSTER, *[*models][:1])))
    others = {name: one for name, one in ((SHARED, shared), (INITIAL, initial)) if one is not None}
    measured = {name: _measured(local, {**own, **one}) for name, one in others.items()}
    result = side_by_side(_measured(local, own), measured)
    return result._replace(metrics={**result.metrics, **numbers})


def keep_best(
    request: StepRequest,
    model: Trained,
    measure: Callable[[Trained], StepResult],
    train: Callable[[Trained], Trained],
) -> tuple[Trained, StepResult]:
    """Return the best of a model that is trained as often as asked for, and what is said of it."""
    n_fits = check_count(N_FITS, request.config.get(N_FITS), 0, MOST_FITS)
    result = measure(model)
    best, kept, before = model, 0, _loss_of(result)
    least = before
    for fit in range(1, 1 + n_fits):
        model = train(model)
        loss = _loss_of(measure(model))
        if loss < least:
            best, kept, least = model, fit, loss
    losses = {name: loss for name, loss in ((BEFORE, before), (AFTER, least)) if loss < inf}
    return best, StepResult([], result.num_examples, {**losses, KEPT_FITS: kept})


def side_by_side(own: StepResult, others: Mapping[str, StepResult]) -> StepResult:
    """Return what was measured of a client's own model, and, under their names, of others."""
    numbers = {**own.metrics}
    for name, one in others.items():
        each = {metric: value for metric, value in one.metrics.items() if metric != CLUSTER}
        numbers |= {f"{name}/{metric}": value for metric, value in each.items()}
    return StepResult([], own.num_examples, {n: v for n, v in numbers.items() if v == v})  # no NaN


def own_state(context: Context, run: str) -> PrivateState:
    """Return where `adapt` keeps the client's own model."""
    return PrivateState(context, run + OWN, private_store(context, OWN_MODELS))


def kept_model(
    context: Context,
    run: str,
    model: Model,
    round_: int = files.LAST_ROUND,
    find: Find | None = None,
) -> Model | None:
    """Return the own model that a client has, of which ``model`` is the shared one, or None."""
    kept = own_state(context, run).after(round_)
    if kept is not None and kept.keys() == model.keys():  # else of another model
        return {name: encode(kept[name]) for name in model}
    if find is not None:
        return find(context, run, [*model])
    private = kept_private(context, run)
    return {**model, **private} if private else None


def own_model(
    local: Local, request: StepRequest, round_: int, find: Find | None
) -> tuple[Model, dict[str, Scalar]]:
    """Return the client's own model after a round, and the number of its cluster if it chose."""
    models, numbers = request.models, dict[str, Scalar]()
    initial = models.pop(INITIAL, {})
    private = {} if local.keeps is None else kept_private(local.context, request.run)
    whole = {which: {**model, **private} for which, model in models.items()} or {"": initial}
    chosen = next(iter(whole))
    if len(whole) > 1:
        losses = {which: _loss_of(_measured(local, model)) for which, model in whole.items()}
        chosen = min(losses, key=losses.__getitem__)
        numbers = {CLUSTER: int(chosen)}
    own = kept_model(local.context, request.run, whole[chosen], round_, find)
    return whole[chosen] if own is None else own, numbers


def _measured(local: Local, model: Model) -> StepResult:
    """Return what the user's evaluation says of a model."""
    loss, n, metrics = local.evaluate([*model.values()], [*model])
    return StepResult([], n, with_loss(loss, metrics))


def _loss_of(measured: StepResult) -> float:
    """Return a loss, infinite where there is none."""
    loss = next((float(measured.metrics[n]) for n in LOSSES if n in measured.metrics), inf)
    return inf if isnan(loss) else loss
