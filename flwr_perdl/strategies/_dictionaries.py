"""Which replies of PerMA's clients are like most, and sound.

The clients' side of this is `flwr_perdl.clients.dictionary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flwr_perdl.core.checks import Matrix, check_array
from flwr_perdl.dictionary import normalize_atoms
from flwr_perdl.protocol.records import Replies, Reply

#: By default a client may send at most this many times the median number of atoms, and never more
#: than `MOST_ATOMS`: the work of the matching round grows with the square of these numbers.
ATOMS_FACTOR = 10
MOST_ATOMS = 4096


def check_dictionary(max_atoms: int | None, reply: Reply) -> None:
    """Accept one matrix of unit atoms, not too many of them."""
    shapes: list[Any] = [array.shape for array in reply.arrays]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        raise ValueError(
            "wrong shape: the client's whole dictionary is asked for, one matrix with a row of "
            f"norm 1 per atom, got {shapes}"
        )
    (D,), most = reply.arrays, MOST_ATOMS if max_atoms is None else max_atoms
    if len(D) > most:
        raise ValueError(f"too many atoms: at most {most} are accepted (max_atoms), got {len(D)}")
    norms = np.linalg.norm(D, axis=1)
    wrong = np.flatnonzero(~np.isclose(norms, 1, rtol=0, atol=1e-3))
    if len(wrong):
        raise ValueError(
            "atoms must have norm 1: the client's dictionary is asked for, one atom per row, "
            f"and row {wrong[0]} has norm {norms[wrong[0]]:g}"
        )


def within_bounds(replies: Replies) -> Replies:
    """Return the replies of clients without far more atoms than most; others are left out."""
    have = [atoms_of(reply) for reply in replies.values()]  # withheld atoms are not sent
    most = ATOMS_FACTOR * max(float(np.median(have)), 1.0)
    why = f"it sent {{}} atoms, more than {ATOMS_FACTOR} times the median (max_atoms)"
    sizes = {partition: len(reply.arrays[0]) for partition, reply in replies.items()}
    return replies.leave_out({p: why.format(n) for p, n in sizes.items() if n > most})


def with_enough(replies: Replies, n_global: int, names: Mapping[int, str]) -> Replies:
    """Return the replies of clients with at least ``n_global`` atoms; others are left out.

    Raises
    ------
    ValueError
        If these are half of the clients or more; ``names`` are the clients'.
    """
    sizes = {partition: atoms_of(reply) for partition, reply in replies.items()}
    few = {partition: n_atoms for partition, n_atoms in sizes.items() if n_atoms < n_global}
    if few and 2 * len(few) >= len(sizes):
        who, n_atoms = next(iter(few.items()))
        raise ValueError(
            f"n_global must be at most every client's number of atoms, got n_global={n_global} "
            f"with {n_atoms} atoms at client {names.get(who, who)}."
        )
    return replies.leave_out({p: f"it has {n_atoms} atoms only" for p, n_atoms in few.items()})


def is_orthogonal(reply: Reply) -> bool:
    """Return whether a client's learner keeps its atoms orthonormal."""
    return reply.metrics.get("orthogonal") == 1


def atoms_of(reply: Reply) -> int:
    """Return how many atoms a client has, whether it sends them or not."""
    return int(reply.metrics.get("n_atoms", len(reply.arrays[0])))


def atoms_kind(orthogonal: bool) -> str:
    """Return what a client's atoms are, in words."""
    return "orthonormal atoms" if orthogonal else "atoms of a general learner"


def given_atoms(initial: list[Matrix]) -> Matrix:
    """Return the user's global atoms, of norm 1."""
    if len(initial) != 1:
        raise ValueError(f"initial_arrays must be [global atoms], got {len(initial)} arrays.")
    atoms = check_array("initial_arrays", initial[0], min_rows=1)
    zero = np.flatnonzero(~atoms.any(axis=1))
    if len(zero):
        raise ValueError(f"initial_arrays must have no zero row, got one at {zero[0]}.")
    return normalize_atoms(atoms)
