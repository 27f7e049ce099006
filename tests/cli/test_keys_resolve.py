"""``oncekey keys resolve`` and ``forget``: what is done, what is refused, and what the audit then says."""

from __future__ import annotations

import getpass
import json
import re
import shlex
from pathlib import Path

import psycopg
import pytest

from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.record import StoredResponse
from oncekey.core.responses import MAX_RESPONSE_BYTES
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.errors import MoveRefused
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import LEASE, RESPONSE, KeyTable, Run

KEY = "order-1-of-today"
RESOLVE = ("keys", "resolve", KEY, "--scope", "acme")
FORGET = ("keys", "forget", KEY, "--scope", "acme")
SURE = ("--yes", "--who", "ann", "--why", "the provider says so")
PAID = ("--confirm", "--status", "201", "--body", '{"id": "pay_1"}')


def test_confirm_completes_the_key_with_the_given_bytes(table: KeyTable, operate: Run) -> None:
    """The key is completed with the very bytes that were given, and the audit says who, what and why."""
    table.put(KEY, State.UNKNOWN)
    code, out, error = operate(*RESOLVE, *PAID, "--header", "Location: /payments/pay_1", *SURE)
    assert (code, error) == (0, "")
    assert out == f"key {redact(KEY)}: unknown -> completed; in the audit as ann: the provider says so\n"
    record = table.there(KEY)
    assert record is not None
    assert record.state is State.COMPLETED
    headers = (("location", "/payments/pay_1"), ("content-type", "application/json"))
    assert record.response == StoredResponse(201, headers, b'{"id": "pay_1"}')
    assert table.audit(KEY) == [("ann", "confirm", "unknown", "completed", "the provider says so")]
    now = json.loads(operate("keys", "show", KEY, "--scope", "acme", "--json")[1])["now"]
    assert (now["runs"], now["status"]) == (False, 201)


def test_fail_makes_the_key_failed(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.UNKNOWN)
    code, out, _ = operate(*RESOLVE, "--fail", "--status", "402", "--json", *SURE)
    told = json.loads(out)
    assert (code, told["before"], told["after"], told["response"]["status"]) == (0, "unknown", "failed", 402)
    record = table.there(KEY)
    assert record is not None
    assert (record.state, record.response) == (State.FAILED, StoredResponse(402, (), b""))
    assert table.audit(KEY) == [("ann", "give_up", "unknown", "failed", "the provider says so")]


def test_refute_after_the_quarantine_makes_the_key_retryable(table: KeyTable, operate: Run) -> None:
    """After the quarantine, which counts from the doubt: the next retry runs it."""
    table.put(KEY, State.UNKNOWN, age=301)
    assert operate(*RESOLVE, "--refute", *SURE)[0] == 0
    record = table.there(KEY)
    assert record is not None
    assert record.state is State.FAILED_RETRYABLE
    assert table.audit(KEY) == [("ann", "refute", "unknown", "failed_retryable", "the provider says so")]


def test_refute_before_the_quarantine_is_over_changes_nothing(table: KeyTable, operate: Run) -> None:
    """What was sent may be on its way: nothing is changed, and it says for how long that is so."""
    table.put(KEY, State.UNKNOWN, age=100)
    before = table.there(KEY)
    code, out, error = operate(*RESOLVE, "--refute", *SURE)
    assert (code, out) == (1, "")
    assert "cannot be refuted for another" in error
    assert "may still be on its way. Wait; or use --confirm, if it has happened" in error
    code, _, error = operate(*RESOLVE, "--refute", "--quarantine", "1d", *SURE)
    assert code == 1
    assert (table.there(KEY), table.audit(KEY)) == (before, [])
    assert operate(*RESOLVE, "--refute", "--quarantine", "90s", *SURE)[0] == 0
    why = "quarantine cut short from 300 s to 90 s: the provider says so"
    assert table.audit(KEY) == [("ann", "refute", "unknown", "failed_retryable", why)]


def test_quarantine_of_the_route_is_in_the_row(table: KeyTable, operate: Run) -> None:
    """Neither shorter nor longer than the route said, without the app's code."""
    table.put(KEY, State.UNKNOWN, age=100, quarantine=90.0)
    assert operate(*RESOLVE, "--refute", *SURE)[0] == 0
    assert table.audit(KEY) == [("ann", "refute", "unknown", "failed_retryable", "the provider says so")]
    table.put("another-key-of-today", State.UNKNOWN, age=1000, quarantine=3600.0)
    other = ("keys", "resolve", "another-key-of-today", "--scope", "acme", "--refute")
    code, _, error = operate(*other, *SURE)
    assert (code, "--quarantine 0s" in error) == (1, True)


