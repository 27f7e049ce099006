"""``oncekey dead-letters``: jobs and keys that were given up, taken up again or put away."""

from __future__ import annotations

import json

import pytest

from oncekey.admin import dead_letters
from oncekey.core.jobs import JobState
from oncekey.core.states import Actor, Event, State
from oncekey.stores.api import Duty
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run

KEY = "order-1-of-today"
SURE = ("--yes", "--who", "ann", "--why", "the mail server is back")
WHY = "the mail server is back"


def test_list_shows_dead_jobs_and_dead_keys(table: KeyTable, operate: Run) -> None:
    """Jobs after their last attempt, and unknown outcomes that are asked about no more; nothing else."""
    job_id = table.dead_job(age=7200)
    table.add("send_receipt")
    table.dead_key(KEY, age=3600)
    table.put("order-2-of-today", State.UNKNOWN)
    code, out, error = operate("dead-letters", "list")
    assert (code, error) == (0, "")
    for words in (job_id, "send_receipt", "2 h", "SMTPError: 550 no such user", redact(KEY), "a dead letter"):
        assert words in out
    told = json.loads(operate("dead-letters", "list", "--json")[1])
    assert [job["id"] for job in told["jobs"]] == [job_id]
    assert [key["key"] for key in told["keys"]] == [redact(KEY)]
    for secret in (KEY, "ada@example.com", redact("order-2-of-today")):
        assert secret not in out + json.dumps(told)
    revealed = operate("dead-letters", "list", "--json", "--reveal")[1]
    assert KEY in revealed
    assert "ada@example.com" in revealed


def test_list_without_dead_letters_says_so(table: KeyTable, operate: Run) -> None:
    assert operate("dead-letters", "list") == (0, "no dead letters\n", "")


