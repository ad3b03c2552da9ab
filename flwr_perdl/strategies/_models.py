"""Shared by the strategies for any model: arrays, aggregation, server optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, ClassVar

import numpy as np

from flwr_perdl.clients.own_models import MOST_FITS
from flwr_perdl.core.aggregate import RULES
from flwr_perdl.core.checks import (
    LARGE,
    Matrix,
    check_choice,
    check_count,
    check_kind,
    check_real,
    check_robust,
    own_numbers,
)
from flwr_perdl.core.models import change, check_dtypes, fixed_entries, is_plain, settled
from flwr_perdl.core.npy import as_file
from flwr_perdl.network.compression import TopK
from flwr_perdl.parts import given
from flwr_perdl.parts.private import Patterns, check_patterns
from flwr_perdl.parts.transport import HALF
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import OLD, SECURE, Needs, check_support
from flwr_perdl.protocol.part import Part
from flwr_perdl.protocol.records import HIGHER_IS_BETTER, LOSSES, METRIC
from flwr_perdl.protocol.report import is_higher_better
from flwr_perdl.protocol.request import State
from flwr_perdl.strategies._own_models import EndsWithModels

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
    #: Whether v falls as Yogi's does.
    _slower: ClassVar[bool] = False

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
        v, square = memory[1], change**2
        if self._slower:
            v = v - (1 - _BETA_2) * square * np.sign(v - square)
        else:
            v = _BETA_2 * v + (1 - _BETA_2) * square
        return array + self.learning_rate * (m / (np.sqrt(v) + self.tau)), [m, v]


@dataclass(frozen=True, kw_only=True)
class Yogi(Adam):
    """Server optimizer of FedYogi (Reddi et al. 2021, Algorithm 2).

    As `Adam`, but ``v = v - (1 - beta_2) Delta^2 sign(v - Delta^2)``, which falls more slowly.

    Examples
    --------
    >>> from flwr_perdl.strategies import PersonalizedFedAvg, Yogi
    >>> strategy = PersonalizedFedAvg(["head.*"], optimizer=Yogi(learning_rate=0.03))
    """

    _slower: ClassVar[bool] = True


class TrainsModels(EndsWithModels):
    """A strategy whose clients train models of any kind, of which a part may be private."""

    def __init__(
        self,
        *arguments: Any,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        transport: str | None = None,
        fine_tune: int = 0,
        metric: str = LOSSES[0],
        higher_is_better: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.metric = check_kind("metric", metric, str, "a name")
        self.higher_is_better = is_higher_better(metric, higher_is_better)
        if metric not in LOSSES or self.higher_is_better:
            self._told = {METRIC: metric, HIGHER_IS_BETTER: self.higher_is_better}
        self._part = Patterns.of("private", private, share)
        self.private = check_patterns("private", private)
        self.share = check_patterns("share", share)
        wires = (HALF.name,)
        self.transport = None if transport is None else check_choice("transport", transport, wires)
        self.fine_tune = check_count("fine_tune", fine_tune, 0, MOST_FITS)
        self._chooses = bool(fine_tune)
        self._after_rounds = [self._tune] if fine_tune else []


class ModelStrategy(TrainsModels):
    """A strategy that averages models of any kind, and may take a step along the mean change."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "secure": SECURE,
        "privacy": "a client sends more than one noised sum: use PersonalizedFedAvg",
        "reuse_last_reply": OLD,
        "clusters": "one model is for all: use ClusteredFedAvg",
    }
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(("compression",), "robust", (False, "mean"), "rules compare whole changes"),
    )

    def __init__(
        self,
        *others: Part,
        optimizer: Momentum | Adam | None,
        robust: str | bool,
        transport: str | None,
        compression: TopK | None,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        own: dict[str, Any] = {"private": private, "share": share, "transport": transport}
        kinds = (TopK, type(None))
        self.compression = check_kind("compression", compression, kinds, "a TopK or None")
        parts = given(private, transport, share=share, compression=compression)
        super().__init__(*parts, *others, **own, **options)
        kept = {"private": private or share} if private or share else {}
        check_support(self, {**kept, "robust": robust, "compression": compression})
        steps = (Momentum, Adam, type(None))
        self.optimizer: Momentum | Adam | None = check_kind(
            "optimizer", optimizer, steps, "a Momentum, Adam or Yogi, or None"
        )
        self.robust = check_robust(robust, RULES)

    def take_step(
        self,
        model: Sequence[Matrix],
        means: Sequence[Matrix],
        memory: Sequence[Matrix],
        *,
        idle: bool = False,
    ) -> tuple[list[Matrix], list[Matrix]]:
        """Return the next model and the optimizer's memory.

        ``idle``: nobody has trained the model, so that it and the memory stay as they are.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return list(means), []
        found, kept = list(means), list[Matrix]()
        for i, name in enumerate(self.model_names):
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
