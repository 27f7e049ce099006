"""Retry-After in both forms, full jitter, and the budgets for tries and for time."""

from __future__ import annotations

from statistics import mean

import pytest

from oncekey.client import Budget, Rules
from oncekey.client.attempts import Attempts, Step
from oncekey.client.decisions import Seen
from oncekey.client.reading import Answer, answer_of, key_expires, retry_after
from oncekey.errors import ConfigurationError

NOW = 1_800_000_000.0  # Fri, 15 Jan 2027 08:00:00 GMT


def answer(status: int = 503, body: bytes = b"", **headers: str) -> Answer:
    return answer_of(status, [(name.replace("_", "-"), text) for name, text in headers.items()], body)


class Hands:
    """A clock that is set by hand, and chance that is known."""

    def __init__(self, chance: float = 1.0) -> None:
        self.now = 0.0
        self.chance = chance

    def rules(self, **budget: float) -> Rules:
        return Rules(
            budget=Budget(**budget),  # type: ignore[arg-type]
            clock=lambda: self.now,
            wall_clock=lambda: NOW + self.now,
            chance=lambda: self.chance,
        )

    def attempts(self, **budget: float) -> Attempts:
        return self.rules(**budget).attempts("POST", "https://api.example.com/pay", [], b"{}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("99999999999999999999", 999_999_999_999.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Friday, 15-Jan-27 08:00:30 GMT", 30.0),
        ("Fri Jan 15 08:00:30 2027", 30.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("", None),
        ("٣", None),
        ("Fri, 99 Jan 2027 08:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_in_both_forms(text: str, seconds: float | None) -> None:
    assert retry_after(answer(Retry_After=text), NOW) == seconds


def test_retry_after_as_a_date_is_measured_by_the_clock_of_the_server() -> None:
    """Ours is an hour ahead. By our own clock the date would be long over."""
    late = answer(Retry_After="Fri, 15 Jan 2027 08:00:30 GMT", Date="Fri, 15 Jan 2027 08:00:00 GMT")
    assert retry_after(late, NOW + 3600) == 30.0


def test_expiry_of_a_key_is_measured_by_the_clock_of_the_server() -> None:
    told = answer(Idempotency_Expires="Sat, 16 Jan 2027 08:00:00 GMT", Date="Fri, 15 Jan 2027 08:00:00 GMT")
    assert key_expires(told, NOW - 3600) == NOW - 3600 + 86_400
    assert key_expires(answer(), NOW) is None


def test_waits_without_retry_after_are_random_and_double_up_to_the_longest() -> None:
    budget = Budget(first_wait=0.5, longest_wait=4.0)
    assert [budget.wait(number, None, 1.0) for number in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert [budget.wait(number, None, 0.0) for number in (1, 5, 10_000)] == [0.0, 0.0, 0.0]


def test_jitter_is_full() -> None:
    """Chosen between nothing and the whole wait, by a chance of its own for each request."""
    rules = Rules(budget=Budget(tries=2, first_wait=1.0))
    waits = [
        rules.attempts("POST", "https://a.example/", [], b"").failed(Seen.LOST, OSError()).wait for _ in range(2000)
    ]
    assert min(waits) < 0.05
    assert 0.95 < max(waits) <= 1.0
    assert 0.45 < mean(waits) < 0.55


def test_retry_after_is_obeyed_and_a_little_spread() -> None:
    attempts = Hands(chance=0.5).attempts(first_wait=0.5, longest_wait=10.0)
    assert attempts.answered(answer(Retry_After="7")) == Step(True, 7.25)


@pytest.mark.parametrize("after", ["11", "3600", "Fri, 15 Jan 2027 09:00:00 GMT"])
def test_retry_after_beyond_the_longest_wait_hands_back_at_once(after: str) -> None:
    attempts = Hands().attempts(longest_wait=10.0, seconds=100_000.0)
    assert attempts.answered(answer(Retry_After=after)) == Step(False)


def test_tries_are_counted() -> None:
    attempts = Hands().attempts(tries=3, seconds=1000.0)
    assert [attempts.failed(Seen.LOST, OSError()).again for _ in range(3)] == [True, True, False]


def test_try_that_would_start_after_the_time_is_not_made() -> None:
    hands = Hands()
    attempts = hands.attempts(tries=100, seconds=10.0, first_wait=4.0, longest_wait=4.0)
    assert attempts.failed(Seen.LOST, OSError()) == Step(True, 4.0)
    hands.now = 6.5
    assert attempts.failed(Seen.LOST, OSError()) == Step(False)


def test_one_try_gets_at_most_the_time_that_is_left() -> None:
    hands = Hands()
    attempts = hands.attempts(seconds=10.0)
    hands.now = 7.0
    assert attempts.seconds_left == pytest.approx(3.0)


def test_questions_about_a_request_in_flight_cost_time_and_no_tries() -> None:
    hands = Hands(chance=0.0)
    attempts = hands.attempts(tries=2, seconds=30.0)
    for _ in range(29):
        assert attempts.answered(answer(409, Retry_After="1")) == Step(True, 1.0)
        hands.now += 1.0
    assert attempts.answered(answer(409, Retry_After="1")) == Step(False)


@pytest.mark.parametrize(
    "wrong",
    [{"tries": 0}, {"seconds": 0}, {"seconds": float("inf")}, {"first_wait": -1}, {"longest_wait": float("nan")}],
)
def test_budget_that_makes_no_sense_is_refused_with_its_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Budget(**wrong)  # type: ignore[arg-type]
