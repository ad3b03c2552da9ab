"""A client's part in a secure round: what it sends leaves it masked, as a summand.

Flower's ``secaggplus_mod`` makes the keys, the shares of the keys and the masks. Here its requests
are told from others, and the reply of a NumPyClient becomes what the mod masks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from flwr_perdl._checks import LARGE, Matrix, check_count, check_real
from flwr_perdl._compat import fitres_to_recorddict
from flwr_perdl._records import CONFIG, LARGEST_INT, NUM_EXAMPLES, error_of, read_reply

#: The config key of a request whose replies are summed under masks: a client counts by its number
#: of samples, and for at most so many.
MAX_WEIGHT = "perdl.max-weight"
#: And the largest norm of the arrays that it sends.
NORM = "perdl.norm"


def in_secure_round(message: Message) -> bool:
    """Whether a message is a step of SecAgg+; `masked` then masks the reply."""
    return RECORD_KEY_CONFIGS in message.content


def masked(message: Message, context: Context, call_next: Any) -> Message:
    """Take a step of SecAgg+, in one of which ``call_next`` makes the reply that is masked."""

    def summand(request: Message, context: Context) -> Message:
        return _summand(request, call_next(request, context))

    return secaggplus_mod(message, context, summand)


def _summand(request: Message, reply: Message) -> Message:
    """Return what Flower's mod masks: arrays of norm 1 at most, and the weight of the client.

    The request's largest norm becomes 1, the range in which the mod counts.
    """
    if reply.has_error():
        raise ValueError(error_of(reply))
    arrays, n_samples, metrics = read_reply(reply.content)
    config = request.content.config_records[CONFIG]
    most = check_count(MAX_WEIGHT, config.get(MAX_WEIGHT), 1, LARGEST_INT)
    norm = check_real(NORM, config.get(NORM), 0, LARGE, open_low=True)
    fitted = FitRes(
        Status(Code.OK, ""),
        ndarrays_to_parameters(_clipped([array / norm for array in arrays])),
        min(n_samples, most),
        {**metrics, NUM_EXAMPLES: n_samples},
    )
    content = fitres_to_recorddict(fitted, keep_input=True)
    return Message(content, reply_to=request)


def _clipped(arrays: list[Matrix]) -> list[Matrix]:
    """Return arrays that are scaled down to norm 1 if together they have a larger one."""
    peak = max((float(np.abs(array).max(initial=0)) for array in arrays), default=0.0)
    if peak > 1:  # a square must not overflow
        arrays = [array / peak for array in arrays]
    norm = float(np.sqrt(sum(float(np.vdot(array, array)) for array in arrays)))
    shorter = max(norm, 1.0) if peak <= 1 else norm
    return [array / shorter for array in arrays] if shorter != 1 else arrays
