"""What of each value is encrypted, and for which row and column. The only place that knows.

==============================================  ==================  ======================  ==========================
value                                           row                 column                  stored as
==============================================  ==================  ======================  ==========================
a response, with its status and headers         (scope, key)        ``response``            the envelope in
                                                                                            ``response_body``
an error of a key or a job, one in a job's      (scope, key)        ``error``               text: a job's error can
history                                                                                     become its key's
a step's result, and the kept request           (scope, key)        ``result:`` and the     text
                                                                    step's name
an operator's reason                            (scope, key), or    ``why``                 text: a store may put
                                                ``LOSS``                                    words before it
a job's payload                                 (job's id,)         ``payload``             text
==============================================  ==================  ======================  ==========================

All else stays readable, because a store looks it up: scopes, keys, operations, names of steps and tasks, downstream
keys, ids of providers, owners, states and times. ``NO_RESOLVER`` stays, too: health checks count it.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import orjson

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.health import NO_RESOLVER
from oncekey.core.jobs import Conclusion, Job, NewJob
from oncekey.core.record import Record, StoredResponse
from oncekey.core.sealed import (
    MARK,
    SEALED_RESPONSE,
    SEALED_TEXT,
    as_text,
    envelope_in,
    is_sealed,
    is_sealed_text,
    key_id_of,
    not_opened,
)
from oncekey.core.steps import Step
from oncekey.core.swaps import End, Swap
from oncekey.encryption.envelope import Row
from oncekey.encryption.keyring import Keyring
from oncekey.errors import StoreError

RESPONSE, ERROR, WHY, PAYLOAD = "response", "error", "why", "payload"
LOSS: Row = ("accept_loss",)
"""The row of the reason for which an operator accepted a loss: it is about the store, and not about a key."""

_LENGTH = struct.Struct(">I")


def result_column(step_name: str) -> str:
    return f"result:{step_name}"


class Values:
    """Seals values before a store gets them, and opens what it returns.

    A keyring that does not encrypt seals nothing: the three pieces ``sealed_text``, ``sealed_json`` and
    ``sealed_response`` return what they got, and all other methods are made of them.
    """

    __slots__ = ("keyring",)

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring

    # -- pieces ----------------------------------------------------------------------------------------------------

    def sealed_text(self, text: str, row: Row, column: str) -> str:
        if not self.keyring.encrypts:
            return text
        return as_text(self.keyring.seal(text.encode("utf-8", "surrogatepass"), row, column))

    def opened_text(self, text: str, row: Row, column: str) -> str:
        """The text; one that does not open is replaced by a sentence. A text from before encryption stays as it is."""
        envelope = envelope_in(text)
        if envelope is None:
            return text
        content = self.keyring.open(envelope, row, column)
        if content is not None:
            return content.decode("utf-8", "surrogatepass")
        lost = key_id_of(envelope) not in self.keyring.ids
        return not_opened(
            envelope, "which is not in the keyring" if lost else "and it does not belong here, or was changed"
        )

    def sealed_json(self, content: bytes, row: Row, column: str) -> bytes:
        if not self.keyring.encrypts:
            return content
        return as_text(self.keyring.seal(content, row, column)).encode()

    def opened_json(self, content: bytes, row: Row, column: str) -> bytes:
        """The JSON. If it does not open it stays sealed, and ``core.sealed.is_sealed`` tells its reader."""
        envelope = envelope_in(content.decode("ascii", "replace")) if is_sealed(content) else None
        opened = None if envelope is None else self.keyring.open(envelope, row, column)
        return content if opened is None else opened

    def sealed_response(self, response: StoredResponse, row: Row) -> StoredResponse:
        """One envelope of all of it. The status is also outside, so that a tombstone has it when the key is lost."""
        if not self.keyring.encrypts:
            return response
        body = response.body
        try:
            head = orjson.dumps((response.status, response.headers, response.schema_version, body is not None))
        except TypeError as error:
            raise StoreError("a response has a header that cannot be stored") from error
        content = b"".join((_LENGTH.pack(len(head)), head, body or b""))
        return StoredResponse(response.status, (), self.keyring.seal(content, row, RESPONSE), SEALED_RESPONSE)

    def opened_response(self, response: StoredResponse, row: Row) -> StoredResponse:
        """The response. One that does not open is a tombstone; one from before encryption stays as it is."""
        if response.schema_version != SEALED_RESPONSE:
            return response
        content = self.keyring.open(response.body or b"", row, RESPONSE)
        if content is None:
            return StoredResponse(response.status, (), None, SEALED_RESPONSE)
        return response_in(content)

    # -- keys --------------------------------------------------------------------------------------------------------

    def sealed_error(self, error: str | None, row: Row) -> str | None:
        """An error that did not open, and is written back, is stored as it was."""
        if error is None or error == NO_RESOLVER or is_sealed_text(error):
            return error
        return self.sealed_text(error, row, ERROR)

    def opened_error(self, error: str, row: Row) -> str:
        """The error of a key. If it does not open it stays sealed: a move of the row writes it back as it was."""
        envelope = envelope_in(error)
        content = None if envelope is None else self.keyring.open(envelope, row, ERROR)
        return error if content is None else content.decode("utf-8", "surrogatepass")

    def sealed_swap(self, change: Swap) -> Swap:
        response, error, step, audit = change.response, change.last_error, change.step, change.audit
        if response is None and error is None and step is None and audit is None:
            return change
        row = (change.scope, change.key)
        return replace(
            change,
            response=None if response is None else self.sealed_response(response, row),
            last_error=self.sealed_error(error, row),
            step=None if step is None else self.sealed_step(step, row),
            audit=None if audit is None else self.sealed_audit(audit, row),
        )

    def sealed_end(self, end: End | Swap) -> End | Swap:
        """The end of an attempt, as an event loop writes it."""
        if isinstance(end, Swap):
            return self.sealed_swap(end)
        row = (end.scope, end.key)
        error = self.sealed_error(end.last_error, row)
        return End(end.scope, end.key, end.owner, self.sealed_response(end.response, row), end.of, end.to_state, error)

    def opened_record(self, record: Record) -> Record:
        """A copy, if anything is sealed: the store may keep the record that it returned."""
        response, error = record.response, record.last_error
        if response is not None and response.schema_version == SEALED_RESPONSE:
            response = self.opened_response(response, (record.scope, record.key))
        elif error is None or not error.startswith(MARK):
            return record
        if error is not None:
            error = self.opened_error(error, (record.scope, record.key))
        return with_contents(record, response, error)

    def sealed_step(self, step: Step, row: Row) -> Step:
        if step.result is None or is_sealed(step.result):  # a result that did not open is written back as it was
            return step
        return replace(step, result=self.sealed_json(step.result, row, result_column(step.name)))

    def opened_step(self, step: Step, row: Row) -> Step:
        if step.result is None or not is_sealed(step.result):
            return step
        return replace(step, result=self.opened_json(step.result, row, result_column(step.name)))

    def sealed_audit(self, audit: Audit, row: Row) -> Audit:
        return Audit(audit.who, self.sealed_text(audit.why, row, WHY))

    def opened_line(self, line: AuditLine) -> AuditLine:
        if MARK not in line.why:
            return line
        row = LOSS if line.event == LOSS[0] else (line.scope, line.key)
        why = SEALED_TEXT.sub(lambda found: self.opened_text(found[0], row, WHY), line.why)
        return replace(line, why=why)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def sealed_job(self, job: NewJob) -> NewJob:
        return replace(job, payload=self.sealed_json(job.payload, (job.id,), PAYLOAD))

    def sealed_conclusion(self, conclusion: Conclusion, row: Row) -> Conclusion:
        """``row``: the key of the job."""
        response = conclusion.response
        return replace(
            conclusion,
            response=None if response is None else self.sealed_response(response, row),
            error=self.sealed_error(conclusion.error, row),
        )

    def opened_job(self, job: Job) -> Job:
        row = (job.scope, job.key)
        error = job.last_error
        return replace(
            job,
            payload=self.opened_json(job.payload, (job.id,), PAYLOAD),
            last_error=None if error is None else self.opened_text(error, row, ERROR),
            history=self.opened_history(job.history, row),
        )

    def opened_history(self, history: bytes, row: Row) -> bytes:
        """The errors of attempts. The store adds each to a list of JSON, so only the errors themselves are sealed."""
        if MARK.encode() not in history:
            return history
        entries = orjson.loads(history)
        return orjson.dumps([{**entry, "error": self.opened_text(entry["error"], row, ERROR)} for entry in entries])


def response_in(content: bytes) -> StoredResponse:
    """The response that an opened envelope holds."""
    start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    status, headers, version, has_body = orjson.loads(content[_LENGTH.size : start])
    pairs = tuple([(name, text) for name, text in headers])
    return StoredResponse(status, pairs, content[start:] if has_body else None, version)


def with_contents(record: Record, response: StoredResponse | None, error: str | None) -> Record:
    """The record with another response and error. Written out: ``replace`` takes four times as long."""
    return Record(
        record.scope, record.key, record.operation, record.fingerprint, record.fingerprint_version, record.effects,
        record.state, record.attempt, record.owner, record.lease_until, record.recovery_point, response, error,
        record.reconcile_at, record.reconcile_tries, record.created_at, record.finished_at, record.retention_seconds,
        record.expires_at, record.now, record.fingerprint_recipe, record.quarantine_seconds,
    )  # fmt: skip
