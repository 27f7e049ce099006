"""``@once.function``: results, as JSON and by a codec."""

from __future__ import annotations

import json
import pickle
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey import Confirmed, OnceKey, OutcomeUnknown, ResultNotKept
from oncekey.functions import forms
from tests.functions.conftest import Provider


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


def test_result_that_is_too_large_is_the_first_callers_only(once: OnceKey, caplog: pytest.LogCaptureFixture) -> None:
    @once.function("charge", key="order", max_response_bytes=10)
    def charge(order: str) -> str:
        return "x" * 100

    for key in ("a", "b"):
        assert charge(key) == "x" * 100
    with pytest.raises(ResultNotKept):
        charge("a")
    (line,) = [each for each in caplog.messages if "its result is not kept" in each]
    assert line.startswith("charge returned more than 10 bytes (max_response_bytes)")


def test_every_caller_gets_the_result_as_it_was_stored(memory: OnceKey) -> None:
    @memory.function("charge", key="order")
    def charge(order: str) -> object:
        return {"pair": (1, 2), "n": 2**70}

    assert charge("a") == {"pair": [1, 2], "n": 2**70}
    assert charge("a") == {"pair": [1, 2], "n": 2**70}


class Status(Enum):
    PAID = "paid"


VALUES = [
    Decimal("1.10"),
    Decimal("-0E+3"),
    UUID("5c3c0f80-17b1-4c3e-9a5e-5ab5a3b1b1ce"),
    datetime(2026, 11, 17, 22, 10, 0, 5, tzinfo=timezone(timedelta(hours=1))),
    date(2026, 11, 17),
    time(22, 10),
    timedelta(days=-1, microseconds=3),
    b"\x00\xff",
]


def test_money_dates_and_ids_come_back_as_they_were_returned(once: OnceKey, provider: Provider) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> object:
        provider.charge(order)
        return {"values": VALUES, "nested": [{"total": Decimal("9.99")}], "$decimal": 1, "status": Status.PAID}

    wanted = {"values": VALUES, "nested": [{"total": Decimal("9.99")}], "$decimal": 1, "status": "paid"}
    for _ in range(2):
        result = charge("a")
        assert result == wanted
        assert [type(each) for each in result["values"]] == [type(each) for each in VALUES]
        assert str(result["values"][1]) == "-0E+3"
    assert provider.charged == ["a"]


_JSON = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
_OTHERS = (
    st.decimals(allow_nan=False) | st.uuids() | st.datetimes() | st.dates() | st.times() | st.timedeltas() | st.binary()
)
_NAMES = st.text() | st.sampled_from(["$", "$decimal", "$bytes", "$dict", "$other"]) | st.integers() | st.uuids()


@given(st.recursive(_JSON | _OTHERS, lambda inner: st.lists(inner) | st.dictionaries(_NAMES, inner), max_leaves=12))
def test_every_value_with_a_form_is_restored_from_its_json(value: Any) -> None:
    """Also a dict that looks like the form of another value."""
    assert forms.restored(json.loads(json.dumps(forms.plain(value)))) == value


def test_two_names_of_a_dict_never_become_one(memory: OnceKey) -> None:
    class Colour(Enum):
        RED = "red"

    @memory.function("count", key="order")
    def count(order: str, colours: bool) -> Any:
        return {Colour.RED: 1, "red": 2} if colours else {1: "a", "1": "b", UUID(int=7): {2: "c"}}

    kept = {1: "a", "1": "b", UUID(int=7): {2: "c"}}
    assert [count("a", False), count("a", False)] == [kept, kept]
    with pytest.raises(ResultNotKept, match="two names of a dict have one form"):
        count("b", True)
    with pytest.raises(ResultNotKept, match="does not run again"):
        count("b", True)


def test_verdict_of_an_operator_may_have_the_form_of_a_value(once: OnceKey) -> None:
    @once.function("charge", key="order")
    def charge(order: str) -> Decimal:
        raise OutcomeUnknown

    with pytest.raises(OutcomeUnknown):
        charge("a")
    once.ingest_blocking(Confirmed(200, {"$decimal": "1.10"}), key="a", operation="charge")
    assert charge("a") == Decimal("1.10")


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
