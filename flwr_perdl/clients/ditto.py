"""What a client does for `flwr_perdl.strategies.Ditto`, by nothing but its own training.

It trains twice in a round: the server's model, which it sends, and one of its own, which it keeps
in its private state, pulled towards the server's. It evaluates its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import own_models
from flwr_perdl.clients.dispatch import step
from flwr_perdl.clients.own_models import TUNE
from flwr_perdl.core.checks import Matrix, check_real
from flwr_perdl.core.models import check_trained, fixed_entries, is_float, settled
from flwr_perdl.core.npy import as_file
from flwr_perdl.protocol.client_state import PrivateArrays, PrivateState, private_store
from flwr_perdl.protocol.local import Local, StepRequest, StepResult, hide_numbers
from flwr_perdl.protocol.part import Arrays
from flwr_perdl.protocol.records import EVALUATE, NEW_STATE, TRAIN, encode, with_loss

DITTO = "ditto"
#: The share of the way to the server's model that a client's own goes.
PULL = "perdl.pull"


@step(DITTO, TRAIN)
def train(local: Local, request: StepRequest) -> StepResult:
    """Train the server's model, and the client's own, which is then pulled towards the server's."""
    pull = check_real(PULL, request.config.get(PULL), 0, 1)
    kept, given = local.kept.before(request.round), request.arrays
    own = _own(kept, given)
    with hide_numbers():
        sent = local.fit(request.received, state="shared")  # evaluations see the own model's state
        trained = local.fit(own).arrays
    each = enumerate(zip(request.names, trained, given, strict=True))
    keep = {f"{i:06d}": as_file(_pull(*one, pull)) for i, one in each}
    metrics = {**sent.metrics, NEW_STATE: int(kept is None)}
    return StepResult(sent.sent, sent.num_examples, metrics, keep)


@step(DITTO, EVALUATE, kind=EVALUATE)
def evaluate_personal(local: Local, request: StepRequest) -> StepResult:
    """Evaluate the client's own model."""
    kept = local.kept.after(request.round)
    own = _own(kept, request.arrays)
    with hide_numbers():
        loss, n, metrics = local.evaluate(own)
    lost = {NEW_STATE: 1} if kept is None else {}
    return StepResult([], n, {**with_loss(loss, metrics), **lost})


@step(DITTO, TUNE, whole=True)
def tune_personal(local: Local, request: StepRequest) -> StepResult:
    """Fine-tune the client's own model."""
    return own_models.tune(local, request, personal_model)


def personal_model(context: Context, run: str, names: Sequence[str]) -> Arrays | None:
    """Return the client's own model, None before its first training."""
    kept = PrivateState(context, run, private_store(context, DITTO)).newest()
    if kept is None:
        return None
    return dict(zip(names, (encode(kept[name]) for name in sorted(kept)), strict=True))


def _own(kept: PrivateArrays | None, given: Sequence[Matrix]) -> Sequence[Matrix]:
    """Return the client's own model, at first the server's."""
    own = given if kept is None else [kept[name] for name in sorted(kept)]
    if (shapes := [a.shape for a in own]) != [a.shape for a in given]:
        raise ValueError(
            f"arrays must have shapes {shapes}, as this client's own model, got "
            f"{[array.shape for array in given]}: a changed model needs a new run."
        )
    return own


def _pull(name: str, own: Matrix, shared: Matrix, pull: float) -> Matrix:
    """Return the client's trained array on its way to the server's; counters stay as they are."""
    fixed = fixed_entries(shared)
    with hide_numbers():
        check_trained(name, own, shared, fixed)
    if not is_float(own):
        return own
    with np.errstate(invalid="ignore"):  # of infinite entries, which are fixed
        return settled(own + pull * (shared - own), own, fixed)
