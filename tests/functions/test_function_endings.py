"""``@once.function``: what becomes of a key whose function raised, was cancelled or spoke; and what the log says."""

from __future__ import annotations

import asyncio
import re
import shlex
from datetime import timedelta
from typing import Any

import pytest

from oncekey import CallFailed, Confirmed, NotExecuted, OnceKey, OutcomeUnknown, Refused, current
from oncekey.upkeep.reconciler import Reconciler
from tests.cli.key_table import runner
from tests.functions.conftest import Provider


def test_exception_of_an_external_function_makes_its_key_unknown(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> None:
        provider.charge(order)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        charge("a")
    with pytest.raises(OutcomeUnknown):
        charge("a")
    assert provider.charged == ["a"]


def test_exception_of_a_repeatable_function_lets_the_next_call_run(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order", effects="repeatable")
    def charge(order: str) -> int:
        provider.charge(order)
        if current().attempt == 1:
            raise TimeoutError
        return current().attempt

    with pytest.raises(TimeoutError):
        charge("a")
    assert charge("a") == 2 == charge("a")
    assert provider.charged == ["a", "a"]


def test_words_of_the_function_decide_what_becomes_of_its_key(once: OnceKey) -> None:
    errors: list[Exception] = [NotExecuted("nothing"), Refused("wrong"), OutcomeUnknown("perhaps")]

    @once.function("charge", key="order")
    def charge(order: str) -> None:
        raise errors.pop(0)

    with pytest.raises(NotExecuted):
        charge("a")
    with pytest.raises(Refused):
        charge("b")
    with pytest.raises(OutcomeUnknown, match="perhaps"):
        charge("a")  # it ran again: NotExecuted let it
    with pytest.raises(OutcomeUnknown, match="may have happened"):
        charge("a")
    assert not errors


def test_refusal_after_a_verb_fails_the_key_for_good(once: OnceKey) -> None:
    @once.function("charge", key="order", effects="repeatable")
    def charge(order: str) -> None:
        current().downstream_key("provider")
        raise Refused("the card was declined", status=402)

    with pytest.raises(Refused):
        charge("a")
    with pytest.raises(CallFailed, match="402") as raised:
        charge("a")
    assert raised.value.status == 402
    assert b"declined" in raised.value.body


def test_verdict_on_an_unknown_key_is_the_result_of_the_next_call(once: OnceKey) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> Any:
        raise TimeoutError

    for order in ("a", "b"):
        with pytest.raises(TimeoutError):
            charge(order)
    once.ingest_blocking(Confirmed(201, {"id": 7}), key="a", operation="charge")
    once.ingest_blocking(Confirmed(402, {"why": "declined"}), key="b", operation="charge")
    assert charge("a") == {"id": 7}
    with pytest.raises(CallFailed):
        charge("b")


def test_resolver_settles_an_unknown_call(once: OnceKey) -> None:
    """The reconciler asks it by the function's name."""

    @once.function("charge", key="order")
    def charge(order: str) -> Any:
        raise TimeoutError

    @once.resolver("charge")
    def find(inquiry: Any) -> Confirmed:
        assert (inquiry.operation, inquiry.key) == ("charge", "a")
        return Confirmed(200, {"id": 7})

    with pytest.raises(TimeoutError):
        charge("a")
    reconciler = Reconciler(once)
    reconciler.run()
    reconciler.close()
    assert charge("a") == {"id": 7}


def test_plain_function_runs_on_after_max_run_and_its_result_is_kept(
    memory: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    @memory.function("charge", key="order", effects="repeatable", max_run=timedelta(minutes=1))
    def charge(order: str) -> int:
        operation, keeper = current(), memory.engine.keeper
        operation.runs_until = 0.0  # the minute is over
        keeper.look()
        assert not keeper.keeps(operation.record)
        return operation.attempt

    assert charge("a") == 1 == charge("a")
    assert "goes on in its thread, without a lease" in caplog.text


# -- what the log says -------------------------------------------------------------------------------------------------


def test_warning_about_an_unknown_outcome_speaks_of_the_function_and_its_command_runs(
    once: OnceKey,
    url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> dict[str, int]:
        raise RuntimeError("the provider hung up")

    with pytest.raises(RuntimeError):
        charge("order-1-of-today")
    (line,) = [each.getMessage() for each in caplog.records if "left a key whose" in each.getMessage()]
    assert "its function raised RuntimeError" in line
    assert "Its repeated calls are refused" in line
    assert "declare the function 'transactional'" in line
    for word in ("route", "handler", "response", "retries"):
        assert word not in line
    command = shlex.split(re.findall(r"`oncekey (keys resolve .*?)`", line)[0])
    command[command.index("JSON")] = '{"id": 7}'
    run = runner(url, monkeypatch, capsys)
    assert run(*command, "--yes")[::2] == (0, "")
    assert charge("order-1-of-today") == {"id": 7}


async def test_wait_for_around_an_external_function_is_named_as_the_reason(
    memory: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[asyncio.Timeout] = []

    @memory.function("charge", key="order")
    async def charge(order: str) -> None:
        limits[0].reschedule(0.0)  # the time is over now, and not before the function was entered
        await asyncio.Event().wait()

    async def timed() -> None:
        async with asyncio.timeout(None) as limit:  # as wait_for does it
            limits.append(limit)
            await charge("a")

    with pytest.raises(TimeoutError):
        await timed()
    with pytest.raises(OutcomeUnknown):
        await charge("a")
    (line,) = [each.getMessage() for each in caplog.records if "left a key whose" in each.getMessage()]
    assert "its function was cancelled while it ran, as asyncio.wait_for" in line
    assert "put time-outs around the calls inside of it" in line


def test_warning_of_a_transactional_function_speaks_of_the_function(
    once: OnceKey, caplog: pytest.LogCaptureFixture
) -> None:
    @once.function("charge", key="order", effects="transactional")
    def charge(order: str) -> None:
        if order == "b":
            raise RuntimeError

    charge("a")
    with pytest.raises(RuntimeError):
        charge("b")
    enlisted, raised = [each.getMessage() for each in caplog.records if "transactional" in each.getMessage()]
    assert "its function enlisted no transaction" in enlisted
    assert "its function failed without having enlisted" in raised
    assert raised.endswith("once per function")
