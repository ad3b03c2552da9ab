"""The client of `DictionaryAveraging`, the baseline of P0's B.1.

The maths, its source and its deviations are in `flwr_perdl.dictionary.aggregation`. A client
answers the first ``"average"`` with its own start, and every later one with iterations of its
learner from the dictionary of all clients.
"""

from __future__ import annotations

import numpy as np

from flwr_perdl.clients.dictionary import LOCAL_ATOMS, LearnerClient, mean_square, read_local_steps
from flwr_perdl.clients.steps import StepRequest, StepResult, step
from flwr_perdl.dictionary import reconstruct, update_weights
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.coding import remainder

AVERAGE = "average"


class DictionaryAveragingClient(LearnerClient):
    """A client of `DictionaryAveraging`: all its atoms are everybody's.

    What leaves it, in every round: the atoms of its dictionary, and the leading direction of what
    it leaves of the samples where an atom is not sent. Each is a sum over samples, and is sent only
    as `flwr_perdl.privacy.may_send` allows.

    Its parameters are those of `LearnerClient`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryAveragingClient, client_app
    >>> from flwr_perdl.dictionary import MODLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import DictionaryAveraging
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryAveragingClient(own, MODLearner(8), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = DictionaryAveraging().start(grid, num_rounds=2)
    >>> result.arrays.to_numpy_ndarrays()[0].shape
    (8, 6)
    """

    @step(AVERAGE)
    def average(self, request: StepRequest) -> StepResult:
        """Start, or iterate from the dictionary of all clients."""
        X, learner, n_steps = self.X, self.learner, read_local_steps(request)
        if request.arrays:
            D = self.global_atoms(request)
        else:
            D, n_steps = self.first_dictionary(request), 0
        C = learner.code(X, D)
        before = C, D
        for _ in range(n_steps):
            before = C, D
            D = learner.update(X, C, D)
            C = learner.code(X, D)
        weights = update_weights(learner, X, *before) if n_steps else C
        rest = remainder(X, reconstruct(C, D))
        used = np.any(C, axis=0) & self.may_send(weights, X)
        sent = np.vstack([np.where(used[:, None], D, 0), np.zeros_like(D[:1])])
        if not used.all() and rest.any():
            direction = principal_directions(rest, 1)
            if self.may_send(rest @ direction.T, rest)[0]:
                sent[-1] = direction
        return self.result(sent, mean_square(rest), len(D), {LOCAL_ATOMS: D[:0]})