def test_quarantine_that_is_cut_short_is_asked_about_and_audited(table: KeyTable, operate: Run) -> None:
    """The reason stands behind it, cut where it is too long, and so it does not push the fact out of the line."""
    table.put(KEY, State.UNKNOWN, age=1)
    code, _, error = operate(*RESOLVE, "--refute", "--quarantine", "0s", said="they say so\nn\n")
    assert (code, "quarantine cut short from 300 s to 0 s\n" in error, table.audit(KEY)) == (1, True, [])
    code, _, error = operate(*RESOLVE, "--refute", "--quarantine", "0s", "--yes")
    assert (code, "--why" in error) == (2, True)
    assert operate(*RESOLVE, "--refute", "--quarantine", "0s", "--yes", "--why", "because " * 100)[0] == 0
    ((_, _, _, _, why),) = table.audit(KEY)
    assert why.startswith("quarantine cut short from 300 s to 0 s: because because")
    assert len(why) == changes.WHY_CHARS


@pytest.mark.parametrize("state", [State.IN_PROGRESS, State.PENDING, State.COMPLETED, State.FAILED_RETRYABLE])
@pytest.mark.parametrize("how", [PAID, ("--refute",), ("--fail", "--status", "500")])
def test_resolve_refuses_keys_that_are_not_unknown(
    table: KeyTable, operate: Run, state: State, how: tuple[str, ...]
) -> None:
    """Whatever else it is, it says what that means, before any prompt; and nothing is changed."""
    table.put(KEY, state, age=LEASE + 301)
    before = table.there(KEY)
    code, out, error = operate(*RESOLVE, *how)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert f"key {redact(KEY)} is {state}: only an unknown outcome can be" in error
    assert (table.there(KEY), table.audit(KEY)) == (before, [])


def test_resolve_shows_the_change_and_asks_before_it(table: KeyTable, operate: Run) -> None:
    """It shows what will happen, asks for the reason, then for a yes. The operator's name is the login name."""
    table.put(KEY, State.UNKNOWN)
    code, out, error = operate(*RESOLVE, *PAID, said="it is in their ledger\nn\n")
    assert (code, out) == (1, "")
    assert f"key {redact(KEY)}, POST /payments: unknown becomes completed: retries get 201 with 15 bytes" in error
    assert error.endswith("oncekey: nothing was changed\n")
    assert table.audit(KEY) == []
    code, out, error = operate(*RESOLVE, *PAID, "--json", said="it is in their ledger\ny\n")
    assert (code, json.loads(out)["why"]) == (0, "it is in their ledger")
    assert table.audit(KEY) == [(getpass.getuser(), "confirm", "unknown", "completed", "it is in their ledger")]


@pytest.mark.parametrize("command", [(*RESOLVE, *PAID), FORGET])
def test_resolve_without_a_terminal_changes_nothing(table: KeyTable, operate: Run, command: tuple[str, ...]) -> None:
    """Without a terminal nothing is done, unless --yes and --why say so."""
    table.put(KEY, State.UNKNOWN if "resolve" in command else State.COMPLETED)
    before = table.there(KEY)
    assert operate(*command)[0] == 1
    assert operate(*command, "--why", "because", said="")[0] == 1
    for options in (["--yes"], ["--yes", "--why", " "], ["--why", " "]):
        code, _, error = operate(*command, *options)
        assert (code, "--why" in error) == (2, True)
    assert (table.there(KEY), table.audit(KEY)) == (before, [])


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, "one of --confirm"),
        (["--confirm", "--refute"], 2, "one of --confirm"),
        (["--confirm"], 2, "needs --status"),
        (["--fail"], 2, "needs --status"),
        (["--fail", "--status", "201"], 2, "400 to 599"),
        (["--confirm", "--status", "99"], 1, "200 to 599"),
        (["--refute", "--status", "201"], 2, "takes no response"),
        (["--confirm", "--status", "201", "--quarantine", "0s"], 2, "goes with --refute"),
        (["--happened", "charge"], 2, "need --result JSON"),
        (["--correct", "charge"], 2, "need --result JSON"),
        (["--happened", "charge", "--result", "{"], 2, "is not JSON"),
        (["--happened", "charge", "--result", "@no-such-file"], 1, "cannot be read"),
        (["--happened", "charge", "--result", "1", "--status", "201"], 2, "takes no response"),
        (["--not-happened", "charge", "--result", "1"], 2, "go with --happened"),
        (["--refute", "--provider-id", "ch_7"], 2, "go with --happened"),
        (["--refute", "--final"], 2, "goes with --confirm and --fail"),
        (["--happened", "charge", "--not-happened", "charge", "--result", "1"], 2, "one of --confirm"),
        (["--confirm", "--status", "201", "--body", "paid"], 2, "is not JSON"),
        (["--confirm", "--status", "201", "--body", "@no-such-file"], 1, "cannot be read"),
        (["--confirm", "--status", "201", "--header", "Location"], 2, "NAME:VALUE"),
        (["--confirm", "--status", "201", "--header", "Set-Cookie: a=b"], 1, "would go to every client"),
        (["--confirm", "--status", "201", "--header", "X: a\rb"], 1, "line break"),
    ],
)
def test_resolve_refuses_wrong_options(
    table: KeyTable, operate: Run, options: list[str], code: int, words: str
) -> None:
    table.put(KEY, State.UNKNOWN, age=1000)
    before = table.there(KEY)
    ended, out, error = operate(*RESOLVE, *options, *SURE)
    assert (ended, out, words in " ".join(error.replace("│", " ").split())) == (code, "", True)
    assert (table.there(KEY), table.audit(KEY)) == (before, [])


