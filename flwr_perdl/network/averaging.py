"""Decentralized averaging of any model: nodes train locally and average with their neighbors.

Every node k has a model ``w_k``, its own data, and the user's training, which takes the place of a
gradient step: ``fit_k(w) = w - mu g_k(w)``, with any number of epochs of any optimizer. ``A`` are
the network's weights, symmetric or at least doubly stochastic, ``t`` is the round. A node's round
is here, and is the same in memory (`flwr_perdl.network.averaging_in_memory`) and at a Flower client
(`flwr_perdl.clients.diffusion_averaging`).

=========================================  ======================================================
literature                                 here
=========================================  ======================================================
adapt-then-combine (ATC)                   ``method="atc"``
``psi_k = fit_k(w_k)``                     `AveragingNode.adapt`
``w_k <- sum_l a_kl psi_l``                `AveragingNode.combine`
combine-then-adapt (CTA)                   ``method="cta"``
``w_k <- fit_k(sum_l a_kl w_l)``           `AveragingNode.combine`
exact diffusion                            ``method="exact_diffusion"``
``psi_k(t) = fit_k(w_k(t-1))``             `AveragingNode.adapt`, ``state.last_i``
``phi_k = psi_k(t) + w_k(t-1)              `AveragingNode.adapt`; ``psi_k(0) = w_k(0)``
- psi_k(t-1)``
``w_k(t) = (phi_k + sum_l a_kl phi_l)/2``  `AveragingNode.combine`
gradient tracking                          ``method="gradient_tracking"``
``g_k(t) = w_k(t-1) - fit_k(w_k(t-1))``    `AveragingNode.adapt`, ``state.last_i``
``y_k(t) = sum_l a_kl y_l(t-1)             `AveragingNode.adapt`, ``state.tracker_i``; 0 at
+ g_k(t) - g_k(t-1)``                      the start
``w_k(t) = sum_l a_kl (w_l - y_l)``        `AveragingNode.combine`
clipping, trimmed mean                     ``robust``: `flwr_perdl.core.aggregate`
push-sum, stochastic gradient push         ``method="push_sum"``; ``a_kl = 1 / (out-degree of l
                                           + 1)`` by `push_weights`, columns sum to one
``x_k <- x_k + fit_k(z_k) - z_k``          `AveragingNode.adapt`; ``z``: ``state.model_i``
``x_k <- sum_l a_kl x_l,                   `AveragingNode.combine`, ``state.weight_0``; 1 at
u_k <- sum_l a_kl u_l, z_k = x_k / u_k``   the start
=========================================  ======================================================

Sources. ATC and CTA: Sayed, "Adaptation, learning, and optimization over networks", Foundations and
Trends in Machine Learning 7, 2014. Exact diffusion: Yuan, Ying, Zhao, Sayed, IEEE TSP 67, 2019.
Gradient tracking: Nedić, Olshevsky, Shi, "Achieving geometric convergence for distributed
optimization over time-varying graphs", SIAM Journal on Optimization 27, 2017, combined after the
step. Push-sum: Nedić, Olshevsky, "Distributed optimization over time-varying directed graphs", IEEE
TAC 60, 2015, in the order of Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for
distributed deep learning", ICML 2019: step, then push.

Deviation: where the papers take one gradient step of a known learning rate, this calls the user's
training. The two corrected methods then converge to a point where the changes by the nodes' ``fit``
sum to zero; for one full gradient step this is the minimum of the sum of the nodes' losses.

Compressed messages: `flwr_perdl.network._compressed`. Groups: `flwr_perdl.network._groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array, count_values, row_products
from flwr_perdl.core.keys import ROUND
from flwr_perdl.core.models import (
    Start,
    as_dtype,
    check_dtypes,
    check_trained,
    cleared,
    far_too_large,
    fixed_entries,
    is_float,
    is_plain,
    largest_averaged,
    settled,
)
from flwr_perdl.core.npy import as_file
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.network.messages import Neighborhood

#: The method by default: where the network is fixed and symmetric, or not known.
FIXED = "exact_diffusion"
#: The report that every method makes: how far a node's model was from its neighborhood's mean.
DISTANCE = "neighbor-distance"
#: What else a node reports of itself: the size of the messages that it has received in the round.
RECEIVED, BYTES = "floats-received", "bytes-received"
_OWN = (DISTANCE, RECEIVED, BYTES)


class Trainer(NamedTuple):
    """What a node's user has written, as the algorithm calls it: `Local`'s methods, or a client's.

    Attributes
    ----------
    fit : callable
        ``(arrays, **config)`` -> ``arrays``, ``metrics`` as attributes.
    evaluate : callable
        ``(arrays, **config) -> (loss, num_examples, metrics)``.
    select : callable
        ``(arrays, **config) -> (cost, num_examples, ...)``: less is better.
    """

    fit: Callable[..., Any]
    evaluate: Callable[..., tuple[float, int, Mapping[str, Any]]]
    select: Callable[..., Any]


class NodeState(NamedTuple):
    """What a node keeps between rounds.

    Attributes
    ----------
    model : list of ndarray
        ``w``, in the dtypes of the model's arrays; after ``adapt`` what is sent, with push-sum the
        numerators.
    fixed : list of (ndarray of bool or None)
        Which entries of each array stay as they are.
    last, tracker : list of ndarray
        Of each array that the method corrects, ``psi`` of exact diffusion or ``g`` of gradient
        tracking, and its ``y``.
    weight : list of ndarray
        Push-sum's ``u`` (1,).
    reports : ndarray
        About the last round, in the order of `AveragingNode.names`.
    more : dict of str to ndarray
        What compression and groups keep besides.
    """

    model: list[Array]
    fixed: list[NDArray[np.bool_] | None]
    last: list[Array]
    tracker: list[Array]
    weight: list[Array]
    reports: Array
    more: dict[str, Array]

    def to_arrays(self) -> dict[str, Array]:
        """Return the state as arrays by name, such as ``model_0``."""
        lists: dict[str, Any] = self._asdict()
        more, reports = lists.pop("more"), lists.pop("reports")
        pairs = ((f"{kind}_{i}", a) for kind, own in lists.items() for i, a in enumerate(own))
        return {**{name: a for name, a in pairs if a is not None}, "reports": reports, **more}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> NodeState:
        """Return what `to_arrays` was called on."""
        more, found = {**arrays}, dict[str, dict[int, Array]]()
        for name in arrays:
            kind, _, i = name.partition("_")
            if i:
                found.setdefault(kind, {})[int(i)] = more.pop(name)
        lists: Any = {kind: [*found.get(kind, {}).values()] for kind in cls._fields[:-2]}
        lists["fixed"] = [found.get("fixed", {}).get(i) for i in found["model"]]
        return cls(**lists, reports=more.pop("reports"), more=more)


@dataclass(frozen=True, eq=False)
class Form:
    """The arrays of a model: their names, and a model of that form."""

    names: Sequence[str]
    like: Sequence[Array]

    @cached_property
    def sent(self) -> list[int]:
        """Which arrays are sent to the neighbors: all but booleans."""
        return [i for i, array in enumerate(self.like) if array.dtype.kind != "b"]

    @cached_property
    def corrected(self) -> list[int]:
        """Which arrays a method may correct; the others are averaged plainly."""
        arrays = zip(self.names, self.like, strict=True)
        return [i for i, (name, array) in enumerate(arrays) if not is_plain(name, array)]

    def __post_init__(self) -> None:
        """Check the dtypes."""
        check_dtypes("initial, or what get_parameters returns,", self.names, self.like)

    def without(self, names: Collection[str]) -> Form:
        """Return the form of a model without these arrays."""
        kept = {n: own for n, own in zip(self.names, self.like, strict=True) if n not in names}
        return Form([*kept], [*kept.values()])

    def named(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return a model by name, or none; a ValueError if it has another form."""
        forms = ([(a.shape, a.dtype) for a in some] for some in (arrays, self.like))
        if arrays and next(forms) != next(forms):
            raise ValueError(
                "arrays must end with a model of the form that config says, got others."
            )
        return dict(zip(self.names, arrays, strict=True)) if arrays else {}

    def checked(
        self, whose: str, arrays: Sequence[Array], before: Sequence[Start] = ()
    ) -> list[Array]:
        """Return a model, trained from the one ``before`` if any, in the dtypes of this form."""
        own, shapes = [np.asarray(array) for array in arrays], [a.shape for a in self.like]
        if (found := [array.shape for array in own]) != shapes:
            raise ValueError(f"{whose} must have arrays of shapes {shapes}, got {found}.")
        try:
            own = [as_dtype(array, old.dtype) for array, old in zip(own, self.like, strict=True)]
            for name, array, start in zip(self.names, own, before, strict=False):
                check_trained(name, array, *start)
        except ValueError as error:
            raise ValueError(f"{whose} must return what can be averaged: {error}") from None
        return own


