from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_perdl.core import files


def test_arrays_and_meta_come_back(tmp_path: Path) -> None:
    arrays = {"D": np.arange(6.0).reshape(2, 3), "flag": np.array(True)}
    files.save(tmp_path / "new" / "file.npz", arrays, {"round": 3})
    saved = files.load(tmp_path / "new" / "file.npz")
    assert saved.meta == {"format": 4, "round": 3}
    assert set(saved.arrays) == {"D", "flag"}
    np.testing.assert_array_equal(saved.arrays["D"], arrays["D"])


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    files.save(path, {"x": np.ones(2)}, {})
    with pytest.raises(TypeError):
        files.save(path, {"x": np.zeros(2)}, {"bad": object()})
    np.testing.assert_array_equal(files.load(path).arrays["x"], np.ones(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.npz"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"meta": np.array({"format": 1}, dtype=object)},  # pickled
        {"a/x": np.ones(2), "meta": np.array('{"format": 1, "round": 3}')},
        {"a/x": np.ones(2), "meta": np.array('{"format": 5, "round": 3}')},
        {"a/x": np.zeros(2), "meta": None},
    ],
)
def test_pickled_objects_other_versions_and_replaced_arrays_are_refused(
    tmp_path: Path, arrays: dict[str, Any]
) -> None:
    path = tmp_path / "file.npz"
    files.save(path, {"x": np.ones(2)}, {"round": 3})
    with np.load(path) as stored:
        named = dict(stored)
    np.savez(path, **{name: named[name] if own is None else own for name, own in arrays.items()})
    with pytest.raises(ValueError, match=r"file\.npz"):
        files.load(path)


def test_two_rounds_are_kept_and_an_abandoned_future_goes(tmp_path: Path) -> None:
    for round_ in (1, 2, 3, 4):
        files.save_round(tmp_path, round_, {}, {})
    assert files.rounds_in(tmp_path) == [3, 4]
    files.save_round(tmp_path, 3, {}, {})
    assert files.rounds_in(tmp_path) == [3]
    (tmp_path / "other.txt").write_text("not ours")
    assert files.rounds_in(tmp_path / "nowhere") == []
    assert files.rounds_in(tmp_path) == [3]


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    """A damaged file is refused, or the damage is in bytes that say nothing (zip's dates)."""
    path = tmp_path / "file.npz"
    arrays = {"x": np.arange(4.0), "y": np.array(True)}
    files.save(path, arrays, {"round": 3})
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            found = files.load(path)
        except ValueError:
            refused += 1
            continue
        assert found.meta == {"format": 4, "round": 3}
        assert set(found.arrays) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.arrays[name], array)
    assert refused > len(whole) / 2


def test_a_journal_is_read_as_far_as_its_mark(tmp_path: Path) -> None:
    journal = files.Journal(tmp_path / "new" / "history.jsonl")
    journal.append([{"round": 1}, {"round": 2, "error": float("inf")}])
    mark = journal.mark
    journal.append([{"round": 3}])
    assert journal.path.read_text().count("\n") == 3
    assert journal.path.stat().st_mode & 0o777 == 0o600
    again, entries = files.Journal.read(tmp_path / "new", mark)
    assert entries == [{"round": 1}, {"round": 2, "error": float("inf")}]
    assert again.mark == mark
    again.append([{"round": "another"}])  # in place of what was there
    assert files.Journal.read(tmp_path / "new", again.mark)[1][2:] == [{"round": "another"}]
    with pytest.raises(ValueError, match=r"history\.jsonl"):
        files.Journal.read(tmp_path / "new", journal.mark | {"bytes": mark["bytes"] + 3})


@pytest.mark.parametrize(
    "changed",
    [
        {"file": "other.jsonl"},
        {"file": ".."},
        {"bytes": 10**18},
        {"bytes": -1},
        {"bytes": "2"},
        {"sha256": ""},
    ],
)
def test_a_journal_that_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    journal = files.Journal(tmp_path / "history.jsonl")
    journal.append([1, 2])
    with pytest.raises(ValueError, match=tmp_path.name):
        files.Journal.read(tmp_path, journal.mark | changed)
