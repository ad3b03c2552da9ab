"""The inner loop of means, compiled: NumPy would write and read each product once more."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from flwr_perdl.core.compiled import compiled


@compiled
def add_weighted(total: NDArray[Any], weight: float, array: NDArray[Any]) -> None:
    """Add ``weight * array`` to a total in float64."""
    for i in range(len(total)):
        total[i] += weight * array[i]