def test_where_a_body_comes_from(table: KeyTable, operate: Run, tmp_path: Path) -> None:
    """A file or standard input, byte for byte; what is not JSON says what it is; what is not kept is refused."""
    file = tmp_path / "answer"
    file.write_bytes(b"\xffpaid\n")
    plain = ("--header", "Content-Type: text/plain", "--confirm", "--status", "200")
    table.put(KEY, State.UNKNOWN)
    assert operate(*RESOLVE, *plain, "--body", f"@{file}", *SURE)[0] == 0
    record = table.there(KEY)
    assert record is not None
    assert record.response == StoredResponse(200, (("content-type", "text/plain"),), b"\xffpaid\n")
    table.put("another-key-of-today", State.UNKNOWN)
    other = ("keys", "resolve", "another-key-of-today", "--scope", "acme")
    file.write_bytes(b"x" * (MAX_RESPONSE_BYTES + 1))
    code, _, error = operate(*other, *plain, "--body", f"@{file}", *SURE)
    assert (code, "more than oncekey keeps" in error) == (1, True)
    assert operate(*other, "--confirm", "--status", "200", "--body", "@-", *SURE, said='{"a":1}')[0] == 0
    record = table.there("another-key-of-today")
    assert record is not None
    assert record.response == StoredResponse(200, (("content-type", "application/json"),), b'{"a":1}')


def test_a_long_reason_is_cut(table: KeyTable, operate: Run) -> None:
    """As other texts in the tables are: a pasted log in an audit is not read."""
    table.put(KEY, State.UNKNOWN)
    assert operate(*RESOLVE, *PAID, "--yes", "--why", "because " * 1000)[0] == 0
    assert [len(why) for *_, why in table.audit(KEY)] == [changes.WHY_CHARS]


