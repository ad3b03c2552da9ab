"""The client of clustered mixed regression (FedMD and FedX)."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients.dispatch import ProtocolClient, rounded, step
from flwr_perdl.core.checks import Matrix, check_array, check_count, check_kind
from flwr_perdl.protocol.local import Local, StepRequest, StepResult
from flwr_perdl.protocol.records import CLUSTER, EVALUATE, Scalar
from flwr_perdl.regression import Loss, SquaredLoss
from flwr_perdl.regression.losses import (
    SQUARED,
    FeatureMap,
    apply_features,
    check_labels,
    check_loss,
    check_points,
)
from flwr_perdl.regression.phases import OPTION_RULES, Ask
from flwr_perdl.regression.two_phase import answer

MIXED_REGRESSION = "mixed_regression"
#: What the server calls its result.
CLUSTER_COEFFICIENTS = "coefficients"
#: Options of a request travel in its config under this prefix.
OPTION = "perdl.option."
#: The largest norms of models by default. With the squared loss replies are linear in the model,
#: and a large one shows no more; other gradients become steps, and show single points.
_LINEAR_NORM, _OTHER_NORM = 1e9, 5.0


class RegressionClient(ProtocolClient):
    """A client whose data come from one of k unknown regression models.

    It rejects a request that its protocol does not send before it touches the data, answers a
    limited number, and keeps only their count. What leaves it: first its curvature and its
    features' mean squares; in Phase 1 its part of the residual moment, a d x w matrix that sums
    over pairs of points, and, with enough points, its own estimate; in Phase 2 its cluster, loss
    and update of its cluster's model. For a client with one point these reveal the point and its
    response: with fewer than ``min_support`` points nothing leaves. What it receives: the models of
    all clusters, the step size, the basis of the clients' moments and, in the paper's variant,
    every anchor's estimate without its name.

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_inputs)
        The client's inputs, float64 or float32.
    y : ndarray of shape (n_samples,)
        Responses; -1 and 1 for the logistic loss.
    context : Context
        The argument of the client's factory; identifies the client.
    features : callable, optional
        Feature map phi from inputs to (n_samples, d); the identity by default.
    loss : Loss, default squared
        The loss of Phase 2, for a linear predictor. With another than the squared one, models of a
        norm above 5 are rejected: at a large model the gradient is a sum over a few points that the
        server can choose. Scale features to about 1.
    evaluation : tuple of ndarray, optional
        Held-out inputs and responses for `evaluate`; by default the client's own data.
    min_support : int, default 3
        Fewest points behind each sum that leaves the client; with fewer it does not train.
        The paper's variant sums over half of them.
    max_runs : int, default 8
        As in `DictionaryClient`.
    max_requests : int, default 1000
        As in `DictionaryClient`.

    Raises
    ------
    ValueError
        If the data are empty, not finite, of different lengths or widths, or have squares out of
        their dtype's range; if a response is not -1 or 1 with the logistic loss; if the client's
        identity is unknown.
    TypeError
        If ``loss`` lacks a method of a loss.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import RegressionClient, client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FedX
    >>> X = np.random.default_rng(0).standard_normal((6, 10, 2))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return RegressionClient(own, own @ [2.0, -1.0], context)
    >>> grid = InProcessGrid(client_app(make_client), 6)
    >>> result = FedX(1).start(grid, num_rounds=20)
    >>> result.arrays.to_numpy_ndarrays()[0].round(3)
    array([[ 2., -1.]])
    """

    only = (
        "this strategy clusters the linear models of RegressionClient, with any feature map and "
        "loss; ClusteredFedAvg clusters any model with the clients' fit"
    )
    starts_open = False

    def __init__(
        self,
        X: Matrix,
        y: Matrix,
        context: Context,
        *,
        features: FeatureMap | None = None,
        loss: Loss = SQUARED,
        evaluation: tuple[Matrix, Matrix] | None = None,
        min_support: int = 3,
        max_runs: int = 8,
        max_requests: int = 1000,
    ) -> None:
        super().__init__(context, max_runs=max_runs, max_requests=max_requests)
        if evaluation is not None:
            check_kind("evaluation", evaluation, tuple, "(X, y) or None")
            if len(evaluation) != 2:
                raise ValueError(f"evaluation must be (X, y), got {len(evaluation)} entries.")
        self.features = features
        check_loss(loss)
        self.loss = loss
        self.min_support = check_count("min_support", min_support)
        self._max_norm = _LINEAR_NORM if isinstance(loss, SquaredLoss) else _OTHER_NORM
        self.X, self.y = self._check(X, y)
        self.held_out = (self.X, self.y)
        if evaluation is not None:
            try:
                self.held_out = self._check(*evaluation, columns=self.X.shape[1])
            except ValueError as error:
                raise ValueError(f"evaluation {error}") from error

    def answer(self, request: StepRequest) -> StepResult:
        """Return what leaves the client: sums over at least ``min_support`` points."""
        ask, n = _read(request, self._max_norm), len(self.y)
        points = {"halves": n // 2, "pair": 1}.get(str(ask.options.get("estimate")), n)
        if points < self.min_support:
            raise ValueError(
                f"min_support must be at most {points} for this client to take step {ask.step!r}, "
                f"which sums over {points} of its {n} points, got {self.min_support}."
            )
        # `fedmd.moment` (line 9), `fedmd.anchor` (11-15) or `fedx.update` (Phase 2).
        try:
            sent = answer(self.X, self.y, ask, self.loss)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"parameters and config must be complete for step {ask.step!r}, got "
                f"{len(ask.arrays)} arrays and {sorted(request.config)} ({error})."
            ) from error
        return StepResult([sent], n)

    def measure(self, request: StepRequest) -> StepResult:
        """Find the cluster by the client's own data, and measure its model on the held-out data.

        The metrics are the ``"loss"``, the model's mean loss with six significant digits, the
        ``"cluster"`` and, with the squared loss, ``"mse"``; there are none where there are fewer
        than ``min_support`` points, held out or not.
        """
        if len(request.arrays) != 1:
            raise ValueError(f"parameters must be [models], got {len(request.arrays)} arrays.")
        centers = check_array("parameters", request.arrays[0], min_rows=1, columns=self.X.shape[1])
        _check_norms("parameters", centers, self._max_norm)
        X, y = self.held_out
        if min(len(self.y), len(y)) < self.min_support:
            return StepResult([], len(y))
        cluster = self.cluster(centers)
        loss = rounded(float(self.loss.values(X, y, centers[cluster : cluster + 1])[0]))
        metrics: dict[str, Scalar] = {"loss": loss, CLUSTER: cluster}
        if isinstance(self.loss, SquaredLoss):
            metrics["mse"] = 2 * loss
        return StepResult([], len(y), metrics)

    def cluster(self, centers: Matrix) -> int:
        """Return the cluster whose model fits this client's data best, the first of equals."""
        centers = check_array("centers", centers, min_rows=1, columns=self.X.shape[1])
        return int(self.loss.values(self.X, self.y, centers).argmin())

    def adapted(self, request: StepRequest, n_fits: int) -> dict[str, Matrix]:
        """Return the coefficients of the client's cluster."""
        centers = np.vstack(request.arrays)
        return {CLUSTER_COEFFICIENTS: centers[self.cluster(centers)]}

    def predict(self, centers: Matrix, X: Matrix) -> Matrix:
        """Return the predictions of this client's cluster model.

        Parameters
        ----------
        centers : ndarray of shape (k, d)
            The models of all clusters.
        X : ndarray of shape (n, n_inputs)
            Inputs.

        Returns
        -------
        ndarray of shape (n,)
        """
        theta = centers[self.cluster(centers)]
        predictions: Matrix = self._map_features(X, columns=len(theta)) @ theta
        return predictions

    def _map_features(self, X: Matrix, columns: int | None = None) -> Matrix:
        """Return the features of inputs."""
        name = "X" if self.features is None else "features(X)"
        return check_array(name, apply_features(X, self.features), columns=columns)

    def _check(self, X: Matrix, y: Matrix, columns: int | None = None) -> tuple[Matrix, Matrix]:
        """Return features and responses."""
        if self.features is not None:
            check_array("X", X, min_rows=1)
        X, y = check_points(self._map_features(X, columns), y)
        check_labels("y", y, self.loss)
        return X, y


