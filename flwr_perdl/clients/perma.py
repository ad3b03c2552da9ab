"""PerMA's steps at a client (P0, Algorithm 1, lines 2-5; Algorithms 3 and 6).

P0 = Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The paper stores atoms as columns; here rows are atoms.

=======================================  =======================================================
paper                                    here
=======================================  =======================================================
D_i^(0), local initialization (line 3)   reply to ``"start"``
D^g,(t)                                  ``G``, which comes with ``"update"``
D_i^l,(t)                                ``local_atoms`` of the client's private state
local refinement (Algorithm 6)           `flwr_perdl.dictionary.refine_local`
local_update (Algorithm 3)               `flwr_perdl.dictionary.stacks.update_stack`
=======================================  =======================================================

What a client sends: in reply to ``"start"`` its dictionary; to ``"update"`` a row per global atom,
statistics or the updated atom, as the server asks. `flwr_perdl.strategies.perma` lists what each
party receives.

Deviations: a client keeps its own local atoms instead of receiving them (line 7); it withholds rows
of its replies that show single samples (`flwr_perdl.clients.DictionaryClient`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from flwr_perdl._checks import Matrix, check_choice, check_count
from flwr_perdl._exposure import shown
from flwr_perdl._random import spawn
from flwr_perdl._records import Scalar
from flwr_perdl.clients._cohort import alike, stack
from flwr_perdl.clients._requests import check_products
from flwr_perdl.clients._secure import MAX_WEIGHT
from flwr_perdl.clients._steps import (
    LOCAL_ATOMS,
    LOCAL_STEPS,
    MOST_STEPS,
    Asked,
    DictionaryMember,
    Participant,
    Steps,
    Taken,
    global_atoms,
    is_ours,
    mean_square,
    own_start,
    read_local_steps,
    started_without,
)
from flwr_perdl.clients.base import PrivateArrays, PrivateState
from flwr_perdl.dictionary import (
    align_to_global,
    reconstruct,
    refine_local,
    update_support,
    warm_starts,
)
from flwr_perdl.dictionary.stacks import update_stack, updated_at_once

START = "start"
UPDATE = "update"
#: What an update sends of the global atoms: the updated atoms, or the statistics of the update.
SENDS = "perdl.sends"
ATOMS = "atoms"
STATISTICS = "statistics"
#: Whether statistics are those of orthonormal atoms: 1, 0, or as the client's learner has it.
ORTHOGONAL = "perdl.orthogonal"
OWN = -1
REFINE_STEPS = "perdl.refine-steps"

#: The name of the first dictionary in a client's private state, before it knows its local atoms.
DICTIONARY = "dictionary"


class PerMASteps(Steps):
    """``"start"``, then ``"update"`` in every round."""

    names = (START, UPDATE)

    def check(self, client: DictionaryMember, asked: Asked) -> Matrix | None:
        """Accept no atoms in the start; in an update, atoms that are not too alike."""
        config, n_arrays = asked.config, len(asked.parameters)
        read_local_steps(asked)
        check_count(REFINE_STEPS, config.get(REFINE_STEPS, 0), 0, MOST_STEPS)
        check_count(ORTHOGONAL, config.get(ORTHOGONAL, OWN), OWN, 1)
        sends = check_choice(SENDS, config.get(SENDS, ATOMS), (ATOMS, STATISTICS))
        own = int(client.learner.orthogonal)
        if MAX_WEIGHT in config and config.get(ORTHOGONAL) != own:  # a sum is of one kind
            raise ValueError(
                f"{ORTHOGONAL} must be {own} in a secure round with this client's learner, got "
                f"{config.get(ORTHOGONAL)!r}."
            )
        if asked.step == START:
            if n_arrays:
                raise ValueError(f"parameters must be none in the start, got {n_arrays} arrays.")
            return None
        G = global_atoms(client, asked)
        check_products(G, orthogonal=sends == STATISTICS and client.learner.orthogonal)
        return G

    def at_once(self, client: DictionaryMember, asked: Asked) -> bool:
        """Return whether updates of many such clients are one computation."""
        alone = asked.step == START or asked.config.get(REFINE_STEPS, 0)
        return not alone and _kind(client, _options(asked.config)) is not None

    def take(
        self, participants: Sequence[Participant], G: Matrix | None, asked: Asked
    ) -> list[Taken]:
        """Start, or update the global atoms ``G`` and the client's own."""
        if G is not None:
            return self._update(participants, G, asked)
        starts = _starts([one.client for one in participants], asked)
        each = zip(participants, starts, strict=True)
        return [_start(client, state, D, asked) for (client, state), D in each]

    def _update(self, participants: Sequence[Participant], G: Matrix, asked: Asked) -> list[Taken]:
        """Local update (Algorithm 3), after local refinement (Algorithm 6) if asked for."""
        options, refine_steps = _options(asked.config), int(asked.config.get(REFINE_STEPS, 0))
        kinds, begun, anew = [], [], []  # of each client: its kind, local atoms, if made anew
        for i, (client, state) in enumerate(participants):
            local_atoms, made = self.own_atoms(client, G, asked, state.before(asked.round))
            if refine_steps:
                D = np.vstack([G, local_atoms])
                refined = refine_local(client.X, D, len(G), client.learner, n_iter=refine_steps)
                local_atoms = refined[len(G) :]
            kinds.append((_kind(client, options) or i, local_atoms.shape))
            begun.append(local_atoms)
            anew.append(made)
        taken: dict[int, Taken] = {}
        for same in alike(kinds):
            X = stack([participants[i].client.X for i in same])
            shared, first = np.broadcast_to(G, (len(same), *G.shape)), participants[same[0]].client
            D = np.concatenate([shared, stack([begun[i] for i in same])], axis=1)
            updates = update_stack(X, D, G, first.learner, min_support=first.min_support, **options)
            for i, before, after, sent, error in zip(same, D, *updates, strict=True):
                client, state = participants[i]
                state.save(asked.round, {LOCAL_ATOMS: after[len(G) :]})  # they never leave
                sent = _unexposed(client, sent, before, G, options)
                sent = _rounded(sent, client.digits)
                if MAX_WEIGHT in asked.config:
                    sent = _scaled(client, sent, options["statistics"])
                taken[i] = Taken(sent, float(error), len(after), anew[i])
        return [taken[i] for i in range(len(participants))]

    def own_atoms(
        self, client: DictionaryMember, G: Matrix, asked: Asked, saved: PrivateArrays | None
    ) -> tuple[Matrix, bool]:
        """Return the local atoms, and whether they had to be made anew.

        After the start they are what the global atoms leave of the dictionary. A client that joins
        late, or has lost its state, makes its own start and aligns it in the same way.
        """
        if saved is not None and LOCAL_ATOMS in saved:
            return saved[LOCAL_ATOMS], False
        D = own_start(client, asked) if saved is None else saved[DICTIONARY]
        return align_to_global(D, G).local_atoms, saved is None


