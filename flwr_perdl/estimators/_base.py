"""scikit-learn's conventions, without scikit-learn: parameters, fitted attributes, input.

scikit-learn's own functions (``clone``, ``check_is_fitted``, ``get_tags``) work on these
estimators. What only they call finds scikit-learn among the loaded modules.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Self

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.core import html
from flwr_perdl.core.checks import (
    FLOATS,
    Matrix,
    brief_repr,
    check_array,
    check_choice,
    check_count,
    check_function,
    check_list,
)
from flwr_perdl.core.extras import load_extra
from flwr_perdl.dictionary import reconstruct
from flwr_perdl.protocol.compat import NumPyClient
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ProtocolStrategy

#: Makes the grid of so many nodes that all run one app.
MakeGrid = Callable[[ClientApp, int], InProcessGrid]


class NotFittedError(ValueError, AttributeError):
    """The estimator is not fitted yet.

    Like scikit-learn's error of this name it is a ValueError and an AttributeError, and where
    scikit-learn is loaded, it is that error too.

    Examples
    --------
    >>> from flwr_perdl.estimators import NotFittedError, PersonalizedDictionaryLearning
    >>> try:
    ...     PersonalizedDictionaryLearning(4).transform([[1.0, 2.0]])
    ... except NotFittedError as error:
    ...     print(error)
    PersonalizedDictionaryLearning must be fitted first: call fit.
    """


class Estimator:
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
    #: "transformer" or "regressor": for scikit-learn.
    _estimator_type = "transformer"
    #: Whether NaN is a missing entry: for scikit-learn.
    _allow_nan = False
    #: Methods, each with an argument that scikit-learn's metadata routing passes on to it.
    _metadata: Sequence[tuple[str, str]] = ()

    @classmethod
    def _parameters(cls) -> dict[str, Any]:
        """Return the parameters' names, in order, and their defaults."""
        own = list(signature(cls.__init__).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in own}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name.

        Parameters
        ----------
        deep : bool, default True
            For scikit-learn: no parameter is an estimator itself.

        Returns
        -------
        dict of str to object
        """
        return {name: getattr(self, name) for name in self._parameters()}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; none is set if one is unknown.

        Parameters
        ----------
        **params
            New values.

        Returns
        -------
        self
        """
        known = self._parameters()
        if unknown := params.keys() - known:
            raise ValueError(
                f"params must be of {', '.join(known)} for {type(self).__name__}, got "
                f"{sorted(unknown)}."
            )
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """Return the call that makes the estimator, without defaults."""
        known, words = self._parameters(), []
        for name, value in self.get_params().items():
            default = known[name]
            if type(value) is not type(default) or repr(value) != repr(default):
                words.append(f"{name}={brief_repr(value)}")
        return f"{type(self).__name__}({', '.join(words)})"

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags of the estimator; only scikit-learn calls this."""
        utils: Any = sys.modules["sklearn.utils"]
        regressor = self._estimator_type == "regressor"
        return utils.Tags(
            estimator_type=self._estimator_type,
            target_tags=utils.TargetTags(required=regressor),
            transformer_tags=None if regressor else utils.TransformerTags(["float64", "float32"]),
            regressor_tags=utils.RegressorTags() if regressor else None,
            input_tags=utils.InputTags(allow_nan=self._allow_nan),
        )

    def get_metadata_routing(self) -> Any:
        """Return what scikit-learn passes on to which method; only scikit-learn calls this."""
        routing: Any = sys.modules["sklearn.utils.metadata_routing"]
        request = routing.MetadataRequest(owner=type(self).__name__)
        for method, argument in self._metadata:
            getattr(request, method).add_request(param=argument, alias=True)
        return request

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

    def _check_fitted(self) -> None:
        """Raise a NotFittedError, which is also scikit-learn's, before ``fit``."""
        if self.__sklearn_is_fitted__():
            return
        theirs = getattr(sys.modules.get("sklearn.exceptions"), "NotFittedError", None)
        kind: type[NotFittedError] = NotFittedError
        if theirs is not None:
            kind = type("NotFittedError", (NotFittedError, theirs), {})
        raise kind(f"{type(self).__name__} must be fitted first: call fit.")

    def _read_sites(self, X: Any, *, min_columns: int = 1) -> list[Matrix]:
        """Return the sites' tables of a call of ``fit``."""
        tables = tables_of(X)
        check_names(tables, missing=self._allow_nan)
        sites: list[Matrix] = []
        for i, table in tables.items():
            name, columns, nan = f"X[{i}]", sites[0].shape[1] if sites else None, self._allow_nan
            site = as_matrix(name, table, min_rows=1, min_columns=min_columns, missing=nan)
            sites.append(check_array(name, site, columns=columns, missing=nan))
        kind = np.result_type(*sites)
        return [site.astype(kind, copy=False) for site in sites]

    def _fitted(self, n_features: int, table: Any) -> Self:
        """Set what scikit-learn's estimators say of their columns, when all else has been learned.

        ``table`` is what ``fit`` was given, or the first of it: a data frame has names.
        """
        names = feature_names(table)
        self.n_features_in_ = n_features
        vars(self).pop("feature_names_in_", None)
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        return self

    def _read_rows(self, X: Any) -> Matrix:
        """Return the rows of a call after ``fit``, with the columns that ``fit`` saw."""
        self._check_fitted()
        names, known = feature_names(X), getattr(self, "feature_names_in_", None)
        if names is not None and known is not None and names != list(known):
            raise ValueError(
                "X must have the columns of fit in the same order, but it "
                f"{difference(names, list(known))}."
            )
        rows = as_matrix("X", X, missing=self._allow_nan)
        if rows.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {rows.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
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
        n_rounds: int,
        **start: Any,
    ) -> tuple[Matrix, InProcessGrid]:
        """Run the strategy, and return what it learned, and the grid; set the history."""
        strategy = make_strategy(
            seed=self._one_seed(), num_clients=n_sites, min_clients=n_sites, fraction_evaluate=0.0
        )
        check_function("grid", self.grid, "a function (app, n_sites) or None")
        grid = (self.grid or InProcessGrid)(client_app(make_client), n_sites)
        verbose = "bar" if self.verbose else "quiet"
        result = strategy.start(grid, num_rounds=n_rounds, verbose=verbose, **start)
        self.history_ = strategy.history
        self.n_iter_ = len(self.history_)
        (learned,) = result.arrays.to_numpy_ndarrays()
        return learned, grid


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
    def _pictured(self) -> dict[str, Matrix]:
        """Return what `fit` has learned, by name."""

    def _repr_html_(self) -> str:
        """Return the call, and below it the atoms as pictures where they are images."""
        found = self._pictured() if self.__sklearn_is_fitted__() else {}
        return html.titled(repr(self), html.atoms(found) if found else "")

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
            chosen = check_choice("transform", transform, ("default", "pandas", "polars"))
            self._sklearn_output_config = {"transform": chosen}  # scikit-learn's clone copies it
        return self

    def _framed(self, codes: Matrix, X: Any, names: Sequence[str]) -> Any:
        """Return codes, the rows of ``X``, in the form that `set_output` has chosen."""
        theirs: Any = sys.modules.get("sklearn")
        default = "default" if theirs is None else theirs.get_config()["transform_output"]
        own: dict[str, str] = getattr(self, "_sklearn_output_config", {})
        chosen = own.get("transform", default)
        if chosen == "polars":
            return load_extra("polars", "data frames").DataFrame(codes, schema=list(names))
        if chosen == "default":
            return codes
        return data_frame(codes, columns=list(names), index=getattr(X, "index", None))

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

    def _fitted_sites(self, n_features: int, X: Any) -> Self:
        """Set the sites' names, where ``X`` is a mapping, and what `_fitted` sets."""
        vars(self).pop("site_names_", None)
        if isinstance(X, Mapping):
            self.site_names_ = list(X)
        return self._fitted(n_features, next(iter(tables_of(X).values())))

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


