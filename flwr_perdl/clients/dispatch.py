"""Steps of a protocol at the client: one function each, found by the names in the request.

A request names its protocol and its step. The dispatcher looks the pair up and calls a function of
two arguments, ``(local, request) -> StepResult``. `Local` is what an algorithm may use at a client,
whatever the app is: a client with ``fit`` and ``evaluate``, a ClientApp with its own handlers, or a
client made for the protocol.

The protocols of this library are the files of ``flwr_perdl/clients`` that have steps. A name is
looked up among these, never imported as given. Your own protocols are arguments of `client_app`.
What a step keeps is saved only after the step succeeded: a failed step leaves no trace, and can be
requested again.

A malicious server learns more than one that follows its protocol: a second request that differs a
little from the first can isolate one sample in the difference of the replies. So a client of a
protocol answers a limited number of requests. The rules, within one Flower run (an engine binds
``context.state`` to ``context.run_id``, whatever the server's messages say):

- At most ``max_runs`` tokens ``perdl.run``. This stops a server that uses a fresh token each time,
  to get at a client without its state. A server app starts a few strategies one after another; an
  `InProcessGrid` begins a new Flower run with each.
- Under a token, rounds only increase, separately for training and evaluation. Only the last round
  may be repeated, with the identical request: a resumed server does so, and gets the same reply.
- A protocol's first step, which sends a whole dictionary, comes first under a token or not at all.
- At most ``max_requests`` training requests and as many evaluations over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from importlib import import_module
from math import nan
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

from flwr.app import Array, ConfigRecord, Context

from flwr_perdl.core.checks import (
    Matrix,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_list,
)
from flwr_perdl.core.npy import file_of
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.client_state import Member, private_store
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import (
    ANSWERED,
    EVALUATE,
    LARGEST_INT,
    OURS,
    PROTOCOL,
    ROUND,
    RUN,
    SEED,
    STEP,
    TRAIN,
    OtherClientError,
    Scalar,
)

#: Significant digits of the metrics that leave a client: more would tell what single samples are.
DIGITS = 6

Function = Callable[[Local, StepRequest], StepResult]
Registered = TypeVar("Registered", bound=Function)


class Step(NamedTuple):
    """A function that takes a step of a protocol, and what it wants."""

    protocol: str
    name: str
    kind: str
    function: Function
    #: The class of the clients that can take it; None: any app, by its training and evaluation.
    client: type[Any] | None
    #: Whether it sends nothing that the server can read where the node pins its neighbors' keys.
    seals: bool
    #: Whether it sees the whole model, arrays that are private among them, and sends numbers alone.
    whole: bool


#: ``(protocol, kind, step) -> Step``.
Steps = Mapping[tuple[str, str, str], Step]


def step(
    protocol: str,
    name: str,
    *,
    kind: str = TRAIN,
    client: type[Any] | None = None,
    seals: bool = False,
    whole: bool = False,
) -> Callable[[Registered], Registered]:
    """Register a function ``(local, request) -> StepResult`` as a step of a protocol.

    Parameters
    ----------
    protocol : str
        The protocol: `ProtocolStrategy.protocol_name` of the strategy that requests the step.
    name : str
        The step's name in requests; an evaluation is "evaluate".
    kind : {"train", "evaluate"}, default "train"
        The messages that it answers.
    client : type, optional
        The class of clients that can take the step with their own data. Mods around training then
        wrap the step. Without it the step works with any app, by `Local.fit` and `Local.evaluate`,
        and mods wrap these.
    seals : bool, default False
        Whether the step uses sealed messages where the node pins its neighbors' keys.
    whole : bool, default False
        Whether the step sees the whole model, with the arrays of `keep_private`, and sends no
        arrays.

    Returns
    -------
    callable
        The decorator.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import StepResult, step
    >>> @step("federated-mean", "mean", client=dict)
    ... def mean(local, request):
    ...     return StepResult([local.client["X"].mean(axis=0)], len(local.client["X"]))
    """
    for argument, value in (("protocol", protocol), ("name", name)):
        check_kind(argument, value, str, "a text")
    check_choice("kind", kind, (TRAIN, EVALUATE))
    check_kind("client", client, (type, type(None)), "a class or None")
    check_flag("seals", seals)
    check_flag("whole", whole)

    def register(function: Registered) -> Registered:
        registered = Step(protocol, name, kind, function, client, seals, whole)
        vars(function)["_steps"] = [*vars(function).get("_steps", ()), registered]
        return function

    return register


def steps_of(places: object) -> Steps:
    """Return the steps in modules and among functions, which are a list of both.

    Raises
    ------
    TypeError
        If one is neither.
    ValueError
        If a module has no step, or a function is none.
    """
    found: dict[tuple[str, str, str], Step] = {}
    for place in check_list("protocols", places):
        if not isinstance(place, ModuleType) and not callable(place):
            raise TypeError(f"protocols must be modules or steps, got {place!r}.")
        steps = _collect(vars(place).values() if isinstance(place, ModuleType) else [place])
        if not steps:
            raise ValueError(f"protocols must have functions that @step registers, got {place!r}.")
        found.update(steps)
    return found


def _collect(values: Iterable[Any]) -> Steps:
    """Return the steps that are among these values."""
    steps = [one for value in values for one in getattr(value, "__dict__", {}).get("_steps", ())]
    return {(one.protocol, one.kind, one.name): one for one in steps}


@cache
def _files() -> frozenset[str]:
    """Return the names of the files that a protocol may be in."""
    return frozenset(module.name for module in iter_modules([str(Path(__file__).parent)]))


@cache
def _steps_in(protocol: str) -> Steps:
    """Return the steps in one of these files."""
    steps = _collect(vars(import_module(f".{protocol}", __package__)).values())
    return {key: one for key, one in steps.items() if one.protocol == protocol}


def find_step(config: Mapping[str, Any], kind: str, own: Steps) -> Step | None:
    """Return the step that a request asks for; None if it is one as FedAvg's.

    An evaluation of a protocol without one of its own is the app's.

    Raises
    ------
    ValueError
        If the client knows no such protocol, or step.
    """
    protocol = config.get(PROTOCOL)
    if protocol is None:
        return None
    protocol, name = str(protocol), str(config.get(STEP, ""))
    steps = own
    if not any(one == protocol for one, _, _ in own):  # only names of files are looked up, and kept
        steps = _steps_in(protocol) if protocol in _files() else {}
    if (found := steps.get((protocol, kind, name))) is not None:
        return found
    if not steps:
        raise ValueError(
            f"{PROTOCOL} must be one that this client knows, got {protocol[:100]!r}: a protocol of "
            "your own is client_app(protocols=[...])."
        )
    known = [one for its, of_kind, one in steps if (its, of_kind) == (protocol, kind)]
    if kind == EVALUATE and not known:
        return None
    raise ValueError(f"step must be one of {', '.join(map(repr, known))}, got {name!r}.")


def read_step(
    config: Mapping[str, Scalar],
    arrays: list[Matrix],
    names: Iterable[str] = (),
    received: Sequence[Array] = (),
) -> StepRequest:
    """Return what a request says, or raise a ValueError."""
    try:
        round_ = check_count(ROUND, config[ROUND], 0, LARGEST_INT)
        seed = check_count(SEED, config[SEED], 0, LARGEST_INT)
    except KeyError as error:
        raise ValueError(f"config must have {error}, got {sorted(config)}.") from None
    step_, run = str(config.get(STEP, "")), str(config.get(RUN, ""))
    return StepRequest(step_, arrays, config, round_, seed, run, tuple(names), received)


def take(asked: Step, local: Local, request: StepRequest) -> StepResult:
    """Return what a step comes to, and keep what it keeps."""
    result = asked.function(local, request)
    if asked.whole and len(result.arrays):
        raise ValueError(f"step {asked.name!r} sees private arrays, and must send none, got some.")
    if result.keep is not None and asked.kind == TRAIN:
        local.kept.save(request.round, result.keep, alone=result.last)
    return result


@one_blas_thread()
def take_by(
    client: Any, context: Context, asked: Step, arrays: list[Matrix], config: Mapping[str, Scalar]
) -> StepResult:
    """Return what a step comes to at a client that is made for it."""
    reject_other_client(asked, client)
    request = read_step(config, arrays)
    if isinstance(client, ProtocolClient):
        if client.limits is not None:
            runs, requests = client.limits
            # A run of messages among neighbors has many, about one sum.
            most = LARGEST_INT if asked.seals else requests
            _admit(context, asked.kind, request, runs, most)
        store = client.store
    else:
        store = private_store(context, asked.protocol)
    return take(asked, Local(context, request, store, client=client), request)


# Virtual clients in one process are sent the same bytes, of which one digest is enough.
@lru_cache(maxsize=1)
def _digest(config: str, arrays: tuple[bytes, ...]) -> str:
    """Return what tells a request from every other one: its config and the arrays' files."""
    each = [sha256(part).digest() for part in (config.encode(), *arrays)]
    return sha256(b"".join(each)).hexdigest()[:32]


