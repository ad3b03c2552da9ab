"""PerMA's steps at a client with nothing but its own ``fit`` and ``evaluate`` (P0, Algorithm 1).

P0 = Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023, whose local algorithm A_i may be any. Here it is the client's ``fit``, which takes a
dictionary and returns it trained, as for FedAvg, and makes the client's first dictionary where it
receives none. What `flwr_perdl.clients.perma` does for a `DictionaryClient` is done around it: the
local atoms stay in the client's private state, and only the global ones leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
from flwr.app import Context

from flwr_perdl.clients._handlers import Evaluate, Evaluated, Fit, Fitted, NoEvaluateError, floats
from flwr_perdl.clients.base import PrivateArrays, PrivateState, private_shelf
from flwr_perdl.clients.dictionary import LOCAL_ATOMS, LOCAL_STEPS, MOST_STEPS
from flwr_perdl.clients.perma import (
    ATOMS,
    CHOOSE,
    DICTIONARY,
    HELD_OUT,
    REFINE_STEPS,
    SENDS,
    START,
    UPDATE,
)
from flwr_perdl.core.checks import Matrix, check_array, check_choice, check_count
from flwr_perdl.dictionary import align_to_global, normalize_atoms
from flwr_perdl.privacy.secure_client import MAX_WEIGHT
from flwr_perdl.protocol.records import ANEW, ROUND, RUN, STEP, Scalar

#: What the client's own functions do not see of the config.
_OURS = (STEP, SENDS, LOCAL_STEPS, REFINE_STEPS, MAX_WEIGHT)


def fit_perma(
    fit: Fit,
    evaluate: Evaluate,
    parameters: list[Matrix],
    config: Mapping[str, Scalar],
    context: Context,
) -> Fitted:
    """Start, or update the global atoms and the client's own (Algorithm 1, lines 3, 10 and 11).

    To choose among numbers of global atoms each is updated, and measured by ``evaluate``.
    """
    step = check_choice(STEP, config.get(STEP), (START, CHOOSE, UPDATE))
    if config[SENDS] != ATOMS:
        raise ValueError(
            'aggregation must be "mean", or another one that takes atoms, for a client with fit '
            f"and evaluate alone, got {config[SENDS]!r}, which DictionaryClient computes."
        )
    if config.get(REFINE_STEPS):
        raise ValueError(
            "refine_steps must be 0 for a client with fit and evaluate alone, got "
            f"{config[REFINE_STEPS]!r}."
        )
    own = _own(config)
    state, round_ = _state(context, config), int(config[ROUND])
    if step == START:
        D, n, metrics = _started(fit, own)
        state.save(round_, {DICTIONARY: D})
        return [D], n, {**metrics, "n_atoms": len(D)}
    sent, keep, errors, saved = [], {}, {}, state.before(round_)
    for given in parameters:
        G = check_array("global atoms", given)
        local_atoms, anew = _local_atoms(fit, own, G, saved)
        D, n, metrics = _trained(fit, np.vstack([G, local_atoms]), config)
        aligned = align_to_global(D, G)
        sent.append(aligned.global_atoms)
        name = LOCAL_ATOMS if step == UPDATE else f"{LOCAL_ATOMS}_{len(G)}"
        keep[name] = aligned.local_atoms
        if step == CHOOSE:
            whole = np.vstack([aligned.global_atoms, aligned.local_atoms])
            with suppress(NoEvaluateError):
                errors[f"{HELD_OUT}{len(G)}"] = float(evaluate([whole], dict(own))[0])
    state.save(round_, keep)
    return sent, n, {**metrics, **errors, "n_atoms": len(D), ANEW: int(anew)}


def _trained(
    fit: Fit, D: Matrix, config: Mapping[str, Scalar]
) -> tuple[Matrix, int, dict[str, Scalar]]:
    """Return the dictionary after the local steps, and what ``fit`` says of it."""
    for _ in range(check_count(LOCAL_STEPS, config.get(LOCAL_STEPS, 1), 1, MOST_STEPS)):
        trained, n, metrics = fit([D], _own(config))
        D = _dictionary(trained, D.shape)
    return D, n, metrics


def evaluate_perma(
    fit: Fit,
    evaluate: Evaluate,
    parameters: list[Matrix],
    config: Mapping[str, Scalar],
    context: Context,
) -> Evaluated:
    """Return the client's evaluation of its own dictionary: global atoms first, then its own."""
    G, own = check_array("global atoms", parameters[0]), _own(config)
    saved = _state(context, config).before(int(config[ROUND]) + 1)
    local_atoms, anew = _local_atoms(fit, own, G, saved)
    loss, n, metrics = evaluate([np.vstack([G, local_atoms])], own)
    return loss, n, {**metrics, **({ANEW: 1} if anew else {})}


def _own(config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: value for key, value in config.items() if key not in _OURS}


def _state(context: Context, config: Mapping[str, Scalar]) -> PrivateState:
    return PrivateState(context, str(config[RUN]), private_shelf(context, "dictionary, own fit"))


def _started(fit: Fit, config: Mapping[str, Scalar]) -> tuple[Matrix, int, dict[str, Scalar]]:
    """Return the dictionary that the client makes by itself."""
    try:
        trained, n, metrics = fit([], dict(config))
        return _dictionary(trained), n, metrics
    except Exception as error:
        raise ValueError(
            "fit must return [dictionary], the client's own, where it receives no parameters (the "
            f"start of PerMA), got {type(error).__name__}: {error}"
        ) from error


def _local_atoms(
    fit: Fit, config: Mapping[str, Scalar], G: Matrix, saved: PrivateArrays | None
) -> tuple[Matrix, bool]:
    """Return the client's own atoms, and whether they are made anew, as without a saved state."""
    for name in (LOCAL_ATOMS, f"{LOCAL_ATOMS}_{len(G)}"):
        if saved is not None and name in saved:
            return saved[name], False
    D = _started(fit, config)[0] if saved is None else saved[DICTIONARY]
    return align_to_global(D, G).local_atoms, saved is None


def _dictionary(trained: list[Matrix], shape: tuple[int, int] | None = None) -> Matrix:
    """Return the dictionary that ``fit`` returned, with atoms of norm 1."""
    shapes = [np.shape(array) for array in trained]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shape not in (None, shapes[0]):
        wanted = "one matrix, a row per atom" if shape is None else f"the dictionary, {shape}"
        raise ValueError(f"fit must return [dictionary], {wanted}, got shapes {shapes}.")
    return normalize_atoms(floats(trained)[0])
