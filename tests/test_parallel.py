"""Threads for windows of clients: the order, the bounds, and the errors of one by one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flwr_perdl._parallel import in_threads, n_kernel_threads, n_threads, short_turns


@pytest.fixture(params=["1", "2", "64"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit the threads, as schedulers do; never to more than there are cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    assert n_threads() <= int(request.param)
    return n_threads()


def test_results_come_in_order(limit: int) -> None:
    assert list(in_threads(lambda i: i * i, range(100))) == [i * i for i in range(100)]


def test_no_more_is_taken_than_two_for_each_thread(limit: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i

    for done, result in enumerate(in_threads(lambda i: i, items())):
        assert result == done
        assert len(taken) <= done + 2 * limit


def test_items_are_made_in_the_callers_thread(limit: int) -> None:
    made = {threading.get_ident() for _ in in_threads(lambda i: i, range(9))}
    assert made == {threading.get_ident()}


def test_all_threads_compute_each_item_once(limit: int) -> None:
    calls: list[tuple[int, int]] = []

    def slowly(i: int) -> None:
        calls.append((i, threading.get_ident()))
        time.sleep(0.01)

    items = range(6 * limit)
    list(in_threads(slowly, items))
    assert sorted(i for i, _ in calls) == list(items)
    threads = {thread for _, thread in calls}
    assert threading.get_ident() in threads
    assert len(threads) == limit


def test_an_error_is_raised_in_its_turn(limit: int) -> None:
    results = in_threads(lambda i: 1 // (3 - i), range(9))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("asked", ["", "0", "many", "-1"])
def test_a_limit_that_is_none_is_passed_over(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = n_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert n_threads() == (1 if asked == "0" else cores) >= 1


def test_a_call_inside_of_another_has_one_thread(limit: int) -> None:
    def threads(_: int) -> set[int]:
        return {threading.get_ident(), *in_threads(lambda i: threading.get_ident(), range(9))}

    inner = list(in_threads(threads, range(6)))
    assert all(len(own) == 1 for own in inner) or limit == 1


def test_kernels_have_no_more_threads_than_blas_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert n_kernel_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert n_kernel_threads() == n_threads()


def test_turns_are_as_long_afterwards_however_many_had_them_short() -> None:
    before = sys.getswitchinterval()
    first, second = short_turns(), short_turns()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() < before
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < before
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before
