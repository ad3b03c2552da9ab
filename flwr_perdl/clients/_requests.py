"""What a client demands of a request before it touches its samples, and which ones it answers.

A server that sends what it likes learns more than one that follows its protocol: rows of growing
length move samples over a learner's threshold one at a time, and a second request that differs a
little from the first isolates one sample in the difference of the replies. So requests must be what
a protocol can send (`check_atoms`, `check_products`), and a client answers only so many of them
(`LimitedClient`).

The rules of `admit`, within one run of Flower (an engine binds ``context.state`` to
``context.run_id``, whatever the server's messages say):

- At most ``max_runs`` tokens ``perdl.run``. A server that asks under a fresh token each time, to
  meet the client without its state, ends there. A server app starts a few strategies one after
  another; an `InProcessGrid` begins a new run of Flower with each.
- Under a token the rounds only increase, separately for training and for evaluation. The last round
  may be asked again, with the same request alone: a server that crashed does so when it resumes,
  and receives the same reply.
- A protocol's first step, which sends a whole dictionary, comes first under a token or not at all.
- At most ``max_requests`` training requests and as many evaluations over all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context

from flwr_perdl.clients.dispatch import ProtocolClient
from flwr_perdl.clients.local import StepRequest
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.protocol.records import ANSWERED, ROUND, Scalar

#: Significant digits of the metrics that leave a client: more would tell what single samples are.
DIGITS = 6
#: How far from 1 the squared norm of an atom in a request may be, and from 0 the product of two
#: that must be orthogonal.
_ODD = 2e-3
#: The largest cosine of two atoms in a request: differences of the replies' rows for two atoms that
#: are almost equal would show single samples.
_MOST_COHERENT = 0.99


def check_atoms(atoms: Matrix, *, most: int) -> Matrix:
    """Return the atoms of a request, or raise a ValueError unless they have norm 1.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        Finite.
    most : int
        The client's own number of atoms, which is the largest in a request.
    """
    if len(atoms) > most:
        raise ValueError(f"global atoms must be at most {most}, got {len(atoms)}.")
    with np.errstate(over="ignore"):
        squares = np.einsum("ij,ij->i", atoms, atoms)
    odd = np.flatnonzero(~(np.abs(squares - 1) <= _ODD))
    if len(odd):
        norm = float(squares[odd[0]]) ** 0.5
        raise ValueError(f"global atoms must have norm 1, got norm {norm:g} in row {odd[0]}.")
    return atoms


def check_products(atoms: Matrix, *, orthogonal: bool) -> None:
    """Raise a ValueError if atoms of norm 1 are too alike to train with.

    Parameters
    ----------
    atoms : ndarray of shape (n_atoms, n_features)
        From `check_atoms`.
    orthogonal : bool
        Whether the rows must be orthogonal; else they must differ.
    """
    cosines = atoms @ atoms.T
    np.fill_diagonal(cosines, 0)
    largest, limit = float(np.abs(cosines).max(initial=0)), _ODD if orthogonal else _MOST_COHERENT
    if largest > limit:
        raise ValueError(
            f"global atoms must have cosines of at most {limit:g} with each other for what is "
            f"asked of this client's learner, got {largest:.3g}."
        )


def digest(parameters: Sequence[Matrix], config: Mapping[str, Scalar]) -> str:
    """Return what tells a request from every other one."""
    own = {key: value for key, value in config.items() if key.startswith("perdl.")}
    found = sha256(repr((sorted(own.items()), config[ROUND])).encode())
    for array in parameters:
        found.update(repr((array.shape, array.dtype.str)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def admit(
    context: Context, kind: str, request: StepRequest, *, max_runs: int, max_requests: int
) -> None:
    """Note a request in ``context.state``, or raise a ValueError if it may not be answered.

    Parameters
    ----------
    context : Context
        The client's Flower context.
    kind : {"train", "evaluate"}
        What is asked for.
    request : StepRequest
        The request. One without arrays is a protocol's first step, which sends a whole dictionary.
    max_runs, max_requests : int
        See the module's docstring.
    """
    record = context.state.get(ANSWERED)
    # By kind: how many; by "run/kind": the last round, and the digest of its request.
    noted = record.copy() if isinstance(record, ConfigRecord) else ConfigRecord()
    asked, round_ = digest(request.arrays, request.config), request.round
    token = sha256(request.run.encode()).hexdigest()[:16]
    runs = {key.partition("/")[0] for key in noted if "/" in key}
    if token not in runs and len(runs) >= max_runs:
        raise ValueError(
            f"max_runs must be more to go on: this client takes part in {max_runs} runs of a "
            "strategy within one run of Flower."
        )
    before = str(noted.get(f"{token}/{kind}", "-1"))
    last = int(before.partition(" ")[0])
    if before == f"{round_} {asked}":
        return
    if round_ <= last:
        raise ValueError(
            f"{ROUND} must be more than the last one, {last}, or the same request again, got "
            f"{round_}."
        )
    if not request.arrays and last >= 0:
        raise ValueError("step must be a first one in a run's first request only, got it again.")
    count = int(str(noted.get(kind, 0))) + 1
    if count > max_requests:
        raise ValueError(
            f"max_requests must be more to go on: this client answers {max_requests} requests "
            f"to {kind} within one run of Flower."
        )
    noted[kind], noted[f"{token}/{kind}"] = count, f"{round_} {asked}"
    context.state[ANSWERED] = noted


class LimitedClient(ProtocolClient):
    """A client that answers only so many requests: see `admit`."""

    def __init__(
        self,
        context: Context,
        *,
        max_runs: int,
        max_requests: int,
        algorithm: str | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        super().__init__(context, algorithm=algorithm, state_dir=state_dir)
        self.max_runs = check_count("max_runs", max_runs, 1)
        self.max_requests = check_count("max_requests", max_requests, 1)

    def admit(self, kind: str, request: StepRequest) -> None:
        """Note the request, or refuse it: one too many, or not after the last one."""
        limits = {"max_runs": self.max_runs, "max_requests": self.max_requests}
        admit(self.context, kind, request, **limits)


def rounded(value: float) -> float:
    """Return a metric with as many digits as may leave the client."""
    return float(f"{value:.{DIGITS}g}")
