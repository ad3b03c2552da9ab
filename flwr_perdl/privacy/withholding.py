"""Withholding: which rows of a reply a client may send.

A row of a reply is a sum of terms ``w_ij x_i`` over samples. It reveals a sample whose term is most
of the sum. The rule looks at the terms only: a mask that depends on the sum would leak it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import observed, row_norms
from flwr_perdl.core.checks import Matrix, check_array, check_count

#: The largest share of a row's squared terms that one sample may have. A plain count of samples
#: lets through rows of heavy-tailed samples that show one; with 1/2 clients of few samples withhold
#: half of their rows. benchmarks/secure.py measures what is left (results/attackers.md).
MOST_OF_ONE = 2 / 3


def may_send(weights: Matrix, X: Matrix, min_support: int) -> NDArray[np.bool_]:
    """Return which of the sums ``weights.T @ X`` may leave a client.

    At least ``min_support`` samples must have a term ``w_ij x_i``, and none of them more than two
    thirds of ``sum_i |w_ij|^2 |x_i|^2``. This prevents accidents, not attacks: differences of
    replies can still reveal samples, and only noise helps against those.

    Parameters
    ----------
    weights : ndarray of shape (n_samples, n_rows)
        The weights of each row.
    X : ndarray of shape (n_samples, n_features)
        The samples, or whatever the rows are sums of.
    min_support : int
        Fewest samples behind a row; 0 allows every row.

    Returns
    -------
    ndarray of bool of shape (n_rows,)

    Raises
    ------
    ValueError
        If shapes do not match, or ``min_support`` is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.privacy import may_send
    >>> weights = np.array([[1.0, 9.0], [1.0, 1.0], [1.0, 1.0]])
    >>> may_send(weights, np.eye(3), min_support=3)
    array([ True, False])
    """
    X = check_array("X", X, squares=True)
    weights = check_array("weights", weights)
    check_count("rows of weights", len(weights), len(X), len(X))
    check_count("min_support", min_support)
    return rows_allowed(weights, X, min_support)


def rows_allowed(weights: Matrix, X: Matrix, min_support: int) -> NDArray[np.bool_]:
    """Return `may_send` of arguments that are as they should be."""
    return _allowed(np.abs(weights) * row_norms(X)[:, None], min_support)


def may_send_entries(weights: Matrix, X: Matrix, min_support: int) -> NDArray[np.bool_]:
    """Return which entries of the sums ``weights.T @ X`` may leave, (n_rows, n_features).

    The rule of `may_send` for each entry: its terms are those of the samples that have the feature,
    which is NaN in the others.
    """
    seen, lengths = ~np.isnan(X), row_norms(observed(X))
    terms = (np.abs(weights) * lengths[:, None]).T
    rows = [_allowed(row[:, None] * seen, min_support) for row in terms]
    return np.reshape(np.array(rows, dtype=bool), (len(rows), X.shape[1]))


def _allowed(terms: Matrix, min_support: int) -> NDArray[np.bool_]:
    """Return which sums may leave, whose terms have the lengths in a column."""
    if not min_support:
        return np.ones(terms.shape[1], dtype=bool)
    longest = terms.max(axis=0, initial=0)
    # Relative to the longest: squares of very small or large terms are no numbers.
    squares = (terms / np.where(longest > 0, longest, 1)) ** 2
    among_others = MOST_OF_ONE * squares.sum(axis=0) >= 1
    return np.asarray(among_others & (np.count_nonzero(terms, axis=0) >= min_support))
