"""What a client does with a finished run's model: fine-tune it, and keep the best.

The client's *own model* is, of the models that came, the one with the lowest loss, with the arrays
that the client keeps private in their place; in a protocol whose clients have whole models of their
own it is that one. A client that has trained in the run and has lost what it kept says so, and no
other model takes its place.

The step sees the whole model, by handlers around which no `keep_private` stands. So nothing but
numbers leaves the client: the dispatcher refuses arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from flwr.app import Context

from flwr_perdl.clients.dispatch import step
from flwr_perdl.core import files
from flwr_perdl.core.checks import check_count
from flwr_perdl.parts.private import TRAIN_NAMES, kept_private
from flwr_perdl.protocol.client_state import OWN, PrivateState, private_store
from flwr_perdl.protocol.local import Local, StateLostError, StepRequest, StepResult
from flwr_perdl.protocol.part import Arrays
from flwr_perdl.protocol.records import CLUSTER, Scalar, encode, view

OWN_MODELS, TUNE = "own_models", "tune"
#: How often a client trains at most; whether it has trained in the run, and so has a model of its
#: own where the protocol gives it one.
N_FITS, TRAINED = "perdl.n-fits", "perdl.trained"
#: What precedes the names of the run's initial arrays; of all others, the number of a cluster.
INITIAL = "initial"
#: Maximum number of times that a client trains for one request.
MOST_FITS = 1000
#: A metric of a reply: how many trainings are kept; and what follows the names of those that the
#: client's evaluation had before the first training.
KEPT_FITS, BEFORE = "fits-kept", "-before"

#: ``(context, run, names) -> arrays``: those of a model that are a client's own, or None.
Find = Callable[[Context, str, Sequence[str]], Arrays | None]


@step(OWN_MODELS, TUNE, whole=True)
def tune(
    local: Local, request: StepRequest, find: Find | None = None, inside: str = ""
) -> StepResult:
    """Train the client's own model up to so many times, and keep the best by its ``evaluate``.

    ``inside`` follows the run's token where the client keeps its private arrays.
    """
    if local.keeps is not None:
        local.keeps.check_whole(local.context, request.run + inside, request.models.values())
    model, numbers = _own_model(local, request, find)
    best, result = keep_best(local, model, request.config.get(N_FITS))
    state = own_state(local.context, request.run)
    state.save(request.round, {name: view(array) for name, array in best.items()})
    return result._replace(metrics={**result.metrics, **numbers})


def keep_best(
    local: Local, model: Arrays, n_fits: object, trained: Sequence[str] | None = None
) -> tuple[Arrays, StepResult]:
    """Return the best of a model that is trained so often, and what is measured of it.

    ``trained`` are the names of the only arrays that are trained; by default all are. The app's
    records in ``context.state`` go on from one training to the next; those of the best stay.
    """
    n_fits = check_count(N_FITS, n_fits, 0, MOST_FITS)
    names = [*model] if trained is None else trained
    told = {} if trained is None else {TRAIN_NAMES: json.dumps(names)}
    first = best = local.select([*model.values()], [*model])
    chosen, kept, model = model, 0, dict(model)
    for fit in range(1, 1 + n_fits):
        moved = local.fit([*model.values()], [*model], **told)
        model |= {
            name: array for name, array in zip(model, moved.sent, strict=True) if name in names
        }
        measured = local.select([*model.values()], [*model])
        if measured.cost < best.cost:
            chosen, kept, best = dict(model), fit, measured
    local.check_cost([best])
    best.keep_records(local.context)
    before: dict[str, Scalar] = {f"{name}{BEFORE}": value for name, value in first.metrics.items()}
    return chosen, StepResult([], best.num_examples, {**before, **best.metrics, KEPT_FITS: kept})


def own_state(context: Context, run: str) -> PrivateState:
    """Return where `tune` keeps the client's own model."""
    return PrivateState(context, run + OWN, private_store(context, OWN_MODELS))


def kept_model(
    context: Context,
    run: str,
    names: Sequence[str],
    round_: int = files.LAST_ROUND,
    find: Find | None = None,
) -> Arrays | None:
    """Return the arrays of a model with these names that are a client's own, None without any."""
    kept = own_state(context, run).after(round_)
    if kept is not None and kept.keys() == set(names):  # else of another model
        return {name: encode(kept[name]) for name in names}
    return (kept_private(context, run) if find is None else find(context, run, names)) or None


def choose_model(local: Local, models: Mapping[str, Arrays]) -> tuple[Arrays, dict[str, Scalar]]:
    """Return the model with the lowest loss, and the number of its cluster if there are several."""
    if len(models) == 1:
        return next(iter(models.values())), {}
    measured = {name: local.select([*own.values()], [*own]) for name, own in models.items()}
    local.check_cost(measured.values())
    chosen = min(measured, key=lambda name: measured[name].cost)
    return models[chosen], {CLUSTER: int(chosen)}


def _own_model(
    local: Local, request: StepRequest, find: Find | None
) -> tuple[Arrays, dict[str, Scalar]]:
    """Return the client's own model before a round, and the number of its cluster if it chose."""
    private = {} if local.keeps is None else kept_private(local.context, request.run)
    models = {name: {**model, **private} for name, model in request.models.items()}
    model, numbers = choose_model(local, models)
    own = kept_model(local.context, request.run, [*model], request.round - 1, find)
    if own is None and request.config.get(TRAINED) and (find or local.keeps):
        raise StateLostError("this client's own model")
    return {**model, **(own or {})}, numbers
