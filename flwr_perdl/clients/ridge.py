"""The client of `flwr_perdl.strategies.FederatedRidge`: sums over its samples, and its own part."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients.dispatch import ProtocolClient, rounded, step
from flwr_perdl.clients.neighbor_relay import ANNOUNCE, EXCHANGE, SHOW, STATE, Turn, own_keys
from flwr_perdl.core import checks
from flwr_perdl.core.checks import LARGE, Matrix, check_count, check_real
from flwr_perdl.privacy.noised_client import BOUND, SAMPLE_BOUND
from flwr_perdl.protocol.client_state import PrivateArrays, PrivateState, private_store
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.part import Arrays
from flwr_perdl.protocol.records import CLUSTER, EVALUATE, MAX_WEIGHT, Scalar, encode, view
from flwr_perdl.random import spawn
from flwr_perdl.regression import ridge as maths
from flwr_perdl.regression.ridge import RandomFeatures, RidgeModel

RIDGE = "ridge"
MOMENTS, SUMS, ERRORS, SOLVE = "moments", "sums", "errors", "solve"
#: What requests say: the numbers of random features and of classes (0: regression), into how many
#: folds samples are parted, what a client's own model is, and which coefficients deviate.
FEATURES, CLASSES, FOLDS = "perdl.features", "perdl.classes", "perdl.folds"
LEVEL, RANDOM = "perdl.level", "perdl.random"
#: Without a server: the round after which sums of products are averaged, not of columns; the number
#: of nodes; the features' scale, and the penalties that are tried.
SWITCH, NODES, SCALE, TRIED = "perdl.switch", "perdl.nodes", "perdl.scale", "perdl.penalties"
SHARED, GROUPS, PERSONAL, LOCAL = "shared", "groups", "personal", "local"
#: What is measured, the simplest first, and what a client's own part may be.
LEVELS = (SHARED, GROUPS, PERSONAL, LOCAL)
RANDOMS = ("all", "intercept", "columns")
N_FOLDS = 3
#: The most random features, of whose products there are as many as their square, and classes that a
#: client computes with.
MOST_FEATURES, MOST_CLASSES = 5_000, 10_000
#: The name of what a client keeps; those of a mixed model's variances.
COEFFICIENTS = "coefficients"
VARIANCES, RANDOM_ARRAY = ("variances", "noise"), "random"


class RidgeClient(ProtocolClient):
    """A client that sends sums over its samples once, and solves its own part of the model.

    What leaves it: counts, sums and sums of squares of its columns; then the products of its
    features and responses, summed over its samples, in three folds; where the server compares
    levels, its squared error by level; metrics on ``held_out``. The sums of fewer samples than
    there are features determine these samples up to a rotation: use secure sums where that counts.
    With fewer than ``min_support`` samples nothing leaves; those of a class of which there are
    fewer have no part in the sums. Its own part stays.

    Parameters
    ----------
    X : ndarray of shape (n_samples, d)
        Inputs, float64 or float32; NaN where a value is missing.
    y : ndarray of shape (n_samples,) or (n_samples, q)
        Classes, integers from 0, or responses.
    context : Context
        The argument of the client's factory; identifies the client.
    held_out : tuple of ndarray, optional
        Samples ``(X, y)`` for evaluation only; by default there are no metrics.
    min_support : int, default 3
        Fewest samples behind each sum and metric that leaves the client.
    state_dir : str or Path, optional
        Folder for the client's own part; by default see `private_store`.
    max_runs : int, default 8
        As in `DictionaryClient`.
    max_requests : int, default 100
        As in `DictionaryClient`: a run takes two to four, and one for each further ``scale``.

    Raises
    ------
    ValueError
        If the data are empty, infinite or of different lengths or widths, or the client's identity
        is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import RidgeClient, client_app
    >>> from flwr_perdl.regression import RidgeModel
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FederatedRidge
    >>> X = np.random.default_rng(0).standard_normal((6, 40, 2))
    >>> def make_client(context):
    ...     i = context.node_config["partition-id"]
    ...     return RidgeClient(X[i], X[i] @ [2.0, -1.0] + i, context)
    >>> strategy = FederatedRidge("personal", features=0)
    >>> result = strategy.start(InProcessGrid(client_app(make_client), 6))
    >>> RidgeModel.of(strategy.result.model_of(3)).predict(np.zeros((1, 2))).round(1)
    array([3.])
    """

    only = "this strategy learns from the sums of RidgeClient, which has the client's samples"
    starts_open = False

    def __init__(
        self,
        X: Matrix,
        y: NDArray[Any],
        context: Context,
        *,
        held_out: tuple[Matrix, NDArray[Any]] | None = None,
        min_support: int = 3,
        state_dir: str | Path | None = None,
        max_runs: int = 8,
        max_requests: int = 100,
    ) -> None:
        limits: Any = {"max_runs": max_runs, "max_requests": max_requests}
        super().__init__(context, algorithm=RIDGE, state_dir=state_dir, **limits)
        self.X, self.y = _check_data("", X, y)
        self.held_out: tuple[Matrix, NDArray[Any]] | None = None
        if held_out is not None:
            if len(checks.check_kind("held_out", held_out, (tuple, list), "(X, y) or None")) != 2:
                raise ValueError(f"held_out must be (X, y), got {len(held_out)} entries.")
            self.held_out = _check_data("held_out ", *held_out, columns=self.X.shape[1])
        self.min_support = check_count("min_support", min_support)

    def moments(self, request: StepRequest) -> StepResult:
        """Return the counts, sums and sums of squares of the columns, of bounds within -1 and 1."""
        X, noised = self.X, SAMPLE_BOUND.get() is not None
        for bounds in request.arrays:
            middles, halves = maths.of_bounds(bounds)
            X = (X - middles) / halves
        if noised or request.arrays:  # whatever the request says, a sample is bounded
            X = np.clip(X, -1, 1)
        found = maths.column_moments(X)
        if not noised:
            found[:, found[0] < self.min_support] = 0
        return self._sent(request, found, len(X), sqrt(found.size))

    def sums(self, request: StepRequest) -> StepResult:
        """Return the products of features and responses, summed by fold."""
        _, Z, Y = self._points(request)
        noised, most = SAMPLE_BOUND.get() is not None, 1 / sqrt(Y.shape[1])
        for heights in request.arrays[3:]:
            Y = Y / heights
        if not _n_classes(request) and (noised or request.arrays[3:]):  # of norm 1 at most
            Y = np.clip(Y, -most, most)
        fold, n_folds = self._folds(request)
        form = maths.bounded_sums if noised else maths.ridge_sums
        sums = np.empty((n_folds, maths.sums_size(Z.shape[1], Y.shape[1])))
        for f in range(n_folds):
            sums[f] = form(Z[fold == f], Y[fold == f])
        return self._sent(request, sums, int(np.sum(fold >= 0)), maths.ROW_LENGTH)

    def _sent(self, request: StepRequest, sums: Matrix, n: int, length: float) -> StepResult:
        """Return sums as they leave: where they get noise each sample adds ``bound`` at most."""
        bound = SAMPLE_BOUND.get()
        if bound is not None:
            return StepResult([sums * (bound / length)], n, {BOUND: bound})
        if n < max(self.min_support, 1):
            raise ValueError(f"min_support must be at most {n} here, got {self.min_support}.")
        return StepResult([sums / n if MAX_WEIGHT in request.config else sums], n)

    def errors(self, request: StepRequest) -> StepResult:
        """Return the mean squared errors on held-out folds, by level.

        The request has the shared model, and those of groups, without each fold. A client with too
        few samples for folds says nothing.
        """
        _, Z, Y = self._points(request)
        shared, groups = request.arrays[3:]
        (fold, n_folds), total = self._folds(request), dict.fromkeys(LEVELS, 0.0)
        each = [fold == f for f in range(n_folds)]
        if not all(map(np.any, each)):
            return StepResult([], len(Z))
        for f, held in enumerate(each):
            A, B = Z[(fold >= 0) & ~held], Y[(fold >= 0) & ~held]
            models = {
                SHARED: shared[f],
                GROUPS: groups[f][_nearest(groups[f], A, B)],
                PERSONAL: shared[f] + maths.fit_part(A, B - A @ shared[f], _random(request)),
                LOCAL: maths.fit_deviation(A, B).coefficients,
            }
            for level, w in models.items():
                total[level] += float(np.sum((Y[held] - Z[held] @ w) ** 2))
        n = int(np.sum(fold >= 0))
        return StepResult([], n, {level: rounded(error / n) for level, error in total.items()})

    def solve(self, request: StepRequest) -> StepResult:
        """Solve the client's own part, keep the model with it, and measure that."""
        features, Z, Y = self._points(request)
        models, *spread = request.arrays[3:]
        own, group = models[0], 0
        if request.config.get(LEVEL) == LOCAL:
            own = maths.fit_deviation(Z, Y).coefficients
        elif request.config.get(LEVEL) != SHARED:
            own, group = _own_model(models, Z, Y, _random(request), spread)
        result = self._measured(request, features, own, group)
        return result._replace(keep={COEFFICIENTS: own}, last=True)

    def measure(self, request: StepRequest, kept: PrivateArrays | None) -> StepResult:
        """Measure the client's own model on ``held_out``; without one its group's."""
        features, Z, Y = self._points(request)
        models = request.arrays[3]
        group = _nearest(models, Z, Y)
        own = models[group] if kept is None else kept[COEFFICIENTS]
        return self._measured(request, features, own, group)

    def average(self, turn: Turn, request: StepRequest) -> StepResult:
        """Average sums with the neighbors: those of columns, then of features; solve at the end."""
        config, asked = request.config, request._replace(arrays=[])
        state = turn.saved or {"values": self.moments(asked).arrays[0], "weight": np.ones(1)}
        if turn.is_new:
            if turn.pending:
                around = turn.received([state["values"], state["weight"]])
                state = {**state, "values": around.mean(0), "weight": around.mean(1)}
            columns = [state[name] for name in maths.MODEL_ARRAYS[:2] if name in state]
            switches = turn.works and turn.round > check_count(SWITCH, config.get(SWITCH))
            if (switches and not columns) or (turn.shows and columns):
                total = check_count(NODES, config.get(NODES), 1) * state["values"] / state["weight"]
                columns = columns or [*maths.standardize(total)]
                columns.append(np.array([check_real(SCALE, config.get(SCALE), 0, LARGE)]))
                asked = asked._replace(arrays=columns)
                if turn.shows:
                    state = self._solved(turn, asked, total)
                else:
                    state = {"values": self.sums(asked).arrays[0], "weight": np.ones(1)}
                    state |= dict(zip(maths.MODEL_ARRAYS, columns[:2], strict=False))
        message = [state["values"], state["weight"]] if turn.awaits else []
        return turn.result(state, message, [])

    def _solved(self, turn: Turn, request: StepRequest, total: Matrix) -> dict[str, Matrix]:
        """Return the node's own model of all nodes' sums, and have its metrics reported."""
        features, _, Y = self._points(request)
        given = str(request.config.get(TRIED)).split()
        tried = [check_real(TRIED, float(one), 0, LARGE) for one in given]
        w = maths.choose_ridge(total, features.size, Y.shape[1], tried).coefficients
        found = self.solve(request._replace(arrays=[*request.arrays, w[None]]))
        turn.combined({name: float(value) for name, value in found.metrics.items()})
        own = RidgeModel(features, (found.keep or {})[COEFFICIENTS], _n_classes(request))
        return {**own.to_arrays(), RANDOM_ARRAY: np.array(RANDOMS.index(_random(request)))}

    def adapted(self, request: StepRequest, n_fits: int) -> dict[str, Matrix]:
        """Return the client's own model by `adapt`; its group's, or the shared one, of no fits."""
        shared = [{n: view(a) for n, a in model.items()} for model in request.models.values()]
        models = [RidgeModel.of(model) for model in shared]
        features, classes = models[0].features, models[0].classes
        Z, Y = features(self.X), _outputs("y", self.y, classes)
        spread = [shared[0][name] for name in VARIANCES if name in shared[0]]
        each = np.stack([model.coefficients for model in models])
        own, group = _own_model(each, Z, Y, RANDOMS[int(shared[0][RANDOM_ARRAY])], spread)
        return RidgeModel(features, own if n_fits else each[group], classes).to_arrays()

    def _points(self, request: StepRequest) -> tuple[RandomFeatures, Matrix, Matrix]:
        """Return the features that a request describes, of the samples, and their responses."""
        (means, deviations, (scale,)), config = request.arrays[:3], request.config
        if len(means) != self.X.shape[1]:
            raise ValueError(f"X must have {len(means)} columns, got {self.X.shape[1]}.")
        n_features = check_count(FEATURES, config.get(FEATURES), 0, MOST_FEATURES)
        how: Any = {"scale": float(scale), "seed": request.seed}
        features = RandomFeatures.draw(means, deviations, n_features, **how)
        return features, features(self.X), _outputs("y", self.y, _n_classes(request))

    def _folds(self, request: StepRequest) -> tuple[NDArray[np.intp], int]:
        """Return each sample's fold, and their number; -1: it takes no part.

        A class, or a client, with too few samples for all folds is in one; with too few for one it
        is left out: its products would be those of single samples. Under noise nothing depends on
        other samples.
        """
        rng, bounded = spawn(request.seed, self.partition), SAMPLE_BOUND.get() is not None
        most = 1 if bounded else N_FOLDS  # folds of noised sums would depend on other samples
        n_folds = check_count(FOLDS, request.config.get(FOLDS), 1, most)
        labels = self.y if _n_classes(request) and not bounded else np.zeros(len(self.y))
        folds, least = np.full(len(labels), -1), 0 if bounded else max(self.min_support, 1)
        for label in np.unique(labels):
            own = np.flatnonzero(labels == label)
            if len(own) >= n_folds * least:
                folds[own] = rng.permutation(len(own)) % n_folds
            elif len(own) >= least:
                folds[own] = rng.integers(n_folds)
        return folds, n_folds

    def _measured(
        self, request: StepRequest, features: RandomFeatures, w: Matrix, group: int
    ) -> StepResult:
        """Return a model's metrics on ``held_out``."""
        metrics: dict[str, Scalar] = {CLUSTER: group} if len(request.arrays[3]) > 1 else {}
        if self.held_out is None or len(self.held_out[1]) < max(self.min_support, 1):
            return StepResult([], len(self.y), metrics)
        (X, y), classes = self.held_out, _n_classes(request)
        outputs = features(X) @ w
        squares = np.sum((_outputs("held_out y", y, classes) - outputs) ** 2, axis=1)
        metrics["loss"] = rounded(float(squares.mean()))
        right = float(np.mean(outputs.argmax(axis=1) == y)) if classes else 0.0
        name, value = ("accuracy", rounded(right)) if classes else ("mse", metrics["loss"])
        return StepResult([], len(y), {**metrics, name: value})


