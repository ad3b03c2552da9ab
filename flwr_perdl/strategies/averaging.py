"""One dictionary, averaged atom by atom without matching: what PerMA is compared with.

After Gkillas et al. (2022) and Huang et al. (2022), as P0 (Liang et al., NeurIPS 2023, B.1) cites
them; see `flwr_perdl.dictionary.aggregation` for the maths and for what is fairer here.

What each party receives:

- *The server*, in round one: every client's own dictionary (a zero row for an atom that too few
  samples make up). Later: every client's updated dictionary, likewise. In every round: the leading
  direction of a client's residuals where it withholds an atom and enough samples make up that
  direction, numbers of samples and atoms, mean errors, and a 0 under ``"anew"``. Never: samples or
  codes. All atoms are everybody's: there are no local ones to keep.
- *A client*: the dictionary of all, the seed and the options; nothing of any other client. In round
  two that is the dictionary of *one* client, the one with the most samples.
- *Evaluations* return mean errors only.

The clients are made with `DictionaryAveragingClient`, which says what leaves them.
"""

from __future__ import annotations

from functools import partial
from typing import Unpack

import numpy as np

from flwr_perdl.clients.averaging import AVERAGE
from flwr_perdl.clients.dictionary import LOCAL_STEPS, MOST_STEPS
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_flag
from flwr_perdl.dictionary import aggregate_atoms, average_dictionaries, common_start
from flwr_perdl.privacy import Noise
from flwr_perdl.privacy.noised_server import check_privacy, sum_channel
from flwr_perdl.protocol.combine import sizes_of
from flwr_perdl.protocol.options import ServerOptions
from flwr_perdl.protocol.records import ANEW, Reply
from flwr_perdl.protocol.request import Protocol, Replies, Request, State
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies._dictionaries import (
    DictionaryStrategy,
    alike,
    check_shape,
    given_atoms,
    is_orthogonal,
)

STARTS = ("common", "own")
#: What a reply holds.
_PACKED = "the client's atoms, one per row, and a last row for its residuals, which may be zeros"


class DictionaryAveraging(DictionaryStrategy):
    """Learn one dictionary for all clients by averaging theirs, atom by atom, in every round.

    Round one asks for the clients' own dictionaries, every further one for updates of the
    dictionary of all; ``num_rounds`` of `start` counts both. Started with ``[dictionary]`` as
    initial arrays it skips round one.

    Parameters
    ----------
    start_from : {"common", "own"}, default "common"
        "common": all start from the dictionary of the client with the most samples. "own": the
        naive one-shot average, of the clients' own dictionaries in whatever order their atoms are;
        the run then ends after round one.
    weighted : bool, default True
        Whether clients count by their numbers of samples.
    local_steps : int, default 1
        Iterations of the client's learner per round.
    max_atoms : int, optional
        Maximum number of atoms in a client's first reply; by default ten times the median over the
        clients, and at most 4,096. A client with more is left out of round one and named.
    privacy : Noise, optional
        As in `PerMA`, with ``level="client"``; all clients then count alike.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule. (Clients whose dictionaries have another shape than most are
        left out of round one, and noted.)

    Notes
    -----
    Result: ``strategy.start(...).arrays.to_numpy_ndarrays()`` is ``[dictionary]`` of shape
    (n_atoms, n_features). Floats per client and round: n_atoms x n_features down, as many up and
    n_features more.

    A reply is one matrix of shape (n_atoms + 1, n_features): the client's atoms, each of norm 1, or
    zeros where it withholds one; and a last row, the leading direction of its residuals, which may
    replace an atom that no client uses, or zeros. Its metrics may have ``"orthogonal"``: 1 if the
    client's learner keeps its atoms orthonormal. `DictionaryAveragingClient` replies so; a client
    of one's own packs with ``np.vstack([atoms, np.zeros((1, n_features))])``.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryAveragingClient, client_app
    >>> from flwr_perdl.dictionary import LassoLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import DictionaryAveraging
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryAveragingClient(own, LassoLearner(4), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = DictionaryAveraging().start(grid, num_rounds=3)
    >>> result.arrays.to_numpy_ndarrays()[0].shape
    (4, 6)
    """

    flags = (ANEW, "orthogonal")
    privacy: Noise | None

    def __init__(
        self,
        *,
        start_from: str = "common",
        weighted: bool = True,
        local_steps: int = 1,
        max_atoms: int | None = None,
        privacy: Noise | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(max_atoms, **options)
        self.privacy, self._secure = privacy, check_privacy(privacy)
        self.start_from = check_choice("start_from", start_from, STARTS)
        self.weighted = check_flag("weighted", weighted)
        self.local_steps = check_count("local_steps", local_steps, 1, MOST_STEPS)

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """One request per communication round."""
        if state is None and initial:
            state = {"atoms": given_atoms(initial)}
        if state is None:
            replies = yield Request(AVERAGE, check=self._check_own, max_weight=None)
            state = self._first(replies)
            if self.start_from == "own":
                return [state["atoms"]]
        while True:
            atoms = state["atoms"]
            replies = yield Request(
                AVERAGE,
                [atoms],
                {LOCAL_STEPS: self.local_steps},
                state,
                partial(check_shape, (len(atoms) + 1, atoms.shape[1]), what=_PACKED),
                max_weight=None,
                secure=sum_channel(
                    self._secure, self.privacy, [np.pad(atoms, ((0, 1), (0, 0)))], of="atoms"
                ),
            )
            average = average_dictionaries(
                np.stack([reply.arrays[0] for reply in replies.values()]),
                atoms,
                weights=self._weights(replies),
                orthogonal=_all_orthogonal(replies, atoms),
            )
            state = {"atoms": average}

    def _first(self, replies: Replies) -> State:
        """Return the dictionary that all go on with, or the naive average."""
        replies = self.within_bounds(replies)
        replies = alike(replies, lambda reply: reply.arrays[0].shape, "an array of shape {}".format)
        own = {partition: reply.arrays[0][:-1] for partition, reply in replies.items()}
        sizes = {partition: reply.num_examples for partition, reply in replies.items()}
        orthogonal = _all_orthogonal(replies)
        rng = spawn(self.options.seed, SERVER, 1)
        atoms = common_start(own, sizes, rng, orthogonal=orthogonal)
        if self.start_from == "own":
            atoms = aggregate_atoms(
                np.stack(list(own.values())),
                atoms,
                method="weighted" if self.weighted else "mean",
                weights=self._weights(replies),
                orthogonal=False,
            ).global_atoms
        return {"atoms": atoms}

    def _check_own(self, reply: Reply) -> None:
        """Accept one matrix of atoms of norm 1, withheld ones zero, and a last row."""
        shapes = [array.shape for array in reply.arrays]
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] < 2:
            raise ValueError(f"wrong shape: one matrix is asked for, got {shapes}: {_PACKED}")
        self.check_number_of_atoms(shapes[0][0] - 1)
        norms = np.linalg.norm(reply.arrays[0][:-1], axis=1)
        if not np.allclose(norms[norms > 0], 1, atol=1e-3):
            raise ValueError(f"atoms must have norm 1 or be zero: {_PACKED}")

    def _weights(self, replies: Replies) -> Matrix | None:
        if not self.weighted:
            return None
        return sizes_of(replies)


def _all_orthogonal(replies: Replies, atoms: Matrix | None = None) -> bool:
    return all(is_orthogonal(reply, atoms) for reply in replies.values())
