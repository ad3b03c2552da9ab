"""Shared by the strategies for any model: arrays, aggregation, server optimizers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from logging import INFO, WARNING
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import Result

from flwr_perdl.clients.personalized import KEPT
from flwr_perdl.clients.transport import TRANSPORT, Transport
from flwr_perdl.core.aggregate import RULES
from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_kind,
    check_real,
    check_robust,
    own_numbers,
)
from flwr_perdl.core.models import change, check_dtypes, fixed_entries, is_plain, settled
from flwr_perdl.core.npy import as_file
from flwr_perdl.network.compression import TopK
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.driver import Plan, ProtocolRun
from flwr_perdl.protocol.options import OLD, SECURE, Needs, ServerOptions, check_support
from flwr_perdl.protocol.records import ARRAYS, CONFIG, LEFT_OUT, Limits, Reply, read_reply
from flwr_perdl.protocol.request import State
from flwr_perdl.strategies._own_models import TrainsModels

TRAIN = "train"
#: Names in a checkpoint: the model's arrays, and the optimizer's.
_MODEL, MEMORY = "model", "memory"


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """Server momentum: ``m = beta m + Delta``, ``x = x + learning_rate m``.

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

    def begin(self, array: Matrix) -> list[Matrix]:
        """Return the memory of an array before the first step."""
        return [np.zeros_like(array)]

    def step(
        self, array: Matrix, change: Matrix, memory: Sequence[Matrix]
    ) -> tuple[Matrix, list[Matrix]]:
        """Return the next array and memory."""
        m: Matrix = self.beta * memory[0] + change
        return array + self.learning_rate * m, [m]


#: The paper's, of `Adam` and `Yogi`.
_BETA_1, _BETA_2 = 0.9, 0.99


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Server optimizer of FedAdam (Reddi et al. 2021, Algorithm 2).

    ``m = beta_1 m + (1 - beta_1) Delta``, ``v = beta_2 v + (1 - beta_2) Delta^2``,
    ``x = x + learning_rate m / (sqrt(v) + tau)``, from m = 0 and v = tau^2, with the paper's
    beta_1 = 0.9 and beta_2 = 0.99. Flower's FedAdam adds a bias correction, which the paper does
    not have.

    Parameters
    ----------
    learning_rate : float, default 0.1
        Above 0.
    tau : float, default 1e-3
        Above 0: the larger, the less adaptive.

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
    tau: float = 1e-3

    def __post_init__(self) -> None:
        """Check the arguments."""
        own_numbers(self)
        check_real("learning_rate", self.learning_rate, 0, LARGE, open_low=True)
        check_real("tau", self.tau, 1e-12, LARGE)

    def begin(self, array: Matrix) -> list[Matrix]:
        """Return the memory of an array before the first step, m and v."""
        return [np.zeros_like(array), np.full_like(array, self.tau**2)]

    def step(
        self, array: Matrix, change: Matrix, memory: Sequence[Matrix]
    ) -> tuple[Matrix, list[Matrix]]:
        """Return the next array and memory."""
        m: Matrix = _BETA_1 * memory[0] + (1 - _BETA_1) * change
        v = self._second(memory[1], change**2)
        return array + self.learning_rate * (m / (np.sqrt(v) + self.tau)), [m, v]

    def _second(self, v: Matrix, square: Matrix) -> Matrix:
        return _BETA_2 * v + (1 - _BETA_2) * square


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """Server optimizer of FedYogi (Reddi et al. 2021, Algorithm 2).

    As `Adam`, but ``v = v - (1 - beta_2) Delta^2 sign(v - Delta^2)``, which falls more slowly.

    Examples
    --------
    >>> from flwr_perdl.strategies import PersonalizedFedAvg, Yogi
    >>> strategy = PersonalizedFedAvg(["head.*"], optimizer=Yogi(learning_rate=0.03))
    """

    def _second(self, v: Matrix, square: Matrix) -> Matrix:
        moved: Matrix = v - (1 - _BETA_2) * square * np.sign(v - square)
        return moved


