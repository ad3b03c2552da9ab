"""One dictionary from nodes that only exchange with neighbors: data diffusion behind ``fit``.

Chainais and Richard, "A diffusion strategy for distributed dictionary learning", iTWIST 2014:
`flwr_perdl.network.DataDiffusion` has its symbols, and what a neighbor receives.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.estimators._base import SiteTransformer
from flwr_perdl.network import CombinationMatrix, DataDiffusion, Topology


@dataclass(eq=False, repr=False)
class NetworkDictionaryLearning(SiteTransformer):
    """Learn one dictionary at nodes that keep their data and exchange it with their neighbors.

    ``fit`` runs `DataDiffusion` in memory: in every round a node codes its samples, updates its
    dictionary, and averages it with its neighbors'. There is no server.

    Parameters
    ----------
    topology : Topology or CombinationMatrix
        Which nodes are neighbors, one node per table of ``fit``; a topology has Metropolis weights.
    n_atoms : int, default 10
        Atoms of the dictionary.
    coder : {"omp", "lasso", "focuss", "nonnegative"}, default "omp"
        Sparse coder: see `DataDiffusion`.
    n_nonzero : int, default 3
        Atoms per sample of "omp".
    alpha : float, default 0.1
        Penalty of "lasso" and "focuss".
    update : {"mod", "ksvd", "gradient"}, default "mod"
        How a node updates its dictionary.
    nonnegative : bool, default False
        Whether negative entries of atoms are set to zero.
    rounds : int, default 100
        Communication rounds.
    seed : int, default 0
        Seed of all random draws.
    random_state : int, optional
        scikit-learn's name of ``seed``; give one of the two.

    Attributes
    ----------
    components_ : ndarray of shape (n_atoms, n_features)
        The mean of the nodes' dictionaries, unit rows.
    node_components_ : ndarray of shape (n_nodes, n_atoms, n_features)
        Every node's own.
    disagreement_ : ndarray of shape (n_nodes,)
        Largest distance of a node's atom from the same atom of ``components_``: near 0 at
        consensus. Nodes with too few samples, or slowly mixing networks, need more rounds.
    n_iter_ : int
        Number of rounds.
    floats_sent_ : float
        Values that reached a neighbor, over all nodes and rounds.
    n_features_in_, feature_names_in_
        The columns, as in scikit-learn.

    Raises
    ------
    ValueError
        By ``fit``: if there is not one table per node, or a table or parameter breaks its rule.

    See Also
    --------
    flwr_perdl.network.DataDiffusion : with streams, other networks, and every option.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import Topology
    >>> from flwr_perdl.estimators import NetworkDictionaryLearning
    >>> rng = np.random.default_rng(0)
    >>> atoms = rng.standard_normal((12, 8))
    >>> atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    >>> codes = rng.uniform(-1, 1, (600, 12)) * (rng.random((600, 12)).argsort(axis=1) < 2)
    >>> tables = np.split(codes @ atoms, 4)
    >>> model = NetworkDictionaryLearning(Topology.ring(4), n_atoms=12, n_nonzero=2).fit(tables)
    >>> bool(np.all(np.abs(atoms @ model.components_.T).max(axis=1) > 0.99))
    True
    >>> model.transform(tables[0]).shape
    (150, 12)
    """

    _whose = "node"
    __metadata_request__score: ClassVar = {"node": True}

    topology: Topology | CombinationMatrix
    n_atoms: int = 10
    _: KW_ONLY
    coder: str = "omp"
    n_nonzero: int = 3
    alpha: float = 0.1
    update: str = "mod"
    nonnegative: bool = False
    rounds: int = 100
    seed: int = 0
    random_state: int | None = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from the nodes' tables.

        Parameters
        ----------
        X : list or mapping of array_like of shape (n_samples_i, n_features)
            One table per node, rows are samples; the columns are the same everywhere. The keys of a
            mapping are the nodes' names.
        y : ignored
            For scikit-learn.

        Returns
        -------
        self
        """
        learner = self._learner()
        wanted = "a Topology or a CombinationMatrix"
        network = check_kind("topology", self.topology, (Topology, CombinationMatrix), wanted)
        tables = self._read_sites(X)
        learned = learner.fit(tables, network, self.rounds, seed=self._one_seed())
        self.node_components_ = learned.dictionaries
        self.components_ = normalize_atoms(self.node_components_.mean(0), self.node_components_[0])
        apart = np.linalg.norm(self.node_components_ - self.components_, axis=2)
        self.disagreement_ = apart.max(axis=1)
        self.n_iter_, self.floats_sent_ = learned.rounds, learned.floats_sent
        return self._fitted_sites(X)

    def transform(self, X: Any, node: Any = None) -> Any:
        """Return the codes of samples.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            Samples.
        node : int or str, or a sequence of them, optional
            With whose dictionary; of a list or mapping, the node of each table. By default
            ``components_``.

        Returns
        -------
        ndarray or DataFrame of shape (n_samples, n_atoms)
            See `set_output`; the columns of a frame are "atom0", "atom1", …. Of a list or mapping,
            a list or mapping of them.
        """
        return self._each(self._transform, X, node)

    def _code(self, rows: Matrix, D: Matrix) -> Matrix:
        return self._learner().code(rows, D)

    def _names(self, who: Any) -> NDArray[Any]:
        return np.array([f"atom{i}" for i in range(len(self.atoms(who)))], dtype=object)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the atoms' names: "atom0", "atom1", ….

        Parameters
        ----------
        input_features : ignored
            For scikit-learn.

        Returns
        -------
        ndarray of str
        """
        return self._names(None)

    def inverse_transform(self, codes: Any, node: Any = None) -> Any:
        """Return the samples that have these codes.

        Parameters
        ----------
        codes : array_like of shape (n_samples, n_atoms)
            What ``transform`` returns.
        node : int, optional
            See `transform`.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
        """
        return self._each(self._rebuild, codes, node)

    def score(self, X: Any, y: Any = None, *, node: Any = None) -> float:
        """Return the share of energy explained, at most 1.

        Parameters
        ----------
        X : array_like of shape (n_samples, n_features), or a list or mapping of them
            Samples.
        y : ignored
            For scikit-learn.
        node : int or str, or a sequence of them, optional
            See `transform`.

        Returns
        -------
        float
        """
        return self._explained_share(X, node)

    def atoms(self, node: int | str | None = None) -> Matrix:
        """Return a node's dictionary, or ``components_``.

        Parameters
        ----------
        node : int or str, optional
            The node.

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        check_is_fitted(self)
        if node is None:
            return self.components_
        nodes: Matrix = self.node_components_
        chosen: Matrix = nodes[self._place(node, len(nodes))]
        return chosen

    def _learner(self) -> DataDiffusion:
        """Return the algorithm with this estimator's options."""
        return DataDiffusion(
            self.n_atoms,
            coder=self.coder,
            n_nonzero=self.n_nonzero,
            alpha=self.alpha,
            update=self.update,
            nonnegative=self.nonnegative,
        )
