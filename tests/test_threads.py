"""Threads for windows of clients: the order, the bounds, the errors; and those of BLAS."""

from __future__ import annotations

import re
import threading
import time

import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from flwr_perdl.core.threads import in_threads, n_threads, one_blas_thread

#: Where the wheels of NumPy and SciPy have their libraries, on Linux and on a Mac.
OWN = re.compile(r"(numpy|scipy)(\.libs|[/\\]\.dylibs)")


@pytest.fixture(params=["1", "2", "64"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the threads, as schedulers do; never to more than there are cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    assert n_threads() <= int(request.param)
    return n_threads()


def test_results_come_in_order(limit: int) -> None:
    assert list(in_threads(lambda i: i * i, range(100))) == [i * i for i in range(100)]


def test_all_threads_compute_each_item_once(limit: int) -> None:
    calls: list[tuple[int, int]] = []

    def slowly(i: int) -> None:
        calls.append((i, threading.get_ident()))
        time.sleep(0.01)

    items = range(6 * limit)
    list(in_threads(slowly, items))
    assert sorted(i for i, _ in calls) == list(items)
    threads = {thread for _, thread in calls}
    assert len(threads) == limit


def test_an_error_is_raised_in_its_turn(limit: int) -> None:
    results = in_threads(lambda i: 1 // (3 - i), range(9))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_call_inside_of_another_has_one_thread(limit: int) -> None:
    def threads(_: int) -> set[int]:
        return {threading.get_ident(), *in_threads(lambda i: threading.get_ident(), range(9))}

    inner = list(in_threads(threads, range(6)))
    assert all(len(own) == 1 for own in inner) or limit == 1


def blas_threads() -> set[int]:
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
        assert blas_threads() == {2}
        with one_blas_thread():
            with one_blas_thread():
                assert blas_threads() == {1}
            assert blas_threads() == {1}
        assert blas_threads() == {2}
