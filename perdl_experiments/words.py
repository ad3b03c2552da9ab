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


def megabytes(values: float) -> float:
    """Return the size of so many float64 values in MB."""
    return values * 8e-6


def data_size(values: float) -> str:
    """Return the size of so many float64 values, such as "1.2 MB"."""
    size = megabytes(values)
    if size >= 0.1:
        return f"{size:,.0f} MB" if size >= 1000 else f"{size:.3g} MB"
    return f"{1e3 * size:.3g} kB" if size >= 1e-3 else f"{1e6 * size:.0f} bytes"