def _check_data(
    name: str, X: Matrix, y: NDArray[Any], columns: int | None = None
) -> tuple[Matrix, NDArray[Any]]:
    """Return a client's samples."""
    X = checks.check_array(f"{name}X", X, min_rows=1, columns=columns, squares=True, missing=True)
    given = checks.as_array(f"{name}y", y)
    if given.ndim not in (1, 2) or len(given) != len(X) or not given.size:
        raise ValueError(f"{name}y must have a row for each of X's {len(X)}, got {given.shape}.")
    if given.dtype.kind not in "iu":
        given = checks.check_array(f"{name}y", given, ndim=given.ndim, squares=True)
    return X, given


def _n_classes(request: StepRequest) -> int:
    return check_count(CLASSES, request.config.get(CLASSES), 0, MOST_CLASSES)


def _random(request: StepRequest) -> str:
    return checks.check_choice(RANDOM, request.config.get(RANDOM), RANDOMS)


def _outputs(name: str, y: NDArray[Any], classes: int) -> Matrix:
    """Return responses as the server counts them, (n, q): of classes one column each."""
    if not classes:
        return y.astype(np.float64, copy=False).reshape(len(y), -1)
    if y.ndim != 1 or y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"{name} must be integers from 0 to {classes - 1} for classes={classes}, got others "
            f"or an array of {y.dtype} with {y.ndim} dimensions."
        )
    one_hot: Matrix = (y[:, None] == np.arange(classes)).astype(np.float64)
    return one_hot


