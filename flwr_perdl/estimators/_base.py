"""What all estimators share: a seed, sites and their tables, the run of a strategy.

Parameters, tags, metadata routing and containers are scikit-learn's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from sklearn import utils
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import (
    Matrix,
    brief_repr,
    check_array,
    check_choice,
    check_count,
    check_function,
    check_list,
)
from flwr_perdl.dictionary import reconstruct
from flwr_perdl.protocol.compat import NumPyClient
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ProtocolStrategy

#: Makes the grid of so many nodes that all run one app.
MakeGrid = Callable[[ClientApp, int], InProcessGrid]


class Estimator(BaseEstimator):
    """What all estimators share; a subclass is a dataclass whose fields are its parameters.

    Attributes
    ----------
    n_features_in_ : int
        Number of columns that ``fit`` saw.
    feature_names_in_ : ndarray of str
        Their names, where ``fit`` was given data frames.
    """

    seed: int
    random_state: int | None
    #: Whether NaN is a missing entry.
    _allow_nan = False

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of the estimator."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._allow_nan
        return tags

    def _one_seed(self) -> int:
        """Return ``random_state`` where it is given, else ``seed``."""
        if self.random_state is None:
            return self.seed
        if self.seed != 0:
            raise ValueError(f"seed must be left out with random_state, got {self.seed!r}.")
        return check_count("random_state", self.random_state)

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether ``fit`` has been called; scikit-learn's ``check_is_fitted`` asks."""
        return hasattr(self, "n_features_in_")

    def _read_sites(self, X: Any, *, min_columns: int = 1) -> list[Matrix]:
        """Return the sites' tables of a call of ``fit``."""
        tables = tables_of(X)
        check_columns(tables)
        sites: list[Matrix] = []
        for i, table in tables.items():
            rules: dict[str, Any] = {
                "min_columns": min_columns,
                "columns": sites[0].shape[1] if sites else None,
                "missing": self._allow_nan,
            }
            sites.append(as_matrix(f"X[{i}]", table, min_rows=1, **rules))
        kind = np.result_type(*sites)
        return [site.astype(kind, copy=False) for site in sites]

    def _finish(self, table: Any) -> Self:
        """Set what scikit-learn's estimators say of their columns, when all else has been learned.

        ``table`` is what ``fit`` was given, or the first of it.
        """
        validate_data(self, table, skip_check_array=True)
        return self

    def _read_rows(self, X: Any) -> Matrix:
        """Return the rows of a call after ``fit``, with the columns that ``fit`` saw."""
        check_is_fitted(self)
        rows = as_matrix("X", X, missing=self._allow_nan)
        validate_data(self, X, reset=False, skip_check_array=True)
        return rows


class Federated(Estimator):
    """An estimator whose ``fit`` runs a strategy, with a client per site, in this process."""

    grid: MakeGrid | None
    verbose: bool

    def _federate(
        self,
        make_strategy: Callable[..., ProtocolStrategy],
        make_client: Callable[[Context], NumPyClient],
        n_sites: int,
        n_rounds: int | None = None,
        **start: Any,
    ) -> tuple[Any, InProcessGrid]:
        """Run the strategy, and return it, and the grid; set the history."""
        strategy = make_strategy(
            seed=self._one_seed(), num_clients=n_sites, min_clients=n_sites, fraction_evaluate=0.0
        )
        check_function("grid", self.grid, "a function (app, n_sites) or None")
        grid = (self.grid or InProcessGrid)(client_app(make_client), n_sites)
        verbose = "bar" if self.verbose else "quiet"
        strategy.start(grid, num_rounds=n_rounds, verbose=verbose, **start)
        self.history_ = strategy.history
        self.n_iter_ = len(self.history_)
        return strategy, grid


