"""The experiment on hyperspectral images: a user's file without the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.studies import materials, run_study, save


def test_the_truth_changes_what_is_measured_and_not_what_is_found(tmp_path: Path) -> None:
    data = materials()
    known = run_study("unmixing", data=save(tmp_path, **data), tiles=2, rounds=40)
    del data["endmembers"]
    without = run_study("unmixing", data=save(tmp_path, "b.npz", **data), tiles=2, rounds=40)
    assert not [name for name in without.metrics if name.startswith("sad")]
    assert without.metrics["error"] == pytest.approx(known.metrics["error"])
    found = [one.arrays["spectra_network"] for one in (known, without)]
    np.testing.assert_array_equal(*found)
