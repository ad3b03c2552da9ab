"""What a node does for `flwr_perdl.strategies.DiffusionAveraging`, by nothing but its own app.

The node is a `DiffusionClient` that runs `AveragingProgram`; the program's client are the app's
train and evaluate handlers, which receive the messages that FedAvg sends, with the algorithm's
round as ``"server-round"``. Arrays that the node keeps private (`keep_private`) are no part of the
model that the program averages: they are in the app's requests, and in no message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import own_models
from flwr_perdl.clients.dispatch import step
from flwr_perdl.clients.neighbor_relay import ANNOUNCE, EXCHANGE, SHOW, STATE, DiffusionClient, Kept
from flwr_perdl.clients.own_models import TUNE
from flwr_perdl.core.checks import Matrix, brief_repr, check_kind
from flwr_perdl.core.keys import PURPOSE, SELECT
from flwr_perdl.core.models import DTYPES
from flwr_perdl.network.averaging import AveragingOptions
from flwr_perdl.network.averaging_program import state_type
from flwr_perdl.network.compression import RandomQuantization, TopK
from flwr_perdl.network.messages import Delivery
from flwr_perdl.parts.private import kept_private
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
from flwr_perdl.protocol.records import (
    LEFT_OUT,
    RUN,
    SEALED,
    SEED,
    Scalar,
    encode,
)

AVERAGING = "diffusion_averaging"
#: Says as JSON: the learner's options, and name, shape and dtype of every array of the model.
ABOUT = "perdl.averaging"
#: The dtypes of a model's arrays as this says them.
_DTYPES = {dtype.str: dtype for dtype in DTYPES}
#: What a node can make of a number and options.
COMPRESSIONS = (TopK, RandomQuantization)


def averaging_config(
    learner: AveragingOptions,
    start: Mapping[str, Matrix],
    shows: bool,
    half: bool,
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
    about = {
        "learner": options,
        "arrays": arrays,
        "shows": shows,
        "half": half,
    }
    return {ABOUT: json.dumps(about)}


@step(AVERAGING, ANNOUNCE, seals=True)
@step(AVERAGING, EXCHANGE, seals=True)
@step(AVERAGING, SHOW, seals=True)
def exchange(local: Local, request: StepRequest) -> StepResult:
    """Take a step of `neighbor_relay` by an app that knows nothing of it."""
    config, keeps = request.config, local.keeps
    forms, learner, about = _read_about(str(config.get(ABOUT)))
    private = [] if keeps is None else keeps.part.private(forms)
    run = request.run + INNER
    start = Delivery.from_arrays(request.arrays, bool(config.get(SEALED))).start
    given, told = ([(a.shape, a.dtype) for a in some] for some in (start, forms.values()))
    if start and given != told:
        raise ValueError("arrays must end with a model of the form that config says, got others.")
    model = dict(zip(forms, start or forms.values(), strict=True))
    if keeps is not None and start:
        keeps.begin(local.context, run, {name: encode(array) for name, array in model.items()})
    shared = [name for name in forms if name not in private]
    inner: dict[str, Scalar] = {RUN: run, SEED: request.seed}
    if private:
        inner[LEFT_OUT] = json.dumps(private)
    app = _App(local, shared, inner)
    first = [model[name] for name in shared]
    program = learner.program(lambda node: app, initial=first, array_names=shared, in_files=True)
    node = _Node(program, local.context)
    node.has_start, node.half = bool(start), about["half"] is True
    node.shows = "state" if about["shows"] is True else "observed"
    return node.exchange(request, local.kept)


def _read_about(given: str) -> tuple[dict[str, Matrix], AveragingOptions, dict[str, Any]]:
    """Return what `averaging_config` says: the model's forms, without memory, the options, all."""
    try:
        about = json.loads(given)
        forms = {
            str(name): np.broadcast_to(np.zeros((), _DTYPES[dtype]), shape)
            for name, shape, dtype in about["arrays"]
        }
        options = {**about["learner"]}
        if options["compression"] is not None:
            kind, own_options = options["compression"]
            options["compression"] = COMPRESSIONS[kind](**own_options)
        about = {name: about[name] for name in ("shows", "half")}
        return forms, AveragingOptions(**options), about
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{ABOUT} must be DiffusionAveraging's options as JSON, got {brief_repr(given)}: "
            f"{error!r}"
        ) from None


@step(AVERAGING, TUNE, whole=True)
def tune(local: Local, request: StepRequest) -> StepResult:
    """Fine-tune the node's own model."""
    return own_models.tune(local, request, kept_model, INNER)


def kept_model(context: Context, run: str, names: Sequence[str]) -> Arrays | None:
    """Return a node's own model, None before its first exchange."""
    kept = PrivateState(context, run, private_store(context, AVERAGING)).newest()
    private = kept_private(context, run + INNER)
    if kept is None:
        return None
    shared = [name for name in names if name not in private]
    own = {n: encode(kept[f"{STATE}model_{i}"]) for i, n in enumerate(shared)}
    return {name: private[name] if name in private else own[name] for name in names}


class _App:
    """An app's training and evaluation, as a program's client."""

    def __init__(self, local: Local, names: list[str], inner: Mapping[str, Scalar]) -> None:
        self._local, self._names, self._inner = local, names, inner

    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Train; ``config`` has the algorithm's round."""
        asked: dict[str, Any] = {**self._inner, **config}
        trained = self._local.fit(parameters, self._names, **asked)
        return trained.arrays, trained.num_examples, trained.metrics

    def evaluate(self, parameters: list[Matrix], config: dict[str, Scalar]) -> Evaluated:
        """Evaluate; an app that does not has nothing to evaluate on."""
        asked: dict[str, Any] = {**self._inner, **config}
        try:
            if config.get(PURPOSE) == SELECT:
                measured = self._local.select(parameters, self._names, **asked)
                return measured.cost, measured.num_examples, measured.metrics
            return self._local.evaluate(parameters, self._names, **asked)
        except NoEvaluateError:
            return nan, 0, {}


class _Node(DiffusionClient):
    """A node whose start is the server's to send."""

    has_start = False

    def _end(self, state: Any, *, sealed: bool) -> list[Matrix]:
        if sealed:  # whatever the server asks for: it has not read the messages, either
            self.shows = "nothing" if self.pins else "observed"
        return super()._end(state, sealed=sealed)

    def _kept(self, arrays: Mapping[str, Any] | None) -> Any:
        if arrays is None and not self.has_start:
            raise StateLostError("this node's model")
        if arrays is None:
            return super()._kept(arrays)
        fields = [name.removeprefix(STATE) for name in arrays if name.startswith(STATE)]
        return Kept.from_arrays(arrays, state_type(tuple(fields)))  # a start would take as long
