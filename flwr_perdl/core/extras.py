"""Libraries of extras, imported where they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_extra(module: str, purpose: str, install: str) -> Any:
    """Return a module, or raise an ImportError that says what to install, and for what."""
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        message = f"{library} must be installed for {purpose}: pip install {install}."
        raise ImportError(message) from error
