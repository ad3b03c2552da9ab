"""Packages whose names load their modules when they are first used.

A SuperNode starts a process for each message, which would otherwise load every protocol.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__``, by what it imports for type checkers.

    Parameters
    ----------
    package, file : str
        The package's ``__name__`` and ``__file__``. Under ``if TYPE_CHECKING`` it has its imports.
    """
    tree = ast.parse(Path(file).read_text("utf-8"))
    inside = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imports = [node for node in inside if isinstance(node, ast.ImportFrom)]
    where = {own.name: str(node.module) for node in imports for own in node.names}

    def load(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted({*vars(sys.modules[package]), *where})
