"""What a node does for `flwr_perdl.strategies.DiffusionAveraging`, by nothing but its own app.

The algorithm is `flwr_perdl.network.averaging.AveragingNode`, the exchange of messages that of
`flwr_perdl.clients.neighbor_relay`. The app's train and evaluate handlers receive the messages that
FedAvg sends, with the algorithm's round as ``"server-round"``. Arrays that the node keeps private
(`keep_private`) are no part of the model that is averaged: they are in the app's requests, and in
no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import nan
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import own_models
from flwr_perdl.clients.dispatch import step
from flwr_perdl.clients.neighbor_relay import ANNOUNCE, EXCHANGE, SHOW, STATE, Turn, own_keys
from flwr_perdl.clients.own_models import TUNE
from flwr_perdl.core.checks import Matrix, brief_repr, check_kind
from flwr_perdl.core.models import DTYPES
from flwr_perdl.core.npy import pack_arrays
from flwr_perdl.network.averaging import BYTES, Form, NodeState, Trainer
from flwr_perdl.network.averaging_options import AveragingOptions
from flwr_perdl.network.compression import RandomQuantization, TopK
from flwr_perdl.parts.private import kept_private
from flwr_perdl.parts.transport import halved
from flwr_perdl.protocol.client_state import INNER, PrivateState, private_store
from flwr_perdl.protocol.local import (
    Evaluated,
    Local,
    NoEvaluateError,
    StateLostError,
    StepRequest,
    StepResult,
)
from flwr_perdl.protocol.part import Arrays
from flwr_perdl.protocol.records import LEFT_OUT, RUN, Scalar, encode

AVERAGING = "diffusion_averaging"
#: Says as JSON: the learner's options, and name, shape and dtype of every array of the model.
ABOUT = "perdl.averaging"
#: The dtypes of a model's arrays as this says them.
_DTYPES = {dtype.str: dtype for dtype in DTYPES}
#: What a node can make of a number and options.
COMPRESSIONS = (TopK, RandomQuantization)


def averaging_config(
    learner: AveragingOptions, start: Mapping[str, Matrix], shows: bool, half: bool
) -> dict[str, Scalar]:
    """Return what a request says to the nodes besides what every diffusion's does.

    ``shows``: whether nodes show their models at the end; ``half``: whether messages travel in half
    floats.
    """
    options = {**vars(learner)}
    compression = learner.compression
    if compression is not None:
        check_kind("compression", compression, COMPRESSIONS, "a TopK or RandomQuantization")
        options["compression"] = COMPRESSIONS.index(type(compression)), vars(compression)
    arrays = [[name, array.shape, array.dtype.str] for name, array in start.items()]
    about = {"learner": options, "arrays": arrays, "shows": shows, "half": half}
    return {ABOUT: json.dumps(about)}


@step(AVERAGING, ANNOUNCE, seals=True)
@step(AVERAGING, EXCHANGE, seals=True)
@step(AVERAGING, SHOW, seals=True)
def average(local: Local, request: StepRequest) -> StepResult:
    """Take a step of `neighbor_relay` by an app that knows nothing of it."""
    form, options, shows, half = _read_about(str(request.config.get(ABOUT)))
    keys, keeps = own_keys(local.context), local.keeps
    turn = Turn(local.partition, keys, request, local.kept, encode=_halve if half else None)
    first, run, more = form.named(turn.delivery.start), request.run + INNER, {}
    private = [] if keeps is None else keeps.part.private(form.names)
    if private:
        form, more = form.without(private), {LEFT_OUT: json.dumps(private)}
    if keeps is not None and first:
        keeps.begin(local.context, run, {name: encode(own) for name, own in first.items()})
    node = options.node(form, turn.node)
    trainer = _trainer(local, form.names, {RUN: run, **more})
    if turn.saved is not None:
        state = NodeState.from_arrays(turn.saved)
    elif first:
        state = node.start([first[name] for name in form.names])
    else:
        raise StateLostError("this node's model")
    if turn.is_new:
        # Combination comes first: the messages of the last round have only now been delivered.
        if turn.pending:
            message = node.message(state)
            around, rejected = node.screened(state, turn.received(message))
            state = node.combine(state, around, trainer)
            reports = node.report(state)
            if half:  # the neighborhood has them in full
                sizes = [sum(a.nbytes for a in some) for some in (_halve(message), message)]
                reports[BYTES] *= sizes[0] / sizes[1]
            turn.combined(reports, rejected)
        if turn.works:
            state = node.adapt(state, turn.round, trainer)
    arrays, message = state.to_arrays(), node.message(state) if turn.awaits else []
    shown: dict[str, Matrix] = {}
    if turn.shows and not (turn.hides and keys.get("pinned")):
        shown = {name: own[None] for name, own in node.observe(state).items()}
        if shows and not turn.hides:  # if it cannot read messages, the server learns no model
            shown |= {STATE + name: own[None] for name, own in arrays.items()}
    packed = [pack_arrays(shown)] if shown else []
    return turn.result(arrays, message, packed, node.silent(state))


def _trainer(local: Local, names: Sequence[str], more: Mapping[str, Scalar]) -> Trainer:
    """Return the app's training and evaluation as the algorithm calls them."""
    own: dict[str, Any] = {"names": names, **more}

    def evaluate(arrays: Sequence[Matrix], **config: Any) -> Evaluated:
        try:
            return local.evaluate(arrays, **own, **config)
        except NoEvaluateError:  # it has nothing to evaluate on
            return nan, 0, {}

    return Trainer(partial(local.fit, **own), evaluate, partial(local.select, **own))


def _halve(message: Sequence[Matrix]) -> list[Matrix]:
    """Return a message in half floats; a single number, as push-sum's weight, in full."""
    return [a if a.size == 1 else halved(str(i), a) for i, a in enumerate(message)]


@lru_cache(maxsize=8)  # nodes of one process, and all rounds, have the same
def _read_about(given: str) -> tuple[Form, AveragingOptions, bool, bool]:
    """Return what `averaging_config` says: the model's form, without memory, the options, both."""
    try:
        about = json.loads(given)
        like = [
            np.broadcast_to(np.zeros((), _DTYPES[dtype]), shape)
            for _, shape, dtype in about["arrays"]
        ]
        form = Form([str(name) for name, *_ in about["arrays"]], like)
        options = {**about["learner"]}
        if options["compression"] is not None:
            kind, own_options = options["compression"]
            options["compression"] = COMPRESSIONS[kind](**own_options)
        shows, half = (about[name] is True for name in ("shows", "half"))
        return form, AveragingOptions(**options), shows, half
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{ABOUT} must be DiffusionAveraging's options as JSON, got {brief_repr(given)}: "
            f"{error!r}"
        ) from None


@step(AVERAGING, TUNE, whole=True)
def tune_node(local: Local, request: StepRequest) -> StepResult:
    """Fine-tune the node's own model."""
    return own_models.tune(local, request, node_model, INNER)


def node_model(context: Context, run: str, names: Sequence[str]) -> Arrays | None:
    """Return a node's own model, None before its first exchange."""
    kept = PrivateState(context, run, private_store(context, AVERAGING)).newest()
    private = kept_private(context, run + INNER)
    if kept is None:
        return None
    shared = [name for name in names if name not in private]
    own = {n: encode(kept[f"{STATE}model_{i}"]) for i, n in enumerate(shared)}
    return {name: private[name] if name in private else own[name] for name in names}
