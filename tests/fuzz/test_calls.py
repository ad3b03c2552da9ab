"""Malformed calls of all public callables: the first of those that `make fuzz-calls` draws."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz import calls


@pytest.mark.parametrize("name", calls.callables())
def test_a_valid_call_succeeds(name: str) -> None:
    _, called = calls.callables()[name]
    calls.call(called, calls.valid(name, called))  # compiled here, where no time is measured
    assert calls.finding(called, calls.valid(name, called), "no error names this") is None


def test_malformed_calls_are_right_or_name_the_argument() -> None:
    drawn = islice(calls.draws(seed=0), 3000)
    assert [call for call in drawn if call[-1] is not None] == []
