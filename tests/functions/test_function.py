"""``@once.function``: duplicates, keys, tenants, results and exceptions, of sync and async functions."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import uvloop

from oncekey import (
    SINGLE_TENANT,
    CallFailed,
    Confirmed,
    InProgress,
    KeyReused,
    NotExecuted,
    OnceKey,
    OutcomeUnknown,
    Policy,
    Refused,
    ResultNotKept,
    current,
)
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.upkeep.reconciler import Reconciler


class Provider:
    """Counts what was really done."""

    def __init__(self) -> None:
        self.charged: list[Any] = []

    def charge(self, order: Any, amount: int = 1) -> dict[str, Any]:
        self.charged.append(order)
        return {"order": order, "number": len(self.charged)}


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def memory() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


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


def test_result_that_is_not_json_completes_the_key_and_says_so(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> object:
        provider.charge(order)
        return {1, 2}

    with pytest.raises(ResultNotKept, match="ran and its key is completed") as raised:
        charge("a")
    assert raised.value.result == {1, 2}
    with pytest.raises(ResultNotKept, match="does not run again") as raised:
        charge("a")
    assert raised.value.result is None
    assert provider.charged == ["a"]


def test_result_that_is_too_large_is_the_first_callers_only(once: OnceKey) -> None:
    @once.function("charge", key="order", max_response_bytes=10)
    def charge(order: str) -> str:
        return "x" * 100

    assert charge("a") == "x" * 100
    with pytest.raises(ResultNotKept):
        charge("a")


def test_every_caller_gets_the_result_as_it_was_stored(memory: OnceKey) -> None:
    @memory.function("charge", key="order")
    def charge(order: str) -> object:
        return {"pair": (1, 2), "n": 2**70}

    assert charge("a") == {"pair": [1, 2], "n": 2**70}
    assert charge("a") == {"pair": [1, 2], "n": 2**70}


def test_codec_keeps_results_that_json_cannot(once: OnceKey) -> None:
    @once.function("charge", key="order", codec=pickle)
    def charge(order: str) -> set[int]:
        return {1, 2}

    assert charge("a") == {1, 2}
    assert charge("a") == {1, 2}


def test_verdict_is_read_as_json_although_the_function_has_a_codec(once: OnceKey) -> None:
    @once.function("charge", key="order", codec=pickle)
    def charge(order: str) -> Any:
        raise OutcomeUnknown("perhaps")

    with pytest.raises(OutcomeUnknown):
        charge("a")
    once.ingest_blocking(Confirmed(200, {"id": 7}), key="a", operation="charge")
    assert charge("a") == {"id": 7}


def test_result_of_another_codec_is_an_error_and_not_a_run(once: OnceKey, provider: Provider) -> None:
    def define(codec: Any) -> Any:
        @once.function("charge", key="order", codec=codec)
        def charge(order: str) -> Any:
            return [provider.charge(order)]

        return charge

    define(pickle)("a")
    with pytest.raises(ResultNotKept, match="cannot be read"):
        define(None)("a")
    assert provider.charged == ["a"]


def test_tenants_do_not_share_keys(url: str, provider: Provider) -> None:
    with OnceKey(url, scope=lambda request: "never asked") as once:

        @once.function("charge", key="order", scope=lambda account: account["tenant"], ignore=["account"])
        def charge(account: dict[str, str], order: str) -> Any:
            assert current().scope == account["tenant"]
            return provider.charge(order)["number"]

        assert [charge({"tenant": "a"}, "1"), charge({"tenant": "b"}, "1"), charge({"tenant": "a"}, "1")] == [1, 2, 1]


def test_functions_do_not_share_keys(once: OnceKey) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> str:
        return "charged"

    @once.function("ship", key="order", effects="repeatable")
    def ship(order: str) -> str:
        return "shipped"

    @once.function("pack", key="order", effects="repeatable")
    def pack(order: str) -> str:
        return "packed"

    assert (charge("a"), ship("a"), pack("a"), charge("a")) == ("charged", "shipped", "packed", "charged")


@pytest.mark.parametrize("key", ["order-1", 42, UUID(int=7)])
def test_key_may_be_text_a_number_or_a_uuid(memory: OnceKey, provider: Provider, key: Any) -> None:
    @memory.function("charge", key="order")
    def charge(order: Any) -> str:
        provider.charge(order)
        return current().key

    assert charge(key) == str(key) == charge(key)
    assert provider.charged == [key]


@pytest.mark.parametrize("key", [None, True, 1.5, "", "  ", "a\nb", "schlüssel", "x" * 256, ["a"]])
def test_call_without_a_usable_key_does_not_run(memory: OnceKey, provider: Provider, key: Any) -> None:
    @memory.function("charge", key="order")
    def charge(order: Any) -> Any:
        return provider.charge(order)

    with pytest.raises(ConfigurationError, match="nothing ran") as raised:
        charge(key)
    assert "schl" not in str(raised.value)
    assert provider.charged == []


def test_caller_may_choose_the_key(memory: OnceKey, provider: Provider) -> None:
    @memory.function("charge")
    def charge(order: str) -> int:
        number: int = provider.charge(order)["number"]
        return number

    with pytest.raises(ConfigurationError, match=r"with_key"):
        charge("a")
    assert [charge.with_key("k1")("a"), charge.with_key("k2")("a"), charge.with_key("k1")("a")] == [1, 2, 1]
    assert charge.with_key("k1", scope="other")("a") == 3


async def test_caller_of_an_async_function_may_choose_the_key(memory: OnceKey, provider: Provider) -> None:
    @memory.function("charge", key="order")
    async def charge(order: str) -> Any:
        return provider.charge(order)["number"]

    assert await charge.with_key("k1")("a") == 1 == await charge.with_key("k1")("a")
    assert await charge("a") == 2


def test_key_may_be_a_function_of_nothing(memory: OnceKey) -> None:
    """As with the id of a queue's current task."""

    @memory.function("charge", key=lambda: "the task's id")
    def charge(order: str) -> str:
        return current().key

    assert charge("a") == "the task's id"


