from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdl_experiments import run_experiment
from perdl_experiments.studies import configure, find
from perdl_experiments.studies.separation import METHODS, _data, _least_distance

SMALL: dict[str, Any] = {
    "seeds": 2,
    "dimension": 8,
    "separations": "0.05,2",
    "noises": "0.1,1.5",
    "points": "4,30",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out, seen = tmp_path_factory.mktemp("separation"), []
    results = run_experiment(
        "separation", clients=60, rounds=40, out=out, options=SMALL, progress=seen.append
    )
    assert (seen[-1].done, seen[-1].total) == (8, 8)
    return results, out


def test_all_clusters_are_found_where_that_is_easy_and_nowhere_where_it_is_not(small: Any) -> None:
    results, out = small
    with np.load(out / "arrays.npz") as arrays:
        found = {method: arrays[f"found_{method}"] for method in METHODS}
        assert arrays["points"].tolist() == [4, 30]
    for method in ("k_known", "k_auto", "truth"):
        easy, hard = found[method][1, 0, 1], found[method][0, 1, 0]
        assert (easy, hard) == (1, 0)
    assert results["metrics"]["found_truth_4_points"] == found["truth"][0].mean()
    assert [row[0] for row in results["tables"][0]["rows"]] == ["4", "30"]


def test_models_are_as_far_apart_as_asked_and_share_a_part() -> None:
    config = configure(find("separation"), clients=3, options={"dimension": 400})
    theta = _data([5, 0.1, 0.5], config, 0).theta
    apart = [np.linalg.norm(theta[i] - theta[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(apart, 0.5, rtol=0.15)
    assert _least_distance(theta) == pytest.approx(min(apart))
    assert 0.8 < np.linalg.norm(theta.mean(axis=0)) < 1.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separations": "far"}, "separations must be numbers such as"),
        ({"noises": "-1"}, "noises must be"),
        ({"points": "0"}, "points must be between 1 and"),
        ({"dimension": 2}, "dimension must be at least 3"),
    ],
)
def test_bad_options_get_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment("separation", options=options)
