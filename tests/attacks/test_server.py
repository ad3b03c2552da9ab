"""Attacks on the server, by clients that send what they like, and on who reads a run's files.

Whoever holds a registered node chooses its replies. What the server spends on one, shows of it, and
lets it change must stay within bounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_perdl._records import Reply
from flwr_perdl.strategies import DictionaryAveraging, PerMA, PerPCA, perma
from flwr_perdl.strategies._protocol import Replies

GIB = 2**30


def unit_atoms(n_atoms: int, seed: int = 0) -> Any:
    atoms = np.random.default_rng(seed).standard_normal((n_atoms, 8))
    return atoms / np.linalg.norm(atoms, axis=1, keepdims=True)


def start_replies(sizes: list[int]) -> Replies:
    """Return start replies of clients with so many atoms each."""
    made = {i: Reply([unit_atoms(n, i)], 100, {"n_atoms": n}) for i, n in enumerate(sizes)}
    return Replies(made)


# Item 8: a dictionary with far too many atoms ------------------------------------------------

#: Nine honest clients and a liar; the liar's reply has 1.3 MB.
HUGE_START = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
from tests.attacks.test_server import start_replies
from flwr_perdl.strategies import PerMA
steps = PerMA(3).protocol([], None)
next(steps)
steps.send(start_replies([8] * 9 + [20_000]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_huge_dictionary_costs_the_server_no_memory() -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a thread's stack counts
    command, root = [sys.executable, "-c", HUGE_START], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-300:]
    assert int(done.stdout.split()[-1]) < GIB


@pytest.mark.parametrize("colluders", [1, 3])
@pytest.mark.parametrize("matching", ["consensus", "paths"])
def test_only_dictionaries_of_likely_sizes_are_matched(
    monkeypatch: pytest.MonkeyPatch, warned: pytest.LogCaptureFixture, matching: str, colluders: int
) -> None:
    matched: list[int] = []
    match = perma.global_matching

    def noting(dictionaries: Any, *args: Any, **options: Any) -> Any:
        matched.extend(map(len, dictionaries))
        return match(dictionaries, *args, **options)

    monkeypatch.setattr(perma, "global_matching", noting)
    steps = PerMA(3, matching=matching).protocol([], None)
    next(steps)
    replies = start_replies([8] * (9 - colluders) + [80] + [81] * colluders)
    steps.send(replies)
    assert matched == [8] * (9 - colluders) + [80]
    liars = range(10 - colluders, 10)
    assert replies.noted == {i: {"left out": 1.0} for i in liars}
    assert all(f"client {i}: it sent 81 atoms" in warned.text for i in liars)


@pytest.mark.parametrize(
    "make", [lambda **o: PerMA(2, **o), lambda **o: PerPCA(2, **o), DictionaryAveraging]
)
def test_no_client_may_send_more_atoms_than_the_limit(make: Callable[..., Any]) -> None:
    def asked(n_atoms: int, **options: Any) -> None:
        request = next(make(**options).protocol([], None))
        atoms = unit_atoms(n_atoms)
        if isinstance(make(), DictionaryAveraging):
            atoms = np.vstack([atoms, np.zeros((1, 8))])
        request.check(Reply([atoms], 1, {}))

    asked(4096)
    with pytest.raises(ValueError, match=r"at most 4096 are accepted \(max_atoms\), got 4097"):
        asked(4097)
    asked(5000, max_atoms=5000)
    with pytest.raises(ValueError, match="at most 7 are accepted"):
        asked(8, max_atoms=7)
    with pytest.raises(ValueError, match="max_atoms must be at least 1, got 0"):
        asked(8, max_atoms=0)


def test_a_direction_sent_many_times_does_not_decide_where_perpca_starts() -> None:
    honest = np.eye(4)[:2]
    liar = np.repeat(np.eye(4)[3:], 4, axis=0)
    stacks = [honest, honest, honest, liar]
    replies = Replies({i: Reply([rows], 100, {"n_atoms": 2}) for i, rows in enumerate(stacks)})
    steps = PerPCA(2).protocol([], None)
    next(steps)
    start = steps.send(replies).arrays[0]
    np.testing.assert_allclose(start.T @ start, np.diag([1.0, 1.0, 0.0, 0.0]), atol=1e-12)
    assert replies.noted == {3: {"left out": 1.0}}


def test_a_large_work_of_scoring_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    dictionaries = [unit_atoms(n, n) for n in (8, 9, 200)]
    whole = perma.global_matching(dictionaries, 3)
    monkeypatch.setattr("flwr_perdl.dictionary.matching._BLOCK", 1000)
    parts = perma.global_matching(dictionaries, 3)
    np.testing.assert_allclose(parts.global_atoms, whole.global_atoms, atol=1e-12)
