"""What a node does for `flwr_perdl.strategies.DiffusionAveraging`, by nothing but its own app.

The node is a `DiffusionClient` that runs `AveragingProgram`; the program's client are the app's
train and evaluate handlers, which receive the messages that FedAvg sends, with the algorithm's
round as ``"server-round"``. Arrays that the node keeps private (`keep_private`) are no part of the
model that the program averages: they are in the app's requests, and in no message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import nan
from typing import Any

import numpy as np
from flwr.app import Context, Message

from flwr_perdl.clients._clusters import configs_of
from flwr_perdl.clients._handlers import Evaluated, Fitted, Handlers, NoEvaluateError
from flwr_perdl.clients.base import INNER
from flwr_perdl.clients.diffusion import SEALED, DiffusionClient
from flwr_perdl.clients.keep_private import LEFT_OUT, KeepPrivate, matched
from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.network.averaging import AveragingOptions
from flwr_perdl.network.compression import RandomQuantization, TopK
from flwr_perdl.network.messages import Delivery
from flwr_perdl.protocol.records import RUN, SEED, Scalar, encode, read_request, reply_to

#: Marks the requests, and says as JSON: the learner's options, how late a message may be, and name,
#: shape and dtype of every array of the model.
AVERAGING = "perdl.averaging"
#: What a node can make of a number and options.
COMPRESSIONS = (TopK, RandomQuantization)


def averaging_config(
    learner: AveragingOptions, max_delay: int, start: Mapping[str, Matrix], shows: bool
) -> dict[str, Scalar]:
    """Return what a request says to the nodes besides what every diffusion's does.

    ``shows``: whether nodes show their models at the end.
    """
    options = {name: value for name, value in vars(learner).items() if name != "config"}
    compression = learner.compression
    if compression is None:
        del options["consensus_step"]
    else:
        check_kind("compression", compression, COMPRESSIONS, "a TopK or RandomQuantization")
        options["compression"] = COMPRESSIONS.index(type(compression)), vars(compression)
    arrays = [[name, array.shape, array.dtype.str] for name, array in start.items()]
    about = {"learner": options, "max_delay": max_delay, "arrays": arrays, "shows": shows}
    return {AVERAGING: json.dumps(about)}


def answer_averaging(
    message: Message,
    context: Context,
    call: Callable[[Message, Context], Message],
    keep: KeepPrivate | None = None,
) -> Message:
    """Answer a message by an app that knows nothing of it, which may keep arrays private."""
    given, config = read_request(message)
    about = json.loads(str(config[AVERAGING]))
    forms = {name: (tuple(shape), np.dtype(dtype)) for name, shape, dtype in about["arrays"]}
    private = [] if keep is None else matched("patterns", keep.patterns, forms)
    run = str(config[RUN]) + INNER
    start = Delivery.from_arrays(given, bool(config.get(SEALED))).start
    if start and [(array.shape, array.dtype) for array in start] != [*forms.values()]:
        raise ValueError("arrays must end with a model of the form that config says, got others.")
    # A start that is not sent takes no memory, whatever sizes the config announces.
    none = (np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in forms.values())
    model = dict(zip(forms, start or none, strict=True))
    if keep is not None and start:
        keep.begin(context, run, {name: encode(array) for name, array in model.items()})
    shared = [name for name in forms if name not in private]
    own: dict[str, Scalar] = {RUN: run, SEED: config[SEED]}
    if private:
        own[LEFT_OUT] = json.dumps(private)
    client = _App(Handlers(message, context, call, shared), config, own)
    options = about["learner"]
    if options["compression"] is not None:
        kind, own_options = options["compression"]
        options["compression"] = COMPRESSIONS[kind](**own_options)
    learner = AveragingOptions(**options)
    first = [model[name] for name in shared]
    program = learner.program(lambda node: client, initial=first, array_names=shared)
    node = _Node(program, context, max_delay=about["max_delay"])
    node.has_start = bool(start)
    node.shows = "state" if about["shows"] is True else "observed"
    return reply_to(message, *node.fit(given, config))


class _App:
    """An app's handlers, as a program's client."""

    def __init__(
        self, app: Handlers, config: Mapping[str, Scalar], own: Mapping[str, Scalar]
    ) -> None:
        users = configs_of(config, lambda key: key.startswith("perdl."))
        self._app, self._train, self._measure = app, {**users.fit, **own}, {**users.evaluate, **own}

    def fit(self, parameters: list[Matrix], config: dict[str, Scalar]) -> Fitted:
        """Train; ``config`` has the algorithm's round."""
        return self._app.fit(parameters, {**self._train, **config})

    def evaluate(self, parameters: list[Matrix], config: dict[str, Scalar]) -> Evaluated:
        """Evaluate; an app that does not has nothing to evaluate on."""
        try:
            return self._app.evaluate(parameters, {**self._measure, **config})
        except NoEvaluateError:
            return nan, 0, {}


class _Node(DiffusionClient):
    """A node whose start is the server's to send."""

    has_start = False

    def _end(self, state: Any, *, sealed: bool) -> list[Matrix]:
        if sealed:  # whatever the server asks for: it has not read the messages, either
            self.shows = "observed"
        return super()._end(state, sealed=sealed)

    def _kept(self, arrays: Mapping[str, Any] | None) -> Any:
        if arrays is None and not self.has_start:
            raise ValueError(
                "arrays must end with the model to begin with, got none: this node keeps no state "
                "from before, and without a state-dir in its node config a restart loses it."
            )
        return super()._kept(arrays)