def test_more_than_are_asked_for(table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All unknown outcomes are looked through, page by page, until there are enough."""
    monkeypatch.setattr(dead_letters, "_PAGE", 2)
    for number in range(5):
        table.put(f"a-key-{number}-of-today", State.UNKNOWN)
        table.dead_key(f"b-key-{number}-of-today")
    for limit, more in ((4, True), (5, False)):
        code, out, _ = operate("dead-letters", "list", "--json", "--reveal", "--limit", str(limit))
        told = json.loads(out)
        assert (code, told["more"]) == (0, more)
        assert [key["key"] for key in told["keys"]] == [f"b-key-{number}-of-today" for number in range(limit)]
    assert "first 4 of a kind" in operate("dead-letters", "list", "--limit", "4")[2]


def test_show_of_a_job_has_its_attempts_and_changes(table: KeyTable, operate: Run) -> None:
    """It shows each attempt with its error, and the operators' changes; the payload only if it is asked for."""
    job_id = table.dead_job()
    code, out, _ = operate("dead-letters", "show", job_id)
    assert code == 0
    for words in (job_id, "dead; tried once", "ATTEMPT", "SMTPError: 550 no such user", "oncekey-down"):
        assert words in out
    assert "ada@example.com" not in out
    assert "ada@example.com" in operate("dead-letters", "show", job_id, "--reveal")[1]
    operate("dead-letters", "retry", job_id, *SURE)
    told = json.loads(operate("dead-letters", "show", job_id, "--json")[1])
    assert (told["state"], told["attempts"][0]["error"], told["payload"]) == (
        *("ready", "SMTPError: 550 no such user"),
        None,
    )
    assert [(line["who"], line["event"], line["job"]) for line in told["history"]] == [("ann", "retry_job", job_id)]
    code, _, error = operate("dead-letters", "show", "no-such-job")
    assert (code, "there is no job no-such-job" in error) == (1, True)


def test_show_of_a_key_equals_keys_show(table: KeyTable, operate: Run) -> None:
    """The same as keys show."""
    table.dead_key(KEY)
    asked = (KEY, "--scope", "acme")
    assert operate("dead-letters", "show", *asked)[:2] == operate("keys", "show", *asked)[:2]
    told = json.loads(operate("dead-letters", "show", *asked, "--json")[1])
    assert told["record"]["dead_letter"] is True


def test_a_job_is_taken_up_again(table: KeyTable, operate: Run) -> None:
    """Its attempts start over, the key that only it made unknown is pending again, and the audit says so."""
    (record,) = table.pending()
    job_id = table.dead_job("pay", of=record)
    assert table.key(record).state is State.UNKNOWN
    code, out, error = operate("dead-letters", "retry", job_id, "--why", WHY, said="n\n")
    assert (code, out, table.get(job_id).state) == (1, "", JobState.DEAD)
    assert "RUN again" in error
    code, out, _ = operate("dead-letters", "retry", job_id, *SURE)
    assert (code, out) == (0, f"job {job_id}: dead letter -> ready; in the audit as ann: {WHY}\n")
    job = table.get(job_id)
    assert (job.state, job.attempt) == (JobState.READY, 0)
    assert table.key(record).state is State.PENDING
    assert table.audit(record.key) == [("ann", "retry_job", "dead", "ready", WHY)]
    code, _, error = operate("dead-letters", "retry", job_id, *SURE)
    assert (code, f"job {job_id} is ready, and no dead letter" in error) == (1, True)
    assert len(table.audit(record.key)) == 1


def test_a_job_whose_key_was_settled_without_it_is_not_run_again(table: KeyTable, operate: Run) -> None:
    """The reconciler found the charge, or the client's retry was allowed: run again, the old job would charge twice."""
    for event, more in ((Event.CONFIRM, {}), (Event.REFUTE, {"quarantine_seconds": 0.0})):
        (record,) = table.pending()
        job_id = table.dead_job("pay", of=record)
        table.age(record, 3600.0)
        table.move(table.key(record), event, Actor.RECONCILER, **more)
        code, _, error = operate("dead-letters", "retry", job_id, *SURE)
        assert (code, "a second run could repeat" in error) == (1, True)
        assert table.get(job_id).state is JobState.DEAD
        assert operate("dead-letters", "discard", job_id, *SURE)[0] == 0


def test_a_job_is_put_away(table: KeyTable, operate: Run) -> None:
    """It is never run; the key that it was to settle stays unknown, and the question says so."""
    (record,) = table.pending()
    job_id = table.dead_job("pay", of=record)
    code, _, error = operate("dead-letters", "discard", job_id, "--why", WHY, said="\n")
    assert (code, "if its key is unknown, settle it with keys resolve" in error, table.get(job_id).state) == (
        1,
        True,
        JobState.DEAD,
    )
    code, out, _ = operate("dead-letters", "discard", job_id, "--json", *SURE)
    assert (code, json.loads(out)["after"]) == (0, "cancelled")
    assert table.get(job_id).state is JobState.CANCELLED
    assert table.key(record).state is State.UNKNOWN
    assert table.audit(record.key) == [("ann", "discard_job", "dead", "cancelled", WHY)]
    for command in ("retry", "discard"):
        code, _, error = operate("dead-letters", command, job_id, *SURE)
        assert (code, "is cancelled, and no dead letter" in error) == (1, True)
        assert operate("dead-letters", command, "no-such-job", *SURE)[0] == 1


def test_a_key_is_asked_about_again(table: KeyTable, operate: Run) -> None:
    """Back on the reconciler's list, with its tries before it."""
    table.dead_key(KEY)
    asked = ("dead-letters", "retry", KEY, "--scope", "acme")
    assert operate(*asked, "--why", WHY, said="n\n")[0] == 1
    code, out, _ = operate(*asked, *SURE)
    assert (code, "on the reconciler's list" in out) == (0, True)
    record = table.there(KEY)
    assert record is not None
    assert (record.state, record.reconcile_tries, record.last_error) == (
        *(State.UNKNOWN, 0),
        "the provider does not know it",
    )
    assert record.reconcile_at is not None
    assert table.audit(KEY) == [("ann", Event.POSTPONE, "unknown", "unknown", WHY)]


def test_unknown_key_that_waits_out_its_pause_is_asked_about_now(table: KeyTable, operate: Run) -> None:
    """Its resolver is mended: the operator does not wait for the rest of an hour."""
    record = table.put(KEY, State.UNKNOWN)
    table.move(record, Event.POSTPONE, Actor.RECONCILER, reconcile_in=3000.0, last_error="the resolver raised KeyError")
    assert table.store.due(Duty.UNKNOWNS, 10) == []
    asked = ("dead-letters", "retry", KEY, "--scope", "acme")
    assert "the reconciler asks about it now" in operate(*asked, "--why", WHY, said="n\n")[2]
    code, out, _ = operate(*asked, *SURE)
    assert (code, f"key {redact(KEY)}: waiting -> on the reconciler's list, due now" in out) == (0, True)
    (due,) = table.store.due(Duty.UNKNOWNS, 10)
    assert (due.reconcile_tries, due.last_error) == (0, "the resolver raised KeyError")
    assert table.audit(KEY) == [("ann", Event.POSTPONE, "unknown", "unknown", WHY)]


def test_half_done_key_that_waits_out_its_pause_goes_on_now(table: KeyTable, operate: Run) -> None:
    table.half_done(KEY)
    assert table.store.due(Duty.RESUMABLE, 10) == []
    assert operate("dead-letters", "retry", KEY, "--scope", "acme", *SURE)[0] == 0
    assert [each.key for each in table.store.due(Duty.RESUMABLE, 10)] == [KEY]


def test_half_done_dead_letter_is_listed_and_goes_on_again(table: KeyTable, operate: Run) -> None:
    """Upkeep tried it for the last time; an operator puts it back on its list, with its tries before it."""
    table.half_done("order-2-of-today")
    dead = table.dead_half_done(KEY)
    code, out, _ = operate("dead-letters", "list", "--json")
    (listed,) = json.loads(out)["keys"]
    assert (code, listed["state"], listed["key"]) == (0, "failed_retryable", redact(KEY))
    assert "half done, resumed 2 times, and no more: a dead letter" in operate("dead-letters", "list")[1]
    assert table.store.counts().dead == 1
    asked = ("dead-letters", "retry", KEY, "--scope", "acme")
    code, out, _ = operate(*asked, *SURE)
    assert (code, "dead letter -> on the resumer's list" in out) == (0, True)
    record = table.there(KEY)
    assert record is not None
    assert (record.state, record.owner, record.reconcile_tries) == (State.FAILED_RETRYABLE, dead.owner, 0)
    assert record.reconcile_at is not None
    assert record.last_error == dead.last_error
    assert table.audit(KEY) == [("ann", Event.POSTPONE, "failed_retryable", "failed_retryable", WHY)]
    assert "no dead letters" in operate("dead-letters", "list")[1]
    assert (
        "half done; its client's retry goes on with it, or upkeep now, if once.resume has a function"
        in operate("keys", "show", KEY, "--scope", "acme")[1]
    )


def test_key_without_steps_is_no_dead_letter(table: KeyTable, operate: Run) -> None:
    table.put(KEY, State.FAILED_RETRYABLE)
    code, _, error = operate("dead-letters", "retry", KEY, "--scope", "acme", *SURE)
    assert (code, "is failed_retryable" in error) == (1, True)


def test_a_key_is_not_put_away(table: KeyTable, operate: Run) -> None:
    """What may have happened does not go away; and what is not unknown has nothing to be asked about."""
    table.dead_key(KEY)
    before = table.there(KEY)
    code, _, error = operate("dead-letters", "discard", KEY, "--scope", "acme", *SURE)
    assert (code, "`oncekey keys resolve`" in error) == (1, True)
    assert (table.there(KEY), table.audit(KEY)) == (before, [])
    table.put("order-2-of-today", State.COMPLETED)
    code, _, error = operate("dead-letters", "retry", "order-2-of-today", "--scope", "acme", *SURE)
    assert (code, "only an unknown outcome or a half-done request can be tried again" in error) == (1, True)
