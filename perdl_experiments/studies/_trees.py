"""Trees of all clients' rows in one place: what federated methods are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix

#: Of each method the option that is chosen, and its values.
TREES = {
    "forest": ("min_samples_leaf", (1, 3, 10)),
    "boosting": ("learning_rate", (0.03, 0.1, 0.3)),
}
Rows = tuple[Matrix, NDArray[Any]]


def trees(
    method: str,
    train: Rows,
    whole: Rows,
    error: Callable[[Any], float],
    *,
    seed: int,
    classes: bool,
) -> tuple[Any, str]:
    """Return trees with the option that is best, and what that is.

    Parameters
    ----------
    method : {"forest", "boosting"}
        Random forest or gradient boosting.
    train, whole : tuple of ndarray
        Features and what is predicted: of the rows for training, and of those to choose by, too.
    error : callable
        Of trees of the former, on the rows to choose by.
    seed : int
        What trees are drawn by.
    classes : bool
        Whether classes are predicted, or numbers.
    """
    from sklearn import ensemble  # an extra

    name = {"forest": "RandomForest", "boosting": "HistGradientBoosting"}[method]
    make = getattr(ensemble, name + ("Classifier" if classes else "Regressor"))
    option, values = TREES[method]

    def learned(value: float, rows: Rows) -> Any:
        return make(**{option: value}, random_state=seed).fit(*rows)

    best = min(values, key=lambda value: error(learned(value, train)))
    return learned(best, whole), f"{best:g}"
