"""Which factors all sites share, and which are specific to one: PerMA behind ``fit``.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023: `flwr_perdl.strategies.PerMA` has its symbols, and what each party receives.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from zipfile import BadZipFile

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from flwr_perdl.clients import DictionaryClient, kept_local_atoms
from flwr_perdl.clients.dictionary import N_NONZERO, FirstDictionary, data_warnings
from flwr_perdl.core.checks import (
    Matrix,
    check_choice,
    check_count,
    check_flag,
    check_function,
    check_kind,
)
from flwr_perdl.dictionary import (
    LassoLearner,
    Learner,
    OrthogonalLearner,
    WarmStart,
    align_to_global,
    refine_local,
    sparse_code,
    warm_start,
)
from flwr_perdl.dictionary.atoms import COPY
from flwr_perdl.dictionary.learners import check_samples
from flwr_perdl.estimators._base import (
    Federated,
    MakeGrid,
    SiteTransformer,
    tables_of,
)
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import spawn
from flwr_perdl.strategies import PerMA
from flwr_perdl.strategies.perma import NAMED

#: How a site learns its first dictionary where no learner is given. With a third of the iterations
#: digits' error (k = 10) is 0.0085 too, but in a third of the draws of planted factors a site's own
#: ones are missed.
LASSO_START: FirstDictionary = partial(warm_start, n_iter=30, boost=4, decay=0.9)


@dataclass(eq=False, repr=False)
class PersonalizedDictionaryLearning(SiteTransformer, Federated):
    """Learn atoms that all sites share, and atoms that are specific to each site.

    The samples of site i are sparse combinations of the global atoms and the site's local ones:
    ``X[i] ≈ codes @ [global_atoms_; local_atoms_[i]]``. ``fit`` runs `PerMA` with a
    `DictionaryClient` per site, like a federation in which no site sees another one's samples.

    Parameters
    ----------
    n_atoms : int
        Atoms of a site, global ones included.
    n_global : int, "auto" or "agree", default "auto"
        Number of global atoms. "auto" tries five shares (0 to 100 %) in the first rounds and keeps
        the one with the lowest error on samples that the sites hold out for these; "agree" finds on
        how many the sites agree: see `PerMA`.
    learner : callable, optional
        ``n_atoms -> Learner``, such as `OrthogonalLearner` or ``partial(MODLearner, n_nonzero=5)``;
        by default `LassoLearner`, which does best without tuning.
    alpha : float or "auto", default "auto"
        The default learner's penalty; "auto" is a twentieth of each sample's norm.
    n_nonzero : int, optional
        Atoms per sample of ``transform``, by orthogonal matching pursuit (OMP); by default the
        learner's own codes.
    rounds : int, default 20
        Communication rounds; the first one finds the global atoms.
    aggregation : str, default "statistics"
        See `PerMA`.
    matching : str, default "consensus"
        See `PerMA`.
    min_support : int, default 3
        Fewest samples behind each atom that a site sends: see `DictionaryClient`.
    warm_start : bool, default False
        Whether ``fit`` on a fitted model continues from its atoms, for the same sites in the same
        order.
    seed : int, default 0
        Seed of all random draws.
    random_state : int, optional
        scikit-learn's name of ``seed``; give one of the two.
    grid : callable, optional
        ``(app, n_sites) -> InProcessGrid``, such as ``partial(InProcessGrid, state_dir="kept")``;
        by default `InProcessGrid`.
    verbose : bool, default False
        Whether to show a progress bar.

    Attributes
    ----------
    global_atoms_ : ndarray of shape (n_global, n_features)
        The atoms that all sites share, unit rows.
    local_atoms_ : list of ndarray of shape (n_local, n_features)
        Each site's own, unit rows. In a federation of several parties these stay at the sites.
    history_ : list of RoundReport
        Every round: errors by site, who was left out, communication.
    n_iter_ : int
        Number of rounds.
    client_ : int or None
        The default of ``client`` in all methods: the ``client`` of `from_run`.
    n_features_in_, feature_names_in_
        The columns, as in scikit-learn.

    Raises
    ------
    ValueError
        By ``fit``: if a table or a parameter breaks its rule.
    TooFewReplies
        By ``fit``: if a site's client fails. The error says why.

    Warns
    -----
    UserWarning
        By ``fit``: if a table has fewer samples than atoms or mostly zero samples, if atoms are
        duplicates or unused, or if ``n_global`` was chosen and is all.

    See Also
    --------
    flwr_perdl.strategies.PerMA : the protocol, for Flower projects.

    Examples
    --------
    Four sites share two of their four atoms.

    >>> import numpy as np
    >>> from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance
    >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning
    >>> rng = np.random.default_rng(0)
    >>> basis = np.linalg.qr(rng.standard_normal((10, 10)))[0]
    >>> own = [np.vstack([basis[:2], basis[2 + 2 * i : 4 + 2 * i]]) for i in range(4)]
    >>> sites = [rng.choice([-1, 0, 1], (100, 4), p=[0.2, 0.6, 0.2]) @ D for D in own]
    >>> model = PersonalizedDictionaryLearning(4, 2, learner=OrthogonalLearner).fit(sites)
    >>> bool(dictionary_distance(basis[:2], model.global_atoms_) < 1e-6)
    True
    >>> model.transform(sites[3], client=3).shape
    (100, 4)
    """

    _allow_nan = True
    __metadata_request__score: ClassVar = {"client": True}

    n_atoms: int
    n_global: int | Literal["auto", "agree"] = "auto"
    _: KW_ONLY
    learner: Callable[[int], Learner] | None = None
    alpha: float | Literal["auto"] = "auto"
    n_nonzero: int | None = None
    rounds: int = 20
    aggregation: str = "statistics"
    matching: str = "consensus"
    min_support: int = 3
    warm_start: bool = False
    seed: int = 0
    random_state: int | None = None
    grid: MakeGrid | None = None
    verbose: bool = False

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from one table per site.

        Parameters
        ----------
        X : list or mapping of array_like of shape (n_samples_i, n_features)
            One table per site; the keys of a mapping are the sites' names. Rows are samples; the
            columns are the same everywhere. NaN is a missing entry, with the default `LassoLearner`
            or a `MODLearner`, and ``aggregation="statistics"``: codes, errors and `score` use the
            observed entries only, and `reconstruct` fills in the others. Fill a column that a site
            lacks with NaN; a sample without observed entries has codes of zeros.
        y : ignored
            For scikit-learn.

        Returns
        -------
        self
        """
        learner = self._learner()
        n_rounds, n_global = check_count("rounds", self.rounds, 2), self.n_global
        if not (isinstance(n_global, str) and check_choice("n_global", n_global, NAMED)):
            check_count("n_global", n_global, 1, self.n_atoms)
        check_count("min_support", self.min_support)
        # of one column there is one atom
        sites = self._read_sites(X, min_columns=2)
        self._check_missing(sites, learner)
        most = max(map(len, sites))
        if most < self.min_support:
            raise ValueError(
                f"X must have a table with at least min_support={self.min_support} samples, got "
                f"n_samples={most} in the largest."
            )
        go_on = check_flag("warm_start", self.warm_start) and self.__sklearn_is_fitted__()
        if go_on:
            self._check_known(sites, X)
        self._learn(sites, learner, n_rounds, go_on=go_on)
        if isinstance(n_global, str) and not go_on and len(self.global_atoms_) == self.n_atoms > 1:
            warnings.warn(
                f"n_global={n_global!r} shares all {self.n_atoms} atoms; sites have none of their "
                "own. Give n_global to keep some.",
                UserWarning,
                stacklevel=2,
            )
        self._warn(sites, learner)
        self.client_: int | None = None
        return self._fitted_sites(X)

    def _learn(
        self,
        sites: list[Matrix],
        learner: Learner,
        n_rounds: int,
        *,
        go_on: bool,
    ) -> None:
        """Run the strategy, from the atoms that there are or from starts of the sites' own."""
        given = self._dictionaries() if go_on else []
        strategy = partial(
            PerMA,
            len(self.global_atoms_) if go_on else self.n_global,
            aggregation=self.aggregation,
            matching=self.matching,
        )

        def make_client(context: Context) -> DictionaryClient:
            i = int(context.node_config[PARTITION_ID])
            return _SiteClient(
                sites[i],
                learner,
                context,
                start=partial(_given, given[i]) if go_on else _start(learner),
                min_support=self.min_support,
            )

        errors_of = ConfigRecord(
            {} if self.n_nonzero is None else {N_NONZERO: str(min(self.n_nonzero, self.n_atoms))}
        )
        options: dict[str, Any] = {"evaluate_config": errors_of}
        if go_on:
            options["initial_arrays"] = ArrayRecord([self.global_atoms_])
        done, grid = self._federate(strategy, make_client, len(sites), n_rounds, **options)
        self.global_atoms_: Matrix = done.result.shared.to_numpy_ndarrays()[0]
        self.local_atoms_: list[Matrix] = grid.local_atoms()

    def _dictionaries(self) -> list[Matrix]:
        """Return the sites' whole dictionaries."""
        return [np.vstack([self.global_atoms_, own]) for own in self.local_atoms_]

    def _check_known(self, sites: list[Matrix], X: Any) -> None:
        """Raise a ValueError if tables are not of the sites, with the columns, of the model."""
        self._read_rows(next(iter(tables_of(X).values())))
        if len(sites) != len(self.local_atoms_):
            raise ValueError(
                f"X must have a table of each of the {len(self.local_atoms_)} sites that the model "
                f"has, got {len(sites)}."
            )

    @classmethod
    def from_run(
        cls, folder: str | Path, *, client: int | str | None = None, **parameters: Any
    ) -> Self:
        """Return an estimator with the atoms of a finished run of PerMA.

        Parameters
        ----------
        folder : str or Path
            The folder of ``flwr-perdl run EXPERIMENT --out FOLDER``, on the machine that has the
            clients' states.
        client : int or str, optional
            Default of ``client`` in all methods: a partition or a name. Without it, the global
            atoms only.
        **parameters
            Parameters of the estimator; by default the run's options of the same names. ``learner``
            is required if the run's is neither "orthogonal" nor "lasso".

        Returns
        -------
        PersonalizedDictionaryLearning

        Raises
        ------
        ValueError
            If the folder is not that of such a run, or has no such client.

        Examples
        --------
        >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning
        >>> folder = "runs/digits"  # flwr-perdl run digits --out runs/digits
        >>> model = PersonalizedDictionaryLearning.from_run(folder, client=3)  # doctest: +SKIP
        >>> codes = model.transform(X)  # doctest: +SKIP
        """
        path = Path(check_kind("folder", folder, (str, Path), "a path"))
        try:
            config = json.loads((path / "results.json").read_text())["config"]
            with np.load(path / "arrays.npz") as arrays:
                global_atoms = arrays["global_atoms"]
            kept = kept_local_atoms(path / "state")
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            why = str(error).rstrip(".")
            raise ValueError(
                f"folder must be that of a finished run of PerMA, got {str(path)!r}: {why}."
            ) from error
        names = sorted(kept, key=lambda name: (int(name) if name.isdecimal() else 0, name))
        if client is not None and str(client) not in kept:
            raise ValueError(f"client must be of {', '.join(names)}, got {client!r}.")
        given = {name: config[name] for name in cls._get_param_names() if name in config}
        known = {"orthogonal": OrthogonalLearner, "lasso": None}
        learner = given.pop("learner", None)
        if learner in known:
            given["learner"] = known[learner]
        elif "learner" not in parameters:
            raise ValueError(f"learner must be given for this run, whose own is {learner!r}.")
        n_local = max(len(own) for own in kept.values())
        model = cls(**{"n_atoms": len(global_atoms) + n_local, **given, **parameters})
        model.global_atoms_, model.local_atoms_ = global_atoms, [kept[name] for name in names]
        model.client_ = None if client is None else names.index(str(client))
        return model._finish(global_atoms)

    def add_site(self, X: Any) -> int:
        """Learn the local atoms of a new site; the global atoms don't change.

        As a client that joins late, it learns a dictionary locally, removes the atoms that match
        global ones, and refines the rest.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features)
            The site's table.

        Returns
        -------
        int
            The site's number: ``client`` of the other methods, and its place in ``local_atoms_``.

        Examples
        --------
        >>> import numpy as np
        >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning
        >>> sites = np.random.default_rng(0).standard_normal((4, 50, 6))
        >>> model = PersonalizedDictionaryLearning(5, n_global=2, rounds=3).fit(list(sites[:3]))
        >>> number = model.add_site(sites[3])
        >>> number, model.transform(sites[3], client=number).shape
        (3, (50, 5))
        """
        check_is_fitted(self)
        G, learner, number = self.global_atoms_, self._learner(), len(self.local_atoms_)
        rows = self._read_rows(X).astype(G.dtype, copy=False)
        if not len(rows):
            raise ValueError("X must have at least one sample, got n_samples=0.")
        alone = _start(learner)(rows, learner, rng=spawn(self._one_seed(), number)).dictionary
        own = align_to_global(alone, G).local_atoms
        # Its local atoms were learned beside atoms of its own; the global ones leave other rests.
        refined = refine_local(rows, np.vstack([G, own]), len(G), learner)
        for _ in range(0 if learner.orthogonal else self.rounds):  # as a site that takes part
            refined = np.vstack([G, learner.step(rows, refined)[len(G) :]])
        self.local_atoms_ = [*self.local_atoms_, refined[len(G) :]]
        return number

    def remove_site(self, client: Any) -> None:
        """Remove a site's local atoms; later sites move up by one place.

        The global atoms don't change, and keep what they learned from the site's samples.

        Parameters
        ----------
        client : int or str
            The site's place in ``local_atoms_``, or its name.

        Examples
        --------
        >>> import numpy as np
        >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning
        >>> sites = np.random.default_rng(0).standard_normal((4, 50, 6))
        >>> model = PersonalizedDictionaryLearning(5, n_global=2, rounds=3).fit(list(sites))
        >>> model.remove_site(1)
        >>> len(model.local_atoms_)
        3
        """
        check_is_fitted(self)
        i = self._place(client, len(self.local_atoms_))
        if names := getattr(self, "site_names_", []):
            self.site_names_ = [*names[:i], *names[i + 1 :]]
        self.local_atoms_ = [*self.local_atoms_[:i], *self.local_atoms_[i + 1 :]]

    def transform(self, X: Any, client: Any = None) -> Any:
        """Return the codes of samples.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            One table, or those of several sites.
        client : int or str, or a sequence of them, optional
            Whose atoms to use: the global ones, then those of this site of ``fit``; for a list or
            mapping, the site of each table. By default ``client_``, or the global ones only, as for
            a new site.

        Returns
        -------
        ndarray or DataFrame of shape (n_samples, n_global + n_local)
            See `set_output`; the columns of a frame are "global0", …, "local0", …. For a list or
            mapping, a list or mapping of them.
        """
        return self._each(self._transform, X, client)

    def _code(self, rows: Matrix, D: Matrix) -> Matrix:
        if self.n_nonzero is None:
            return self._learner().code(rows, D)
        return sparse_code(rows, D, n_nonzero=min(self.n_nonzero, len(D)))

    def _names(self, who: Any) -> NDArray[Any]:
        r, n_atoms = len(self.global_atoms_), len(self.atoms(who))
        names = [f"global{i}" for i in range(r)] + [f"local{i}" for i in range(n_atoms - r)]
        return np.array(names, dtype=object)

    def get_feature_names_out(
        self, input_features: Any = None, *, client: int | str | None = None
    ) -> NDArray[Any]:
        """Return the atoms' names: "global0", …, and for a site "local0", ….

        Parameters
        ----------
        input_features : ignored
            For scikit-learn.
        client : int or str, optional
            The site.

        Returns
        -------
        ndarray of str
        """
        return self._names(client)

    def inverse_transform(self, codes: Any, client: Any = None) -> Any:
        """Return the samples that have these codes.

        Parameters
        ----------
        codes : array_like of shape (n_samples, n_atoms), or a list or mapping of them
            Output of `transform` for the same ``client``.
        client : int or str, or a sequence of them, optional
            See `transform`.

        Returns
        -------
        ndarray or DataFrame of shape (n_samples, n_features), or a list or mapping of them
        """
        return self._each(self._rebuild, codes, client)

    def reconstruct(self, X: Any, client: Any = None) -> Any:
        """Return the samples' reconstructions: ``inverse_transform(transform(X))``.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            One table, or those of several sites.
        client : int or str, or a sequence of them, optional
            See `transform`.

        Returns
        -------
        ndarray or DataFrame of shape (n_samples, n_features), or a list or mapping of them
        """
        return self.inverse_transform(self.transform(X, client), client)

    def score(self, X: Any, y: Any = None, *, client: Any = None) -> float:
        """Return the share of energy explained, ``1 - ||X - reconstruct(X)||^2 / ||X||^2``.

        ``cross_val_score(model, sites)`` measures how well the global atoms fit sites that were not
        in ``fit``. For held-out samples of the same sites, ``client`` says which site each table
        belongs to, through scikit-learn's metadata routing; without it scikit-learn passes
        ``client`` to ``fit``, which does not take it. Searches and ``cross_val_score`` index sites
        by number: give them ``list(sites.values())`` instead of a mapping.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            One table, or those of several sites.
        y : ignored
            For scikit-learn.
        client : int or str, or a sequence of them, optional
            See `transform`.

        Returns
        -------
        float
            At most 1; of several tables, over all their samples.

        Examples
        --------
        How many atoms should be global? Each of four sites holds out its last samples.

        >>> import numpy as np
        >>> import sklearn
        >>> from sklearn.model_selection import GridSearchCV
        >>> from flwr_perdl.dictionary import OrthogonalLearner
        >>> from flwr_perdl.estimators import PersonalizedDictionaryLearning
        >>> rng = np.random.default_rng(0)
        >>> basis = np.linalg.qr(rng.standard_normal((10, 10)))[0]
        >>> own = [np.vstack([basis[:2], basis[2 + 2 * i : 4 + 2 * i]]) for i in range(4)]
        >>> sites = [rng.choice([-1, 0, 1], (100, 4), p=[0.2, 0.6, 0.2]) @ D for D in own]
        >>> tables = [X[:70] for X in sites] + [X[70:] for X in sites]
        >>> model = PersonalizedDictionaryLearning(4, learner=OrthogonalLearner, rounds=5)
        >>> split = [(range(4), range(4, 8))]  # learn from the first four tables, score the others
        >>> with sklearn.config_context(enable_metadata_routing=True):
        ...     search = GridSearchCV(model, {"n_global": [2, 3, 4]}, cv=split, refit=False)
        ...     search = search.fit(tables, client=[0, 1, 2, 3] * 2)
        >>> search.best_params_
        {'n_global': 2}
        """
        return self._explained_share(X, client)

    def atoms(self, client: int | str | None = None) -> Matrix:
        """Return a site's whole dictionary: the global atoms, then its local ones.

        Parameters
        ----------
        client : int or str, optional
            The site's place in the list of ``fit``, or its name in the mapping. By default
            ``client_``, or only the global atoms.

        Returns
        -------
        ndarray of shape (n_global + n_local, n_features)
        """
        check_is_fitted(self)
        client = self.client_ if client is None else client
        if client is None:
            return self.global_atoms_
        i = self._place(client, len(self.local_atoms_))
        return np.vstack([self.global_atoms_, self.local_atoms_[i]])

    def _check_missing(self, sites: list[Matrix], learner: Learner) -> None:
        """Raise a ValueError if the tables have NaN that cannot be a missing entry."""
        missing = [np.isnan(check_samples(f"X[{i}]", S, learner)) for i, S in enumerate(sites)]
        if self.aggregation != "statistics" and any(map(np.any, missing)):
            raise ValueError(
                f'aggregation must be "statistics" where X has NaN, got {self.aggregation!r}.'
            )
        for i, site in enumerate(missing):
            if site.all():
                raise ValueError(f"X[{i}] must have an entry that is not NaN, got none.")
        never = np.all([site.all(axis=0) for site in missing], axis=0)
        if never.any():
            raise ValueError(
                "X must have an entry that is not NaN in every column, at one site or more, got "
                f"none in column {never.argmax()}: leave it out."
            )

    def _warn(self, sites: list[Matrix], learner: Learner) -> None:
        """Warn once of tables and atoms that seem wrong."""
        given = list(zip(sites, self._dictionaries(), strict=True))
        codes, r = [learner.code(X, D) for X, D in given], len(self.global_atoms_)
        used = [np.any(C, axis=0) for C in codes]
        shared = np.any([own[:r] for own in used], axis=0)
        by_warning: dict[str, list[str]] = {}
        for i, (X, D) in enumerate(given):
            found = data_warnings(X, len(D))
            if not (shared.all() and used[i][r:].all()):
                found.append("atoms that no sample uses: lower n_atoms")
            if (np.triu(np.abs(D @ D.T), 1) > COPY).any():
                found.append("atoms that are copies of others: lower n_atoms")
            for what in found:
                by_warning.setdefault(what, []).append(f"X[{i}]")
        for what, where in by_warning.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            warnings.warn(f"{where[0]}{more}: {what}.", UserWarning, stacklevel=3)

    def _learner(self) -> Learner:
        """Return what a site learns with."""
        n_atoms = check_count("n_atoms", self.n_atoms, 1)
        if self.n_nonzero is not None:
            check_count("n_nonzero", self.n_nonzero, 1)
        if self.learner is None:
            return LassoLearner(n_atoms, self.alpha)
        if self.alpha != "auto":
            raise ValueError(f"alpha must be left out where learner is given, got {self.alpha!r}.")
        check_function("learner", self.learner, "a function of n_atoms")
        return self.learner(n_atoms)


class _SiteClient(DictionaryClient):
    """A client of `fit`, which itself warns of tables and atoms."""

    warns = False


def _start(learner: Learner) -> FirstDictionary:
    """Return how a site's dictionary starts."""
    return LASSO_START if isinstance(learner, LassoLearner) else warm_start


def _given(D: Matrix, X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
    """Start from a dictionary that is there."""
    return WarmStart(D, nan, ())
