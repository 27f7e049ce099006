"""What a retry would get now. The same code decides it as for a real request, but the key is not changed."""

from __future__ import annotations

import json

from oncekey.core.by_operation import delivered_again
from oncekey.core.decision import Claim, Replay, Unknown, Unreadable, decide
from oncekey.core.policy import Policy
from oncekey.core.problems import ProfileName
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Event
from oncekey.core.values import value
from oncekey.web.responses import answer_to


@value
class Outlook:
    """What an identical retry of the first request gets."""

    runs: bool
    """The handler is called."""
    status: int | None
    """None: the handler decides."""
    problem: str | None
    """The type of the problem document, if the answer is one."""
    words: str


class _Voice:
    """The default profile. An app may have another, with other texts of the same meaning."""

    profile: ProfileName = "ietf"
    docs_url = None
    status_url = None


def outlook(record: Record | None) -> Outlook:
    if record is None:
        return Outlook(True, None, None, "it runs, as a new request: there is no such key")
    decision = decide(record, _same_request(record))
    if isinstance(decision, Claim):
        match decision.event:
            case Event.RESERVE:
                return Outlook(True, None, None, "it runs, as a new request: the key has expired")
            case Event.DOUBT:
                decision = Unknown(record)  # a real request would make the key unknown first
            case _:
                then = f", {again}" if (again := delivered_again(record.operation)) else ""
                return Outlook(True, None, None, f"it runs, as attempt {record.attempt + 1}{_resuming(record)}{then}")
    if isinstance(decision, Unreadable) and record.response is not None:  # this command has no keyring; the app has one
        return Outlook(False, record.response.status, None, "the stored response, which is encrypted")
    answer = answer_to(decision, Policy(), _Voice())
    if isinstance(decision, Replay):
        kept = record.response is not None and record.response.replayable
        words = f"the stored response, {len(answer.body):,} bytes" if kept else "a note: the body was not kept"
        return Outlook(False, answer.status, None, words)
    document = json.loads(answer.body)
    return Outlook(False, answer.status, document.get("type"), str(document["title"]))


def _same_request(record: Record) -> Reservation:
    return Reservation(
        *(record.scope, record.key, record.operation, record.fingerprint, record.fingerprint_version),
        *(record.effects, "", 1.0, record.retention_seconds, record.fingerprint_recipe),
    )


def _resuming(record: Record) -> str:
    return f", and goes on after '{record.recovery_point}'" if record.recovery_point else ""
