"""The step of `PerPCA` at a client: the baseline of Shi and Kontar (2022).

The maths, its source and its deviations are in `flwr_perdl.dictionary.perpca`. A client answers the
first ``"components"`` with the principal directions of its samples, and every later one with the
shared components after a gradient step on these and on its own components.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_perdl._checks import LARGE, Matrix, check_real
from flwr_perdl.clients._requests import check_products
from flwr_perdl.clients._steps import (
    LOCAL_ATOMS,
    Asked,
    DictionaryMember,
    Participant,
    Steps,
    Taken,
    global_atoms,
    mean_square,
)
from flwr_perdl.clients.base import PrivateArrays, PrivateState
from flwr_perdl.dictionary import atom_support, row_support
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.learners import limited
from flwr_perdl.dictionary.perpca import local_start, perpca_step

COMPONENTS = "components"
STEP_LENGTH = "perdl.step-length"


class PerPCASteps(Steps):
    """``"components"`` in every round."""

    names = (COMPONENTS,)

    def check(self, client: DictionaryMember, asked: Asked) -> Matrix | None:
        """Accept orthonormal components and the length of the step."""
        if not asked.parameters:
            return None
        check_real(STEP_LENGTH, asked.config.get(STEP_LENGTH), 0, LARGE, open_low=True)
        U = global_atoms(client, asked)
        check_products(U, orthogonal=True)
        return U

    def take(
        self, participants: Sequence[Participant], G: Matrix | None, asked: Asked
    ) -> list[Taken]:
        """Start, or take a step from the shared components ``G``."""
        if G is None:
            return [_directions(client, state, asked) for client, state in participants]
        return [self._step(client, state, G, asked) for client, state in participants]

    def _step(
        self, client: DictionaryMember, state: PrivateState, U: Matrix, asked: Asked
    ) -> Taken:
        """Take a gradient step on shared and own components."""
        V, anew = self.own_atoms(client, U, asked, state.before(asked.round))
        found = perpca_step(client.X, U, V, float(asked.config[STEP_LENGTH]))
        state.save(asked.round, {LOCAL_ATOMS: found.local_components})
        support = atom_support(client.X @ found.global_components.T)
        supported = limited(support, found.dominated) >= client.min_support
        sent = np.where(supported[:, None], found.global_components, 0)
        return Taken(sent, found.loss / client.X.size, client.learner.n_atoms, anew)

    def own_atoms(
        self, client: DictionaryMember, G: Matrix, asked: Asked, saved: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return the client's own components; before its first step, their start."""
        V = None if saved is None else saved.get(LOCAL_ATOMS)
        if V is None or not len(V):
            V = local_start(client.X, G, max(_n_components(client) - len(G), 0))
        return V, saved is None


def _directions(client: DictionaryMember, state: PrivateState, asked: Asked) -> Taken:
    """Return the principal directions, as many as the client will have components."""
    X, D = client.X, principal_directions(client.X, _n_components(client))
    codes = X @ D.T
    supported = row_support(X, codes) >= client.min_support
    state.save(asked.round, {LOCAL_ATOMS: D[:0]})  # says that this client has taken part
    return Taken(D[supported], mean_square(X - codes @ D), client.learner.n_atoms)


def _n_components(client: DictionaryMember) -> int:
    """Return how many components a client has, shared ones and its own."""
    return min(client.learner.n_atoms, int(client.X.shape[1]))
