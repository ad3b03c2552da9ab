"""Every public name: a summary of one line, an example that runs; and a page, made from both."""

from __future__ import annotations

import doctest
import inspect
import logging
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

#: As docs/reference.py lists them.
PACKAGES = (
    *("estimators", "strategies", "clients", "simulations", "network", "dictionary"),
    *("regression", "privacy", "core.checks", "core.files", "random"),
    *("protocol.events", "protocol.records", "core.threads", "trackers", "export"),
    "pytorch",
)
#: The library that a name's example needs, or a module's, where it is not one of the library's own.
NEEDS = {"to_frame": "pandas", "flwr_perdl.pytorch": "torch"}


def documented() -> Iterator[Any]:
    """Yield a parameter for every public class and function, each once."""
    seen = set()
    for package in PACKAGES:
        module = import_module(f"flwr_perdl.{package}")
        for name in module.__all__:
            one = getattr(module, name)
            is_documented = inspect.isclass(one) or inspect.isfunction(one)
            if is_documented and not isinstance(one, types.GenericAlias) and one not in seen:
                seen.add(one)
                yield pytest.param(one, id=f"{package}.{name}")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Print arrays as NumPy does by default, and nothing of Flower's rounds."""
    level = logging.getLogger("flwr").level
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    with np.printoptions(precision=8, suppress=False, linewidth=75):
        yield
    logging.getLogger("flwr").setLevel(level)


@pytest.mark.parametrize("one", list(documented()))
def test_a_public_name_has_a_summary_and_an_example_that_runs(one: Any) -> None:
    summary, _, rest = inspect.cleandoc(one.__dict__.get("__doc__") or one.__doc__).partition("\n")
    assert summary.endswith("."), f"{one.__name__}: the first line is not a sentence"
    assert not rest or rest.startswith("\n"), f"{one.__name__}: the summary has more than one line"
    assert "\nExamples\n--------\n" in rest, f"{one.__name__} has no section Examples"
    (example,) = doctest.DocTestFinder(recurse=False).find(one, one.__name__, globs={})
    assert example.examples
    for name in {one.__name__, one.__module__} & NEEDS.keys():
        pytest.importorskip(NEEDS[name])
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