class SiteTransformer(Estimator):
    """An estimator that codes tables, each with the dictionary of one of ``fit``'s sites."""

    #: The argument that says whose dictionary.
    _whose = "client"

    @abstractmethod
    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the sites' tables."""

    @abstractmethod
    def transform(self, X: Any, site: Any = None, /) -> Any:
        """Return the codes of samples with a site's dictionary."""

    @abstractmethod
    def atoms(self, site: Any = None, /) -> Matrix:
        """Return a site's dictionary."""

    @abstractmethod
    def _code(self, rows: Matrix, D: Matrix) -> Matrix:
        """Return the codes of samples with a dictionary, of the same dtype."""

    @abstractmethod
    def _names(self, who: Any) -> NDArray[Any]:
        """Return the names of a site's atoms."""

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of the estimator."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags = utils.TransformerTags(preserves_dtype=["float64", "float32"])
        return tags

    def set_output(self, *, transform: str | None = None) -> Self:
        """Choose the output of ``transform``.

        Parameters
        ----------
        transform : {"default", "pandas", "polars"}, optional
            Arrays, or data frames with a named column per atom (pandas: with the index of ``X``).
            None changes nothing. By default scikit-learn's ``set_config(transform_output=...)``
            applies.

        Returns
        -------
        self
        """
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}  # scikit-learn's clone copies it
        return self

    def _encode(self, X: Any, who: Any) -> tuple[Matrix, Matrix, Matrix]:
        """Return the rows of one table, their codes, and the atoms."""
        rows, D = self._read_rows(X), self.atoms(who)
        return rows, self._code(rows.astype(D.dtype, copy=False), D), D

    def _transform(self, X: Any, who: Any) -> Any:
        """Return the codes of one table, in the form that `set_output` has chosen."""
        framed = _Codes(self._encode(X, who)[1], self._names(who))
        framed._sklearn_output_config = getattr(self, "_sklearn_output_config", {})
        return framed.transform(X)

    def _rebuild(self, codes: Any, who: Any) -> Matrix:
        """Return the samples of one table of codes."""
        D = self.atoms(who)
        read = as_matrix("codes", codes, min_columns=0, columns=len(D))
        return reconstruct(read.astype(D.dtype, copy=False), D)

    def _explained_share(self, X: Any, who: Any) -> float:
        """Return the share of the observed energy of ``X`` that is explained; 1 of zeros."""
        energy = missed = 0.0
        for rows, codes, D in (self._encode(*pair) for pair in self._pairs(X, who)):
            energy += float(np.nansum(rows**2))
            missed += float(np.nansum((rows - reconstruct(codes, D)) ** 2))
        return 1 - missed / energy if energy else 1.0

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Fit the sites' tables, and return the codes of each with its site's dictionary.

        Parameters
        ----------
        X : list or mapping of array_like of shape (n_samples_i, n_features)
            One table per site.
        y : ignored
            For scikit-learn.

        Returns
        -------
        list or mapping of ndarray or DataFrame
            Codes of each table, see `transform`.
        """
        return self.fit(X).transform(X, range(len(X)))

    def _fitted_sites(self, X: Any) -> Self:
        """Set the sites' names, where ``X`` is a mapping, and what `_finish` sets."""
        if isinstance(X, Mapping):
            self.site_names_ = list(X)
        elif hasattr(self, "site_names_"):
            del self.site_names_
        return self._finish(next(iter(tables_of(X).values())))

    def _place(self, who: Any, n_sites: int) -> int:
        """Return a site's place in ``fit``, of its number or name."""
        names: list[str] = getattr(self, "site_names_", [])
        if names and isinstance(who, str):
            return names.index(check_choice(self._whose, who, names))
        return check_count(self._whose, who, 0, n_sites - 1)

    def _pairs(self, X: Any, who: Any) -> list[tuple[Any, Any]]:
        """Return the tables of ``X``, each with its site; one table is alone."""
        if not has_sites(X):
            return [(X, who)]
        tables = list(tables_of(X).values())
        if who is None:
            return [(table, None) for table in tables]
        if len(check_list(self._whose, who)) != len(tables):
            raise ValueError(
                f"{self._whose} must have a site for each of the {len(tables)} tables of X, got "
                f"{len(who)}."
            )
        return list(zip(tables, who, strict=True))

    def _each(self, call: Callable[[Any, Any], Any], X: Any, who: Any) -> Any:
        """Return ``call(table, site)`` of one table, or of each of a list or mapping."""
        found = [call(table, site) for table, site in self._pairs(X, who)]
        if isinstance(X, Mapping):
            return dict(zip(X, found, strict=True))
        return found if has_sites(X) else found[0]


class _Codes(TransformerMixin, BaseEstimator):
    """The codes of one table, of which scikit-learn makes what is asked for."""

    def __init__(self, codes: Matrix, names: NDArray[Any]) -> None:
        self.codes, self.names = codes, names

    def transform(self, X: Any) -> Any:
        """Return the codes; scikit-learn wraps this method."""
        return self.codes

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the columns' names."""
        return self.names


def has_sites(X: Any) -> bool:
    """Return whether ``X`` is a list or mapping of tables, and no table itself."""
    if isinstance(X, Mapping) or not isinstance(X, Sequence) or isinstance(X, str):
        return isinstance(X, Mapping) or getattr(X, "ndim", 2) == 3
    try:
        return len(X) > 0 and np.ndim(X[0]) == 2
    except ValueError:  # rows of several lengths
        return False


def tables_of(X: Any) -> dict[str, Any]:
    """Return the tables of a list or mapping, by the number or name that errors have."""
    if isinstance(X, np.ndarray) and X.ndim == 3:
        X = list(X)
    named = isinstance(X, Mapping)
    if not (named or isinstance(X, Sequence)) or isinstance(X, str):
        raise TypeError(f"X must be a list of tables, one per site, got {brief_repr(X)}.")
    if named and not all(isinstance(name, str) for name in X):
        raise TypeError(f"X must have a name (str) for each table, got {brief_repr(list(X))}.")
    if not len(X):
        raise ValueError("X must have at least one site, got none.")
    return {repr(key): table for key, table in (X.items() if named else enumerate(X))}


def feature_names(table: Any) -> list[str] | None:
    """Return the names of a data frame's columns; None of anything else, or if not all are text."""
    columns = getattr(table, "columns", None)
    names = None if columns is None else list(columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def check_columns(tables: Mapping[str, Any]) -> None:
    """Raise a ValueError that says which data frames have other columns."""
    (first, known), *others = ((key, feature_names(table)) for key, table in tables.items())
    for key, names in others:
        if names != known:
            only = sorted({*(names or ())} ^ {*(known or ())})
            how = f"only one has {only[0]!r} (it may be all NaN)" if only else "the order differs"
            raise ValueError(f"X[{key}] must have the columns of X[{first}], in order: {how}.")


def as_matrix(
    name: str,
    table: Any,
    *,
    min_rows: int = 0,
    min_columns: int = 1,
    ndim: int = 2,
    **rules: Any,
) -> Matrix:
    """Return a table as a float array: numbers of other kinds become float64.

    A table is an array, a list of rows, or a data frame. ``rules`` are those of our `check_array`.
    """
    try:
        array = utils.check_array(
            table,
            dtype=[np.float64, np.float32],
            ensure_all_finite=False,
            ensure_2d=ndim == 2,
            ensure_min_samples=min_rows,
            ensure_min_features=min_columns,
            input_name=name,
        )
    except ValueError as error:
        raise ValueError(f"{name} must be a table of numbers: {error}") from error
    return check_array(name, array, ndim=ndim, squares=True, **rules)
