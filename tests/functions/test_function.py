"""``@once.function``: duplicates of sync and async functions, one after the other and at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import uvloop

from oncekey import SINGLE_TENANT, InProgress, KeyReused, OnceKey, Policy, current
from oncekey.errors import OperatorError, SchemaError, StoreError, StoreOverloaded, StoreUnavailable
from oncekey.testing.http.stack import until
from tests.functions.conftest import Provider


def test_second_call_gets_the_first_result(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    def charge(order: str, amount: int) -> dict[str, Any]:
        return provider.charge(order, amount)

    assert charge("a", 5) == charge(order="a", amount=5) == {"order": "a", "number": 1}
    assert charge("b", 5)["number"] == 2
    assert provider.charged == ["a", "b"]


async def test_async_second_call_gets_the_first_result(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    async def charge(order: str, amount: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        return provider.charge(order, amount)

    assert asyncio.iscoroutinefunction(charge)
    assert await charge("a", 5) == await charge("a", amount=5)
    assert provider.charged == ["a"]


def test_each_event_loop_may_call_an_async_function(once: OnceKey, provider: Provider) -> None:
    """A task queue may make a new event loop for every task."""

    @once.function("charge", key="order")
    async def charge(order: str) -> dict[str, Any]:
        return provider.charge(order)

    assert asyncio.run(charge("a")) == asyncio.run(charge("a"))
    asyncio.run(charge("b"))
    assert provider.charged == ["a", "b"]


def test_event_loops_of_several_threads_have_one_effect(once: OnceKey, provider: Provider) -> None:
    """Half of them are uvloop's."""

    @once.function("charge", key="order", in_flight="wait", wait=timedelta(seconds=30))
    async def charge(order: str) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return provider.charge(order)

    def run(number: int) -> Any:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if number % 2 else None) as runner:
            return runner.run(charge("a"))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert provider.charged == ["a"]
    assert results == [results[0]] * 8


def test_threads_that_call_at_once_have_one_effect(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order", in_flight="wait", wait=timedelta(seconds=30))
    def charge(order: str) -> dict[str, Any]:
        return provider.charge(order)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(charge, ["a"] * 16))
    assert provider.charged == ["a"]
    assert results == [results[0]] * 16


async def test_tasks_that_call_at_once_have_one_effect(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order", in_flight="wait", wait=timedelta(seconds=30))
    async def charge(order: str) -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return provider.charge(order)

    results = await asyncio.gather(*[charge("a") for _ in range(16)])
    assert provider.charged == ["a"]
    assert results == [results[0]] * 16


def test_call_in_flight_raises_in_progress(once: OnceKey) -> None:
    @once.function("charge", key="order", retry_after=timedelta(seconds=7))
    def charge(order: str) -> float:
        try:
            charge(order)
        except InProgress as error:
            return error.retry_after
        return 0.0

    assert charge("a") == 7.0


def test_wait_ends_with_in_progress_when_its_bound_is_over(once: OnceKey) -> None:
    @once.function("charge", key="order", in_flight="wait", wait=timedelta(seconds=0.1))
    def charge(order: str) -> str:
        with pytest.raises(InProgress):
            charge(order)
        return "first"

    assert charge("a") == "first"


def test_other_arguments_raise_key_reused(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    def charge(order: str, amount: int) -> dict[str, Any]:
        return provider.charge(order, amount)

    charge("a", 5)
    with pytest.raises(KeyReused):
        charge("a", 6)
    assert provider.charged == ["a"]


def test_store_that_is_down_means_that_the_function_does_not_run(provider: Provider) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    with OnceKey(nowhere, scope=SINGLE_TENANT) as once:

        @once.function("charge", key="order", begin_timeout=timedelta(seconds=2))
        def charge(order: str) -> Any:
            return provider.charge(order)

        with pytest.raises(StoreUnavailable):
            charge("a")
    assert provider.charged == []


@pytest.mark.parametrize("error", [SchemaError("run `oncekey migrate`"), StoreOverloaded("full"), StoreError("odd")])
async def test_key_that_cannot_be_looked_up_is_store_unavailable_with_the_reason(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, error: OperatorError
) -> None:
    """Also after the circuit breaker has opened, which asks the store no more."""
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:

        def fail(batch: Any) -> Any:
            raise error

        monkeypatch.setattr(once.store, "reserve", fail)

        @once.function("charge", key="order")
        def charge(order: str) -> Any:
            return provider.charge(order)

        @once.function("charge_later", key="order")
        async def charge_later(order: str) -> Any:
            return provider.charge(order)

        for number in range(7):
            with pytest.raises(
                StoreUnavailable, match="charge: its key cannot be looked up, and nothing ran"
            ) as raised:
                charge(str(number))
            assert str(error) in str(raised.value)
        with pytest.raises(StoreUnavailable, match="charge_later: its key cannot be looked up") as raised:
            await charge_later("a")
        assert str(error) in str(raised.value)
    assert provider.charged == []


def test_function_on_a_database_without_tables_says_what_to_run(postgres_url: str, provider: Provider) -> None:
    with OnceKey(postgres_url, scope=SINGLE_TENANT) as once:

        @once.function("charge", key="order")
        def charge(order: str) -> Any:
            return provider.charge(order)

        with pytest.raises(StoreUnavailable, match="oncekey migrate"):
            charge("a")
    assert provider.charged == []


def test_lease_of_a_long_function_is_renewed(memory: OnceKey, provider: Provider) -> None:
    """Without the keeper, the second call would take over after the lease."""
    ended, began = threading.Event(), threading.Event()

    @memory.function("charge", key="order", effects="repeatable", lease=timedelta(seconds=1.5))
    def charge(order: str) -> Any:
        began.set()
        ended.wait(30)
        return provider.charge(order)

    def lease_until() -> float:
        (record,) = memory.store.listing()
        return record.lease_until

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(charge, "a")
        assert began.wait(30)
        lease = lease_until()
        until(lambda: lease_until() > lease + 1.5, "it was renewed for longer than a lease")
        with pytest.raises(InProgress):
            charge("a")
        ended.set()
        assert first.result(30) == charge("a")
    assert provider.charged == ["a"]


def test_function_gets_the_policy_of_the_app_without_options() -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects="repeatable")) as once:

        @once.function("charge", key="order")
        def charge(order: str) -> str:
            return current().policy.effects

        assert charge("a") == "repeatable"
        assert once.policy_of("charge").key_per == "endpoint"


def test_nested_functions_have_an_operation_each(memory: OnceKey) -> None:
    @memory.function("inner", key="order")
    def inner(order: str) -> str:
        return current().name

    @memory.function("outer", key="order")
    def outer(order: str) -> list[str]:
        return [current().name, inner(order), current().name]

    assert outer("a") == ["outer", "inner", "outer"]
