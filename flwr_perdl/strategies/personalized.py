"""PersonalizedFedAvg: a part of the model is shared, the rest is each client's own.

Which part is shared makes the method: all but the head (FedPer: Arivazhagan et al., "Federated
Learning with Personalization Layers", 2019), all but the body (LG-FedAvg: Liang et al., "Think
Locally, Act Globally", 2020), all but the normalization (FedBN: Li et al., "FedBN: Federated
Learning on Non-IID Features via Local Batch Normalization", ICLR 2021). With ``alternate`` it is
FedRep (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1). The server's optimizers are those of Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2:

================================ ===========================================================
paper (Reddi et al.)             here
================================ ===========================================================
``x_t``, ``Delta_t``             the shared arrays; the mean of the clients', minus them
``m_t``, ``v_t``                 the optimizer's memory
``eta``, ``beta_1``, ``tau``, …  ``learning_rate``, ``beta_1``, ``tau``, …
================================ ===========================================================

What each party receives:

- *The server*: per client and round the shared arrays after training, how many numbers stayed at
  the client, whether these began anew, its number of samples, and the metrics of its own training.
  Never a private array, nor a sample; what the shared arrays say of both is not hidden.
- *A client*: the shared arrays, and once the private arrays' start, which is the same for all.
- *Evaluations* are each client's of its own model, and return what its own evaluation does.

The clients keep their part by `keep_private`, whose patterns are theirs: a client that keeps less
than the server leaves out refuses to train. A client of `client_app` without patterns keeps what
the server leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType

from flwr_perdl.clients.keep_private import ALTERNATE, KEPT, LEFT_OUT, check_patterns, matched
from flwr_perdl.core.checks import (
    FLOATS,
    LARGE,
    Matrix,
    check_array,
    check_choice,
    check_flag,
    check_kind,
    check_real,
    own_numbers,
)
from flwr_perdl.protocol.combine import Combine
from flwr_perdl.protocol.driver import Conversation, Plan
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import ARRAYS, named
from flwr_perdl.protocol.request import Protocol, Request, State
from flwr_perdl.protocol.strategy import ProtocolStrategy
from flwr_perdl.regression.clustering import ROBUST

TRAIN = "train"
#: Names in a checkpoint: the model's arrays, the optimizer's, and which of the model are private.
_MODEL, _MEMORY, _PRIVATE = "model", "memory", "private"


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """The server's step with momentum: ``m = beta m + Delta``, ``x = x + learning_rate m``.

    FedAvgM of Hsu et al., "Measuring the Effects of Non-Identical Data Distribution", 2019.

    Parameters
    ----------
    learning_rate : float, default 1.0
        Above 0.
    beta : float, default 0.9
        At least 0, below 1; 0 with ``learning_rate=1`` is FedAvg.

    Raises
    ------
    ValueError
        If an argument breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.strategies import Momentum, PersonalizedFedAvg
    >>> strategy = PersonalizedFedAvg(["head.*"], optimizer=Momentum(beta=0.5))
    """

    learning_rate: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        """Check the arguments."""
        own_numbers(self)
        check_real("learning_rate", self.learning_rate, 0, LARGE, open_low=True)
        check_real("beta", self.beta, 0, np.nextafter(1, 0))

    def begin(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return the memory before the first step."""
        return [np.zeros_like(array) for array in model]

    def step(
        self, model: Sequence[Matrix], changes: Sequence[Matrix], memory: Sequence[Matrix]
    ) -> tuple[list[Matrix], list[Matrix]]:
        """Return the next model and memory."""
        m: list[Matrix] = [self.beta * old + new for old, new in zip(memory, changes, strict=True)]
        return [x + self.learning_rate * own for x, own in zip(model, m, strict=True)], m


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The server's step of FedAdam (Reddi et al. 2021, Algorithm 2).

    ``m = beta_1 m + (1 - beta_1) Delta``, ``v = beta_2 v + (1 - beta_2) Delta^2``,
    ``x = x + learning_rate m / (sqrt(v) + tau)``, from m = 0 and v = tau^2. Flower's FedAdam also
    corrects a bias, which the paper does not.

    Parameters
    ----------
    learning_rate : float, default 0.1
        Above 0.
    beta_1, beta_2 : float, default 0.9 and 0.99
        At least 0, below 1.
    tau : float, default 1e-3
        Above 0: the larger, the less the steps adapt.

    Raises
    ------
    ValueError
        If an argument breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.strategies import Adam, PersonalizedFedAvg
    >>> strategy = PersonalizedFedAvg(["head.*"], optimizer=Adam(learning_rate=0.03))
    """

    learning_rate: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Check the arguments."""
        own_numbers(self)
        check_real("learning_rate", self.learning_rate, 0, LARGE, open_low=True)
        for name in ("beta_1", "beta_2"):
            check_real(name, getattr(self, name), 0, np.nextafter(1, 0))
        check_real("tau", self.tau, 1e-12, LARGE)

    def begin(self, model: Sequence[Matrix]) -> list[Matrix]:
        """Return the memory before the first step: all m, then all v."""
        v = [np.full_like(array, self.tau**2) for array in model]
        return [*(np.zeros_like(array) for array in model), *v]

    def step(
        self, model: Sequence[Matrix], changes: Sequence[Matrix], memory: Sequence[Matrix]
    ) -> tuple[list[Matrix], list[Matrix]]:
        """Return the next model and memory."""
        first, second = memory[: len(model)], memory[len(model) :]
        b = self.beta_1
        m: list[Matrix] = [b * old + (1 - b) * new for old, new in zip(first, changes, strict=True)]
        v = [self._second(old, new**2) for old, new in zip(second, changes, strict=True)]
        steps = [mi / (np.sqrt(vi) + self.tau) for mi, vi in zip(m, v, strict=True)]
        return [x + self.learning_rate * own for x, own in zip(model, steps, strict=True)], m + v

    def _second(self, v: Matrix, square: Matrix) -> Matrix:
        return self.beta_2 * v + (1 - self.beta_2) * square


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """The server's step of FedYogi (Reddi et al. 2021, Algorithm 2).

    As `Adam`, but ``v = v - (1 - beta_2) Delta^2 sign(v - Delta^2)``, which falls more slowly.

    Examples
    --------
    >>> from flwr_perdl.strategies import PersonalizedFedAvg, Yogi
    >>> strategy = PersonalizedFedAvg(["head.*"], optimizer=Yogi(learning_rate=0.03))
    """

    def _second(self, v: Matrix, square: Matrix) -> Matrix:
        moved: Matrix = v - (1 - self.beta_2) * square * np.sign(v - square)
        return moved


