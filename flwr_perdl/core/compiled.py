"""How the inner loops are compiled: by Numba, at their first call, for all later processes too.

Only modules of kernels import this one, and a function imports its kernels when it is called: a
process that codes nothing does not wait for Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from logging import getLogger
from typing import Any, ParamSpec, TypeVar

from numba import njit

#: The GIL is released, and a division by zero gives what NumPy gives.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

Arguments = ParamSpec("Arguments")
_Result = TypeVar("_Result")


def compiled(function: Callable[Arguments, _Result]) -> Callable[Arguments, _Result]:
    """Compile a function whose loops read like the algorithm, and keep the machine code on disk.

    The machine code lies in ``NUMBA_CACHE_DIR`` if that is set, otherwise in the package's own
    ``__pycache__``, or in the user's cache folder where the installation is read-only. Where none
    of them can be written, every process compiles for itself.

    The code runs in one thread and releases the GIL, so that callers may share the work among
    Python's threads. Numba's own thread pool is not used: calls from several threads, or a fork,
    can end the process. The arithmetic is exactly what the loops say (no "fastmath").
    """
    try:
        fast: Callable[Arguments, _Result] = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # what Numba raises where it finds no folder to write to
        _warn_once()
        fast = njit(**_OPTIONS)(function)
    return fast


@cache
def _warn_once() -> None:
    getLogger("flwr").warning(
        "Every process compiles the inner loops again (a few seconds), since neither the package's "
        "folder nor the user's cache folder is writable: set NUMBA_CACHE_DIR to a writable folder."
    )
