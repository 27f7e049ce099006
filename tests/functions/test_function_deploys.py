"""``@once.function``: a deploy changes which arguments count, while callers still retry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, KeyReused, OnceKey


def first(order: str, cents: int, note: Any = None) -> str:
    return "first"


def later(order: str, cents: int, note: Any = None) -> str:
    return "later"


def with_one_more(order: str, cents: int, note: Any = None, currency: str = "EUR") -> str:
    return "later"


def declared(once: OnceKey, function: Callable[..., str] = later, **options: Any) -> Callable[..., str]:
    """The function as one deploy declares it: in a process of its own, on the same store."""
    deployed = OnceKey(once.store, scope=SINGLE_TENANT)
    made: Callable[..., str] = deployed.function("charge", key="order", effects="repeatable", **options)(function)
    return made


DECLARATIONS: list[dict[str, Any]] = [
    {},
    {"ignore": ["note"]},
    {"ignore": ["cents"]},
    {"arguments": ["cents"]},
    {"arguments": ["note", "cents"]},
]


@pytest.mark.parametrize("then", DECLARATIONS)
@pytest.mark.parametrize("now", DECLARATIONS)
def test_retry_is_compared_by_what_counted_for_the_first_call(
    memory: OnceKey, then: dict[str, Any], now: dict[str, Any]
) -> None:
    declared(memory, first, **then)("a", 5, "x")
    charge = declared(memory, **now)
    counted = {"cents", "note"} - set(then.get("ignore", ()))
    counted &= set(then.get("arguments", counted))
    assert charge("a", 5, "x") == "first"
    for name, arguments in {"cents": ("a", 6, "x"), "note": ("a", 5, "y")}.items():
        if name in counted:
            with pytest.raises(KeyReused):
                charge(*arguments)
        else:
            assert charge(*arguments) == "first"


def test_row_of_a_real_store_keeps_what_counted(once: OnceKey) -> None:
    declared(once, first, ignore=["note"])("a", 5, "x")
    assert declared(once)("a", 5, "y") == "first"
    with pytest.raises(KeyReused):
        declared(once)("a", 6, "x")


@pytest.mark.parametrize("then", DECLARATIONS)
def test_argument_of_a_new_parameter_counts_unless_the_others_were_named(memory: OnceKey, then: dict[str, Any]) -> None:
    declared(memory, first, **then)("a", 5, "x")
    charge = declared(memory, with_one_more)
    assert charge("a", 5, "x") == "first"
    if "arguments" in then:
        assert charge("a", 5, "x", "USD") == "first"
    else:
        with pytest.raises(KeyReused):
            charge("a", 5, "x", "USD")


def test_argument_that_counted_and_has_no_form_any_more_is_another_one(memory: OnceKey) -> None:
    declared(memory, first)("a", 5, "x")
    with pytest.raises(KeyReused):
        declared(memory, ignore=["note"])("a", 5, object())


def test_renamed_parameter_can_be_compared_under_its_old_name(memory: OnceKey) -> None:
    def renamed(order: str, amount: int, note: Any = None) -> str:
        return "later"

    declared(memory, first)("a", 5)
    with pytest.raises(KeyReused, match="renamed a parameter"):
        declared(memory, renamed)("a", 5)
    assert declared(memory, renamed, arguments=lambda amount: {"cents": amount})("a", 5) == "first"