def data_frame(rows: Any, **how: Any) -> Any:
    """Return a pandas DataFrame, or raise an ImportError that says what to install."""
    return load_extra("pandas", "data frames").DataFrame(rows, **how)


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


def explained(X: Matrix, approximation: Matrix) -> float:
    """Return the share of the observed energy of ``X`` that is explained; 1 of zeros."""
    energy = float(np.nansum(X**2))
    return 1 - float(np.nansum((X - approximation) ** 2)) / energy if energy else 1.0


def rebuilt(codes: Any, D: Matrix) -> Matrix:
    """Return the samples of these codes, which are checked; ``D`` are the atoms."""
    read = check_array("codes", as_matrix("codes", codes, min_columns=0), columns=len(D))
    return reconstruct(read.astype(D.dtype, copy=False), D)


def feature_names(table: Any) -> list[str] | None:
    """Return the names of a data frame's columns; None of anything else, or if not all are text."""
    columns = getattr(table, "columns", None)
    names = None if columns is None else list(columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def check_names(tables: Mapping[str, Any], *, missing: bool) -> None:
    """Raise a ValueError that says which table lacks which column, if their names differ."""
    first, *others = ((key, feature_names(table)) for key, table in tables.items())
    for other in others:
        if other[1] == first[1]:
            continue
        lacking = other[1] and first[1] and set(first[1]) < set(other[1])  # the first may lack one
        (one, names), (key, known) = (first, other) if lacking else (other, first)
        more = names and known and not set(known) <= set(names) and missing
        raise ValueError(
            f"X[{one}] must have the columns of X[{key}] in the same order, but it "
            f"{difference(names, known)}{'; keep that column, filled with NaN' if more else ''}."
        )


def difference(names: list[str] | None, known: list[str] | None) -> str:
    """Return in what the columns of a table differ from those that it must have."""
    if names is None or known is None:
        return "has no column names" if names is None else "has column names, unlike the other"
    lacks, more = ([n for n in a if n not in b] for a, b in ((known, names), (names, known)))
    parts = [f"lacks {lacks[0]!r}"] if lacks else []
    parts += [f"has {more[0]!r}"] if more else []
    return " and ".join(parts) or "has the same columns in another order"


def as_matrix(
    name: str,
    table: Any,
    *,
    min_rows: int = 0,
    min_columns: int = 1,
    ndim: int = 2,
    missing: bool = False,
) -> Matrix:
    """Return a table as a float array: numbers of other kinds become float64.

    A table is an array, a list of rows, or a data frame. The sentences of its errors are those that
    scikit-learn's own checks look for.
    """
    if hasattr(table, "tocsr"):
        raise ValueError(f"{name} must be dense, got a sparse {type(table).__name__}.")
    array = np.asarray(table)
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} must be real, got {array.dtype}.")
    if array.dtype not in FLOATS:
        try:
            if array.dtype == object and hasattr(table, "to_numpy"):  # pandas' NA is no float
                array = table.to_numpy(dtype=float, na_value=np.nan)
            array = array.astype(float)
        except ValueError as error:
            raise ValueError(f"{name} must be numbers, got others: {error}.") from error
    if array.ndim != ndim:
        raise ValueError(
            f"Reshape your data: {name} must have {ndim} dimension(s), got shape {array.shape}."
        )
    if ndim == 2:
        for axis, found, least in ((0, "sample", min_rows), (1, "feature", min_columns)):
            if array.shape[axis] < least:
                raise ValueError(
                    f"{name} must have rows and columns, got {array.shape[axis]} {found}(s) "
                    f"(shape={array.shape}) while a minimum of {least} is required."
                )
    return check_array(name, array, ndim=ndim, squares=True, missing=missing)