def _start(client: DictionaryMember, state: PrivateState, D: Matrix, asked: Asked) -> Taken:
    """Local initialization (Algorithm 1, lines 2-5): ``D`` without atoms that show a sample."""
    X, learner, least = client.X, client.learner, client.min_support
    state.save(asked.round, {DICTIONARY: D})
    codes = learner.code(X, D)
    hidden = shown(D, X, started_without(client, asked), least)
    if least:
        hidden |= update_support(X, codes, D, learner) < least
    return Taken(D[~hidden], mean_square(X - reconstruct(codes, D)), len(D))


def _starts(clients: Sequence[DictionaryMember], asked: Asked) -> list[Matrix]:
    """Return the clients' first dictionaries; those of clients of one kind are made at once."""
    starts: dict[int, Matrix] = {}

    def kind(i: int) -> Hashable:
        one = clients[i]
        if not is_ours(one) or getattr(one.start, "args", None):
            return i
        return one.X.shape, one.X.dtype, one.learner, tuple(_start_options(one).items())

    for same in alike(map(kind, range(len(clients)))):
        first = clients[same[0]]
        if len(same) == 1:
            starts[same[0]] = own_start(first, asked)
            continue
        rngs = [spawn(asked.seed, clients[i].partition) for i in same]
        X = [clients[i].X for i in same]
        begun = warm_starts(X, first.learner, rngs=rngs, **_start_options(first))
        starts.update({i: one.dictionary for i, one in zip(same, begun, strict=True)})
    return [starts[i] for i in range(len(clients))]


def _start_options(client: DictionaryMember) -> dict[str, Any]:
    """Return the options of a start that is a partial `warm_start`."""
    return dict(getattr(client.start, "keywords", {}))


def _options(config: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return what a request, already checked, asks of `update_stack`."""
    orthogonal = int(config.get(ORTHOGONAL, OWN))
    return {
        "n_steps": int(config.get(LOCAL_STEPS, 1)),
        "statistics": config.get(SENDS) == STATISTICS,
        "orthogonal": None if orthogonal == OWN else bool(orthogonal),
    }


def _kind(client: DictionaryMember, options: Mapping[str, Any]) -> Hashable:
    """Return what clients that are updated at once have in common, None if this one is not."""
    if not updated_at_once(client.learner, options["statistics"], options["orthogonal"]):
        return None
    return client.X.shape, client.X.dtype, client.learner, client.min_support


def _unexposed(
    client: DictionaryMember, sent: Matrix, D: Matrix, G: Matrix, options: Mapping[str, Any]
) -> Matrix:
    """Return what is sent after several steps from ``D``, without rows that show a sample.

    Each step turns an atom towards a sample that is coded with it, until other samples are coded
    with it as well; the last step alone does not tell. Statistics depend on each other: if one row
    shows a sample, all rows are withheld.
    """
    if options["n_steps"] == 1:
        return sent
    X, d = client.X, client.X.shape[1]

    def without(i: int) -> Matrix:
        others = np.delete(X, i, axis=0)[None]
        found = update_stack(others, D[None], G, client.learner, min_support=0, **options)
        return found.sent[0, :, -d:]

    shows = shown(sent[:, -d:], X, without, client.min_support)
    if options["statistics"]:
        shows |= shows.any()
    return np.where(shows[:, None], 0, sent)


def _rounded(sent: Matrix, digits: int | None) -> Matrix:
    """Return ``sent`` rounded to this number of digits of its largest entry; None: unchanged."""
    if digits is None:
        return sent
    unit = sent.dtype.type(np.abs(sent).max(initial=0) * 10.0**-digits)
    return np.round(sent / unit) * unit if unit else sent


def _scaled(client: DictionaryMember, sent: Matrix, statistics: bool) -> Matrix:
    """Return an update at the scale that all clients of a secure round share.

    Statistics are those of samples of mean norm 1, divided by the number of samples. For
    orthonormal atoms their norm is then 1 at most: neither codes nor residuals are longer than
    samples. Atoms of norm 1 are divided by the square root of their number.
    """
    scale = float(np.vdot(client.X, client.X)) if statistics else len(sent) ** 0.5
    return sent / sent.dtype.type(scale) if scale else sent