def test_nested_functions_have_an_operation_each(memory: OnceKey) -> None:
    @memory.function("inner", key="order")
    def inner(order: str) -> str:
        return current().name

    @memory.function("outer", key="order")
    def outer(order: str) -> list[str]:
        return [current().name, inner(order), current().name]

    assert outer("a") == ["outer", "inner", "outer"]


def test_unknown_outcome_of_an_inner_function_is_one_of_the_outer(memory: OnceKey) -> None:
    @memory.function("inner", key="order")
    def inner(order: str) -> None:
        raise TimeoutError

    @memory.function("outer", key="order", effects="repeatable")
    def outer(order: str) -> None:
        inner(order)

    with pytest.raises(TimeoutError):
        outer("a")
    with pytest.raises(OutcomeUnknown):  # retried, since it is repeatable; its inner function is not
        outer("a")
    record = memory.store.read([(memory.key_scope("single-tenant", "outer"), "a")])[0]
    assert record is not None
    assert record.state == "unknown"


def test_store_that_is_down_means_that_the_function_does_not_run(provider: Provider) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing"
    with OnceKey(nowhere, scope=SINGLE_TENANT) as once:

        @once.function("charge", key="order", begin_timeout=timedelta(seconds=2))
        def charge(order: str) -> Any:
            return provider.charge(order)

        with pytest.raises(StoreUnavailable):
            charge("a")
    assert provider.charged == []


def test_lease_of_a_long_function_is_renewed(memory: OnceKey, provider: Provider) -> None:
    """Without the keeper, the second call would take over after the lease."""
    ended, began = threading.Event(), threading.Event()

    @memory.function("charge", key="order", effects="repeatable", lease=timedelta(seconds=0.6))
    def charge(order: str) -> Any:
        began.set()
        ended.wait(30)
        return provider.charge(order)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(charge, "a")
        began.wait(30)
        threading.Event().wait(1.2)
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
