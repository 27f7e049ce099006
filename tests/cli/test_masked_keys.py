"""A key as the log shows it, masked, is taken by every command that takes a key."""

from __future__ import annotations

import json
import logging
import shlex

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


# -- the scope of a log line -------------------------------------------------------------------------------------------

HOOK = "POST /stripe-ext"


def _said(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """The members of the last line, unquoted as a shell does it."""
    return dict(word.split("=", 1) for word in shlex.split(caplog.messages[-1])[1:])


def test_line_of_a_key_per_endpoint_has_scope_and_endpoint_as_the_commands_take_them(
    table: KeyTable, operate: Run, caplog: pytest.LogCaptureFixture
) -> None:
    record = table.put(SHORT, State.UNKNOWN, scope=f"sender:stripe\x1f{HOOK}", operation=HOOK)
    with caplog.at_level(logging.DEBUG, "oncekey"):
        log_event(Doubted(*about(record), "TimeoutError"))
    assert f" scope=sender:stripe endpoint='{HOOK}' " in f" {caplog.messages[-1]}"
    said = _said(caplog)
    options = ("--scope", said["scope"], "--endpoint", said["endpoint"])
    done = ("--yes", "--why", "asked the sender", *options)
    assert operate("keys", "resolve", said["key_hint"], "--fail", "--status", "402", *done)[0] == 0
    assert operate("keys", "show", said["key_hint"], *options)[0] == 0


@pytest.mark.parametrize("mark", ["\x1f", r"\x1f", r"\u001f"])
def test_scope_is_taken_as_the_app_prints_an_event(table: KeyTable, operate: Run, mark: str) -> None:
    table.put(SHORT, State.UNKNOWN, scope=f"sender:stripe\x1f{HOOK}", operation=HOOK)
    assert operate("keys", "show", SHORT, "--scope", f"sender:stripe{mark}{HOOK}")[0] == 0


def test_tenant_alone_finds_the_mask_of_a_key_per_endpoint(table: KeyTable, operate: Run) -> None:
    table.put(SHORT, State.UNKNOWN, scope=f"acme\x1f{HOOK}", operation=HOOK)
    for other in ("acm", "acme2", f"acme2\x1f{HOOK}", f"acm\x1f{HOOK}"):
        table.put(SHORT, State.COMPLETED, scope=other)
    done = ("--scope", "acme", "--yes", "--why", "asked the sender")
    code, out, error = operate("keys", "resolve", redact(SHORT), "--fail", "--status", "402", *done)
    assert (code, error) == (0, ""), out
    there = table.store.read([(f"acme\x1f{HOOK}", SHORT)])[0]
    assert there is not None
    assert there.state is State.FAILED


# -- a reference alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["acme", f"acme\x1f{HOOK}"])
@pytest.mark.parametrize("state", [State.UNKNOWN, State.COMPLETED])
def test_reference_alone_finds_its_key_in_any_scope(table: KeyTable, operate: Run, scope: str, state: State) -> None:
    table.put("order-7730-9c1e", State.UNKNOWN, scope="zeta")
    table.put(KEY, state, scope=scope)
    code, out, error = operate("keys", "show", redact(KEY), "--json")
    assert (code, error) == (0, "")
    found = json.loads(out)["record"]
    assert (found["key"], found["state"]) == (redact(KEY), state)


def test_reference_of_several_tenants_lists_a_command_for_each(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.UNKNOWN, scope="acme & sons")
    table.put(KEY, State.COMPLETED, scope=f"zeta\x1f{HOOK}")
    code, out, error = operate("keys", "show", redact(KEY))
    assert (code, out) == (1, "")
    assert f"2 keys are masked as {redact(KEY)}" in error
    commands = [line.strip().split("  ")[0] for line in error.splitlines()[1:]]
    states = [json.loads(operate(*shlex.split(each)[1:], "--json")[1])["record"]["state"] for each in commands]
    assert states == ["unknown", "completed"]


def test_command_that_changes_a_key_does_not_look_in_other_tenants(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.UNKNOWN)
    code, out, error = operate("keys", "resolve", redact(KEY), "--refute", "--yes", "--why", "a guess")
    assert (code, out) == (1, "")
    assert f"`{shlex.join(['oncekey', 'keys', 'show', redact(KEY)])}`" in error


def test_reference_of_no_key_says_what_was_read(table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        table.put(KEY + str(number), State.COMPLETED)
    code, _, error = operate("keys", "show", redact(KEY))
    assert code == 1
    assert f"no key of any scope is masked as {redact(KEY)}" in error
    assert "were read" not in error
    monkeypatch.setattr(masks, "LOOKED", 2)
    monkeypatch.setattr(masks, "_PAGE", 1)
    assert "only the first 2 keys were read" in operate("keys", "show", redact(KEY))[2]
