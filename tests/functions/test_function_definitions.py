"""What ``@once.function`` refuses before anything runs: wrong settings, and arguments without a fingerprint."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from oncekey import SINGLE_TENANT, KeyReused, NotExecuted, OnceKey
from oncekey.errors import ConfigurationError


@pytest.fixture
def once() -> Iterator[OnceKey]:
    with OnceKey("memory://", scope=SINGLE_TENANT) as made:
        yield made


def plain(order: Any, amount: int = 1) -> str:
    return "ran"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "ordr"}, "'ordr' is no parameter; the function has: order, amount"),
        ({"key": lambda ordr: ordr}, "'ordr' is no parameter"),
        ({"key": 5}, "name of a parameter, or a plain function"),
        ({"key": lambda *args: "k"}, "by name"),
        ({"scope": "tenant"}, "'tenant' is no parameter"),
        ({"arguments": ["amuont"]}, "'amuont' is no parameter"),
        ({"arguments": "amount"}, "a collection of names"),
        ({"ignore": ["context"]}, "'context' is no parameter"),
        ({"ignore": ["order"], "arguments": ["amount"]}, "leave it out with arguments"),
        ({"codec": object()}, r"dumps\(value\) and loads\(data\)"),
        ({"effect": "repeatable"}, "effect=….: there is no such option"),
        ({"effects": "repeateable"}, "one of external, transactional"),
        ({"methods": {"POST"}}, "methods=….: there is no such option"),
        ({"in_flight": "accepted"}, "it takes 'conflict'"),
        ({"lease": 60}, "it takes a timedelta"),
    ],
)
def test_setting_that_makes_no_sense_is_refused(once: OnceKey, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        once.function("charge", **{"key": "order", **options})(plain)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "POST /charges", "/charges", plain, None])
def test_name_that_is_no_name_is_refused(once: OnceKey, name: Any) -> None:
    """``@once.function`` without parentheses ends here, too."""
    with pytest.raises(ConfigurationError, match=r"Write @once\.function\('charge'"):
        once.function(name)


def test_async_key_function_is_refused(once: OnceKey) -> None:
    async def key(order: str) -> str:
        return order

    with pytest.raises(ConfigurationError, match="plain function"):
        once.function("charge", key=key)(plain)


def test_scope_is_needed_if_the_app_has_tenants() -> None:
    with OnceKey("memory://", scope=lambda request: "a") as once:
        with pytest.raises(ConfigurationError, match="say whose keys these are with scope"):
            once.function("charge", key="order")(plain)
        assert once.function("charge", key="order", scope=SINGLE_TENANT)(plain)("a") == "ran"


def test_two_functions_of_one_name_are_refused(once: OnceKey) -> None:
    once.function("charge", key="order")(plain)
    once.function("charge", key="order")(plain)  # the same one, as after a reload

    def other(order: str) -> None: ...

    with pytest.raises(ConfigurationError, match="have one name"):
        once.function("charge", key="order")(other)


def test_function_that_is_protected_already_is_refused(once: OnceKey) -> None:
    protected = once.function("charge", key="order")(plain)
    with pytest.raises(ConfigurationError, match="protected already"):
        once.function("again", key="order")(protected)


def test_generator_is_refused(once: OnceKey) -> None:
    def rows(order: str) -> Iterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="is a generator"):
        once.function("charge", key="order")(rows)


def test_class_and_classmethod_are_refused(once: OnceKey) -> None:
    for target in (OnceKey, classmethod(plain), 5):
        with pytest.raises(ConfigurationError, match="directly above `def`"):
            once.function("charge", key="order")(target)  # type: ignore[arg-type]


def test_task_of_a_queue_is_refused(once: OnceKey) -> None:
    def task(order: str) -> None: ...

    task.delay = None  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="the queue's decorator above it"):
        once.function("charge", key="order")(task)


def test_coroutine_of_a_plain_function_is_not_started(once: OnceKey) -> None:
    async def charge(order: str) -> None: ...

    def start(order: str) -> Any:
        return charge(order)

    protected = once.function("charge", key="order")(start)
    with pytest.raises(NotExecuted, match="decorate the `async def` itself"):
        protected("a")


def test_partial_and_callable_object_can_be_protected(once: OnceKey) -> None:
    class Charge:
        async def __call__(self, order: str) -> str:
            return order

    assert once.function("partial", key="order")(partial(plain, amount=5))("a") == "ran"
    assert asyncio.run(once.function("object", key="order")(Charge())("a")) == "a"


# -- arguments -------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (1, 2),
        (1, "1"),
        (None, False),
        (0.1, 0.2),
        (2**53, 2**53 + 1),
        (2**80, 2**80 + 1),
        ("a", "b"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (Decimal("1.0"), Decimal("1.1")),
        (Decimal("1.0"), "1.0"),
        (Decimal("1.0"), {"$decimal": "1.0"}),
        ({"$decimal": "1.0"}, {"$": {"$decimal": "1.0"}}),
        (datetime.timedelta(1), datetime.timedelta(2)),
        (UUID(int=1), UUID(int=2)),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
        (b"a", b"b"),
        (Colour.RED, "blue"),
        (Line("a", Decimal(1)), Line("a", Decimal(2))),
    ],
)
def test_argument_counts_by_its_value(once: OnceKey, first: Any, other: Any) -> None:
    protected = once.function("charge", key=lambda: "k")(plain)
    protected(first)
    assert protected(first) == "ran"
    with pytest.raises(KeyReused):
        protected(other)


def test_order_of_names_and_way_of_passing_do_not_count(once: OnceKey) -> None:
    protected = once.function("charge", key=lambda: "k")(plain)
    protected({"a": 1, "b": 2}, 5)
    assert protected(amount=5, order={"b": 2, "a": 1}) == "ran"


@pytest.mark.parametrize(("default", "given"), [(500, 500.0), (500.0, 500), ([1, {"a": 0}], [1.0, {"a": -0.0}])])
def test_number_that_equals_the_default_is_the_same_call(once: OnceKey, default: Any, given: Any) -> None:
    """In JSON 500 and 500.0 are one number."""
    ran: list[Any] = []

    @once.function("charge", key="order")
    def charge(order: str, amount: Any = default) -> int:
        ran.append(amount)
        return len(ran)

    assert [charge("a"), charge("a", given), charge("b", given), charge("b")] == [1, 1, 2, 2]
    with pytest.raises(KeyReused):
        charge("a", 501)


def test_changed_default_refuses_a_call_that_passes_it_as_before(once: OnceKey) -> None:
    """As docs/functions.md says it: what equals the default does not count, so the two calls differ."""

    def define(default: str) -> Any:
        def charge(order: str, currency: str = default) -> str:
            return currency

        return once.function("charge", key="order")(charge)

    old, new = define("EUR"), define("USD")
    assert [old("a", "USD"), old("b")] == ["USD", "EUR"]
    with pytest.raises(KeyReused):
        new("a", "USD")
    assert new("b") == "EUR"


def test_parameter_with_a_default_may_be_added_by_a_deploy(once: OnceKey) -> None:
    def define(version: int) -> Any:
        if version == 1:

            def charge(order: str) -> str:
                return "first"
        else:

            def charge(order: str, currency: str = "EUR", *more: int, **rest: int) -> str:  # type: ignore[misc]
                return "second"

        return once.function("charge", key="order")(charge)

    assert define(1)("a") == "first"
    assert define(2)("a") == "first"
    assert define(2)("a", currency="EUR") == "first"
    for call in (partial(define(2), "a", "USD"), partial(define(2), "a", "EUR", 5), partial(define(2), "a", more=5)):
        with pytest.raises(KeyReused):
            call()


@pytest.mark.parametrize(
    "argument",
    [object(), float("nan"), float("inf"), {1: 2}, {1, 2}, [object()], "\ud800", Exception, lambda: 1],
)
def test_argument_without_a_fingerprint_is_refused_before_the_run(once: OnceKey, argument: Any) -> None:
    ran = []
    protected = once.function("charge", key=lambda: "k")(lambda order: ran.append(1))
    with pytest.raises(ConfigurationError, match="argument 'order' cannot be fingerprinted"):
        protected(argument)
    assert not ran


def test_argument_that_contains_itself_is_refused(once: OnceKey) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        once.function("charge", key=lambda: "k")(plain)(loop)


def test_ignored_arguments_do_not_count(once: OnceKey) -> None:
    def charge(order: str, trace: object) -> str:
        return "ran"

    protected = once.function("charge", key="order", ignore=["trace"])(charge)
    assert protected("a", object()) == protected("a", object()) == "ran"


def test_only_chosen_arguments_count(once: OnceKey) -> None:
    def charge(order: str, amount: int, trace: object) -> str:
        return "ran"

    protected = once.function("charge", key="order", arguments=["amount"])(charge)
    assert protected("a", 2**70, object()) == protected("a", 2**70, object()) == "ran"
    with pytest.raises(KeyReused):
        protected("a", 2**70 + 1, object())


def test_function_may_choose_what_counts(once: OnceKey) -> None:
    class Basket:
        def __init__(self, total: int) -> None:
            self.total = total

    def charge(order: str, basket: Basket, trace: str = "") -> str:
        return "ran"

    protected = once.function("charge", key="order", arguments=lambda basket: {"total": basket.total})(charge)
    assert protected("a", Basket(5)) == protected("a", Basket(5), "t") == "ran"
    with pytest.raises(KeyReused):
        protected("a", Basket(6))


def test_key_may_come_in_the_functions_own_kwargs(once: OnceKey) -> None:
    def charge(**options: Any) -> str:
        return "ran"

    protected = once.function("charge", key="order", scope=lambda tenant, **rest: tenant)(charge)
    assert protected(order="a", tenant="t") == "ran"
    with pytest.raises(ConfigurationError, match="the key is None"):
        protected(tenant="t")


def test_wrong_arguments_are_a_type_error_as_without_oncekey(once: OnceKey) -> None:
    protected: Any = once.function("charge", key="order")(plain)
    with pytest.raises(TypeError, match="too many positional"):
        protected(1, 2, 3)
