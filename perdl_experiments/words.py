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
    for unit, of in {"GB": 1e3, "MB": 1.0, "kB": 1e-3}.items():
        if size >= 0.9995 * of:
            return f"{size / of:.3g} {unit}"
    return f"{size * 1e6:.0f} bytes"
