"""Representations of one line, as a notebook shows strategies, grids and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Self

#: The most characters of one value.
_LONG = 160


def short(value: Any) -> str:
    """Return what a value is: itself where that is short, else its kind and its size."""
    kind = type(value).__name__
    if hasattr(value, "shape"):
        shape = "x".join(map(str, value.shape))
        return f"<{kind} {shape}>" if shape else repr(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if callable(value) and not hasattr(value, "get_params"):
        return str(getattr(value, "__name__", f"<{kind}>"))
    nested = isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values())
    if isinstance(value, Mapping) and len(value) <= 10 and not nested:
        text = "{" + ", ".join(f"{key!r}: {short(own)}" for key, own in value.items()) + "}"
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) <= 10:
        text = f"[{', '.join(map(short, value))}]"
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        text = ""
    else:
        text = " ".join(repr(value).split())
    if text and len(text) <= _LONG and " object at 0x" not in text:
        return text
    return f"<{kind} of {len(value)}>" if hasattr(value, "__len__") else f"<{kind}>"


def short_repr(record: Any) -> str:
    """Return the representation of a named tuple, whose arrays are only described."""
    fields = zip(record._fields, record, strict=True)
    return f"{type(record).__name__}({', '.join(f'{name}={short(own)}' for name, own in fields)})"


class ShownAsCalled:
    """What is represented by the call that made it."""

    _called: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Make it, and remember the call's arguments."""
        made = super().__new__(cls)
        made._called = args, options
        return made

    def __repr__(self) -> str:
        """Return the call that made it; large arguments are only described."""
        args, options = self._called
        names = [name for name in signature(type(self)).parameters if name != "options"]
        given = {**dict(zip(names, args, strict=False)), **options}
        arguments = ", ".join(f"{name}={short(value)}" for name, value in given.items())
        return f"{type(self).__name__}({arguments})"
