"""Which factors all sites share, and which are a site's own: PerMA behind ``fit``.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023: `flwr_perdl.strategies.PerMA` has its symbols, and what each party receives.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from zipfile import BadZipFile

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from flwr_perdl.clients import DictionaryClient, kept_local_atoms
from flwr_perdl.clients.dictionary import N_NONZERO, Start, doubts
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_kind
from flwr_perdl.dictionary import (
    LassoLearner,
    Learner,
    OrthogonalLearner,
    align_to_global,
    refine_local,
    sparse_code,
    warm_start,
)
from flwr_perdl.dictionary.atoms import COPY
from flwr_perdl.dictionary.learners import check_samples
from flwr_perdl.estimators._base import Federated, MakeGrid, SiteTransformer, explained, rebuilt
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import spawn
from flwr_perdl.strategies import PerMA
from flwr_perdl.strategies.perma import NAMED

#: How a site learns its first dictionary where no learner is given. With a third of the iterations
#: digits' error (k = 10) is 0.0085 too, but in a third of the draws of planted factors a site's own
#: ones are missed.
LASSO_START: Start = partial(warm_start, n_iter=30, boost=4, decay=0.9)


class PersonalizedDictionaryLearning(SiteTransformer, Federated):
    """Learn atoms that all sites share, and atoms that are a site's own.

    The samples of site i are sparse combinations of the global atoms and of the site's local ones:
    ``X[i] ≈ codes @ [global_atoms_; local_atoms_[i]]``. ``fit`` runs `PerMA` with a
    `DictionaryClient` per site, as a federation does in which no site sees another one's samples.

    Parameters
    ----------
    n_atoms : int
        Atoms of a site, the global ones included.
    n_global : int, "auto" or "agree", default "auto"
        How many of them are global. "auto" tries none, a quarter, a half, three quarters and all
        in the first rounds, and takes what has the least error on samples that the sites hold out
        for these; "agree" finds on how many the sites agree (P0, B.2): see `PerMA`.
    learner : callable, optional
        ``n_atoms -> Learner``: what a site learns with, such as `OrthogonalLearner` or
        ``partial(MODLearner, n_nonzero=5)``; by default `LassoLearner`, which does best without
        tuning.
    alpha : float or "auto", default "auto"
        The default learner's penalty; "auto" is a twentieth of each sample's norm.
    n_nonzero : int, optional
        Atoms per sample of ``transform`` (orthogonal matching pursuit); by default the learner's
        own codes.
    rounds : int, default 20
        Communication rounds; the first one finds the global atoms.
    aggregation, matching : str, default "statistics", "consensus"
        See `PerMA`.
    min_support : int, default 3
        Samples that must stand behind each atom that a site sends: see `DictionaryClient`.
    seed : int, default 0
        Seed of all draws.
    random_state : int, optional
        The same by scikit-learn's name; one of the two.
    grid : callable, optional
        ``(app, n_sites) -> InProcessGrid``, such as ``partial(InProcessGrid, state_dir="kept")``;
        by default `InProcessGrid`.
    verbose : bool, default False
        Whether a progress bar of the rounds is shown.

    Attributes
    ----------
    global_atoms_ : ndarray of shape (n_global, n_features)
        The atoms that all sites share, unit rows.
    local_atoms_ : list of ndarray of shape (n_local, n_features)
        Each site's own, unit rows. In a federation of several parties these stay at the sites.
    history_ : list of RoundReport
        What happened in every round: errors by site, who was left out, floats sent.
    n_iter_ : int
        Rounds that were run.
    client_ : int or None
        Whose atoms are used where no client is given: the ``client`` of `from_run`.
    n_features_in_, feature_names_in_
        The columns, as in scikit-learn.

    Raises
    ------
    ValueError
        By ``fit``: if a table or a parameter breaks its rule.
    TooFewReplies
        By ``fit``: if a site's client fails. The error names the reason.

    Warns
    -----
    UserWarning
        By ``fit``: if a table has fewer samples than atoms or mostly samples of zeros, or if atoms
        are copies of others or of no use to any sample.

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

    client_: int | None = None
    _allow_nan = True
    _metadata = (("score", "client"),)

    def __init__(
        self,
        n_atoms: int,
        n_global: int | Literal["auto", "agree"] = "auto",
        *,
        learner: Callable[[int], Learner] | None = None,
        alpha: float | Literal["auto"] = "auto",
        n_nonzero: int | None = None,
        rounds: int = 20,
        aggregation: str = "statistics",
        matching: str = "consensus",
        min_support: int = 3,
        seed: int = 0,
        random_state: int | None = None,
        grid: MakeGrid | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_atoms = n_atoms
        self.n_global = n_global
        self.learner = learner
        self.alpha = alpha
        self.n_nonzero = n_nonzero
        self.rounds = rounds
        self.aggregation = aggregation
        self.matching = matching
        self.min_support = min_support
        self.seed = seed
        self.random_state = random_state
        self.grid = grid
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the sites' tables, (n_samples_i, n_features) of each site.

        ``X`` is a list of them, or a mapping of the sites' names to them.
        Rows are samples; the columns are the same everywhere. NaN is a missing entry, with the
        default `LassoLearner` or a `MODLearner`, and ``aggregation="statistics"``: codes, errors
        and `score` see the others alone, and `reconstruct` fills it in. A site may lack a column
        that another one has; a sample of which nothing is observed has codes of zeros. ``y`` is
        ignored.
        """
        learner = self._learner()
        n_rounds, n_global = check_count("rounds", self.rounds, 2), self.n_global
        if not (isinstance(n_global, str) and check_choice("n_global", n_global, NAMED)):
            check_count("n_global", n_global, 1, self.n_atoms)
        check_count("min_support", self.min_support)
        # of one column there is one atom
        sites = self._read_sites(X, min_columns=2, missing=True)
        self._check_missing(sites, learner)
        most = max(map(len, sites))
        if most < self.min_support:
            raise ValueError(
                f"X must have a table with at least min_support={self.min_support} samples, got "
                f"n_samples={most} in the largest."
            )
        strategy = PerMA(
            self.n_global,
            aggregation=self.aggregation,
            matching=self.matching,
            seed=self._one_seed(),
            num_clients=len(sites),
            min_clients=len(sites),
            fraction_evaluate=0.0,
        )

        def make_client(context: Context) -> DictionaryClient:
            return _SiteClient(
                sites[int(context.node_config[PARTITION_ID])],
                learner,
                context,
                start=_start(learner),
                min_support=self.min_support,
            )

        errors_of = ConfigRecord(
            {} if self.n_nonzero is None else {N_NONZERO: str(min(self.n_nonzero, self.n_atoms))}
        )
        learned, grid = self._federate(
            strategy, make_client, len(sites), n_rounds, evaluate_config=errors_of
        )
        self.global_atoms_, self.local_atoms_ = learned, grid.local_atoms()
        self.client_ = None
        self._warn(sites, learner)
        return self._fitted_sites(sites[0].shape[1], X)

    @classmethod
    def from_run(
        cls, folder: str | Path, *, client: int | str | None = None, **parameters: Any
    ) -> Self:
        """Return an estimator with the atoms of a finished run of PerMA.

        Parameters
        ----------
        folder : str or Path
            That of ``flwr-perdl run EXPERIMENT --out FOLDER``, on the machine that has the clients'
            states.
        client : int or str, optional
            Whose atoms all methods use where they are given no client: its partition, or its name.
            Without it these are the global ones alone.
        **parameters
            Parameters of the estimator. The others are the run's options of the same names;
            ``learner`` must be given where the run's is neither "orthogonal" nor "lasso".

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
        given = {name: config[name] for name in cls._parameters() if name in config}
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
        return model._fitted(global_atoms.shape[1], None)

    def add_site(self, X: Any) -> int:
        """Learn the local atoms of a site that ``fit`` did not see; the global atoms stay.

        What a client does that joins late: it learns a dictionary alone, takes out the atoms that
        stand for the global ones, and refines the others beside these. The site's number is
        returned: ``client`` of the other methods, and the place of its atoms in ``local_atoms_``.

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
        self._check_fitted()
        G, learner, number = self.global_atoms_, self._learner(), len(self.local_atoms_)
        rows = self._read_rows(X, missing=True).astype(G.dtype, copy=False)
        if not len(rows):
            raise ValueError("X must have at least one sample, got n_samples=0.")
        alone = _start(learner)(rows, learner, rng=spawn(self._one_seed(), number)).dictionary
        own = align_to_global(alone, G).local_atoms
        # Its local atoms were learned beside atoms of its own; the global ones leave other rests.
        refined = refine_local(rows, np.vstack([G, own]), len(G), learner)
        self.local_atoms_ = [*self.local_atoms_, refined[len(G) :]]
        return number

    def transform(self, X: Any, client: Any = None) -> Any:
        """Return the codes of samples.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            One table, or those of several sites.
        client : int or str, or a sequence of them, optional
            Whose atoms: the global ones, then those of this site of ``fit``; of a list or mapping,
            the site of each table. Without it the global ones alone, which is what a site that was
            not there can do, or those of ``client_``.

        Returns
        -------
        ndarray or DataFrame of shape (n_samples, n_global + n_local)
            See `set_output`; the columns of a frame are "global0", …, "local0", …. Of a list or
            mapping, a list or mapping of them.
        """
        return self._each(self._transform, X, client)

    def _transform(self, X: Any, client: Any) -> Any:
        """Return the codes of one table."""
        rows, D = self._read_rows(X, missing=True), self.atoms(client)
        rows = rows.astype(D.dtype, copy=False)
        if self.n_nonzero is None:
            codes = self._learner().code(rows, D)
        else:
            codes = sparse_code(rows, D, n_nonzero=min(self.n_nonzero, len(D)))
        names = PersonalizedDictionaryLearning.get_feature_names_out(self, client=client)
        return self._framed(codes, X, names.tolist())

    def get_feature_names_out(
        self, input_features: Any = None, *, client: int | str | None = None
    ) -> NDArray[Any]:
        """Return the global atoms' names, "global0", …, and a site's own ones', "local0", …."""
        n_atoms, r = len(self.atoms(client)), len(self.global_atoms_)
        names = [f"global{i}" for i in range(r)] + [f"local{i}" for i in range(n_atoms - r)]
        return np.array(names, dtype=object)

    def inverse_transform(self, codes: Any, client: Any = None) -> Any:
        """Return the samples that have these codes, which `transform` returns for this client."""
        return self._each(lambda C, site: rebuilt(C, self.atoms(site)), codes, client)

    def reconstruct(self, X: Any, client: Any = None) -> Any:
        """Return what the atoms make of samples: ``inverse_transform(transform(X))``."""
        return self.inverse_transform(self.transform(X, client), client)

    def score(self, X: Any, y: Any = None, *, client: Any = None) -> float:
        """Return the share of energy explained, ``1 - ||X - reconstruct(X)||^2 / ||X||^2``.

        Of a list or mapping of tables, the share of all their samples; see `transform`. So
        ``cross_val_score(model, sites)`` says how well global atoms serve sites that were not in
        ``fit``. For samples of the same sites that were held out, ``client`` says whose each table
        is: scikit-learn's metadata routing passes it on.

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
        pairs = [
            (self._read_rows(table, missing=True), site) for table, site in self._pairs(X, client)
        ]
        approximations = [self.reconstruct(rows, site) for rows, site in pairs]
        return explained(np.vstack([rows for rows, _ in pairs]), np.vstack(approximations))

    def atoms(self, client: int | str | None = None) -> Matrix:
        """Return a site's whole dictionary: the global atoms, then its local ones.

        ``client`` is its place in the list of ``fit``, or its name in the mapping; without it the
        global atoms are returned, or the dictionary of ``client_``.
        """
        self._check_fitted()
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
        if (never := np.all([site.all(axis=0) for site in missing], axis=0)).any():
            raise ValueError(
                "X must have an entry that is not NaN in every column, at one site or more, got "
                f"none in column {never.argmax()}: leave it out."
            )

    def _warn(self, sites: list[Matrix], learner: Learner) -> None:
        """Warn once of what is odd about tables and atoms."""
        dictionaries = [np.vstack([self.global_atoms_, L]) for L in self.local_atoms_]
        given = list(zip(sites, dictionaries, strict=True))
        used, r = [np.any(learner.code(X, D), axis=0) for X, D in given], len(self.global_atoms_)
        shared = np.any([own[:r] for own in used], axis=0)
        odd: dict[str, list[str]] = {}
        for i, (X, D) in enumerate(given):
            found = doubts(X, len(D))
            if not (shared.all() and used[i][r:].all()):
                found.append("atoms that no sample uses: lower n_atoms")
            if (np.triu(np.abs(D @ D.T), 1) > COPY).any():
                found.append("atoms that are copies of others: lower n_atoms")
            for what in found:
                odd.setdefault(what, []).append(f"X[{i}]")
        for what, where in odd.items():
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
        if not callable(self.learner):
            raise TypeError(f"learner must be a function of n_atoms, got {self.learner!r}.")
        return self.learner(n_atoms)


class _SiteClient(DictionaryClient):
    """A client of `fit`, which itself warns of what is odd."""

    warns = False


def _start(learner: Learner) -> Start:
    """Return how a site's dictionary starts."""
    return LASSO_START if isinstance(learner, LassoLearner) else warm_start
