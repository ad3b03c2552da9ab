"""What every protocol owes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flwr_perdl.strategies import ServerSettings
from tests.strategies.protocols import CASES, VARIANTS

RESUME = ServerSettings(resume=True)
ALL = CASES | VARIANTS


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """The server died with all replies to a round in, before it saved them; nodes restarted."""
    case, nodes, folder = ALL[name], tmp_path / "nodes", tmp_path / "run"
    whole = case.run(case.grid(), case.cut + 2)
    case.die(case.grid(nodes), checkpoint_dir=folder)
    for _ in range(2):  # and a run that is over stays over
        found = case.run(case.grid(nodes), case.cut + 2, checkpoint_dir=folder, server=RESUME)
        for array, same in zip(found, whole, strict=True):
            np.testing.assert_array_equal(array, same)
