"""Parts of a run: in order, the same wherever they are computed, and none computed in vain."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from perdl_experiments.studies import _parts
from perdl_experiments.studies._parts import Arrays, Part, keep_all

N = 5


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parts, "n_threads", lambda: 2)


@pytest.fixture
def long_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parts, "LONG", 0.0)


def parts() -> dict[str, Part]:
    """Return parts that say by which process, and with how many threads, they were computed."""

    def part(i: int) -> Arrays:
        drawn = np.random.default_rng(i).standard_normal((30, 30))
        threads = os.environ.get("OMP_NUM_THREADS", "")
        return {
            "inverse": np.linalg.inv(drawn),
            "process": np.array(os.getpid()),
            "threads": np.array(threads),
        }

    return {f"part-{i}": partial(part, i) for i in range(N)}


def keep(name: str, compute: Callable[[], Any], *, of: int = 0) -> Any:
    return compute()


def test_long_parts_are_computed_elsewhere_after_the_first_to_the_same_bits(
    long_parts: None,
) -> None:
    found = keep_all(keep, parts())
    assert int(found[0]["process"]) == os.getpid()
    assert os.getpid() not in {int(one["process"]) for one in found[1:]}
    assert {str(one["threads"]) for one in found[1:]} == {"1"}
    for one, part in zip(found, parts().values(), strict=True):
        assert np.array_equal(one["inverse"], part()["inverse"])


def test_parts_that_are_kept_are_not_computed(long_parts: None) -> None:
    kept = {f"part-{i}": {"inverse": np.array(i)} for i in (0, 1, 3)}

    def resumed(name: str, compute: Callable[[], Any], *, of: int = 0) -> Any:
        return kept[name] if name in kept else compute()

    found = keep_all(resumed, parts())
    assert [one["inverse"].ndim for one in found] == [0, 0, 2, 0, 2]
    assert int(found[2]["process"]) == os.getpid() != int(found[4]["process"])


def test_an_error_elsewhere_ends_the_run(long_parts: None) -> None:
    several: dict[str, Any] = {**parts(), "part-3": partial(np.linalg.inv, np.zeros((2, 2)))}
    with pytest.raises(np.linalg.LinAlgError, match="Singular"):
        keep_all(keep, several)
