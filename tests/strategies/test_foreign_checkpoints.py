"""Checkpoints that lack an entry or have another one: the run is right, or the file is named."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_perdl.core import files
from flwr_perdl.strategies import (
    ServerSettings,
)
from tests.strategies.protocols import CASES

RESUME = ServerSettings(resume=True)


@pytest.mark.parametrize("damage", ["missing", "another one"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "one-shot"])  # FedX's state
def test_an_entry_that_is_missing_or_another_one_is_noticed(
    name: str, damage: str, tmp_path: Path, warned: Any
) -> None:
    """Where one is missing, also of the record."""
    case, folder = CASES[name], tmp_path / "damaged"
    whole = case.run(case.grid(), case.cut + 2)
    grid = case.grid()
    grid.early = True
    case.die(grid, checkpoint_dir=tmp_path / "whole")
    path = max((tmp_path / "whole").glob("round-*.npz"))
    states = {node: deepcopy(context.state) for node, context in grid.contexts.items()}
    saved = files.load(path)
    alike = {re.sub(r"/\d+", "/#", entry): entry for entry in saved.arrays}
    for entry in alike.values():
        array = saved.arrays[entry]
        arrays, meta = dict(saved.arrays), dict(saved.meta)
        if damage == "another one":
            arrays[entry] = np.zeros((0, *array.shape))
        elif entry.startswith(("state/groups", "state/message/")):  # there may be none
            continue
        else:
            del arrays[entry]
            meta["arrays"] = {one: of for one, of in meta["arrays"].items() if one != entry}
        shutil.copytree(tmp_path / "whole", folder)
        files.save(folder / path.name, arrays, meta)
        for node, context in grid.contexts.items():
            context.state = deepcopy(states[node])
        warned.clear()
        said = ""
        try:
            found = case.run(grid, case.cut + 2, checkpoint_dir=folder, server=RESUME)
        except ValueError as error:
            said = str(error)
        else:
            for one, wanted in zip(found, whole, strict=True):
                np.testing.assert_array_equal(one, wanted, err_msg=entry)
        if said or damage == "another one":
            assert str(folder / path.name) in said + warned.text, entry
        shutil.rmtree(folder)


def test_a_checkpoint_of_another_version_is_rejected_not_passed_over(tmp_path: Path) -> None:
    case = CASES["perma"]
    grid = case.grid()
    case.run(grid, case.cut, checkpoint_dir=tmp_path)
    path = max(tmp_path.glob("round-*.npz"))
    saved = files.load(path)
    files.save(path, saved.arrays, {**saved.meta, "format": 2})
    with pytest.raises(ValueError, match=rf"{path.name} .*format.*\b2\b"):
        case.run(grid, case.cut + 2, checkpoint_dir=tmp_path, server=RESUME)
