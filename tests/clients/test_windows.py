"""Windows of a cohort: every client once, in order, within the bound, and for all threads."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from flwr_perdl.clients._cohort import windows

MOST = 10


@given(st.lists(st.integers(0, 15)), st.integers(1, 4))
def test_every_item_is_in_one_window_within_the_bound(sizes: list[int], parts: int) -> None:
    found = list(windows(range(len(sizes)), sizes.__getitem__, MOST, parts))
    assert [i for window in found for i in window] == list(range(len(sizes)))
    assert all(found)
    assert all(len(one) == 1 or sum(sizes[i] for i in one) <= MOST for one in found)


@given(st.lists(st.integers(0, MOST)), st.integers(1, 4))
def test_no_more_items_are_held_than_the_last_windows_and_one_more_take(
    sizes: list[int], parts: int
) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(len(sizes)):
            taken.append(i)
            yield i

    given_out = 0
    for window in windows(items(), sizes.__getitem__, MOST, parts):
        given_out += len(window)
        assert sum(sizes[i] for i in taken[given_out:]) <= (2 * parts + 1) * MOST


def test_the_last_items_make_as_many_windows_for_each_thread() -> None:
    assert [len(some) for some in windows(range(5), lambda _: 1, MOST, 2)] == [3, 2]
    assert [len(some) for some in windows(range(15), lambda _: 1, MOST, 1)] == [8, 7]
    assert [len(some) for some in windows(range(20), lambda _: 1, MOST, 2)] == [10, 10]
    assert [len(some) for some in windows(range(26), lambda _: 1, MOST, 2)] == [7, 7, 6, 6]
    assert [len(some) for some in windows(range(52), lambda _: 1, MOST, 2)] == [10, 10, 8, 8, 8, 8]
    assert [len(some) for some in windows(range(2), lambda _: 9, MOST, 4)] == [1, 1]


def test_but_not_windows_too_small_to_be_worth_a_thread() -> None:
    assert [len(some) for some in windows(range(8), lambda _: 1, MOST, 8)] == [2, 2, 2, 2]
