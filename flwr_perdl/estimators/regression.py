"""Many groups of few points, k linear models: FedMD and FedX behind ``fit``.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022:
`flwr_perdl.regression.TwoPhase` has its symbols, `flwr_perdl.strategies.FedX` what each party
receives.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from flwr_perdl.clients import RegressionClient
from flwr_perdl.core.checks import Matrix, check_count, check_flag, is_auto
from flwr_perdl.estimators._base import Federated, MakeGrid, as_matrix
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.strategies import FedX

#: A column whose standard deviation is this share of its largest entry, or less, is constant.
_CONSTANT = 1e-7


@dataclass(eq=False, repr=False)
class MixedRegression(RegressorMixin, Federated):
    """Find k linear models, and which group of points follows which of them.

    The assignment is unknown; a single model serves no group well, and a group has too few points
    for its own. ``fit`` runs `FedX`, which begins with `FedMD`, with a `RegressionClient` per
    group.

    Parameters
    ----------
    k : int or "auto", default "auto"
        Number of models; "auto" finds it, up to ``max_clusters``, if the models differ by more than
        the noise.
    max_clusters : int, default 8
        Largest number of models of "auto".
    rounds : int, default 50
        Communication rounds, at least 4, which `FedMD` takes.
    min_support : int, default 3
        Groups with fewer points take no part in ``fit``; they still get a label.
    seed : int, default 0
        Seed of all random draws.
    random_state : int, optional
        scikit-learn's name of ``seed``; give one of the two.
    fit_intercept : bool, default True
        Whether the models have intercepts. If so, ``fit`` also standardizes columns and responses
        by the means and standard deviations of all points (sums over groups, which clients of a
        federation could send), so units and offsets don't matter. If not, scale the columns alike,
        and center columns and responses.
    grid : callable, optional
        ``(app, n_groups) -> InProcessGrid``; by default `InProcessGrid`.
    verbose : bool, default False
        Whether to show a progress bar.

    Attributes
    ----------
    coef_ : ndarray of shape (k, n_features)
        The models.
    intercept_ : ndarray of shape (k,)
        Their intercepts, zeros without ``fit_intercept``.
    groups_ : ndarray of shape (n_groups,)
        The groups' names, sorted.
    labels_ : ndarray of shape (n_groups,)
        The model of each of ``groups_``, a row of ``coef_``.
    history_ : list of RoundReport
        Every round's report.
    n_iter_ : int
        Number of rounds.
    n_features_in_, feature_names_in_
        The columns, as in scikit-learn.

    Raises
    ------
    ValueError
        By ``fit``: if the arrays do not match, are not finite, or a parameter breaks its rule.
    TooFewReplies
        By ``fit``: if a group's client fails. The error says why.

    See Also
    --------
    flwr_perdl.strategies.FedX : the protocol, for Flower projects, with every option.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.estimators import MixedRegression
    >>> rng = np.random.default_rng(0)
    >>> slopes = np.array([[2.0, 0.0, 1.0], [-1.0, 1.0, 0.0]])
    >>> groups = np.repeat(np.arange(40), 15)
    >>> X = rng.standard_normal((600, 3))
    >>> y = np.sum(X * slopes[groups % 2], axis=1) + 0.1 * rng.standard_normal(600)
    >>> model = MixedRegression(k=2).fit(X, y, groups)
    >>> model.coef_[model.labels_[:2]].round(1) + 0
    array([[ 2.,  0.,  1.],
           [-1.,  1.,  0.]])
    >>> model.predict([[1.0, 1.0, 1.0]], groups=[6]).round(1)
    array([3.])
    """

    __metadata_request__fit: ClassVar = {"groups": True}
    __metadata_request__predict: ClassVar = {"groups": True, "y_own": True}
    #: A Pipeline's score passes a sample_weight, though it be None.
    __metadata_request__score: ClassVar = {"groups": True, "y_own": True, "sample_weight": None}

    k: int | Literal["auto"] = "auto"
    _: KW_ONLY
    max_clusters: int = 8
    rounds: int = 50
    min_support: int = 3
    seed: int = 0
    random_state: int | None = None
    fit_intercept: bool = True
    grid: MakeGrid | None = None
    verbose: bool = False

    def fit(self, X: Any, y: Any, groups: Any) -> Self:
        """Find the models from all groups' points.

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
        asked = None if is_auto("k", self.k) else check_count("k", self.k, 1)
        check_flag("fit_intercept", self.fit_intercept)
        n_rounds = check_count("rounds", self.rounds, 4)
        check_count("min_support", self.min_support)
        inputs = as_matrix("X", X, min_rows=1)
        responses = as_column("y", y, len(inputs))
        names, which, enough = read_groups(groups, len(inputs), self.min_support)
        if asked is not None and asked > len(enough):
            raise ValueError(
                f"k must be at most the number of groups with min_support={self.min_support} "
                f"samples or more, {len(enough)}, got {asked}."
            )
        design, target, scaler = inputs, responses, None
        if self.fit_intercept:
            scaler = Standardizer.of(inputs, responses, np.isin(which, enough))
            design, target = scaler.apply(inputs, responses)
        own = [(design[which == i], target[which == i]) for i in enough]
        strategy = partial(FedX, self.k, max_clusters=self.max_clusters)

        def make_client(context: Context) -> RegressionClient:
            data = own[int(context.node_config[PARTITION_ID])]
            return RegressionClient(*data, context, min_support=self.min_support)

        done, _ = self._federate(strategy, make_client, len(own), n_rounds)
        models = np.stack([one.to_numpy_ndarrays()[0] for one in done.result.models])
        self.coef_, self.intercept_ = models, np.zeros(len(models), models.dtype)
        if scaler is not None:
            self.coef_, self.intercept_ = scaler.models(models)
        self.groups_ = names
        self.labels_ = np.array(
            [self._nearest(inputs[which == i], responses[which == i]) for i in range(len(names))]
        )
        return self._finish(X)

    def assign(self, X: Any, y: Any, groups: Any = None) -> NDArray[np.intp]:
        """Return the model of each point's group: the one that fits the group's points best.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        y : array_like of shape (n_samples,)
            Responses.
        groups : array_like of shape (n_samples,), optional
            The group of each sample; by default one group.

        Returns
        -------
        ndarray of shape (n_samples,)
            Rows of ``coef_``.
        """
        rows = self._read_rows(X)
        responses = as_column("y", y, len(rows))
        owners = np.zeros(len(rows)) if groups is None else as_groups(groups, len(rows))
        models = np.empty(len(rows), dtype=np.intp)
        for group in np.unique(owners):
            members = owners == group
            models[members] = self._nearest(rows[members], responses[members])
        return models

    def predict(self, X: Any, groups: Any = None, y_own: Any = None) -> Matrix:
        """Return predictions.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        groups : array_like of shape (n_samples,), optional
            The group of each sample; by default one new group.
        y_own : array_like of shape (n_samples,), optional
            Known responses, NaN elsewhere: a new group gets the model that fits these best.

        Returns
        -------
        ndarray of shape (n_samples,)

        Raises
        ------
        ValueError
            If a group was not in ``fit`` and has no response in ``y_own``.
        """
        rows = self._read_rows(X).astype(self.coef_.dtype, copy=False)
        known = np.full(len(rows), np.nan)
        if y_own is not None:
            known = as_column("y_own", y_own, len(rows), missing=True)
        if groups is None:
            owners, seen = np.zeros(len(rows), dtype=int), {}
        else:
            owners = as_groups(groups, len(rows))
            seen = dict(zip(self.groups_.tolist(), self.labels_.tolist(), strict=True))
        predictions: Matrix = np.zeros(len(rows), self.coef_.dtype)
        # All samples of a group have one model: single ones would follow their own noise.
        for group in np.unique(owners).tolist():
            members = owners == group
            label = seen.get(group)
            if label is None:
                labeled = members & ~np.isnan(known)
                if not labeled.any():
                    new = "the samples" if groups is None else f"group {group!r}"
                    raise ValueError(
                        f"y_own must have at least one response of {new}, got none; pass groups= "
                        "instead if they are groups that fit saw."
                    )
                label = self._nearest(rows[labeled], known[labeled])
            predictions[members] = rows[members] @ self.coef_[label] + self.intercept_[label]
        return predictions

    def score(self, X: Any, y: Any, groups: Any = None, y_own: Any = None) -> float:
        """Return the coefficient of determination R^2 of the predictions.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            Inputs.
        y : array_like of shape (n_samples,)
            Responses.
        groups, y_own : array_like, optional
            See `predict`.

        Returns
        -------
        float

        Examples
        --------
        How many models? In a search over groups scikit-learn's metadata routing passes on
        ``groups``, and ``y_own``: the responses by which a group that was held out finds its model.

        >>> import numpy as np
        >>> import sklearn
        >>> from sklearn.model_selection import GridSearchCV, GroupKFold
        >>> from flwr_perdl.estimators import MixedRegression
        >>> rng = np.random.default_rng(0)
        >>> groups = np.repeat(np.arange(24), 15)
        >>> X = rng.standard_normal((360, 2))
        >>> y = X[:, 0] * np.where(groups % 2, 3, -1) + 0.1 * rng.standard_normal(360)
        >>> known = np.where(np.arange(360) % 15 < 5, y, np.nan)
        >>> with sklearn.config_context(enable_metadata_routing=True):
        ...     search = GridSearchCV(MixedRegression(rounds=10), {"k": [1, 2]}, cv=GroupKFold(2))
        ...     search = search.fit(X, y, groups=groups, y_own=known)
        >>> search.best_params_
        {'k': 2}
        """
        predictions = self.predict(X, groups, y_own)
        return float(r2_score(as_column("y", y, len(predictions)), predictions))

    def _nearest(self, X: Matrix, y: Matrix) -> int:
        """Return the model that fits points best, the first of equals."""
        errors = X @ self.coef_.T + self.intercept_ - y[:, None]
        return int((errors**2).sum(axis=0).argmin())


