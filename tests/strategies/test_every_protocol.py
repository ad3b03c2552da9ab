"""What every protocol owes, or refuses: a resumed run has the same bits, bad replies count as none.

On Ray and on SuperNodes: ``tests/end_to_end/test_all_protocols.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from flwr_perdl.random import spawn
from flwr_perdl.strategies import NeighborRelay, ServerSettings, TooFewReplies
from tests.grids import arrays_in, failing
from tests.strategies.protocols import CASES, NOISED, START, VARIANTS

RESUME = ServerSettings(resume=True)
ALL = CASES | VARIANTS


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ALL)
def test_a_server_that_dies_at_every_write_of_a_faulty_run_changes_no_bit(
    name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients fail at random; each file is written, or is not, and with it all processes end.

    And a run that is over stays over.
    """
    case, replace, written = ALL[name], os.replace, set[str]()

    def faults(partition: int, message: Message) -> str | None:
        rng = spawn(7, partition, int(message.content["config"].get("server-round", 0)))
        trains = message.metadata.message_type == "train"
        return str(rng.choice(FAULTS)) if trains and rng.random() < 0.1 else None

    def dying(source: Any, target: Any) -> None:
        new = str(target) not in written
        if after or not new:
            replace(source, target)
        if new:
            written.add(str(target))
            raise KeyboardInterrupt

    def run(**options: Any) -> list[np.ndarray]:
        folder = tmp_path / "nodes" if options else None
        return case.run(case.grid(folder, faults=faults), case.cut + 2, **options)

    whole = run()
    monkeypatch.setattr(os, "replace", dying)
    found: list[np.ndarray] = []
    while not found:
        with suppress(KeyboardInterrupt):
            found = run(checkpoint_dir=tmp_path / "run", server=RESUME)
    assert len(written) > case.cut
    found += run(checkpoint_dir=tmp_path / "run", server=RESUME)
    for array, same in zip(found, [*whole, *whole], strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize("name", CASES)
def test_of_sampled_clients_as_many_take_part_and_others_in_other_rounds(name: str) -> None:
    case = CASES[name]
    strategy, _ = case.start(case.grid(), case.cut + 2, fraction_train=0.5)
    asked = [tuple(report.metrics) for report in strategy.history]
    assert {len(clients) for clients in asked} == {3}
    assert len(set(asked)) > 1


@pytest.mark.parametrize("name", CASES)
def test_a_second_start_on_a_grid_has_the_bits_of_the_first(name: str) -> None:
    case = CASES[name]
    grid = case.grid()
    first, second = (case.run(grid, case.cut + 2) for _ in range(2))
    for array, same in zip(first, second, strict=True):
        np.testing.assert_array_equal(array, same)


def named(strategy: Any, round_: int) -> set[str]:
    """Return of whom nothing counted in a round, by the server or by who received it."""
    reports = [report for report in strategy.history if report.round == round_]
    found = {client for report in reports for client in report.dropped}
    if isinstance(strategy, NeighborRelay):
        found |= {f"client {node}" for node in strategy.outcome.dropped_messages}
    return found


def spoil(key: str, value: Any) -> Callable[[RecordDict], None]:
    """Return what puts a value in place of a metric, or something else in place of the arrays."""

    def change(content: RecordDict) -> None:
        if key == "num-examples":
            content["metrics"]["num-examples"] = value
            return
        old = content["arrays"]
        content["arrays"] = ArrayRecord({name: value(array) for name, array in old.items()})

    return change


FAULTS = ("error", "silence", "nan", "shape", "empty")
HOSTILE: dict[str, Any] = {
    "huge": spoil("arrays", lambda array: Array(np.full(array.shape, 1e101))),
    "text": spoil("arrays", lambda array: Array(np.full(array.shape, "x"))),
    "longer": spoil("arrays", lambda array: Array(np.ones((7, *array.shape)))),
    "garbage": spoil("arrays", lambda array: Array("float64", (3, 6), "numpy.ndarray", b"!")),
    "complex": spoil("arrays", lambda array: Array(np.ones(array.shape, complex))),
    "more": lambda content: content["arrays"].update({"more": Array(np.ones(2))}),
    "count": spoil("num-examples", -1),
    "no count": spoil("num-examples", [1.0, 2.0]),
}


@cache
def run(name: str, fault: str) -> tuple[Any, list[np.ndarray]]:
    """Return a run in whose round 2 client 4 fails so, or its reply is lost."""
    case = CASES[name]
    grid = case.grid(faults=failing(fault, [4], [2]) if fault in FAULTS else None)
    grid.spoil, grid.how = HOSTILE.get(fault), fault
    return case.start(grid, case.cut + 2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fault", [*FAULTS, *HOSTILE, "late"])
def test_a_hostile_reply_counts_as_none_and_is_named(name: str, fault: str) -> None:
    """And who was absent is there again in the next round."""
    strategy, found = run(name, fault)
    assert named(strategy, 2) == {"client 4"}
    assert 4 in strategy.history[-1].metrics
    if isinstance(strategy, NeighborRelay):  # neighbors leave it out, each by what it has itself
        return
    none = "silence" if fault in ("silence", "error") else "lost"  # where the client has trained
    for array, same in zip(found, run(name, none)[1], strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize("name", CASES)
def test_a_reply_that_comes_twice_counts_once(name: str) -> None:
    for array, same in zip(run(name, "twice")[1], run(name, "")[1], strict=True):
        np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].initial])
