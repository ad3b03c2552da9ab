"""What a client does for `flwr_perdl.strategies.Ditto`, by nothing but its own training.

It trains twice in a round: the server's model, which it sends, and one of its own, which it keeps
in its private state (`PrivateState`), pulled towards the server's. It evaluates its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Context, Message, MessageType

from flwr_perdl.clients._handlers import Handlers, as_given, evaluation_reply, state_of, unsaid
from flwr_perdl.clients.base import PrivateState, private_shelf
from flwr_perdl.core.checks import Matrix, check_count, check_real
from flwr_perdl.core.models import check_trained, fixed_entries, is_float, settled
from flwr_perdl.protocol.records import (
    ANEW,
    ARRAYS,
    ROUND,
    RUN,
    read_request,
    reply_to,
    route_of,
)

#: Marks the requests of Ditto, evaluations too; and how far a client's own model is pulled.
DITTO, PULL = "perdl.ditto", "perdl.pull"

_ALGORITHM = "ditto"


def answer_ditto(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Answer a message of Ditto by an app that knows nothing of it."""
    given, config = read_request(message)
    round_ = check_count(ROUND, config.get(ROUND))
    state = PrivateState(context, str(config.get(RUN, "")), private_shelf(context, _ALGORITHM))
    names = list(message.content.array_records[ARRAYS])
    app = Handlers(message, context, call, names)
    own_config = {key: value for key, value in config.items() if key not in (DITTO, PULL)}
    trains = route_of(message)[0] == MessageType.TRAIN
    kept = state.before(round_) if trains else state.after(round_)
    own = given if kept is None else [kept[name] for name in sorted(kept)]
    if (shapes := [a.shape for a in own]) != [a.shape for a in given]:
        raise ValueError(
            f"arrays must have shapes {shapes}, as this client's own model, got "
            f"{[array.shape for array in given]}: a changed model wants a new run."
        )
    if not trains:
        return evaluation_reply(message, *app.evaluate(own, own_config))
    pull = check_real(PULL, config.get(PULL), 0, 1)
    with state_of(context, "shared"):  # evaluations see the state of the client's own model
        fitted, n, metrics = app.fit(given, own_config)
    sent = as_given(fitted, given)
    trained, _, _ = app.fit(own, own_config)
    pulled = [_pulled(*arrays, pull) for arrays in zip(names, trained, given, strict=True)]
    state.save(round_, {f"{i:06d}": array for i, array in enumerate(pulled)})
    return reply_to(message, sent, n, {**metrics, ANEW: int(kept is None)})


def _pulled(name: str, own: Matrix, shared: Matrix, pull: float) -> Matrix:
    """Return the client's trained array on its way to the server's; counters stay as they are."""
    fixed = fixed_entries(shared)
    with unsaid(name):
        (own,) = as_given([own], [shared])
        check_trained(name, own, shared, fixed)
    if not is_float(own):
        return own
    with np.errstate(invalid="ignore"):  # of infinite entries, which are fixed
        return settled(own + pull * (shared - own), own, fixed)
