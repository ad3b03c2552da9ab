"""How many atoms are global: several numbers are updated side by side; not in the paper.

Clients measure each number on samples that they hold out of these updates
(`flwr_perdl.clients.perma.DictionaryClient.choose`). The state between the rounds, in checkpoints
too, has the global atoms of each number under a name, and the errors so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from logging import INFO
from math import nan
from typing import Any, NamedTuple

import numpy as np

from flwr_perdl.clients.perma import CHOOSE, HELD_OUT
from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.records import Replies, Reply, Scalar
from flwr_perdl.protocol.request import Request, State

#: Which shares of a client's atoms are tried, in how many rounds at most, and how the state calls
#: them.
SHARES, MOST_TRIALS, CANDIDATE = (0, 0.25, 0.5, 0.75, 1), 4, "candidate_"
#: Errors below this share of a client's largest one are rounding; a round's errors count for so
#: much of the next one's.
ROUNDING, FADES = 1e-12, 0.5


def numbers_to_try(replies: Replies) -> list[int]:
    """Return shares of the least number of atoms among clients that do not have far too few."""
    sizes = np.array([atoms_of(reply) for reply in replies.values()])
    least = int(sizes[2 * sizes >= np.median(sizes)].min())  # the others are left out
    return [round(share * least) for share in SHARES]


def begun(found: Sequence[Matrix], num_rounds: int | None) -> State:
    """Return the state before the first update of ``found``, the last of which clients agree on."""
    rounds = MOST_TRIALS if num_rounds is None else num_rounds - 2
    by_number = {len(atoms): atoms for atoms in found}
    return {
        "rounds_left": np.array(min(max(rounds, 1), MOST_TRIALS)),
        "agreed": np.array(len(found[-1])),
        "errors": np.zeros(len(by_number)),
        **_named([by_number[number] for number in sorted(by_number)]),
    }


def is_choosing(state: State) -> bool:
    """Return whether the number of global atoms is not chosen yet."""
    return "rounds_left" in state


class Update(NamedTuple):
    """How one candidate is updated: as later the chosen one is."""

    #: What clients are told.
    config: Mapping[str, Scalar]
    #: Accepts a reply to atoms, which are orthonormal or not.
    check: Callable[[Matrix, bool, Reply], None]
    #: The new atoms by the replies' array of this index.
    aggregate: Callable[[Replies, int, Matrix, bool], Matrix]
    #: The mean over clients of errors, (n_clients, n_candidates).
    mean: Callable[..., Any]


def choose(state: State, update: Update) -> Generator[Request, Replies, tuple[Matrix, Replies]]:
    """Update the candidates side by side; return the best one, and the last round's replies."""
    orthogonal = bool(state["orthogonal"])
    for left in range(int(state["rounds_left"]), 0, -1):
        candidates = [state[name] for name in sorted(state) if name.startswith(CANDIDATE)]
        replies = yield Request(
            CHOOSE,
            candidates,
            update.config,
            {**state, "rounds_left": np.array(left)},
            partial(_check_each, candidates, update),
            model=[candidates[_best(candidates, state)]],
            max_values=sum(G.size + len(G) ** 2 for G in candidates),
            max_weight=None,
        )
        replies = replies.keep_majority(is_orthogonal, atoms_kind)
        by_client, before = _errors(candidates, replies), state["errors"]
        errors = update.mean(by_client, axis=0)
        errors = FADES * before + (1 - FADES) * errors if before.any() else errors
        candidates = [update.aggregate(replies, i, G, orthogonal) for i, G in enumerate(candidates)]
        state = {**state, **_named(candidates), "errors": errors}
    best = candidates[_most_shared(candidates, state, by_client)]
    log(INFO, "n_global is %d, by the errors on held-out samples.", len(best))
    return best, replies


def _check_each(candidates: Sequence[Matrix], update: Update, reply: Reply) -> None:
    """Accept an update of each candidate."""
    if len(reply.arrays) != len(candidates):
        raise ValueError(
            f"wrong number of arrays: {len(candidates)} are asked for, got {len(reply.arrays)}"
        )
    for G, array in zip(candidates, reply.arrays, strict=True):
        update.check(G, False, reply._replace(arrays=[array]))


def _errors(candidates: Sequence[Matrix], replies: Replies) -> Matrix:
    """Return the errors on samples held out, (n_clients, n_candidates), of mean 1 per client."""
    names = [f"{HELD_OUT}{len(G)}" for G in candidates]
    rows = [[reply.metrics.get(name, nan) for name in names] for reply in replies.values()]
    errors = np.array(rows)[np.isfinite(rows).all(axis=1)]
    if not len(errors):
        raise ValueError(
            'n_global must be a number or "agree" where no client can measure an error on '
            'samples held out, got "auto".'
        )
    errors[errors <= ROUNDING * errors.max(axis=1, keepdims=True)] = 0
    # Relative to the client's own mean, so that no client decides for all by its scale.
    relative: Matrix = errors / np.maximum(errors.mean(axis=1, keepdims=True), 1e-300)
    return relative


def _best(candidates: Sequence[Matrix], state: State) -> int:
    """Return whose error is least; of equals the one on which the clients agree."""
    errors, sizes = state["errors"], [len(G) for G in candidates]
    agreed = sizes.index(int(state["agreed"]))
    if sizes[agreed] and errors[agreed] == errors.min():
        return agreed
    return int(errors.argmin())


def _most_shared(candidates: Sequence[Matrix], state: State, by_client: Matrix) -> int:
    """Return the largest number whose error is within a quarter of a standard error of the least.

    The standard error is that of paired differences over clients. Candidates learn from two thirds
    of the samples: the fewer these are, the more atoms are withheld, and shared ones suffer most.
    """
    best, errors = _best(candidates, state), state["errors"]
    if errors[best] == 0:  # exact up to rounding
        return best
    spread = (by_client - by_client[:, [best]]).std(axis=0) / len(by_client) ** 0.5
    within = np.flatnonzero(errors - errors[best] <= spread / 4)
    return max(map(int, within), key=lambda i: len(candidates[i]))


def _named(candidates: Sequence[Matrix]) -> dict[str, Matrix]:
    """Return the candidates under the names that they have in the state."""
    return {f"{CANDIDATE}{i}": atoms for i, atoms in enumerate(candidates)}


def is_orthogonal(reply: Reply) -> bool:
    """Return whether a client's learner keeps its atoms orthonormal."""
    return reply.metrics.get("orthogonal") == 1


def atoms_of(reply: Reply) -> int:
    """Return how many atoms a client has, whether it sends them or not."""
    return int(reply.metrics.get("n_atoms", len(reply.arrays[0])))


def atoms_kind(orthogonal: bool) -> str:
    """Return what a client's atoms are, in words."""
    return "orthonormal atoms" if orthogonal else "atoms of a general learner"
