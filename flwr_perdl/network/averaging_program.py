"""The program of `flwr_perdl.network.diffusion_averaging`: a node's round."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import count_values, row_products
from flwr_perdl.core.checks import brief_repr, check_list
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
from flwr_perdl.network.combine import Array, Inbox, stacked

#: ``node -> client``; a client has Flower's ``fit``, and ``evaluate`` where models are evaluated.
Clients = Callable[[int], Any]

#: The method by default: where the network is fixed and symmetric, or not known.
FIXED = "exact_diffusion"
#: The report that every method makes: how far a node's model was from its neighborhood's mean.
DISTANCE = "neighbor-distance"
#: What else a node reports of itself: the size of the messages that it has received in the round.
FLOATS, BYTES = "floats-received", "bytes-received"
_OWN = (DISTANCE, FLOATS, BYTES)


@lru_cache
def state_type(fields: tuple[str, ...]) -> Any:
    """Return the type of a state with these fields."""
    return namedtuple("AveragingState", fields)  # its fields are the model's


def arrays_of(state: Any, kind: str) -> list[Array]:
    """Return a state's arrays of one kind, see `AveragingProgram`."""
    pairs = zip(state._fields, state, strict=True)
    return [array for name, array in pairs if name.startswith(f"{kind}_")]


def with_arrays(state: Any, **kinds: Sequence[Array]) -> Any:
    """Return a state with other arrays of some kinds."""
    new: dict[str, Array] = {}
    for kind, arrays in kinds.items():
        names = [name for name in state._fields if name.startswith(f"{kind}_")]
        new.update(zip(names, arrays, strict=True))
    return state._replace(**new)


def fixed_of(state: Any, i: int) -> Any:
    """Return which entries of the i-th array of a state's models are not averaged, if any."""
    return getattr(state, f"fixed_{i}", None)