class Standardizer(NamedTuple):
    """Means and standard deviations of columns and responses.

    Attributes
    ----------
    means, scales : ndarray of shape (n_features,)
        Of the columns; the scale of one that is constant is 0, and its coefficient will be.
    mean, scale : float
        Of the responses; 1 if these are constant.
    """

    means: Matrix
    scales: Matrix
    mean: float
    scale: float

    @classmethod
    def of(cls, X: Matrix, y: Matrix, rows: NDArray[np.bool_]) -> Standardizer:
        """Return the means and standard deviations of these rows."""
        table = np.column_stack([X, y])[rows].astype(np.float64)  # sums of many, as of few
        means, scales = table.mean(axis=0), table.std(axis=0)
        scales[scales <= _CONSTANT * np.abs(table).max(axis=0)] = 0
        columns = means[:-1].astype(X.dtype), scales[:-1].astype(X.dtype)
        return cls(*columns, float(means[-1]), float(scales[-1]) or 1.0)

    def apply(self, X: Matrix, y: Matrix) -> tuple[Matrix, Matrix]:
        """Return standardized columns, with one of ones, and responses."""
        vary = self.scales > 0
        columns = (X[:, vary] - self.means[vary]) / self.scales[vary]
        return np.column_stack([columns, np.ones_like(y)]), (y - self.mean) / self.scale

    def models(self, models: Matrix) -> tuple[Matrix, Matrix]:
        """Return coefficients and intercepts in the units of the data."""
        vary = self.scales > 0
        coefficients = np.zeros((len(models), len(self.means)), models.dtype)
        coefficients[:, vary] = self.scale * models[:, :-1] / self.scales[vary]
        return coefficients, self.mean + self.scale * models[:, -1] - coefficients @ self.means