class PersonalizedFedAvg(ProtocolStrategy):
    """Average a part of the model; the arrays with the given names stay at the clients.

    The clients are any ClientApp around which `keep_private` stands, with the same patterns or
    more: ``client_app(ClientApp(mods=[keep_private("head.*")]))``, or
    ``client_app(make_client, private=["head.*"])``. With Flower's own strategies, private arrays
    travel as the server's values; here they do not travel.

    Parameters
    ----------
    private : sequence of str
        Names of the private arrays, or patterns of them as in ``fnmatch``.
    alternate : bool, default False
        FedRep: in each round a client trains its private arrays while the shared ones are fixed,
        then the shared ones while its own are fixed. See Notes.
    optimizer : Momentum, Adam or Yogi, optional
        The server's step along the mean change. By default the mean is the next model, as in
        FedAvg.
    robust : bool or str, default False
        How to average if clients may lie: True stands for "filtered", False for "mean"; other
        rules: see `flwr_perdl.regression.aggregate`.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule; from `start`, if the initial arrays are none, a pattern
        matches none of them, or the patterns match all.

    Notes
    -----
    Result: ``strategy.start(...).arrays`` has the initial arrays' names; the private ones are as
    they were. ``strategy.history`` has each client's evaluation of its own model, in its last
    report.

    Floats per client and round: the shared arrays down and up, in evaluations down. The private
    arrays' start travels to a client of which the server does not know that it has its own: in its
    first round, after one that it failed in, and after a resume. The client uses it only if it has
    nothing else.

    With ``alternate`` the app's training runs twice in a round. Its config has ``"train-names"``,
    the names to train as a JSON list: ``names = json.loads(config["train-names"])`` and, in
    PyTorch, ``parameter.requires_grad = name in names`` for each of ``net.named_parameters()``. It
    may take more epochs where the names are those of its head, as the paper does. Of each step only
    these arrays count, so that an app that reads nothing of it is right, too. Metrics and number of
    samples are the second step's.

    Shared arrays of other dtypes than float32 and float64, counters for example, travel as float64.
    Numbers of samples weigh, those above ten times the round's median as that.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PersonalizedFedAvg
    >>> class Adds(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [array + 1 for array in parameters], 1, {}
    >>> grid = InProcessGrid(client_app(lambda context: Adds(), private=["1"]), 2)
    >>> strategy = PersonalizedFedAvg(["1"])
    >>> start = ArrayRecord([np.zeros(2), np.zeros(1)])
    >>> strategy.start(grid, start, num_rounds=3).arrays.to_numpy_ndarrays()
    [array([3., 3.]), array([0.])]
    >>> [(report.floats_down, report.floats_up) for report in strategy.history]
    [(3.0, 2.0), (2.0, 2.0), (2.0, 2.0)]
    """

    def __init__(
        self,
        private: Sequence[str],
        *,
        alternate: bool = False,
        optimizer: Momentum | Adam | None = None,
        robust: str | bool = False,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(**options)
        self.private = check_patterns("private", private)
        if not self.private:
            raise ValueError("private must name at least one array, got none.")
        self.alternate = check_flag("alternate", alternate)
        self.optimizer = check_optimizer(optimizer)
        self.robust = check_robust(robust)
        self._is_private: list[bool] = []
        #: Who has a private part, and who is asked in this round: not a part of the state, since
        #: clients may lose theirs while a run is not on.
        self._known: set[int] = set()
        self._asked_now: set[int] = set()

    def settings(self) -> dict[str, Any]:
        """Return the options by the names of the arguments."""
        return {**super().settings(), "optimizer": repr(self.optimizer)}

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> Conversation:
        """Begin a run, or take it up from its checkpoint."""
        listed = list(names)
        if initial and not listed:
            raise ValueError(
                "initial_arrays must be an ArrayRecord, whose arrays have names, got a list: older "
                "projects (as_legacy) have none."
            )
        own = matched("private", self.private, listed) if listed else []
        self._is_private = [name in own for name in listed]
        self._known, self._asked_now = set(), set()
        return super().open(initial, listed)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Train everywhere, and average what is shared."""
        if state is None:
            model = check_model(initial, self._is_private)
            state = packed(model, begun(self.optimizer, self._shared(model)))
            state[_PRIVATE] = np.array(self._is_private)
        self._is_private = state[_PRIVATE].tolist()
        config = {ALTERNATE: True} if self.alternate else {}
        while True:
            model = unpacked(state, _MODEL)
            shared = self._shared(model)
            replies = yield Request(
                TRAIN,
                model,
                config,
                state,
                most=sum(array.size for array in model),
                metrics=(KEPT,),
                combine=Combine(start=shared, rule=self.robust),
            )
            self._known = (self._known - self._asked_now) | set(replies)
            moved, memory = advanced(self.optimizer, shared, replies.combined, state)
            rest = iter(moved)
            pairs = zip(model, self._is_private, strict=True)
            model = [array if private else next(rest) for array, private in pairs]
            state = {**packed(model, memory), _PRIVATE: state[_PRIVATE]}

    def _shared(self, all_of_them: Sequence[Any]) -> list[Any]:
        """Return what belongs to shared arrays of a list with an entry per array."""
        pairs = zip(all_of_them, self._is_private, strict=True)
        return [one for one, private in pairs if not private]

    def _ask(
        self, plan: Plan, nodes: Mapping[int, int], message_type: str, config: ConfigRecord
    ) -> list[Message]:
        """Return a message per client, without private arrays for those that have their own."""
        run = self._running().run
        names, shared = run.array_names, self._shared(run.model)
        shared_names = self._shared(names)
        # The plan's own table, from which reports count what was sent.
        plan.arrays.update(dict.fromkeys(self._known & plan.arrays.keys(), shared))
        left_out = json.dumps([name for name in names if name not in shared_names])
        told = ConfigRecord({**config, LEFT_OUT: left_out})
        messages = super()._ask(plan, nodes, message_type, told)
        for content in {id(message.content): message.content for message in messages}.values():
            arrays = [*content.array_records[ARRAYS].values()]
            content[ARRAYS] = named(arrays, names, shared_names)
        if message_type == MessageType.TRAIN:
            self._asked_now = set(plan.arrays)
        return messages


# What strategies that average a model have in common ------------------------------------------


def check_optimizer(optimizer: Any) -> Momentum | Adam | None:
    """Return the optimizer, or raise a TypeError."""
    kinds = (Momentum, Adam, type(None))
    found: Momentum | Adam | None = check_kind(
        "optimizer", optimizer, kinds, "a Momentum, Adam or Yogi, or None"
    )
    return found


def check_robust(robust: Any) -> str:
    """Return the name of the rule."""
    rule = ("filtered" if robust else "mean") if isinstance(robust, bool) else robust
    return check_choice("robust", rule, ROBUST)


def check_model(initial: Sequence[Matrix], is_private: Sequence[bool]) -> list[Matrix]:
    """Return the initial arrays, those that are averaged as floats."""
    if not initial:
        raise ValueError("initial_arrays must be the arrays of a model, got none.")
    model = []
    for array, private in zip(initial, is_private, strict=True):
        other = array.dtype.kind in "biuf" and array.dtype not in FLOATS
        values = array.astype(np.float64) if other else array
        checked = check_array("initial_arrays", values.ravel(), ndim=1).reshape(array.shape)
        model.append(array if private else checked)
    return model


def begun(optimizer: Momentum | Adam | None, model: Sequence[Matrix]) -> list[Matrix]:
    """Return the optimizer's memory before the first round."""
    return [] if optimizer is None else optimizer.begin(model)


def advanced(
    optimizer: Momentum | Adam | None,
    model: Sequence[Matrix],
    combined: Sequence[Matrix],
    state: State,
) -> tuple[list[Matrix], list[Matrix]]:
    """Return the next model and the optimizer's memory."""
    means = list(combined)
    if optimizer is None:
        return means, []
    changes = [new - old for new, old in zip(means, model, strict=True)]
    moved, memory = optimizer.step(model, changes, unpacked(state, _MEMORY))
    return [np.asarray(array) for array in moved], [np.asarray(array) for array in memory]


def packed(model: Sequence[Matrix], memory: Sequence[Matrix]) -> dict[str, Matrix]:
    """Return the state that a checkpoint holds."""
    both = ((_MODEL, model), (_MEMORY, memory))
    return {f"{kind}/{i:06d}": array for kind, some in both for i, array in enumerate(some)}


def unpacked(state: State, kind: str = _MODEL) -> list[Matrix]:
    """Return the model in a state, or the optimizer's memory."""
    return [state[name] for name in sorted(state) if name.startswith(f"{kind}/")]
