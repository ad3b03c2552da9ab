"""What the strategies that average any model share: its arrays, the rule, the server's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import ClassVar, Unpack

import numpy as np

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
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.driver import ProtocolRun
from flwr_perdl.protocol.options import OLD, SECURE, ServerOptions
from flwr_perdl.protocol.request import State
from flwr_perdl.protocol.strategy import ProtocolStrategy

TRAIN = "train"
#: Names in a checkpoint: the model's arrays, and the optimizer's.
_MODEL, _MEMORY = "model", "memory"


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


class ModelStrategy(ProtocolStrategy):
    """A strategy that averages models of any kind, and may take a step along the mean change."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "secure": SECURE,
        "privacy": "no bound of a client's change is declared: use Flower's LocalDpMod",
        "reuse_last_reply": OLD,
        "clusters": "one model is for all: use ClusteredFedAvg",
    }

    def __init__(
        self,
        optimizer: Momentum | Adam | None,
        robust: str | bool,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(**options)
        kinds = (Momentum, Adam, type(None))
        self.optimizer: Momentum | Adam | None = check_kind(
            "optimizer", optimizer, kinds, "a Momentum, Adam or Yogi, or None"
        )
        self.robust = check_robust(robust, RULES)

    def open(self, initial: list[Matrix], names: Iterable[str] = ()) -> ProtocolRun:
        """Begin a run, or take it up from its checkpoint."""
        self._names = list(names) or list(map(str, range(len(initial))))
        return super().open(initial, names)

    def _array_names(self) -> list[str]:
        """Return the names of the model's arrays, once a run is on."""
        run = self._running().record
        return run.array_names or self._names or [*map(str, range(len(run.model)))]

    def take_step(
        self,
        model: Sequence[Matrix],
        means: Sequence[Matrix],
        state: State,
        names: Sequence[str] | None = None,
    ) -> tuple[list[Matrix], list[Matrix]]:
        """Return the next model and the optimizer's memory; ``names`` are by default all."""
        if self.optimizer is None:
            return list(means), []
        arrays = zip(self._array_names() if names is None else names, model, strict=True)
        steps = [i for i, (name, array) in enumerate(arrays) if not is_plain(name, array)]
        own = [model[i].astype(np.result_type(model[i], np.float32), copy=False) for i in steps]
        fixed = [fixed_entries(model[i]) for i in steps]
        changes = [change(means[i], model[i], f) for i, f in zip(steps, fixed, strict=True)]
        memory = unpack_model(state, _MEMORY) or self.optimizer.begin(own)
        moved, memory = self.optimizer.step(own, changes, memory)
        found = list(means)
        for i, array, entries in zip(steps, moved, fixed, strict=True):
            found[i] = settled(array, model[i], entries)
        return found, [np.asarray(array) for array in memory]


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
    both = ((_MODEL, model), (_MEMORY, memory))
    arrays = {
        f"{kind}/{i:06d}": as_file(array) for kind, some in both for i, array in enumerate(some)
    }
    return {**arrays, **{kind: np.array(len(some)) for kind, some in both}}


def unpack_model(state: State, kind: str = _MODEL) -> list[Matrix]:
    """Return the model in a state, or the optimizer's memory."""
    return [state[f"{kind}/{i:06d}"] for i in range(int(state[kind]))]