def test_an_apps_arrays_have_their_names_in_every_request_and_in_the_result(name: str) -> None:
    seen: list[list[str]] = []

    def note(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(list(message.content["arrays"]))
        return call_next(message, context)

    case = CASES[name]
    grid = case.grid(train_mods=[note])
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    result = case.strategy().start(grid, start, num_rounds=3)
    assert all(names in (list(START), ["body"]) for names in seen)  # mods see the shared part
    assert list(result.arrays) in ([], list(START))  # of DiffusionAveraging there are none
    assert len(seen) > 11


@pytest.mark.parametrize("name", CASES)
def test_what_a_client_keeps_private_stays_there_or_the_run_is_refused(name: str) -> None:
    case = CASES[name]
    grid = case.grid(private=["head"])
    if not case.private:
        with pytest.raises((ValueError, TooFewReplies), match=r"private|patterns"):
            case.run(grid, case.cut + 2)
        return
    case.run(grid, case.cut + 2)
    shared = case.grid()
    if name != "personal" and "parts" not in name:  # whose server leaves it out by itself
        case.run(shared, case.cut + 2)
        assert largest(shared) > 400
    assert largest(grid) < 200


def largest(grid: Any) -> float:
    return max(np.abs(array).max(initial=0) for _, array in arrays_in(grid.replies))


@pytest.mark.parametrize("guard", ["secure", "privacy"])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_secure_or_noised_or_the_option_is_refused(name: str, guard: str) -> None:
    """Clients that insist on it show nothing of their data in the clear, and say why."""
    case = CASES[name]
    options = getattr(case, guard)
    wanted = True if guard == "secure" else (options or NOISED)["privacy"]
    grid = case.grid(**{guard: wanted})
    with pytest.raises(TooFewReplies, match=guard):
        case.run(grid, case.cut + 2)
    if options is None:
        with pytest.raises((ValueError, TypeError), match=guard):
            case.strategy(**{guard: wanted})
        return
    grid = case.grid(**{guard: wanted})
    found = case.run(grid, case.cut + 2, **options)
    assert all(np.isfinite(array).all() for array in found)
    assert not grid.errors
    shown = {step for step, _, reply in grid.exchanges() if reply.get("arrays")}
    assert shown <= {"start"}  # of PerMA in secure rounds: the dictionaries that are matched
