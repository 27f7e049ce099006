"""What is encrypted of each value, and that it opens in its own place only: one test for each column."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.health import NO_RESOLVER
from oncekey.core.jobs import Conclusion, Job, JobEnd, JobState, NewJob
from oncekey.core.record import StoredResponse
from oncekey.core.sealed import MARK, SEALED_RESPONSE, is_sealed, shown
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.encryption.values import LOSS, Values
from tests.encryption.rings import ring

ROW, OTHER = ("tenant-1", "key-1"), ("tenant-1", "key-2")
RESPONSE = StoredResponse(
    201, (("content-type", "application/json"), ("x-secret", "in-header")), b'{"secret":"in-body"}'
)
STEP = Step("charge", StepKind.EFFECT, StepState.DONE, False, b'{"secret":"in-step"}', "down-1", "prov-1")
LOST = "(encrypted with key 1, which is not in the keyring)"
FOREIGN = "(encrypted with key 1, and it does not belong here, or was changed)"

values, others = Values(ring(1)), Values(ring(2))


@pytest.mark.parametrize(
    "response",
    [
        RESPONSE,
        replace(RESPONSE, body=b""),
        replace(RESPONSE, body=None),
        replace(RESPONSE, body=bytes(range(256)) * 100),
        replace(RESPONSE, headers=()),
        replace(RESPONSE, headers=(("x-name", "café ü"),)),
        replace(RESPONSE, schema_version=99),
    ],
)
def test_response_comes_back_as_it_was(response: StoredResponse) -> None:
    sealed = values.sealed_response(response, ROW)
    assert (sealed.status, sealed.headers, sealed.schema_version) == (response.status, (), SEALED_RESPONSE)
    assert b"secret" not in (sealed.body or b"")
    assert not sealed.replayable  # a process without the keyring sees a tombstone
    assert values.opened_response(sealed, ROW) == response


def test_response_of_another_row_or_of_a_lost_key_is_a_tombstone() -> None:
    sealed = values.sealed_response(RESPONSE, ROW)
    tombstone = StoredResponse(201, (), None, SEALED_RESPONSE)
    assert values.opened_response(sealed, OTHER) == tombstone
    assert others.opened_response(sealed, ROW) == tombstone
    assert values.opened_response(replace(sealed, body=None), ROW) == tombstone


def test_response_from_before_encryption_stays_as_it_is() -> None:
    assert values.opened_response(RESPONSE, ROW) is RESPONSE


@pytest.mark.parametrize("text", ["card 4242 refused", "", "ü\0\ud800", MARK + "AAAA"])
def test_text_comes_back_as_it_was(text: str) -> None:
    sealed = values.sealed_text(text, ROW, "error")
    assert sealed.startswith(MARK)
    assert sealed.isascii()
    assert text == "" or text not in sealed
    assert values.opened_text(sealed, ROW, "error") == text


def test_text_that_does_not_open_is_a_sentence() -> None:
    sealed = values.sealed_text("secret", ROW, "error")
    assert others.opened_text(sealed, ROW, "error") == LOST
    assert values.opened_text(sealed, OTHER, "error") == FOREIGN
    assert values.opened_text(sealed, ROW, "why") == FOREIGN
    assert values.opened_text(sealed[:43], ROW, "error") == FOREIGN
    assert values.opened_text(MARK + "no base64!", ROW, "error") == "(encrypted, and damaged)"
    assert shown(sealed) == "(encrypted with key 1, which this process does not have)"
    assert shown("plain") == values.opened_text("plain", ROW, "error") == "plain"


def test_error_that_health_checks_count_stays_readable() -> None:
    assert values.sealed_error(NO_RESOLVER, ROW) == NO_RESOLVER
    assert values.sealed_error(None, ROW) is None


def test_step_result_opens_in_its_own_step_only() -> None:
    sealed = values.sealed_step(STEP, ROW)
    assert replace(sealed, result=STEP.result) == STEP
    assert is_sealed(sealed.result)
    assert b"secret" not in (sealed.result or b"")
    assert values.opened_step(sealed, ROW) == STEP
    for unopened in (
        values.opened_step(sealed, OTHER),
        values.opened_step(replace(sealed, name="refund"), ROW),
        others.opened_step(sealed, ROW),
    ):
        assert is_sealed(unopened.result)
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(unopened.result or b"null")


def test_step_without_a_result_or_from_before_encryption_stays_as_it_is() -> None:
    intended = replace(STEP, result=None)
    assert values.sealed_step(intended, ROW) is intended
    assert values.opened_step(STEP, ROW) is STEP


def line(why: str, event: str = "forget", key: str = "key-1") -> AuditLine:
    return AuditLine(1.0, "ann", event, "tenant-1", key, None, "completed", None, why)


def test_reason_opens_in_the_audit_of_its_own_key_only() -> None:
    sealed = values.sealed_audit(Audit("ann", "secret reason"), ROW).why
    assert values.opened_line(line(sealed)).why == "secret reason"
    assert values.opened_line(line(sealed, key="key-2")).why == FOREIGN
    assert others.opened_line(line(sealed)).why == LOST
    assert values.opened_line(line("plain")) == line("plain")


def test_reason_for_an_accepted_loss_opens_behind_the_words_of_the_store() -> None:
    sealed = values.sealed_audit(Audit("ann", "secret reason"), LOSS).why
    assert values.opened_line(line(f"16 of 16: {sealed}", "accept_loss")).why == "16 of 16: secret reason"


NEW = NewJob("job-1", *ROW, "owner", "POST /payments", "send", b'{"secret":"in-job"}', "down-1", None, True)


def job(payload: bytes, error: str | None = None, history: bytes = b"[]", id: str = "job-1") -> Job:
    return Job(
        id=id,
        scope="tenant-1",
        key="key-1",
        key_owner="owner",
        operation="POST /payments",
        task="send",
        payload=payload,
        downstream_key="down-1",
        settles=True,
        state=JobState.READY,
        attempt=0,
        owner=None,
        lease_until=None,
        run_at=0.0,
        provider_id=None,
        last_error=error,
        history=history,
        created_at=0.0,
        finished_at=None,
        now=0.0,
    )


def test_payload_opens_in_its_own_job_only() -> None:
    sealed = values.sealed_job(NEW).payload
    assert is_sealed(sealed)
    assert b"secret" not in sealed
    assert values.opened_job(job(sealed)).payload == NEW.payload
    assert values.opened_job(job(sealed, id="job-2")).payload == sealed
    assert others.opened_job(job(sealed)).payload == sealed
    assert values.opened_job(job(NEW.payload)).payload == NEW.payload


def test_errors_of_a_job_open_in_jobs_of_its_key_only() -> None:
    ended = Conclusion("job-1", "owner", JobEnd.DEAD, error="secret error", response=RESPONSE)
    sealed = values.sealed_conclusion(ended, ROW)
    assert sealed.error is not None
    assert sealed.error.startswith(MARK)
    assert values.opened_response(sealed.response or RESPONSE, ROW) == RESPONSE
    lapsed = {"attempt": 1, "at": 1.5, "error": "the worker's lease ran out"}
    history = orjson.dumps([lapsed, {"attempt": 2, "at": 2.5, "error": sealed.error}])
    opened = values.opened_job(job(b"{}", sealed.error, history))
    assert opened.last_error == "secret error"
    assert orjson.loads(opened.history) == [lapsed, {"attempt": 2, "at": 2.5, "error": "secret error"}]
    moved = values.opened_job(replace(job(b"{}", sealed.error, history), key="key-2"))
    assert moved.last_error == FOREIGN
    assert orjson.loads(moved.history)[1]["error"] == FOREIGN
