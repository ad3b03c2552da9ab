"""A public subspace in which a model is learned: chosen without the data, at no privacy cost.

Noise has the same size in every direction, but data don't: few directions carry most of an image.
Learning in those alone means less noise, and loses what lies outside them.
"""

from __future__ import annotations

from math import prod

import numpy as np

from flwr_perdl.core.checks import Matrix, brief_repr, check_array, check_count, check_list

#: How far from orthonormal rows may be: float32's rounding.
_ODD = 1e-4
#: The most axes and numbers of a sample: NumPy's, and what a basis is computed of in memory.
_AXES, _NUMBERS = 32, 10**8


class PublicBasis:
    """An orthonormal basis of the subspace in which a model is learned.

    Parameters
    ----------
    matrix : ndarray of shape (n, n_features)
        Its vectors as rows; none may depend on the clients' data.

    Raises
    ------
    ValueError
        If the rows are not orthonormal within 1e-4.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.privacy import PublicBasis
    >>> basis = PublicBasis.dct((8, 8), 16)
    >>> X = np.random.default_rng(0).standard_normal((5, 64))
    >>> basis.project(X).shape, basis.lift(basis.project(X)).shape
    ((5, 16), (5, 64))
    """

    def __init__(self, matrix: Matrix) -> None:
        rows = check_array("matrix", matrix, min_rows=1).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.abs(rows @ rows.T - np.eye(len(rows))).max())
        if not error <= _ODD:
            raise ValueError(f"matrix must have orthonormal rows, got products off by {error:.3g}.")
        rows.flags.writeable = False
        #: The vectors of the basis, as rows; read-only.
        self.matrix: Matrix = rows

    def __repr__(self) -> str:
        """Return the basis in one line."""
        return f"PublicBasis(<{self.matrix.shape[0]} x {self.matrix.shape[1]}>)"

    @classmethod
    def dct(cls, shape: tuple[int, ...], n: int) -> PublicBasis:
        """Return the ``n`` lowest frequencies of the discrete cosine transform.

        Parameters
        ----------
        shape : tuple of int
            Shape of a sample before it is flattened: ``(height, width)`` of an image, ``(length,)``
            of a signal.
        n : int
            Number of frequencies, by increasing sum of squares of relative frequencies.

        Returns
        -------
        PublicBasis
        """
        sizes = [check_count("sizes of shape", size, 1) for size in check_list("shape", shape)]
        n_features = prod(sizes)
        if not 0 < len(sizes) <= _AXES or n_features > _NUMBERS:
            raise ValueError(
                f"shape must have 1 to {_AXES} sizes of at most {_NUMBERS} numbers in all, got "
                f"{brief_repr(shape)}."
            )
        check_count("n", n, 1, n_features)
        from scipy.fft import idctn  # takes longer to load than all that a client needs

        where = np.indices(sizes).reshape(len(sizes), -1)
        height = ((where / np.array(sizes)[:, None]) ** 2).sum(axis=0)
        lowest = np.argsort(height, kind="stable")[:n]
        units = np.zeros((n, n_features))
        units[np.arange(n), lowest] = 1
        axes = tuple(range(1, 1 + len(sizes)))
        waves = idctn(units.reshape(n, *sizes), axes=axes, norm="ortho")
        return cls(waves.reshape(n, n_features))

    def project(self, X: Matrix) -> Matrix:
        """Return samples in the basis, of shape (n_samples, n).

        Parameters
        ----------
        X : ndarray of shape (n_samples, n_features)

        Returns
        -------
        ndarray of shape (n_samples, n)
        """
        X = check_array("X", X, columns=self.matrix.shape[1])
        return X @ self.matrix.T.astype(X.dtype)

    def lift(self, atoms: Matrix) -> Matrix:
        """Return a model's rows, such as atoms, in the samples' space, with the same norms.

        Parameters
        ----------
        atoms : ndarray of shape (n_atoms, n)

        Returns
        -------
        ndarray of shape (n_atoms, n_features)
        """
        atoms = check_array("atoms", atoms, columns=len(self.matrix))
        return atoms @ self.matrix.astype(atoms.dtype)
