from __future__ import annotations

import re

from threadpoolctl import ThreadpoolController, threadpool_limits

from flwr_perdl.core.threads import one_blas_thread

#: Where the wheels of NumPy and SciPy have their libraries, on Linux and on a Mac.
OWN = re.compile(r"(numpy|scipy)(\.libs|[/\\]\.dylibs)")


def threads() -> set[int]:
    """Return the numbers of threads that the loaded BLAS libraries would use.

    NumPy's and SciPy's: other packages bring libraries of their own.
    """
    return {
        library["num_threads"]
        for library in ThreadpoolController().info()
        if library["user_api"] == "blas" and OWN.search(library["filepath"])
    }


def test_the_limit_holds_inside_and_is_lifted_by_the_last_to_leave() -> None:
    with threadpool_limits(2, user_api="blas"):
        assert threads() == {2}
        with one_blas_thread():
            with one_blas_thread():
                assert threads() == {1}
            assert threads() == {1}
        assert threads() == {2}
