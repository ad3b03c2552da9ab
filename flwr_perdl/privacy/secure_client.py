"""A client's part in a sum: what it sends leaves it masked, with noise, or both.

Flower's ``secaggplus_mod`` makes the keys, the shares of the keys and the masks. Here its requests
are told from others and checked, and the reply of a NumPyClient becomes what the mod masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_perdl.core.checks import LARGE, Matrix, brief_repr, check_count, check_real
from flwr_perdl.privacy.ledger import Own
from flwr_perdl.privacy.noised_client import Handler, Promise, answer_noised, fewest, note_opened
from flwr_perdl.protocol.compat import SECAGG, secagg_client
from flwr_perdl.protocol.records import (
    CONFIG,
    LARGEST_INT,
    MAX_WEIGHT,
    NORM,
    NUM_EXAMPLES,
    error_of,
    read_reply,
    to_record,
)

#: The bits of the masks, and of the sum under them.
MASK_BITS = 32


def answer_for_sum(
    message: Message, context: Context, call_next: Handler, min_clients: int, own: Own | None
) -> Message:
    """Answer a request to train whose reply is a part of a sum, secure, with noise, or both."""
    # Of "train.default" Flower's mod masks nothing: an app of client_app makes it "train" before.
    if SECAGG in message.content:
        return _take_step(message, context, call_next, min_clients, own)
    return answer_noised(message, context, call_next, own)


def _take_step(
    message: Message, context: Context, call_next: Handler, min_clients: int, own: Own | None
) -> Message:
    """Take a step of SecAgg+, in one of which ``call_next`` makes the reply that is masked.

    With a guarantee of noise, the request's or the client's ``own``, it has its share of that.
    """
    secagg, asked = secagg_client(), message.content[SECAGG]
    if not isinstance(asked, ConfigRecord) or secagg.Key.STAGE not in asked:
        raise ValueError(
            f"{SECAGG!r} must be a ConfigRecord with a {secagg.Key.STAGE!r} of SecAgg+, got "
            f"{brief_repr(asked)}."
        )
    state = context.state.config_records.get(secagg.state, ConfigRecord())
    stage, Stage = asked[secagg.Key.STAGE], secagg.Stage
    required = 0
    if stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
        required = fewest(message, context, unmask=stage == Stage.UNMASK)
    _check_step(asked, state, max(min_clients, required))
    if stage == Stage.UNMASK:
        note_opened(context, own)

    def summand(request: Message, context: Context) -> Message:
        if own is None and not required:
            return _summand(request, call_next(request, context))
        config = request.content.config_records[CONFIG]
        _check_grid(Promise.read(config), {**state, NORM: config.get(NORM)})
        reply = answer_noised(request, context, call_next, own, masked=True)
        return _summand(request, reply, exact=True)

    answer: Message = secagg.mod(message, context, summand)
    return answer


def _check_step(asked: Mapping[str, Any], own: Mapping[str, Any], min_clients: int) -> None:
    """Raise a ValueError where a step would help to unmask a sum over fewer than ``min_clients``.

    Flower's mod believes the server, also where the client is alone in the round, or where one
    client's two keys are asked for. Its state, ``own``, says what the server asked for at first.
    """
    Key, Stage = secagg_client().Key, secagg_client().Stage
    stage = asked.get(Key.STAGE)
    n_clients = min_clients
    if stage == Stage.SETUP and asked.get(Key.MOD_RANGE) != 2**MASK_BITS:
        # Masks below a small one say much of what they hide: below 2 they all are zero.
        raise ValueError(
            f"{Key.MOD_RANGE} in the secure round must be {2**MASK_BITS}, got "
            f"{brief_repr(asked.get(Key.MOD_RANGE))}."
        )
    if stage == Stage.SHARE_KEYS:
        n_clients = len({tuple(keys) for keys in asked.values() if isinstance(keys, list)})
        # Else each of two parts of the clients would be enough to unmask another sum.
        check_count("threshold in the secure round", own.get("threshold"), n_clients // 2 + 1)
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        n_clients = 1 + len(_nodes(asked, Key.SOURCE_LIST))
    elif stage == Stage.UNMASK:
        active = _nodes(asked, Key.ACTIVE_NODE_ID_LIST)
        both = active & _nodes(asked, Key.DEAD_NODE_ID_LIST)
        if both:
            raise ValueError(
                f"clients must be active or lost in the secure round, got both for {len(both)}."
            )
        n_clients = len(active)
    if n_clients < min_clients:
        raise ValueError(
            f"the secure round must have at least min_clients={min_clients} clients with keys of "
            f"their own, got {n_clients}."
        )


def _nodes(asked: Mapping[str, Any], name: str) -> set[int]:
    """Return the nodes that a request lists under ``name``."""
    listed = asked.get(name)
    if not isinstance(listed, list) or len(set(listed)) != len(listed):
        raise ValueError(
            f"{name} in the secure round must be a list of different nodes, got "
            f"{brief_repr(listed)}."
        )
    return set(listed)


def _check_grid(promise: Promise, state: Mapping[str, Any]) -> None:
    """Reject a secure round whose rounding, or clipping, would change a reply on a grid."""
    wanted = {"target_range": 2 * promise.limit, "clipping_range": 1.0, "max_weight": 1.0}
    wanted[NORM] = promise.limit  # a smaller one would have the mod cut each share, noise and all
    given = {name: state.get(name) for name in wanted}
    if given != wanted:
        raise ValueError(f"the secure round must be one for noise, {wanted}, got {given}.")


def _summand(request: Message, reply: Message, *, exact: bool = False) -> Message:
    """Return what Flower's mod masks: arrays of norm 1 at most, and the weight of the client.

    The request's largest norm becomes 1, the range in which the mod counts. An ``exact`` reply is
    of whole numbers up to it, which the mod, on the same grid, does not round.
    """
    if reply.has_error():
        raise ValueError(error_of(reply))
    arrays, n_samples, metrics, *_ = read_reply(reply.content)
    config = request.content.config_records[CONFIG]
    most = check_count(MAX_WEIGHT, config.get(MAX_WEIGHT), 1, LARGEST_INT)
    norm = check_real(NORM, config.get(NORM), 0, LARGE, open_low=True)
    arrays = [array / norm for array in arrays]
    # The records in which Flower's older interface sends a FitRes.
    content: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {
        "fitres.parameters": to_record(arrays if exact else _clip(arrays)),
        "fitres.num_examples": MetricRecord({"num_examples": min(n_samples, most)}),
        "fitres.metrics": ConfigRecord({**metrics, NUM_EXAMPLES: n_samples}),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(content), reply_to=request)


def _clip(arrays: list[Matrix]) -> list[Matrix]:
    """Return arrays that are scaled down to norm 1 if together they have a larger one."""
    peak = max((float(np.abs(array).max(initial=0)) for array in arrays), default=0.0)
    if peak > 1:  # a square must not overflow
        arrays = [array / peak for array in arrays]
    norm = float(np.sqrt(sum(float(np.vdot(array, array)) for array in arrays)))
    shorter = max(norm, 1.0) if peak <= 1 else norm
    return [array / shorter for array in arrays] if shorter != 1 else arrays
