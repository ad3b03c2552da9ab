from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_perdl.clients import DictionaryClient, kept_local_atoms, local_atoms
from flwr_perdl.core import files
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.strategies import PerMA
from tests.grids import grid_of

X = np.random.default_rng(0).standard_normal((2, 30, 6))


def run(folder: Path | None = None, rounds: int = 2, seed: int = 0, **options: Any) -> Any:
    """Return the grid after a run whose clients keep their atoms in a folder."""

    def make(context: Context, i: int) -> DictionaryClient:
        return DictionaryClient(X[i], OrthogonalLearner(5), context, state_dir=folder)

    grid = grid_of(make, len(X), **options)
    PerMA(n_global=2, seed=seed).start(grid, num_rounds=rounds)
    return grid


def test_a_context_and_its_folder_hold_the_same_atoms(tmp_path: Path) -> None:
    grid = run(tmp_path)
    for i, (context, atoms) in enumerate(
        zip(grid.contexts.values(), grid.local_atoms(), strict=True)
    ):
        assert atoms.shape == (3, 6)
        np.testing.assert_allclose(np.linalg.norm(atoms, axis=1), 1)
        np.testing.assert_array_equal(local_atoms(context), atoms)
        np.testing.assert_array_equal(local_atoms(tmp_path / f"client-{i}"), atoms)
    assert not np.array_equal(*grid.local_atoms())


def test_of_several_runs_the_last_one_is_read(tmp_path: Path) -> None:
    first = run(tmp_path).local_atoms()[0]
    second = run(tmp_path, seed=1).local_atoms()[0]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(local_atoms(str(tmp_path / "client-0")), second)


def test_where_there_are_none_is_said(tmp_path: Path) -> None:
    empty = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
    begun = next(iter(run(rounds=1).contexts.values()))  # the matching round alone
    for source in (empty, begun, tmp_path):
        with pytest.raises(ValueError, match=r"^source"):
            local_atoms(source)
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"^source"):
        local_atoms(wrong)


@pytest.mark.parametrize(
    ("file", "about"),
    [
        ("client-3/run-1/round-000001.npz", {}),
        ("client-3/run-1/round-000001.npz", {"client": 3, "algorithm": "perma", "run": "r"}),
        ("nodes/nodes.npz", {"nodes": 5}),
        ("nodes/nodes.npz", {"nodes": [{"perdl.private.r": [["1/x", "float64", 3]]}]}),
    ],
)
def test_a_prepared_folder_is_refused_by_its_file(
    tmp_path: Path, file: str, about: dict[str, Any]
) -> None:
    files.save(tmp_path / file, {"local_atoms": np.eye(2), "bytes": np.zeros(9, np.uint8)}, about)
    with pytest.raises(ValueError, match=Path(file).name):
        kept_local_atoms(tmp_path)


@pytest.mark.parametrize("key", ["", "ab" * 32])
def test_a_folder_of_all_clients_has_everybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    if key:
        monkeypatch.setenv("FLWR_PERDL_STATE_KEY", key)
    apart = run(tmp_path / "apart").local_atoms()
    run(state_dir=tmp_path / "together")
    for folder in ("apart", "together"):
        kept = kept_local_atoms(tmp_path / folder)
        assert list(kept) == ["0", "1"]
        np.testing.assert_array_equal(list(kept.values()), apart)
