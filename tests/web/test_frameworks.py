"""The public suite over every framework, and that all of them send the same bytes.

Requests are in test_frameworks_requests.py, how handlers end in test_frameworks_endings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.checks import lines
from oncekey.testing.http.protected import Framework
from oncekey.testing.http.repeats import RepeatSuite
from oncekey.testing.http.stack import SECONDS, Stack
from tests.web.frameworks import STACKS, framework_of


class TestRepeats(RepeatSuite):
    @pytest.fixture
    def under_test(self, name: str) -> Framework:
        return framework_of(name)


def _twice(stack: Stack, **asked: Any) -> list[httpx.Response]:
    return [stack.post(**asked), stack.post(**asked)]


def _while_in_flight(stack: Stack, **asked: Any) -> list[httpx.Response]:
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    answers = [stack.post(m="slow", **asked)]
    stack.payments.go.set()
    return [first.result(SECONDS), *answers]


def _after_the_first(stack: Stack, **asked: Any) -> list[httpx.Response]:
    return [stack.post(), stack.post(**asked)]


def _store_down(stack: Stack) -> list[httpx.Response]:
    stack.store.down = {"reserve"}
    return [stack.post()]


def _not_stored(stack: Stack, **asked: Any) -> list[httpx.Response]:
    stack.store.down = {"swap"}
    answers = [stack.post(**asked)]
    stack.store.down = set()
    return answers


def _robbed(stack: Stack) -> list[httpx.Response]:
    first = stack.start(m="slow")
    assert stack.payments.entered.wait(SECONDS)
    stack.store.steal()
    stack.payments.go.set()
    return [first.result(SECONDS)]


SCENARIOS: dict[str, Callable[[Stack], list[httpx.Response]]] = {
    "completed": _twice,
    "streamed": lambda stack: _twice(stack, m="stream"),
    "a 4xx": lambda stack: _twice(stack, m="return-410"),
    "no content": lambda stack: _twice(stack, m="204"),
    "too large": lambda stack: _twice(stack, m="large"),
    "a large stream": lambda stack: _twice(stack, m="stream-large"),
    "an event stream": lambda stack: _twice(stack, m="events"),
    "not executed": lambda stack: _twice(stack, m="not-executed"),
    "outcome unknown": lambda stack: _twice(stack, m="unknown"),
    "refused": lambda stack: _twice(stack, m="refused"),
    "in flight": _while_in_flight,
    "in flight, another body": lambda stack: _while_in_flight(stack, body={"amount": 1}),
    "another body": lambda stack: _after_the_first(stack, body={"amount": 1}),
    "no key": lambda stack: [stack.post(None)],
    "a stream that breaks": lambda stack: _twice(stack, m="stream-broken")[1:],
    "a bad key": lambda stack: [stack.post("two words")],
    "two keys": lambda stack: [stack.post(["k-1", "k-2"])],
    "a large body": lambda stack: [stack.post(content=b"x" * (2 * 1024 * 1024))],
    "store down": _store_down,
    "not stored": _not_stored,
    "not stored, and not executed": lambda stack: _not_stored(stack, m="not-executed"),
    "lease lost": _robbed,
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_framework_says_the_same_bytes(make_stack: MakeStack, scenario: str) -> None:
    """In each situation the status, all headers and the body are the same through all frameworks."""
    said: dict[str, list[str]] = {}
    for name in STACKS:
        answers = SCENARIOS[scenario](make_stack(name))
        said.setdefault(repr([(each.status_code, lines(each), each.content) for each in answers]), []).append(name)
    assert len(said) == 1, "\n\n".join(f"{names} say {what}" for what, names in said.items())
