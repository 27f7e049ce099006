"""``@once.function``: keys, tenants and names."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from oncekey import KeyReused, OnceKey, current
from oncekey.errors import ConfigurationError
from tests.functions.conftest import Provider


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


@pytest.mark.parametrize("arguments", [None, ("order", "cents")])
@pytest.mark.parametrize("key", [42, UUID(int=7)])
def test_key_of_another_type_is_the_same_call(
    memory: OnceKey, provider: Provider, key: Any, arguments: tuple[str, ...] | None
) -> None:
    @memory.function("charge", key="order", arguments=arguments)
    def charge(order: Any, cents: int) -> Any:
        return provider.charge(str(order))["number"]

    assert [charge(key, 5), charge(str(key), 5), charge.with_key(key)(str(key), 5)] == [1, 1, 1]
    with pytest.raises(KeyReused):
        charge(key, 6)


def test_argument_counts_if_the_caller_chose_another_key(memory: OnceKey, provider: Provider) -> None:
    @memory.function("charge", key="order")
    def charge(order: str) -> Any:
        return provider.charge(order)["number"]

    assert charge.with_key("k-1")("a") == 1
    with pytest.raises(KeyReused):
        charge.with_key("k-1")("b")


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
