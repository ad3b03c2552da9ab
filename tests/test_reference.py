"""Every public name: a summary of one line, an example that runs; and a page, made from both."""

from __future__ import annotations

import ast
import doctest
import inspect
import logging
import re
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_perdl.strategies import ServerOptions

#: As docs/reference.py lists them.
PACKAGES = (
    *("estimators", "strategies", "clients", "simulations", "network", "dictionary"),
    *("regression", "privacy", "core.checks", "core.files", "random"),
    *("protocol.records", "core.threads", "export", "pytorch"),
)
#: The library that a name's example needs, or a module's, where it is not one of the library's own.
NEEDS = {"to_frame": "pandas", "flwr_perdl.pytorch": "torch"}


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every public class and function, each once, with its name."""
    seen = set()
    for package in PACKAGES:
        module = import_module(f"flwr_perdl.{package}")
        for name in module.__all__:
            one = getattr(module, name)
            is_documented = inspect.isclass(one) or inspect.isfunction(one)
            if is_documented and not isinstance(one, types.GenericAlias) and one not in seen:
                seen.add(one)
                yield f"{package}.{name}", one


NAMES = dict(documented())


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Print arrays as NumPy does by default, and nothing of Flower's rounds."""
    level = logging.getLogger("flwr").level
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    with np.printoptions(precision=8, suppress=False, linewidth=75):
        yield
    logging.getLogger("flwr").setLevel(level)


@pytest.mark.parametrize("one", NAMES.values(), ids=NAMES)
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


@cache
def left_out() -> set[str]:
    """Return the methods that docs/reference.py, which needs MkDocs, leaves out of the pages."""
    source = Path(__file__).parent.parent / "docs" / "reference.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTERNAL":
            return {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    raise AssertionError("docs/reference.py has no INTERNAL")


def functions(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a name's page has: the function itself, or the methods of a class.

    An override without a section is left to the method that it overrides, as on the pages.
    """
    if inspect.isfunction(one):
        yield one.__name__, one
        return
    for name in dir(one):
        homes = [base for base in one.__mro__ if name in vars(base)]
        ours = [base for base in homes if base.__module__.startswith("flwr_perdl")]
        member = getattr(vars(homes[0])[name], "__func__", vars(homes[0])[name])
        if name[0] == "_" or homes[:1] != ours[:1] or not inspect.isfunction(member):
            continue
        full = f"{ours[0].__name__}.{name}"
        described = len(ours) == 1 or "\n---" in inspect.cleandoc(member.__doc__ or "")
        if described and not {name, full} & left_out():
            yield full, member


def test_the_defaults_of_a_docstring_are_those_of_the_signature() -> None:
    """One value, whatever it is called if it is no literal (`warm_start`, 2**26)."""
    said = re.compile(r"^ *([\w, ]+) : .*\bdefault (.+)$", re.MULTILINE)
    made = {
        function
        for one in NAMES.values()
        for function in (one, *(own for _, own in functions(one)))
    }
    wrong, compared = [], 0
    for function in made - {ServerOptions}:  # of dict, which has no signature
        for names, shown in said.findall(inspect.getdoc(function) or ""):
            parameters = inspect.signature(function).parameters
            for name in parameters.keys() & set(names.split(", ")):
                if not re.fullmatch(r"`?[a-z]\w+`?|SQUARED|2\*\*26", shown):
                    compared += 1
                    if ast.literal_eval(shown) != parameters[name].default:
                        wrong.append(f"{function.__qualname__}: {name}")
    assert compared
    assert not wrong, wrong


def test_what_a_page_has_says_its_parameters_and_what_it_returns() -> None:
    missing = []
    for name, function in (each for one in NAMES.values() for each in functions(one)):
        said = inspect.cleandoc(function.__doc__ or "")
        signature = inspect.signature(function)
        if (
            signature.parameters.keys() - {"self", "cls"}
            and "\nParameters\n----------\n" not in said
        ):
            missing.append(f"{name} has no section Parameters")
        returns = signature.return_annotation not in ("None", "Never")
        if returns and not re.search("\n(Returns\n-------|Yields\n------)\n", said):
            missing.append(f"{name} has no section Returns")
    assert not missing, "\n".join(missing)
