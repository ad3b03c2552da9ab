"""The step of `DictionaryAveraging` at a client: the baseline of P0's B.1.

The maths, its source and its deviations are in `flwr_perdl.dictionary.averaging`. A client answers
the first ``"average"`` with its own start, and every later one with iterations of its learner from
the dictionary of all clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flwr_perdl._checks import Matrix
from flwr_perdl._exposure import shown
from flwr_perdl.clients._steps import (
    LOCAL_ATOMS,
    Asked,
    DictionaryMember,
    Participant,
    Steps,
    Taken,
    global_atoms,
    own_start,
    read_local_steps,
    started_without,
)
from flwr_perdl.clients.base import PrivateArrays, PrivateState
from flwr_perdl.dictionary.averaging import LocalDictionary, update_dictionary

AVERAGE = "average"


class AveragingSteps(Steps):
    """``"average"`` in every round."""

    names = (AVERAGE,)

    def check(self, client: DictionaryMember, asked: Asked) -> Matrix | None:
        """Accept any atoms of norm 1, since the reply is a dictionary and not a sum."""
        read_local_steps(asked)
        return global_atoms(client, asked) if asked.parameters else None

    def take(
        self, participants: Sequence[Participant], G: Matrix | None, asked: Asked
    ) -> list[Taken]:
        """Start, or iterate from ``G``, the dictionary of all clients."""
        return [_average(client, state, G, asked) for client, state in participants]

    def own_atoms(
        self, client: DictionaryMember, G: Matrix, asked: Asked, saved: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return no atoms: all are global."""
        return G[:0], False


def _average(
    client: DictionaryMember, state: PrivateState, G: Matrix | None, asked: Asked
) -> Taken:
    """Return the dictionary after the client's iterations, none of them after its own start."""
    begun, n_steps = (own_start(client, asked), 0) if G is None else (G, read_local_steps(asked))

    def learned(X: Matrix) -> LocalDictionary:
        return update_dictionary(
            X, begun, client.learner, n_steps=n_steps, min_support=client.min_support
        )

    def without(i: int) -> Matrix:
        return learned(np.delete(client.X, i, axis=0)).dictionary

    D, sent, error = learned(client.X)
    if n_steps != 1:  # else the one step has been judged
        judge = without if n_steps else started_without(client, asked)
        sent[:-1][shown(D, client.X, judge, client.min_support)] = 0
    state.save(asked.round, {LOCAL_ATOMS: D[:0]})
    return Taken(sent, error, len(D))