class AveragingNode:
    """One node of the network: what it does in a round.

    Not corrected, but averaged plainly, are integers and the statistics of batch normalization
    (`flwr_perdl.core.models`); booleans are not sent. Arrays that are sent or given to the user's
    training are views of their ``.npy`` files, so that messages have them without a copy.
    """

    def __init__(self, options: Any, form: Form, node: int) -> None:
        self.options = options
        self.method = options.method or FIXED
        self.form = form
        self.node = node
        self._trained = list(dict.fromkeys(options.metrics))
        self._evaluated = list(dict.fromkeys(("loss", *options.metrics)))
        if not options.evaluate_every:
            self._evaluated = []
        fitted = (f"train-{name}" for name in self._trained)
        #: Names of the reports.
        self.names = [*_OWN, *fitted, *(f"evaluate-{name}" for name in self._evaluated)]

    def start(self, model: Sequence[Array], *, known: bool = True) -> NodeState:
        """Return the state before the first round; ``known``: whether all nodes have this model."""
        own, form = self.form.checked("initial", model), self.form
        fixed = [fixed_entries(a) if i in form.sent else None for i, a in enumerate(own)]
        corrected = [cleared(own[i], fixed[i]) for i in form.corrected]
        last, tracker, weight = [], [], []
        if self.method == "exact_diffusion":
            last = corrected
        elif self.method == "gradient_tracking":
            last = tracker = [*map(np.zeros_like, corrected)]
        elif self.method == "push_sum":
            weight = [np.ones(1, np.result_type(np.float32, *corrected))]
        reports = np.full(len(self.names), np.nan)
        return NodeState(own, fixed, last, tracker, weight, reports, {})

    @one_blas_thread()
    def adapt(self, state: NodeState, round_: int, trainer: Trainer) -> NodeState:
        """Train the model; what is sent is the result, corrected where the method does."""
        method, w = self.method, state.model
        if method == "cta":
            return state
        state = self._train(state, round_, trainer)
        psi = state.model
        sent, last, trackers = [*psi], [], []
        for j, i in enumerate(self.form.corrected if method != "atc" else ()):
            fixed = state.fixed[i]
            old, new = cleared(w[i], fixed), cleared(psi[i], fixed)
            if method == "exact_diffusion":
                found = new + old
                found -= state.last[j]
                last.append(new)
            elif method == "gradient_tracking":
                last.append(np.asarray(old - new))
                trackers.append(as_file(state.tracker[j] + last[j] - state.last[j]))
                found = old - trackers[j]
            else:
                found = old * _as_factor(state.weight[0], old) + new - old
            sent[i] = as_file(settled(found, w[i], fixed))
        return state._replace(model=sent, last=last, tracker=trackers)

    def message(self, state: NodeState) -> list[Array]:
        """Return the model; with gradient tracking the tracker, with push-sum the weight.

        Booleans are not in it, and zeros stand for values that are not averaged.
        """
        sent = [cleared(state.model[i], state.fixed[i]) for i in self.form.sent]
        return [*sent, *state.tracker, *state.weight]

    def silent(self, state: NodeState) -> bool:
        """Whether the node sends nothing in this round."""
        return False

    def rejects(self, state: NodeState, around: Neighborhood) -> dict[str, NDArray[np.bool_]]:
        """Return by reason which neighbors' messages do not count, in their order."""
        places = [around.own, *around.neighbors]
        sizes = np.array([around.sizes[j] for j in places]).T
        own, bound = around.messages[around.own], self.options.max_magnitude
        floats = [is_float(array) for array in own]
        limits = [largest_averaged(array.dtype) for array in own]
        most = np.where(floats, far_too_large(sizes) if bound is None else bound, limits)
        large = np.any(sizes[:, 1:] > most[:, None], axis=0)
        reasons: dict[str, Any] = {
            "it has a value that is far larger than those of the neighborhood": large
        }
        if self.method == "push_sum":
            weights = [around.messages[j][-1][0] for j in places[1:]]
            reasons["its weight is not positive"] = np.less_equal(weights, 0)
        return reasons

    def screened(
        self, state: NodeState, around: Neighborhood
    ) -> tuple[Neighborhood, dict[int, str]]:
        """Return the neighborhood without what is rejected, and why, by sender."""
        out = {
            j: reason
            for reason, each in self.rejects(state, around).items()
            for j, rejected in zip(around.neighbors, each, strict=True)
            if rejected
        }
        if not out:
            return around, {}
        return around.without(out), {around.senders[j]: reason for j, reason in out.items()}

    @one_blas_thread()
    def combine(self, state: NodeState, around: Neighborhood, trainer: Trainer) -> NodeState:
        """Average over the neighborhood; evaluate the model where it is the round for that."""
        form, sent, square = self.form, state.model, 0.0
        model = [*sent]
        for i, mean in zip(form.sent, self._means(state, around), strict=True):
            fixed = state.fixed[i]
            own = cleared(sent[i], fixed)
            if self.method == "push_sum" and i in form.corrected:
                own = own / _as_factor(state.weight[0], own)
            if is_float(own):
                apart = np.reshape(own - mean, (1, -1))
                square += float(row_products(apart, apart)[0])
            if self.method == "exact_diffusion" and i in form.corrected:
                mean += own
                mean /= 2
            model[i] = as_file(settled(mean, sent[i], fixed))
        message, n = around.messages[around.own], len(around.neighbors)
        reports = state.reports.copy()
        reports[0] = np.sqrt(square)
        reports[1] = n * count_values(*message)
        reports[2] = n * sum(array.nbytes for array in message)
        trackers = self._tracked(state, around)
        state = state._replace(reports=reports, model=model, tracker=trackers)
        if self.method == "push_sum":
            state = state._replace(weight=[around.mean(-1)])
        if self.method == "cta":
            state = self._train(state, around.round, trainer)
        return self._evaluate(state, around.round, trainer) if self._evaluated else state

    def _means(self, state: NodeState, around: Neighborhood) -> Iterator[Array]:
        """Yield the neighborhood's means of the arrays of the model that are sent."""
        form, rule = self.form, str(self.options.robust)
        floats = [k for k, i in enumerate(form.sent) if is_float(form.like[i])]
        if rule != "mean":
            robust = around.robust_means(floats, rule, self.options.n_liars)
        for k, i in enumerate(form.sent):
            if rule != "mean" and k in floats:
                yield next(robust)
            elif self.method != "push_sum":
                yield around.mean(k)
            else:
                rows = [message[k] for message in around.messages]
                if i not in form.corrected:  # sent as it is: the weights are not in it
                    weights = [message[-1] for message in around.messages]
                    pairs = zip(rows, weights, strict=True)
                    rows = [np.asarray(row * _as_factor(u, row)) for row, u in pairs]
                mean = around.mean_of(rows)
                yield mean / _as_factor(around.mean(-1), mean)

    def _tracked(self, state: NodeState, around: Neighborhood) -> list[Array]:
        """Return the neighborhood's means of the trackers."""
        first = len(self.form.sent)
        pairs = ((around.mean(first + j), own) for j, own in enumerate(state.tracker))
        return [as_file(mean.astype(own.dtype, copy=False)) for mean, own in pairs]

    def observe(self, state: NodeState) -> dict[str, Array]:
        """Return nothing: the models stay at the nodes."""
        return {}

    def report(self, state: NodeState) -> dict[str, float]:
        """Return what the node reports to the operator about the last round."""
        return dict(zip(self.names, state.reports.tolist(), strict=True))

    def _train(self, state: NodeState, round_: int, trainer: Trainer) -> NodeState:
        """Return the state with what ``fit`` makes of the model, and its metrics."""
        trained = trainer.fit(state.model, **{ROUND: round_})
        whose, before = f"fit of node {self.node}", zip(state.model, state.fixed, strict=True)
        psi = self.form.checked(whose, trained.arrays, [*before])
        reports, first = state.reports.copy(), len(_OWN)
        numbers = _numbers(whose, trained.metrics, self._trained)
        reports[first : first + len(numbers)] = numbers
        return state._replace(model=psi, reports=reports)

    def _evaluate(self, state: NodeState, round_: int, trainer: Trainer) -> NodeState:
        """Return the state with reports of ``evaluate``; NaN where this is no round for that."""
        reports, first = state.reports.copy(), len(_OWN) + len(self._trained)
        reports[first:] = np.nan
        if round_ % self.options.evaluate_every == 0:
            loss, n_examples, metrics = trainer.evaluate(state.model, **{ROUND: round_})
            if n_examples:  # none: the client has nothing to evaluate on
                own = {**metrics, "loss": loss}
                whose = f"evaluate of node {self.node}"
                reports[first:] = _numbers(whose, own, self._evaluated)
        return state._replace(reports=reports)


def _as_factor(weight: Array, array: Array) -> Array:
    """Return a weight (1,) in as many dimensions as an array."""
    factor: Array = weight.reshape((1,) * array.ndim)
    return factor


def _numbers(whose: str, metrics: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return the metrics of these names; NaN for one that a client does not have."""
    for name in names:
        if not isinstance(metrics.get(name, 0.0), Real):
            raise ValueError(f"{whose} must return a number as {name!r}, got {metrics[name]!r}.")
    return [float(metrics.get(name, np.nan)) for name in names]