class ModelStrategy(TrainsModels):
    """A strategy that averages models of any kind, and may take a step along the mean change."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "secure": SECURE,
        "privacy": "no bound of a client's change is declared: use Flower's LocalDpMod",
        "reuse_last_reply": OLD,
        "clusters": "one model is for all: use ClusteredFedAvg",
    }
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(("compression",), "robust", (False, "mean"), "rules compare whole changes"),
    )

    def __init__(
        self,
        *,
        optimizer: Momentum | Adam | None,
        robust: str | bool,
        transport: str | None,
        compression: TopK | None,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        fine_tune: int = 0,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        own: dict[str, Any] = {"private": private, "share": share, "fine_tune": fine_tune}
        own |= {"metric": metric, "higher_is_better": higher_is_better}
        super().__init__(transport=transport, **own, **options)
        self._is_private: list[bool] = []
        #: Who has a private part, who is asked in this round, and to whom none is sent: not a part
        #: of the state, since clients may lose theirs while a run is not on.
        self._known: set[int] = set()
        self._asked_now: set[int] = set()
        self._cut: set[int] = set()
        kinds = (TopK, type(None))
        self.compression = check_kind("compression", compression, kinds, "a TopK or None")
        top = None if compression is None else compression.share
        check_support(self, {"robust": robust, "compression": compression})
        self._wire: Transport | None = None
        if transport is not None or top is not None:
            self._wire = Transport(transport is not None, top)
        steps = (Momentum, Adam, type(None))
        self.optimizer: Momentum | Adam | None = check_kind(
            "optimizer", optimizer, steps, "a Momentum, Adam or Yogi, or None"
        )
        self.robust = check_robust(robust, RULES)

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> ProtocolRun:
        """Begin a run, or take it up from its checkpoint."""
        self._known, self._asked_now, self._cut = set(), set(), set()
        return super().open(initial, names)

    def take_names(self, names: Sequence[str]) -> None:
        """Find which arrays are private."""
        self._names, own = list(names), list[str]()
        if self._part is not None and names:
            own = self._part.private(names)
            self._part.warn(names)
        self._is_private = [name in own for name in names]

    def _run_rounds(self, *arguments: Any) -> Result:
        """Take the rounds, and say what the result is not."""
        evaluate_fn = arguments[5]
        if self._part is not None:
            log(
                INFO if evaluate_fn is None else WARNING,
                "Private arrays have their initial values in the result%s; clients have their own.",
                "" if evaluate_fn is None else " and for evaluate_fn",
            )
        return super()._run_rounds(*arguments)

    def _array_names(self) -> list[str]:
        """Return the names of the model's arrays, once a run is on."""
        run = self._running().record
        return run.array_names or self._names or [*map(str, range(len(run.model)))]

    def private_names(self) -> list[str]:
        """Return the names of the arrays that stay at the clients."""
        pairs = zip(self._array_names(), self._is_private, strict=True)
        return [name for name, private in pairs if private]

    def shared(self, arrays: Sequence[Any]) -> list[Any]:
        """Return what belongs to shared arrays of a list with an entry per array, of any models."""
        if self._part is None:
            return list(arrays)
        pairs = zip(arrays, cycle(self._is_private), strict=False)
        return [one for one, private in pairs if not private]

    def whole(self, model: Sequence[Matrix], shared: Sequence[Matrix]) -> list[Matrix]:
        """Return a model with other shared arrays."""
        if self._part is None:
            return list(shared)
        rest, pairs = iter(shared), zip(model, self._is_private, strict=True)
        return [array if private else next(rest) for array, private in pairs]

    def trained_by(self, replies: Collection[int]) -> None:
        """Note that clients have trained: they have a private part of their own."""
        self._known = (self._known - self._asked_now) | set(replies)

    @property
    def needed(self) -> tuple[str, ...]:
        """The metrics of a client that keeps what it is to keep."""
        return () if self._part is None else (KEPT,)

    def _ask(
        self, plan: Plan, nodes: Mapping[int, int], message_type: str, config: ConfigRecord
    ) -> list[Message]:
        """Return a message per client, in as few bytes as the options say.

        Private arrays are in it only for clients that have none of their own.
        """
        if self._part is not None:
            self._cut = self._known & plan.arrays.keys()
            cut = {id(own): self.shared(own) for own in plan.arrays.values()}
            # The plan's own table, from which reports count what was sent.
            plan.arrays.update({who: cut[id(plan.arrays[who])] for who in self._cut})
            left_out = json.dumps(self.private_names())
            config = ConfigRecord({**config, LEFT_OUT: left_out})
            if message_type == MessageType.TRAIN:
                self._asked_now = set(plan.arrays)
        messages, request = super()._ask(plan, nodes, message_type, config), self._running().request
        if self._wire is not None:
            changes = request is not None and request.models is not None
            wire = replace(self._wire, changes=changes and message_type == MessageType.TRAIN)
            for content in {id(one.content): one.content for one in messages}.values():
                content[ARRAYS], dtypes = wire.shortened(content.array_records[ARRAYS])
                told = {TRANSPORT: str(replace(wire, dtypes=dtypes))}
                content[CONFIG] = ConfigRecord({**content.config_records[CONFIG], **told})
        return messages

    def _names_of(self, plan: Plan, partition: int) -> list[str]:
        """Return the names of a model's arrays that a client receives."""
        names = self._array_names()
        return self.shared(names) if partition in self._cut else names

    def _read_trained(self, content: RecordDict, limits: Limits, names: Collection[str]) -> Reply:
        """Return what a reply to training says, changes as the model that they make."""
        request = self._running().request
        models = None if request is None else request.models
        if self._wire is None or models is None:
            return super()._read_trained(content, limits, names)
        reply = read_reply(content, limits._replace(expect=None))
        return self._wire.received(reply, models.begun(reply), self.shared(self._array_names()))

    def take_step(
        self,
        model: Sequence[Matrix],
        means: Sequence[Matrix],
        memory: Sequence[Matrix],
        names: Sequence[str] | None = None,
        *,
        idle: bool = False,
    ) -> tuple[list[Matrix], list[Matrix]]:
        """Return the next model and the optimizer's memory; ``names`` are by default all.

        ``idle``: nobody has trained the model, so that it and the memory stay as they are.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return list(means), []
        found, kept = list(means), list[Matrix]()
        for i, name in enumerate(self._array_names() if names is None else names):
            if is_plain(name, model[i]):
                continue
            own, fixed = model[i], fixed_entries(model[i])
            own = own.astype(np.result_type(own, np.float32), copy=False)
            before = optimizer.begin(own)
            if memory:
                before = list(memory[len(kept) : len(kept) + len(before)])
            if idle:
                kept += map(as_file, before)
                continue
            moved, after = optimizer.step(own, change(means[i], model[i], fixed), before)
            found[i] = as_file(settled(moved, model[i], fixed))
            kept += [as_file(array) for array in after]
        return found, kept


def check_initial(initial: Sequence[Matrix], names: Sequence[str]) -> list[Matrix]:
    """Return an initial model, or raise a ValueError; warn of entries that cannot be averaged."""
    check_dtypes("initial_arrays", names, initial)
    fixed = [
        name
        for name, array in zip(names, initial, strict=True)
        if array.dtype.kind != "b" and fixed_entries(array) is not None
    ]
    if fixed:
        log(
            WARNING,
            "initial_arrays have values that are not finite, or too large to be averaged, in %s: "
            "they stay as they are.",
            ", ".join(map(repr, fixed)),
        )
    return list(initial)


def pack_model(model: Sequence[Matrix], memory: Sequence[Matrix] = ()) -> dict[str, Matrix]:
    """Return the state that a checkpoint holds."""
    both = ((_MODEL, model), (MEMORY, memory))
    arrays = {
        f"{kind}/{i:06d}": as_file(array) for kind, some in both for i, array in enumerate(some)
    }
    return {**arrays, **{kind: np.array(len(some)) for kind, some in both}}


def unpack_model(state: State, kind: str = _MODEL) -> list[Matrix]:
    """Return the model in a state, or the optimizer's memory."""
    return [state[f"{kind}/{i:06d}"] for i in range(int(state[kind]))]
