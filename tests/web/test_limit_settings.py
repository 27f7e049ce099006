"""The settings of limits: how they are read, and which are refused."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from oncekey import OnceKey, Policy
from oncekey.core.rates import Rate
from oncekey.errors import ConfigurationError
from oncekey.limits import Limits, Rates

THREE = Policy(limit="3/minute", effects="repeatable")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100/minute", (100, 60)), (" 5 / seconds ", (5, 1)), ("7 per hour", (7, 3600)), ("1/day", (1, 86_400))],
)
def test_rate_is_read(text: str, rate: tuple[int, int]) -> None:
    assert Policy(limit=text).rate == Rate(*rate)


@pytest.mark.parametrize("text", ["", "100", "0/minute", "-1/minute", "100/fortnight", "x/minute", 100, "1.5/second"])
def test_rate_that_makes_no_sense_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^Policy\(limit=.*\): .*such as '100/minute'"):
        Policy(limit=text)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"storage": "redis"}, "redis://"),
        ({"storage": 7}, "redis://"),
        ({"lookups": "often"}, "100/minute"),
        ({"rates_fail": "maybe"}, "'open' or 'closed'"),
        ({"caps_fail": ""}, "'open' or 'closed'"),
        ({"storage": "store", "lookups": "1/hour"}, "nothing to count"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Limits(**options)


@pytest.mark.parametrize("number", [0, -1, 1.5, "10", True])
def test_cap_takes_a_whole_number(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        OnceKey("memory://", scope=lambda request: "ann", max_active_keys=number)


@pytest.mark.parametrize("wrong", [{"lookups": "1/hour"}, "redis://host", 5])
def test_limits_takes_a_limits(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Limits of oncekey\.limits"):
        OnceKey("memory://", scope=lambda request: "ann", limits=wrong)


def test_unknown_storage_is_named_without_its_password() -> None:
    limits = Limits(storage="nosuch://user:hunter2@host")
    with pytest.raises(ConfigurationError, match=r"storage=.*does not know such an address") as raised:
        OnceKey("memory://", scope=lambda request: "ann", policy=THREE, limits=limits)
    assert "hunter2" not in str(raised.value)


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "limits", None)
    with pytest.raises(ConfigurationError, match=r"oncekey\[limits\]"):
        OnceKey("memory://", scope=lambda request: "ann", policy=THREE)
    OnceKey("memory://", scope=lambda request: "ann", max_active_keys=5).close()  # needs no library


async def test_redis_is_not_asked_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(Rates, "hit", lambda *_: threads.append(threading.current_thread()))
    limits = Limits(storage="redis://127.0.0.1:1")
    with OnceKey("memory://", scope=lambda request: "ann", policy=THREE, limits=limits) as once:
        await once.engine.run(once.limiter.hit(Rate(1, 60), "ann"), 5.0)
        await asyncio.to_thread(once.engine.run_blocking, once.limiter.hit(Rate(1, 60), "ann"), 5.0)
    assert len(threads) == 2
    assert threading.main_thread() not in threads
