"""Ridge regression of many groups, each with its own deviation: `FederatedRidge` behind ``fit``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from flwr.app import Context
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from flwr_perdl.clients import RidgeClient
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.estimators._base import Federated, MakeGrid, as_matrix
from flwr_perdl.estimators.regression import as_column, as_groups, read_groups
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.regression import RidgeModel
from flwr_perdl.strategies import FederatedRidge


@dataclass(eq=False, repr=False)
class PersonalizedRidge(RegressorMixin, Federated):
    """Learn a ridge regression of all groups, and how each group's own differs, in closed form.

    ``fit`` runs `FederatedRidge`, with a `RidgeClient` per group. Models are nonlinear in the
    columns by random Fourier features; NaN counts as a column's mean.

    Parameters
    ----------
    level : {"auto", "shared", "groups", "personal", "groups-personal"}, default "auto"
        What a group's model is, as in `FederatedRidge`, which calls clusters of groups "groups".
    features : int, default 600
        Random Fourier features; 0: linear.
    scale : float or sequence of float, default 2.0
        How much the features vary; of several the best is taken.
    random : {"all", "intercept", "columns"}, default "all"
        Which coefficients differ by group.
    min_support : int, default 3
        Groups with fewer samples take no part in ``fit``.
    seed : int, default 0
        Seed of all random draws.
    random_state : int, optional
        scikit-learn's name of ``seed``; give one of the two.
    grid : callable, optional
        ``(app, n_groups) -> InProcessGrid``; by default `InProcessGrid`.
    verbose : bool, default False
        Whether to show a progress bar.

    Attributes
    ----------
    level_ : str
        What a group's model is.
    groups_ : ndarray of shape (n_groups,)
        The names of the groups that took part, sorted.
    coef_ : ndarray of shape (n_groups, 1 + n_features_in_ + features)
        Their models, of a constant, the standardized columns and the random features.
    shared_coef_ : ndarray of shape (k, 1 + n_features_in_ + features)
        What they deviate from: one model, or those of k clusters.
    history_ : list of RoundReport
        Every exchange's report.
    n_iter_ : int
        Number of exchanges.
    n_features_in_, feature_names_in_
        The columns, as in scikit-learn.

    Raises
    ------
    ValueError
        By ``fit``: if the arrays do not match, or a parameter breaks its rule.

    See Also
    --------
    flwr_perdl.strategies.FederatedRidge : the protocol, for Flower projects, with every option.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.estimators import PersonalizedRidge
    >>> rng = np.random.default_rng(0)
    >>> groups = np.repeat(np.arange(20), 30)
    >>> X = rng.standard_normal((600, 2))
    >>> y = X @ [2.0, -1.0] + np.linspace(-3, 3, 20)[groups] + 0.1 * rng.standard_normal(600)
    >>> model = PersonalizedRidge(features=0).fit(X, y, groups)
    >>> model.level_, model.predict([[1.0, 1.0]] * 2, groups=[0, 19]).round(1)
    ('personal', array([-2.,  4.]))
    """

    __metadata_request__fit: ClassVar = {"groups": True}
    __metadata_request__predict: ClassVar = {"groups": True}
    __metadata_request__score: ClassVar = {"groups": True, "sample_weight": None}  # of Pipelines
    _allow_nan = True

    level: str = "auto"
    _: KW_ONLY
    features: int = 600
    scale: Any = 2.0
    random: str = "all"
    min_support: int = 3
    seed: int = 0
    random_state: int | None = None
    grid: MakeGrid | None = None
    verbose: bool = False

    def fit(self, X: Any, y: Any, groups: Any) -> Self:
        """Learn the models from all groups' samples.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        y : array_like of shape (n_samples,)
            Responses.
        groups : array_like of shape (n_samples,)
            The group of each sample: numbers or names.

        Returns
        -------
        self
        """
        least = check_count("min_support", self.min_support)
        inputs = as_matrix("X", X, min_rows=1, missing=True)
        responses = as_column("y", y, len(inputs)).astype(np.float64)
        names, which, enough = read_groups(groups, len(inputs), least)
        part = responses[np.isin(which, enough)]
        mean, spread = float(part.mean()), float(part.std()) or 1.0
        target = (responses - mean) / spread
        options: dict[str, Any] = {"scale": self.scale, "random": self.random}
        strategy = partial(FederatedRidge, self.level, features=self.features, **options)

        def make_client(context: Context) -> RidgeClient:
            mine = which == enough[int(context.node_config[PARTITION_ID])]
            return RidgeClient(inputs[mine], target[mine], context, min_support=least)

        done, _ = self._federate(strategy, make_client, len(enough))
        result, self.level_, self.groups_ = done.result, done.chosen_level, names[enough]
        own = [RidgeModel.of(result.model_of(i)) for i in range(len(enough))]
        shared = [RidgeModel.of(model) for model in result.models]
        self._features = own[0].features
        level = mean * np.eye(1, self._features.size)
        self.coef_, self.shared_coef_ = (
            level + spread * np.stack([model.coefficients[:, 0] for model in models])
            for models in (own, shared)
        )
        return self._finish(X)

    def predict(self, X: Any, groups: Any = None) -> Matrix:
        """Return predictions.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        groups : array_like of shape (n_samples,), optional
            The group of each sample; one that ``fit`` has not seen, as by default, gets the shared
            model.

        Returns
        -------
        ndarray of shape (n_samples,)

        Raises
        ------
        ValueError
            If a group was not in ``fit``, and there are shared models of several clusters.
        """
        read = self._read_rows(X)
        rows = self._features(read)
        owners = np.full(len(rows), "") if groups is None else as_groups(groups, len(rows))
        known = {} if groups is None else dict(zip(self.groups_.tolist(), self.coef_, strict=True))
        predictions: Matrix = np.empty(len(rows))
        for group in np.unique(owners).tolist():
            model, mine = known.get(group), owners == group
            if model is None and len(self.shared_coef_) > 1:
                raise ValueError(
                    f"groups must be some that fit saw where level={self.level_!r}, got {group!r}."
                )
            predictions[mine] = rows[mine] @ (self.shared_coef_[0] if model is None else model)
        return predictions

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Return the coefficient of determination R^2 of the predictions.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        y : array_like of shape (n_samples,)
            Responses.
        groups : array_like, optional
            See `predict`.

        Returns
        -------
        float
        """
        predictions = self.predict(X, groups)
        return float(r2_score(as_column("y", y, len(predictions)), predictions))
