"""A part of a user's own: what leaves a client has a norm of at most ``norm``, array by array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array

from flwr_perdl.strategies import Part


@dataclass(frozen=True, eq=False)
class Clip(Part):
    name = "clip"

    norm: float = 1.0

    def send(
        self, arrays: dict[str, Array], start: Mapping[str, Array], kept: dict[str, Any]
    ) -> dict[str, Array]:
        """Return the arrays that leave."""
        return {name: self.clipped(array.numpy()) for name, array in arrays.items()}

    def clipped(self, array: np.ndarray) -> Array:
        return Array(array / max(float(np.linalg.norm(array)) / self.norm, 1.0))
