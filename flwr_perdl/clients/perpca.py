"""The client of `PerPCA`, the baseline of Shi and Kontar (2022).

The maths, its source and its deviations are in `flwr_perdl.dictionary.perpca`. A client answers the
first ``"components"`` with the principal directions of its samples, and every later one with the
shared components after a gradient step on these and on its own components.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.clients._requests import check_products
from flwr_perdl.clients.dictionary import LOCAL_ATOMS, LearnerClient, mean_square
from flwr_perdl.clients.steps import StepRequest, StepResult, step
from flwr_perdl.core.checks import LARGE, Matrix, check_real
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.perpca import local_start, perpca_step

COMPONENTS = "components"
STEP_LENGTH = "perdl.step-length"


class PerPCAClient(LearnerClient):
    """A client of `PerPCA`: its first components are everybody's, the others never leave it.

    What leaves it: in the first round the principal directions of its samples; in every later one
    the shared components after its step. Each is a sum over samples, and is sent only as
    `flwr_perdl.privacy.may_send` allows.

    Its parameters are those of `LearnerClient`; of the learner only its number of atoms counts.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import PerPCAClient, client_app
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerPCA
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return PerPCAClient(own, OrthogonalLearner(4), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = PerPCA(n_global=2).start(grid, num_rounds=2)
    >>> grid.local_atoms()[0].shape
    (2, 6)
    """

    @step(COMPONENTS)
    def components(self, request: StepRequest) -> StepResult:
        """Start, or take a gradient step on shared and own components."""
        if not request.arrays:
            return self._directions()
        asked = request.config.get(STEP_LENGTH)
        length = check_real(STEP_LENGTH, asked, 0, LARGE, open_low=True)
        U = self.global_atoms(request)
        check_products(U, orthogonal=True)
        V, anew = self.own_atoms(U, request)
        found = perpca_step(self.X, U, V, length)
        U = found.global_components
        sent = np.where(self.may_send(self.X @ U.T, self.X)[:, None], U, 0)
        error, keep = found.loss / self.X.size, {LOCAL_ATOMS: found.local_components}
        return self.result(sent, error, self.learner.n_atoms, keep, anew=anew)

    def _directions(self) -> StepResult:
        """Return the principal directions, as many as the client will have components."""
        D = principal_directions(self.X, self._n_components)
        codes = self.X @ D.T
        error = mean_square(self.X - codes @ D)
        sent = D[self.may_send(codes, self.X)]
        # no components of its own yet, but a state: it has taken part
        return self.result(sent, error, self.learner.n_atoms, {LOCAL_ATOMS: D[:0]})

    def own_atoms(self, G: Matrix, request: StepRequest) -> tuple[Matrix, bool]:
        """Return the client's own components; before its first step, their start."""
        V = None if request.kept is None else request.kept.get(LOCAL_ATOMS)
        if V is None or not len(V):
            V = local_start(self.X, G, max(self._n_components - len(G), 0))
        return V, request.kept is None

    @property
    def _n_components(self) -> int:
        """How many components the client has, shared ones and its own."""
        return min(self.learner.n_atoms, int(self.X.shape[1]))