def _check_norms(name: str, models: Matrix, most: float) -> None:
    """Raise a ValueError if a model, along the last axis, has a norm above ``most``."""
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.linalg.norm(models, axis=-1).max(initial=0))
    if not largest <= most:
        raise ValueError(f"{name} must have norms of at most {most:g}, got {largest:g}.")


def _read(request: StepRequest, max_norm: float) -> Ask:
    """Return the request, or raise a ValueError unless `two_phases` asks it, whatever the data."""
    name: Any = request.step
    arrays = tuple(map(np.asarray, request.arrays))
    for position, array in enumerate(arrays):
        check_array(f"array {position}", array, ndim=array.ndim)
        if name == "update" or position != 1:  # the others are models, these are directions
            _check_norms(f"array {position}", array, max_norm)
    given = {key.removeprefix(OPTION): value for key, value in request.config.items()}
    known = OPTION_RULES
    options = {key: known[key](key, value) for key, value in given.items() if key in known}
    return Ask(name, arrays, options)


@step(MIXED_REGRESSION, "describe", client=RegressionClient)
@step(MIXED_REGRESSION, "moment", client=RegressionClient)
@step(MIXED_REGRESSION, "anchors", client=RegressionClient)
@step(MIXED_REGRESSION, "update", client=RegressionClient)
def answer_step(local: Local, request: StepRequest) -> StepResult:
    """Send sums over the client's points.

    "describe", not in the paper: the loss's curvature and the features' mean squares. "moment"
    (Phase 1, line 9): the part of the products with the residual moment. "anchors" (lines 10-15):
    the estimate of the client's model, of too few points zeros. "update" (Phase 2, lines 5-7): the
    cluster's number, its loss, and its model's change.
    """
    client: RegressionClient = local.client
    return client.answer(request)


@step(MIXED_REGRESSION, EVALUATE, kind=EVALUATE, client=RegressionClient)
def measure_model(local: Local, request: StepRequest) -> StepResult:
    """Measure the model of the client's cluster on its held-out data."""
    client: RegressionClient = local.client
    return client.measure(request)