def _admit(
    context: Context, kind: str, request: StepRequest, max_runs: int, max_requests: int
) -> None:
    """Note a request in ``context.state``, or raise a ValueError if it may not be answered."""
    record = context.state.get(ANSWERED)
    # By "run/kind": the last round, the digest of its request, and how many there were.
    noted = record.copy() if isinstance(record, ConfigRecord) else ConfigRecord()
    own = sorted(one for one in request.config.items() if one[0].startswith(OURS))
    round_, token = request.round, sha256(request.run.encode()).hexdigest()[:16]
    asked = _digest(repr((own, round_)), tuple(map(file_of, request.arrays)))
    runs = {key.partition("/")[0] for key in noted}
    if token not in runs and len(runs) >= max_runs:
        raise ValueError(
            f"max_runs must be larger to go on: this client takes part in {max_runs} strategy runs "
            "within one Flower run."
        )
    last_, before, n_before = str(noted.get(f"{token}/{kind}", "-1 - 0")).split()
    last = int(last_)
    if (last, before) == (round_, asked):
        return
    if round_ <= last:
        raise ValueError(
            f"{ROUND} must be more than the last one, {last}, or the same request again, got "
            f"{round_}."
        )
    if not request.arrays and last >= 0:
        raise ValueError("step must be a first one in a run's first request only, got it again.")
    counts = (str(one).split()[2] for key, one in noted.items() if key.endswith(f"/{kind}"))
    if sum(map(int, counts)) >= max_requests:
        raise ValueError(
            f"max_requests must be larger to go on: this client answers {max_requests} requests "
            f"to {kind} within one Flower run."
        )
    noted[f"{token}/{kind}"] = f"{round_} {asked} {int(n_before) + 1}"
    context.state[ANSWERED] = noted


