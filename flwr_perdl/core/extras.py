"""Libraries of extras, imported where they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_extra(module: str, purpose: str, extra: str = "") -> Any:
    """Return a module, or raise an ImportError that says what to install, and for what."""
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        how = f"pip install {library}"
        if extra:
            clone = f"in a clone of flwr-perdl: pip install '.[{extra}]'"
            how = f"it comes with the extra {extra!r} ({clone})"
        raise ImportError(f"{library} must be installed for {purpose}: {how}.") from error
