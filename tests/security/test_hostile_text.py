"""Text of a client does not make a pattern run for long: each of these took seconds or hours once."""

from __future__ import annotations

import time

import pytest

from oncekey.engine.transactions.adapters.mysql import commits_by_itself
from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes
from oncekey.telemetry.redaction import describe

LENGTH = 300_000
UNITS = ("a", "'", '"', '"\\', "'a", "=(", "a:", "; ", ";", ";/*", ";--\n", "/*", " ", ";#\n", "--\n", "rollback ")


def described(text: str) -> str:
    return describe(ValueError(text))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("function", [ends_transaction, may_end_transaction, writes, commits_by_itself, described])
def test_hostile_text_is_read_in_time(function: object, unit: str) -> None:
    text = "INSERT INTO notes VALUES ('" + unit * (LENGTH // len(unit)) + "x"
    for each in (text, text[27:]):
        begun = time.process_time()
        function(each)  # type: ignore[operator]
        assert time.process_time() - begun < 2.0


@pytest.mark.parametrize("quote", ["'", '"', "=("])
def test_value_in_a_message_that_is_cut_is_not_shown(quote: str) -> None:
    """Its end is not in the part that is read."""
    said = describe(ValueError(f"refused {quote}{'secret ' * 1000}"))
    assert said == "ValueError: refused …"
