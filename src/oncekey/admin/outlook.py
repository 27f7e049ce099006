"""What a retry would get now. The same code decides it as for a real request, but the key is not changed.

It is what a process with the keyring of this command answers. A command without a keyring cannot speak for the app
where the row is encrypted, since the app has one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from oncekey.admin.encryption import SET_IT
from oncekey.core.by_operation import delivered_again
from oncekey.core.decision import Claim, Replay, Unknown, Unreadable, decide_retry
from oncekey.core.fingerprint import KEY_STEP, UnderKey
from oncekey.core.policy import Policy
from oncekey.core.problems import Answer, ProfileName
from oncekey.core.record import Record
from oncekey.core.sealed import SEALED_RESPONSE, is_sealed, not_readable
from oncekey.core.states import Event
from oncekey.core.steps import Step
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


UNREAD_STEP = 503
"""The status of an attempt that cannot read the result of an earlier step (``engine/sealed_steps.py``)."""
NO_KEY = "it runs, as a new request: there is no such key"
_NOT_TOLD = Outlook(
    *(False, None, None),
    f"this cannot be told without the keyring of the app: a process without it, as this command, answers 503; {SET_IT}",
)


def outlook(
    record: Record, steps: Sequence[Step], under_key: UnderKey | None = None, not_opened: str | None = None
) -> Outlook:
    """``under_key``: of the keyring of this command; None: it has none. ``not_opened``: the words in the place of an
    encrypted response that it cannot open."""
    decision = decide_retry(record, under_key)
    if isinstance(decision, Claim):
        match decision.event:
            case Event.RESERVE:
                return Outlook(True, None, None, "it runs, as a new request: the key has expired")
            case Event.DOUBT:
                decision = Unknown(record)  # a real request would make the key unknown first
            case _:
                return _next_attempt(record, steps, under_key)
    if isinstance(decision, Unreadable) and under_key is None and _is_encrypted(record):
        return _NOT_TOLD
    answer = answer_to(decision, Policy(), _Voice())
    if isinstance(decision, Replay):
        return Outlook(False, answer.status, None, _replayed(record, answer, not_opened))
    document = json.loads(answer.body)
    return Outlook(False, answer.status, document.get("type"), str(document["title"]))


def _is_encrypted(record: Record) -> bool:
    sealed = record.response is not None and record.response.schema_version == SEALED_RESPONSE
    return sealed or record.fingerprint_version >= KEY_STEP


def _next_attempt(record: Record, steps: Sequence[Step], under_key: UnderKey | None) -> Outlook:
    unread = next((step for step in steps if is_sealed(step.result)), None)
    if unread is None:
        then = f", {again}" if (again := delivered_again(record.operation)) else ""
        return Outlook(True, None, None, f"it runs, as attempt {record.attempt + 1}{_resuming(record)}{then}")
    if under_key is None:
        return _NOT_TOLD
    words = not_readable(unread.result or b"", f"the result of step '{unread.name}'")
    return Outlook(False, UNREAD_STEP, None, f"none of its steps runs: {words}")


def _replayed(record: Record, answer: Answer, not_opened: str | None) -> str:
    if record.response is not None and record.response.replayable:
        return f"the stored response, {len(answer.body):,} bytes"
    why = "the body was not kept" if not_opened is None else f"the body cannot be read {not_opened}"
    return f"a note: {why}"


def _resuming(record: Record) -> str:
    return f", and goes on after '{record.recovery_point}'" if record.recovery_point else ""