def test_resolve_by_a_user_without_a_name_asks_for_who(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have a user without a name: it says what to give, and an audit line always has a name."""

    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(getpass, "getuser", no_name)
    table.put(KEY, State.UNKNOWN)
    code, _, error = operate(*RESOLVE, *PAID, "--yes", "--why", "paid")
    assert (code, "--who NAME" in error, table.audit(KEY)) == (1, True, [])
    assert operate(*RESOLVE, *PAID, *SURE)[0] == 0


def test_resolve_of_a_key_that_changed_meanwhile_changes_nothing(table: KeyTable) -> None:
    """What was decided about one attempt is not done to the next, nor twice."""
    seen = table.put(KEY, State.UNKNOWN, age=1000)
    audit = Audit("ann", "paid")
    changes.refute(table.store, seen, audit)
    with pytest.raises(MoveRefused, match=r"changed before this, and is now failed_retryable"):
        changes.confirm(table.store, seen, RESPONSE, audit)
    assert len(table.audit(KEY)) == 1
    final = table.put("another-key-of-today", State.COMPLETED)
    changes.forget(table.store, final, audit)
    with pytest.raises(MoveRefused, match="was deleted before this change"):
        changes.forget(table.store, final, audit)
    assert len(table.audit("another-key-of-today")) == 1


def test_resolve_of_a_locked_key_says_so(postgres_url: str) -> None:
    """The command does not wait for it: it says so."""
    table = KeyTable(postgres_url)
    seen = table.put(KEY, State.UNKNOWN, age=1000)
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM idempotency_keys FOR UPDATE")
        with pytest.raises(MoveRefused, match="held by a transaction right now"):
            changes.refute(table.store, seen, Audit("ann", "paid"))
    table.close()


# -- forget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
def test_forget_deletes_the_row_and_keeps_the_audit(table: KeyTable, operate: Run, state: State) -> None:
    """The row and its steps are gone, the audit is not."""
    record = table.step(table.reserve(KEY, effects=Effects.PHASED), "charge")
    table.move(record, Event.COMPLETE if state is State.COMPLETED else Event.FAIL, response=RESPONSE)
    code, _, error = operate(*FORGET, "--why", "a wrong answer", said="n\n")
    assert (code, "RUNS the operation again" in error) == (1, True)
    code, out, _ = operate(*FORGET, "--json", *SURE)
    assert (code, json.loads(out)["before"], json.loads(out)["after"]) == (0, state, None)
    assert table.there(KEY) is None
    assert table.audit(KEY) == [("ann", "forget", state, None, "the provider says so")]
    assert operate(*FORGET, *SURE)[0] == 1


@pytest.mark.parametrize("state", [State.IN_PROGRESS, State.PENDING, State.FAILED_RETRYABLE, State.UNKNOWN])
def test_forget_refuses_keys_that_are_not_final(table: KeyTable, operate: Run, state: State) -> None:
    table.put(KEY, state, age=1000)
    code, out, error = operate(*FORGET, *SURE)
    assert (code, out) == (1, "")
    assert f"is {state}: only a final key can be forgotten" in error
    assert table.there(KEY) is not None
    assert table.audit(KEY) == []


def test_the_reconciler_and_an_operator_leave_the_same_trail(table: KeyTable) -> None:
    """Both in one history, newest first."""
    record = table.dead_key(KEY)
    line = Audit("reconciler", "asked 1 times")
    table.move(record, Event.POSTPONE, Actor.RECONCILER, audit=line)
    changes.confirm(table.store, table.key(record), RESPONSE, Audit("ann", "paid"))
    assert [who for who, *_ in table.audit(KEY)] == ["ann", "reconciler"]


def test_deferred_request_is_not_refuted_and_its_job_is_named(table: KeyTable, operate: Run) -> None:
    """Refused before the operator is asked: its rows are committed, and only its job may run again."""
    job = table.dead_job("charge", of=table.put(KEY, State.PENDING))
    before = table.there(KEY)
    for how in (("--refute", "--quarantine", "0s"), ("--not-happened", "charge")):
        code, out, error = operate(*RESOLVE, *how)
        assert (code, out, table.there(KEY), table.audit(KEY)) == (1, "", before, [])
        assert "nothing was changed: the request itself is done: it was answered 202" in error
        assert f"`oncekey dead-letters retry {job} --why TEXT`" in error
    shown = operate("keys", "show", KEY, "--scope", "acme")[1]
    assert f"job {job}, dead: `oncekey dead-letters retry {job} --why TEXT`, or `oncekey keys resolve " in shown
    (confirm,) = re.findall(r"or `oncekey (keys resolve .*?)` \(or --fail", shown)
    words = [word.replace("JSON", "{}") for word in shlex.split(confirm)]
    assert operate(*words, said="n\n")[2].endswith("oncekey: nothing was changed\n")
    assert "it can be refuted" not in shown
    assert json.loads(operate("keys", "show", KEY, "--scope", "acme", "--json")[1])["deferred_to"] == job
    assert operate(*RESOLVE, *PAID, *SURE)[0] == 0


def test_refuted_message_is_said_to_need_a_delivery(table: KeyTable, operate: Run) -> None:
    """Its broker has forgotten a message that was parked, so no retry comes by itself."""
    table.put(KEY, State.UNKNOWN, age=301, operation="message payments/billing")
    code, out, _ = operate(*RESOLVE, "--refute", *SURE)
    assert code == 0
    again = "when the message is delivered again. A parked message was acknowledged"
    assert f"it runs {again}" in out
    assert "move its copy back to payments/billing (docs/consumers.md" in out
    shown = operate("keys", "show", KEY, "--scope", "acme")[1]
    assert f"the same request gets now: it runs, as attempt 2, {again}" in shown
