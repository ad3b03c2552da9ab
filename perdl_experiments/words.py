"""Words of reports and messages."""

from __future__ import annotations


def plural(count: object, noun: str) -> str:
    """Return a count with its noun, such as "1 round" or "2,000 rounds".

    Parameters
    ----------
    count : int, float or str
        How many.
    noun : str
        Its singular; "s" makes the plural.
    """
    shown = f"{count:,.0f}" if isinstance(count, int | float) else str(count)
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"
