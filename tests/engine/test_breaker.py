"""The circuit breaker, on a clock that stands still."""

from __future__ import annotations

import pytest

from oncekey.engine.breaker import FAILURES_TO_OPEN, OPEN_SECONDS, Breaker
from oncekey.errors import StoreUnavailable
from tests.engine.doubles import Clock

ERROR = StoreUnavailable("down")


class Watched:
    def __init__(self) -> None:
        self.clock = Clock()
        self.changes: list[tuple[bool, Exception | None]] = []
        self.breaker = Breaker(self.clock, lambda is_open, error: self.changes.append((is_open, error)))

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.breaker.failed(ERROR)


@pytest.fixture
def it() -> Watched:
    return Watched()


def test_breaker_opens_after_five_failures_in_a_row(it: Watched) -> None:
    """Four failures change nothing; the fifth refuses everybody, and is reported once with its cause."""
    it.fail(FAILURES_TO_OPEN - 1)
    assert it.breaker.allows()
    assert it.changes == []
    it.fail(1)
    assert not it.breaker.allows()
    it.fail(3)
    assert it.changes == [(True, ERROR)]


def test_a_success_starts_the_count_again(it: Watched) -> None:
    """Only failures in a row count."""
    it.fail(FAILURES_TO_OPEN - 1)
    it.breaker.succeeded()
    it.fail(FAILURES_TO_OPEN - 1)
    assert it.breaker.allows()
    assert it.changes == []


def test_one_request_a_second_may_try(it: Watched) -> None:
    """While open, one probe passes when the pause is over, and the next only after another pause."""
    it.fail(FAILURES_TO_OPEN)
    it.clock.now += OPEN_SECONDS - 0.001
    assert not it.breaker.allows()
    it.clock.now += 0.001
    assert [it.breaker.allows() for _ in range(3)] == [True, False, False]
    it.clock.now += OPEN_SECONDS
    assert [it.breaker.allows() for _ in range(2)] == [True, False]


def test_a_probe_that_fails_keeps_it_open(it: Watched) -> None:
    """The pause begins again with the failure, and nothing new is reported."""
    it.fail(FAILURES_TO_OPEN)
    it.clock.now += OPEN_SECONDS
    assert it.breaker.allows()
    it.clock.now += 0.5
    it.fail(1)
    it.clock.now += OPEN_SECONDS - 0.001
    assert not it.breaker.allows()
    it.clock.now += 0.001
    assert it.breaker.allows()
    assert it.changes == [(True, ERROR)]


def test_a_probe_that_succeeds_closes_it(it: Watched) -> None:
    """One success lets everybody in again, is reported once, and five new failures are needed to open."""
    it.fail(FAILURES_TO_OPEN)
    it.clock.now += OPEN_SECONDS
    assert it.breaker.allows()
    it.breaker.succeeded()
    assert all(it.breaker.allows() for _ in range(10))
    it.breaker.succeeded()
    assert it.changes == [(True, ERROR), (False, None)]
    it.fail(FAILURES_TO_OPEN - 1)
    assert it.breaker.allows()


def test_breaker_that_closes_during_a_look_lets_the_request_pass(it: Watched) -> None:
    """A success between the look and the lock: the request passes, and the breaker stays closed."""
    it.fail(FAILURES_TO_OPEN)
    lock = it.breaker._lock

    class Closing:
        def __enter__(self) -> None:
            it.breaker._lock = lock
            it.breaker.succeeded()

        def __exit__(self, *_: object) -> None:
            pass

    it.breaker._lock = Closing()  # type: ignore[assignment]
    assert it.breaker.allows()
    assert all(it.breaker.allows() for _ in range(3))


def test_breaker_without_a_listener_opens_and_closes() -> None:
    """Without a listener it opens and closes all the same."""
    breaker = Breaker(Clock())
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(ERROR)
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