def _own_model(
    models: Matrix, Z: Matrix, Y: Matrix, random: str, spread: Sequence[Matrix]
) -> tuple[Matrix, int]:
    """Return the coefficients of a client's own model, and of which model it deviates."""
    group = _nearest(models, Z, Y)
    rest = Y - Z @ models[group]
    own = maths.expect_deviation(Z, rest, *spread) if spread else maths.fit_part(Z, rest, random)
    return models[group] + own, group


def _nearest(models: Matrix, Z: Matrix, Y: Matrix) -> int:
    """Return which model has the least squared error, the first of equals."""
    return int(np.argmin([np.sum((Y - Z @ w) ** 2) for w in models]))


def ridge_model(context: Context, run: str, names: Sequence[str]) -> Arrays | None:
    """Return what the client keeps of its own model: its coefficients; without a server all."""
    kept = PrivateState(context, run, private_store(context, RIDGE)).newest() or {}
    own = {name.removeprefix(STATE): array for name, array in kept.items()}
    return {name: encode(own[name]) for name in names if name in own} or None


@step(RIDGE, MOMENTS, client=RidgeClient)
@step(RIDGE, SUMS, client=RidgeClient)
@step(RIDGE, ERRORS, client=RidgeClient)
@step(RIDGE, SOLVE, client=RidgeClient)
def call_method(local: Local, request: StepRequest) -> StepResult:
    """Take the step that is the client's method of that name."""
    result: StepResult = getattr(local.client, request.step)(request)
    return result


@step(RIDGE, ANNOUNCE, client=RidgeClient, seals=True)
@step(RIDGE, EXCHANGE, client=RidgeClient, seals=True)
@step(RIDGE, SHOW, client=RidgeClient, seals=True)
def average_sums(local: Local, request: StepRequest) -> StepResult:
    """Take a step of a node that averages sums with its neighbors."""
    client: RidgeClient = local.client
    turn = Turn(client.partition, own_keys(local.context), request, local.kept)
    return client.average(turn, request)


@step(RIDGE, EVALUATE, kind=EVALUATE, client=RidgeClient)
def measure_ridge(local: Local, request: StepRequest) -> StepResult:
    """Measure the client's model on its held-out data."""
    client: RidgeClient = local.client
    return client.measure(request, local.kept.after(request.round))