def as_column(name: str, values: Any, length: int, *, missing: bool = False) -> Matrix:
    """Return one number per sample; with ``missing`` NaN is one, too."""
    column = np.asarray(values)
    if column.ndim != 1 or len(column) != length:
        raise ValueError(
            f"{name} should be a 1d array of {length} numbers, got one of shape {column.shape}."
        )
    return as_matrix(name, column, ndim=1, missing=missing)


def as_groups(groups: Any, length: int) -> NDArray[Any]:
    """Return the group of every sample."""
    owners = np.asarray(groups)
    if owners.shape != (length,):
        raise ValueError(f"groups must have shape ({length},), got {owners.shape}.")
    for group in owners.tolist():
        if not isinstance(group, str) and (group is None or group != group):
            raise ValueError(f"groups must have a group for every sample, got {group!r}.")
    kinds = {type(group): group for group in owners.tolist()}
    if str in kinds and len(kinds) > 1:
        found = " and ".join(repr(group) for group in list(kinds.values())[:2])
        raise ValueError(f"groups must be all numbers or all names, got {found}.")
    return owners


def read_groups(
    groups: Any, length: int, min_support: int
) -> tuple[NDArray[Any], NDArray[np.intp], NDArray[np.intp]]:
    """Return the groups' names, which one each sample has, and which are large enough to learn."""
    owners = as_groups(groups, length)
    names, which, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(sizes >= min_support)
    if not len(enough):
        raise ValueError(
            f"groups must have one with at least min_support={min_support} samples, got "
            f"n_samples={sizes.max()} in the largest."
        )
    return names, which, enough