def rounded(value: float) -> float:
    """Return a metric with as many digits as may leave the client."""
    return float(f"{value:.{DIGITS}g}")


def reject_other_client(asked: Step | None, client: Any) -> None:
    """Raise an OtherClientError if a step is for clients of another kind."""
    if asked is None or asked.client is None or isinstance(client, asked.client):
        return
    name = asked.client.__name__
    only = getattr(asked.client, "only", f"this protocol needs a {name} at every client")
    raise OtherClientError(f"the client must be another one: {only}.")


class ProtocolClient(Member):
    """A NumPyClient for the library's protocols, with an identity and private arrays.

    ``fit`` and ``evaluate`` take the step that the request names.

    Parameters
    ----------
    context : Context
        The argument of the client's factory: identifies the client and keeps its state.
    algorithm : str, optional
        Name of the private arrays, so that no other algorithm uses them; by default the class's
        name.
    state_dir : str or Path, optional
        Folder for the private arrays; by default see `private_store`.
    max_runs, max_requests : int, optional
        Number of strategy runs (tokens ``perdl.run``) in one Flower run that the client takes part
        in, and of training requests that it answers there, and of evaluations.

    Raises
    ------
    ValueError
        If the context does not say who the client is.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import Context, RecordDict
    >>> from flwr_perdl.clients import DictionaryClient, ProtocolClient
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    >>> isinstance(DictionaryClient(np.eye(4), OrthogonalLearner(2), context), ProtocolClient)
    True
    """

    #: What the error says where a step needs a client of this class, and has another.
    only: ClassVar[str]
    #: Whether a first step, whose request has no arrays, is answered in the clear if it is secure.
    starts_open: ClassVar[bool] = True

    def __init__(
        self,
        context: Context,
        *,
        algorithm: str | None = None,
        state_dir: str | Path | None = None,
        max_runs: int | None = None,
        max_requests: int | None = None,
    ) -> None:
        super().__init__(context)
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        check_kind("algorithm", algorithm, (str, type(None)), "a name or None")
        self.context = context
        self.store = private_store(context, algorithm or type(self).__name__, state_dir)
        self.limits: tuple[int, int] | None = None
        if max_runs is not None or max_requests is not None:
            runs, requests = (LARGEST_INT if m is None else m for m in (max_runs, max_requests))
            self.limits = check_count("max_runs", runs, 1), check_count("max_requests", requests, 1)

    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Take the training step that ``config`` names, and save what it keeps.

        Parameters
        ----------
        parameters : list of ndarray
            The request's arrays.
        config : dict
            The request's config.

        Returns
        -------
        parameters : list of ndarray
            The arrays that leave the client.
        num_examples : int
            Number of samples.
        metrics : dict
            The step's metrics.
        """
        result = self._take(TRAIN, parameters, config)
        return [*result.arrays], result.num_examples, dict(result.metrics)

    def evaluate(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Take the evaluation step; its loss is the metric ``"loss"``, else NaN.

        Parameters
        ----------
        parameters : list of ndarray
            The request's arrays.
        config : dict
            The request's config.

        Returns
        -------
        loss : float
        num_examples : int
            Number of samples.
        metrics : dict
            The step's other metrics.
        """
        result = self._take(EVALUATE, parameters, config)
        metrics = dict(result.metrics)
        return float(metrics.pop("loss", nan)), result.num_examples, metrics

    @property
    def answers_itself(self) -> bool:
        """Whether it has another ``fit`` or ``evaluate`` than this class, which then answers."""
        functions = [getattr(method, "__func__", None) for method in (self.fit, self.evaluate)]
        return functions != [ProtocolClient.fit, ProtocolClient.evaluate]

    def _take(
        self, kind: str, parameters: list[Matrix], config: Mapping[str, Scalar]
    ) -> StepResult:
        asked = find_step(config, kind, {})
        if asked is None:
            raise ValueError(
                f"config must have {PROTOCOL!r}, of a protocol with a step of this kind, got "
                f"{sorted(config)}: the strategies that this client is made for send it, Flower's "
                "own, such as FedAvg, do not."
            )
        return take_by(self, self.context, asked, list(parameters), config)
