"""A rate that the store itself counts (``Limits(storage="store")``) fails as rates do, and not as the cap does."""

from __future__ import annotations

from typing import Any

import pytest

from oncekey.limits import Limits
from oncekey.testing.http.stack import Stack
from tests.web.test_limits import THREE, CountingStore, statuses

on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])


def that_cannot_count(make_stack: Any, name: str, **options: Any) -> Stack:
    store = CountingStore()
    store.down.add("tally")
    options |= {"policy": THREE, "store": store, "scope": lambda request: request.headers["x-tenant"]}
    stack: Stack = make_stack(name, **options)
    return stack


@on_both
def test_rate_in_a_store_that_cannot_count_fails_open_and_says_so(
    make_stack: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stack = that_cannot_count(make_stack, name, limits=Limits(storage="store"))
    assert statuses(stack, 5) == [201] * 5
    assert caplog.text.count("nothing is limited meanwhile") == 1
    assert "caps_fail" not in caplog.text


@on_both
def test_rate_in_a_store_that_cannot_count_fails_closed_if_declared(
    make_stack: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stack = that_cannot_count(
        make_stack, name, limits=Limits(storage="store", rates_fail="closed", caps_fail="open"), max_active_keys=9
    )
    assert (statuses(stack, 2), stack.runs) == ([503, 503], 0)
    assert caplog.text.count("new keys are refused meanwhile") == 1


@on_both
def test_cap_fails_closed_although_the_rate_beside_it_fails_open(make_stack: Any, name: str) -> None:
    stack = that_cannot_count(make_stack, name, limits=Limits(storage="store"), max_active_keys=9)
    assert (statuses(stack, 2), stack.runs) == ([503, 503], 0)
