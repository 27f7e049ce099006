"""A key as the log shows it, masked, is taken by every command that takes a key."""

from __future__ import annotations

import json
import logging

import pytest

from oncekey.admin import masks
from oncekey.admin.masks import whole_key
from oncekey.core.states import State
from oncekey.errors import KeyNotFound, OperatorError
from oncekey.telemetry.emitter import log_event
from oncekey.telemetry.events import Doubted, about
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run

KEY, SHORT = "order-7731-9c1e", "o-1"


@pytest.mark.parametrize("key", [KEY, SHORT])
def test_masked_key_is_shown_as_the_whole_key_is(table: KeyTable, operate: Run, key: str) -> None:
    for other in ("order-7731-9c1f", "order-7730-9c1e", "zzzz-0001-0002", "o-2"):
        table.put(other, State.COMPLETED)
    table.put(key, State.UNKNOWN)
    table.put(key, State.COMPLETED, scope="zeta")
    whole = operate("keys", "show", key, "--scope", "acme", "--json")
    masked = operate("keys", "show", redact(key), "--scope", "acme", "--json")
    assert whole[0] == masked[0] == 0
    assert json.loads(masked[1])["record"]["state"] == "unknown"
    assert json.loads(masked[1])["record"]["key"] == json.loads(whole[1])["record"]["key"] == redact(key)


def test_mask_of_a_log_line_settles_that_key(table: KeyTable, operate: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The line is read as an operator reads it: scope and key are copied from it."""
    record = table.put(SHORT, State.UNKNOWN)
    table.put(KEY, State.UNKNOWN)
    with caplog.at_level(logging.DEBUG, "oncekey"):
        log_event(Doubted(*about(record), "TimeoutError"))
    said = dict(word.split("=", 1) for word in caplog.messages[0].split()[1:3])
    done = ("--yes", "--why", "asked the provider", "--scope", said["scope"])
    code, out, error = operate("keys", "resolve", said["key_hint"], "--fail", "--status", "402", *done)
    assert (code, error, redact(SHORT) in out) == (0, "", True)
    assert operate("keys", "forget", said["key_hint"], *done)[0] == 0
    assert table.there(SHORT) is None
    there = table.there(KEY)
    assert there is not None
    assert there.state is State.UNKNOWN


def test_mask_of_a_dead_letter_is_taken_with_its_scope(table: KeyTable, operate: Run) -> None:
    table.dead_key(KEY)
    assert operate("dead-letters", "show", redact(KEY), "--scope", "acme")[0] == 0
    code, out, _ = operate("dead-letters", "retry", redact(KEY), "--scope", "acme", "--yes", "--why", "again")
    assert (code, redact(KEY) in out) == (0, True)
    there = table.there(KEY)
    assert there is not None
    assert there.reconcile_at is not None


def test_several_keys_with_one_mask_are_listed_and_none_is_changed(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight digits of a hash can be made to collide, so the operator chooses."""
    monkeypatch.setattr(masks, "redact", lambda key: "orde~00000000")
    table.put("order-1-of-today", State.UNKNOWN)
    table.put("order-2-of-today", State.COMPLETED)
    code, out, error = operate(
        *("keys", "resolve", "orde~00000000", "--refute", "--scope", "acme", "--yes", "--why", "guess")
    )
    assert (code, out) == (1, "")
    assert "2 keys of this scope are masked as orde~00000000" in error
    assert "--reveal` shows them" in error
    assert "order-1-of-today" not in error
    assert [line.split("  ")[1:3] for line in error.splitlines()[1:]] == [
        ["POST /payments", "unknown"],
        ["POST /payments", "completed"],
    ]
    _, _, revealed = operate("keys", "show", "orde~00000000", "--scope", "acme", "--reveal")
    assert "order-1-of-today" in revealed
    assert "order-2-of-today" in revealed


def test_mask_of_no_key_is_not_found_with_a_hint(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.COMPLETED)
    for given, scope in ((redact(KEY), "zeta"), ("orde~00000000", "acme"), ("~00000000", "acme")):
        code, out, error = operate("keys", "show", given, "--scope", scope)
        assert (code, out) == (1, "")
        assert f"no key of this scope is masked as {given}: give --scope" in error


def test_key_that_looks_like_a_mask_is_the_key(table: KeyTable) -> None:
    table.put("~00000000", State.COMPLETED)
    assert whole_key(table.store, "acme", "~00000000") == "~00000000"
    assert whole_key(table.store, "acme", "not-a-mask") == "not-a-mask"


def test_search_is_bounded_and_reads_unknown_keys_first(table: KeyTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "LOOKED", 6)
    monkeypatch.setattr(masks, "_PAGE", 4)
    for number in range(10):
        table.put(f"order-{number}-of-today", State.COMPLETED)
    table.put("order-9-of-yesterday", State.UNKNOWN)
    table.put("zebra-1-of-today", State.COMPLETED)
    assert whole_key(table.store, "acme", redact("order-9-of-yesterday")) == "order-9-of-yesterday"
    assert whole_key(table.store, "acme", redact("order-5-of-today")) == "order-5-of-today"
    assert whole_key(table.store, "acme", redact("zebra-1-of-today")) == "zebra-1-of-today"  # its letters are a range
    with pytest.raises(KeyNotFound, match="only the first 6 keys of the scope were read"):
        whole_key(table.store, "acme", redact("order-8-of-today"))
    assert issubclass(KeyNotFound, OperatorError)