class AveragingProgram:
    """`diffusion_averaging` as a `Program`; on Flower, one for each `DiffusionClient`.

    The state of m nodes hosted here is a NamedTuple of arrays with their first axis: ``nodes``;
    ``reports`` (m, n_reports) about the last round, in the order of ``names``; ``model_0``,
    ``model_1``, … in the dtypes of the model's arrays, ``w``, after ``adapt`` what is sent. Of each
    array that the method corrects there are ``last_i``, which is ``psi`` of exact diffusion or
    ``g`` of gradient tracking, and ``tracker_i``, its ``y``. Push-sum has ``weight_0`` (m, 1), and
    after ``adapt`` the numerators in ``model_i``. Not corrected, but averaged plainly, are integers
    and the statistics of batch normalization (`flwr_perdl.core.models`); booleans are not sent.
    ``fixed_i`` says which entries of a first model stay as they are, of an array that has such.

    With ``in_files``, for a single node, arrays are views of their ``.npy`` files, which its client
    and its neighbors receive without a copy; the client must not change them.
    """

    def __init__(
        self,
        options: Any,
        clients: Clients,
        initial: Sequence[Array] | Any,
        array_names: Sequence[str] = (),
        in_files: bool = False,
    ) -> None:
        # A ClientApp can be called, too; the maths do not import Flower.
        if not callable(clients) or hasattr(clients, "lifespan"):
            raise TypeError(
                "clients must be a function that takes a node's number and returns its "
                f"NumPyClient, got {brief_repr(clients)}."
            )
        if hasattr(initial, "to_numpy_ndarrays"):  # an ArrayRecord
            array_names, initial = [*initial], initial.to_numpy_ndarrays()
        if isinstance(initial, np.ndarray):
            raise ValueError(
                f"initial must be a list of arrays, got one array, of shape {initial.shape}: write "
                "[array]."
            )
        for array in () if initial is None else check_list("initial", initial):
            if isinstance(array, int):  # an array of integers is a counter, and is rounded
                raise ValueError(
                    f"initial must be arrays, got the integer {array}: write {array}.0."
                )
        self.options = options if options.method else replace(options, method=FIXED)
        self.clients = clients
        own = [a if in_files else np.array(a) for a in initial or ()]
        self.initial = None if initial is None else own
        self._array_names = list(array_names)
        self._in_files = in_files
        self._known_form: Form | None = None
        self._trained = list(dict.fromkeys(options.metrics))
        self._evaluated = list(dict.fromkeys(("loss", *options.metrics)))
        if not options.evaluate_every:
            self._evaluated = []
        fitted = (f"train-{name}" for name in self._trained)
        #: Names of the reports.
        self.names = [*_OWN, *fitted, *(f"evaluate-{name}" for name in self._evaluated)]

    def start(self, nodes: NDArray[np.intp]) -> Any:
        """Return the state before the first round."""
        firsts = zip(*(self._first(int(node)) for node in nodes), strict=True)
        model = [self._stacked(arrays) for arrays in firsts]
        form = self._form(int(nodes[0]))
        fixed = {i: fixed_entries(model[i]) for i in form.sent}
        corrected = {i: cleared(model[i], fixed[i]) for i in form.corrected}
        fields = {"nodes": nodes, "reports": np.full((len(nodes), len(self.names)), np.nan)}
        fields |= {f"model_{i}": array for i, array in enumerate(model)}
        fields |= {f"fixed_{i}": entries for i, entries in fixed.items() if entries is not None}
        if self.options.method == "exact_diffusion":
            fields |= {f"last_{i}": array for i, array in corrected.items()}
        elif self.options.method == "gradient_tracking":
            for kind in ("last", "tracker"):
                fields |= {f"{kind}_{i}": np.zeros_like(a) for i, a in corrected.items()}
        elif self.options.method == "push_sum":
            dtype = np.result_type(np.float32, *corrected.values())
            fields["weight_0"] = np.ones((len(nodes), 1), dtype)
        return state_type(tuple(fields))(**fields)

    @one_blas_thread()
    def adapt(self, state: Any, round_: int) -> Any:
        """Train every node's model; what is sent is the result, corrected where the method does."""
        method, w = self.options.method, arrays_of(state, "model")
        if method == "cta":
            return state
        state, psi = self._train(state, w, round_)
        last, trackers = arrays_of(state, "last"), arrays_of(state, "tracker")
        sent, new_last, new_trackers = list(psi), [], []
        for j, i in enumerate(self._of(state).corrected if method != "atc" else ()):
            fixed = fixed_of(state, i)
            old, new = cleared(w[i], fixed), cleared(psi[i], fixed)
            if method == "exact_diffusion":
                found = new + old
                found -= last[j]
                new_last.append(new)
            elif method == "gradient_tracking":
                new_last.append(old - new)
                new_trackers.append(self._written(trackers[j] + new_last[j] - last[j]))
                found = old - new_trackers[j]
            else:
                found = old * by_row(state.weight_0, old) + new - old
            sent[i] = self._written(settled(found, w[i], fixed))
        arrays = {"model": sent, "last": new_last, "tracker": new_trackers}
        return with_arrays(state, **{kind: own for kind, own in arrays.items() if own})

    def message(self, state: Any) -> tuple[Array, ...]:
        """Return the model; with gradient tracking the tracker, with push-sum the weight.

        Booleans are not in it, and zeros stand for values that are not averaged.
        """
        model = arrays_of(state, "model")
        sent = [cleared(model[i], fixed_of(state, i)) for i in self._of(state).sent]
        return (*sent, *arrays_of(state, "tracker"), *arrays_of(state, "weight"))

    @one_blas_thread()
    def combine(self, state: Any, inbox: Inbox) -> Any:
        """Average over the neighborhood; evaluate the model where it is the round for that."""
        method, every, form = self.options.method, self.options.evaluate_every, self._of(state)
        sent, means = arrays_of(state, "model"), self._means(state, inbox)
        model, squares = list(sent), np.zeros(len(state.nodes))
        for i, mean in zip(form.sent, means, strict=True):
            fixed = fixed_of(state, i)
            own = cleared(sent[i], fixed)
            if method == "push_sum" and i in form.corrected:
                own = own / by_row(state.weight_0, own)
            if is_float(own):
                apart = (own - mean).reshape(len(own), -1)
                squares += row_products(apart, apart)
            if method == "exact_diffusion" and i in form.corrected:
                mean += own
                mean /= 2
            model[i] = self._written(settled(mean, sent[i], fixed))
        reports = state.reports.copy()
        reports[:, 0] = np.sqrt(squares)
        reports[:, 1] = inbox.degrees * count_values(*(rows[0] for rows in inbox.rows))
        reports[:, 2] = inbox.degrees * sum(rows[0].nbytes for rows in inbox.rows)
        trackers = self._tracked(state, inbox)
        state = with_arrays(state._replace(reports=reports), model=model, tracker=trackers)
        if method == "push_sum":
            state = state._replace(weight_0=inbox.mean(-1, ordered=True))
        if method == "cta":
            state, w = self._train(state, model, inbox.round)
            state = with_arrays(state, model=w)
        return self._evaluate(state, inbox.round) if every else state

    def _means(self, state: Any, inbox: Inbox) -> Iterator[Array]:
        """Yield the neighborhood's means of the arrays of the model that are sent."""
        form, rule = self._of(state), str(self.options.robust)
        floats = [k for k in range(len(form.sent)) if is_float(inbox.rows[k][0])]
        if rule != "mean":
            robust = inbox.robust_means(floats, rule, self.options.n_liars)
        for k, i in enumerate(form.sent):
            if rule != "mean" and k in floats:
                yield next(robust)
            elif self.options.method != "push_sum":
                yield inbox.mean(k, ordered=True)
            else:
                rows = inbox.rows[k]
                if i not in form.corrected:  # sent as it is: the weights are not in it
                    rows = stacked(rows) * by_row(stacked(inbox.rows[-1]), stacked(rows))
                mean = replace(inbox, rows=(rows,)).mean(ordered=True)
                yield mean / by_row(inbox.mean(-1, ordered=True), mean)

    def _tracked(self, state: Any, inbox: Inbox) -> list[Array]:
        """Return the neighborhood's means of the trackers."""
        first, trackers = len(self._of(state).sent), arrays_of(state, "tracker")
        means = (inbox.mean(first + j, ordered=True) for j in range(len(trackers)))
        pairs = zip(means, trackers, strict=True)
        return [self._written(mean.astype(own.dtype, copy=False)) for mean, own in pairs]

    def rejects(self, state: Any, inbox: Inbox) -> dict[str, NDArray[np.bool_]]:
        """Return by reason which of the inbox's links brought a message that does not count."""
        columns = inbox.links.indices
        sizes, firsts = inbox.magnitudes, [rows[0] for rows in inbox.rows]
        floats, bound = [is_float(array) for array in firsts], self.options.max_magnitude
        limits = [largest_averaged(array.dtype) for array in firsts]
        large = np.zeros(len(columns), dtype=bool)
        for k, own in enumerate(inbox.own):
            links = slice(inbox.links.indptr[k], inbox.links.indptr[k + 1])
            there = sizes[:, [own, *columns[links]]]
            most = np.where(floats, far_too_large(there) if bound is None else bound, limits)
            large[links] = (there[:, 1:] > most[:, None]).any(axis=0)
        reasons = {"it has a value that is far larger than those of the neighborhood": large}
        if self.options.method == "push_sum":
            reasons["its weight is not positive"] = stacked(inbox.rows[-1])[columns, 0] <= 0
        return reasons

    def observe(self, state: Any) -> dict[str, Array]:
        """Return nothing: the models stay at the nodes."""
        return {}

    def report(self, state: Any) -> dict[str, Array]:
        """Return what the nodes report to the operator about the last round, (m,) by name."""
        return dict(zip(self.names, state.reports.T, strict=True))

    def models(self, state: Any) -> dict[int, list[Array]]:
        """Return the nodes' models, as their clients have them: what ``on_end`` may keep."""
        return {
            int(node): [np.array(array[i]) for array in arrays_of(state, "model")]
            for i, node in enumerate(state.nodes)
        }

    def _train(self, state: Any, models: list[Array], round_: int) -> tuple[Any, list[Array]]:
        """Return the state with reports of ``fit``, and what ``fit`` makes of the models."""
        fitted, reports = [], state.reports.copy()
        fixed = [fixed_of(state, j) for j in range(len(models))]
        for i, node in enumerate(map(int, state.nodes)):
            form, asked = self._form(node), {ROUND: round_}
            parameters, _, metrics = self._client(node).fit(self._given(models, i), asked)
            before = [(a[i], f if f is None else f[i]) for a, f in zip(models, fixed, strict=True)]
            fitted.append(form.checked(whose := f"fit of node {node}", parameters, before))
            numbers = _numbers(whose, metrics, self._trained)
            reports[i, len(_OWN) : len(_OWN) + len(self._trained)] = numbers
        return state._replace(reports=reports), [*map(self._stacked, zip(*fitted, strict=True))]

    def _evaluate(self, state: Any, round_: int) -> Any:
        """Return the state with reports of ``evaluate``; NaN where this is no round for that."""
        reports, first = state.reports.copy(), len(_OWN) + len(self._trained)
        reports[:, first:] = np.nan
        due = round_ % self.options.evaluate_every == 0
        model = arrays_of(state, "model")
        for i, node in enumerate(map(int, state.nodes) if due else ()):
            client, asked = self._client(node), {ROUND: round_}
            loss, n_examples, metrics = client.evaluate(self._given(model, i), asked)
            if n_examples:  # none: the client has nothing to evaluate on
                own = {**metrics, "loss": loss}
                reports[i, first:] = _numbers(f"evaluate of node {node}", own, self._evaluated)
        return state._replace(reports=reports)

    def _stacked(self, rows: Sequence[Array]) -> Array:
        """Return the nodes' arrays as one, (m, ...)."""
        return rows[0][None] if self._in_files else np.stack(rows)

    def _given(self, models: Sequence[Array], i: int) -> list[Array]:
        """Return what a client receives of the nodes' models; it may change copies."""
        return [a[i, ...] if self._in_files else np.array(a[i]) for a in models]

    def _written(self, array: Array) -> Array:
        """Return an array as it is sent and kept."""
        return as_file(array[0, ...])[None] if self._in_files else array

    def _client(self, node: int) -> Any:
        """Return a node's client, checked."""
        try:
            client = self.clients(node)
        except AttributeError as error:
            if error.obj is not node:
                raise
            raise TypeError(
                "clients must be a function of the node's number, got one that reads the attribute "
                f"{error.name!r} of its argument: the number itself is the node's partition-id."
            ) from error
        client = getattr(client, "numpy_client", client)  # of what to_client() returned
        evaluates = self.options.evaluate_every or self.options.groups
        needed = ["fit", *(["evaluate"] if evaluates else [])]
        needed += ["get_parameters"] if self.initial is None else []
        for method in needed:
            if not callable(getattr(client, method, None)):
                raise TypeError(
                    f"clients must return a NumPyClient with a method {method}, got {client!r}."
                )
        return client

    def _first(self, node: int) -> list[Array]:
        """Return a node's first model."""
        name, own = "initial", self.initial
        if own is None:
            name, own = f"get_parameters of node {node}", self._client(node).get_parameters({})
        return self._form(node).checked(name, own)

    def _of(self, state: Any) -> Form:
        return self._form(int(state.nodes[0]))

    def _form(self, node: int) -> Form:
        """Return the models' form; without ``initial``, the client of a hosted node says it."""
        if self._known_form is None:
            first = self.initial
            if first is None:
                first = [np.asarray(a) for a in self._client(node).get_parameters({})]
            names = self._array_names or list(map(str, range(len(first))))
            check_dtypes("initial, or what get_parameters returns,", names, first)
            self._known_form = Form(names, first)
        return self._known_form


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


def by_row(weights: Array, array: Array) -> Array:
    """Return weights of rows (m, 1) in as many dimensions as ``array`` (m, ...)."""
    rows: Array = weights.reshape(-1, *(1,) * (array.ndim - 1))
    return rows


def _numbers(whose: str, metrics: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    """Return the metrics of these names; NaN for one that a client does not have."""
    for name in names:
        if not isinstance(metrics.get(name, 0.0), Real):
            raise ValueError(f"{whose} must return a number as {name!r}, got {metrics[name]!r}.")
    return [float(metrics.get(name, np.nan)) for name in names]
