"""How the inner loops are compiled: by Numba, at their first call, for every later process too.

Only modules of kernels import this one, and a function imports its kernels when it is called: what
computes nothing does not wait for Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from typing import ParamSpec, TypeVar

from numba import njit

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function whose loops read like the algorithm, and keep the machine code on disk.

    The machine code lies in ``NUMBA_CACHE_DIR`` if that is set, otherwise in the package's own
    ``__pycache__``, or in the user's cache folder where the installation is read-only. Where none
    of them can be written, every process compiles for itself.

    The code runs in one thread and releases the GIL, so that callers may share the work among
    Python's threads: it needs no thread pool of its own, which calls from several threads or a
    fork would break. Floating-point arithmetic is exactly what the loops say (no "fastmath"); a
    division by zero gives what NumPy gives.
    """
    try:
        fast: Callable[Arguments, Result] = njit(cache=True, nogil=True, error_model="numpy")(
            function
        )
    except RuntimeError as error:  # Numba has found no folder to write to
        getLogger("flwr").warning("Compiled code is not cached (%s): set NUMBA_CACHE_DIR.", error)
        fast = njit(nogil=True, error_model="numpy")(function)
    return fast
