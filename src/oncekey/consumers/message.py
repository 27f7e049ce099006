"""One delivery of one message: ``once.message``. The block runs once, however often the message is delivered.

It builds on :class:`oncekey.functions.attempt.Attempt`: the message's id is the key, its queue the operation, its body
the fingerprint. Here the end of an attempt becomes a ``Situation``, and by ``table.py`` an ``Outcome`` for the broker.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

import orjson

from oncekey.consumers.table import TABLE, OnUnknown, Outcome, Situation, outcome
from oncekey.core.by_operation import OF_MESSAGES
from oncekey.core.judgment import Move
from oncekey.core.personal_data import Personal
from oncekey.core.policy import Policy
from oncekey.core.record import Record
from oncekey.core.routes import MAX_NAME_LENGTH, Route
from oncekey.core.states import Event, State
from oncekey.engine.flows import Finished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import (
    ConfigurationError,
    InProgress,
    KeyReused,
    MessageNotRun,
    NoOperation,
    OperatorError,
    OutcomeUnknown,
    PersonalKey,
    Refused,
)
from oncekey.functions.attempt import Attempt
from oncekey.functions.refusals import AnswerLost, NotLookedUp
from oncekey.telemetry.redaction import redact
from oncekey.web.unknown_outcomes import show_command

KEPT: Final = timedelta(days=14)
"""How long the key of a message is kept, unless the policy of its queue states a ``ttl``. Amazon SQS keeps messages for
at most 14 days, and Kafka's default is 7. A delivery that comes after its key has expired runs again."""

_ID = re.compile(r"[ -~]{1,255}")
_WRITE_AN_ID: Final = (
    "An id is text of 1 to 255 printable ASCII characters, or a whole number, and no other message has it"
)

_BY_EVENT: Final = {
    Event.COMPLETE: Situation.HANDLED,
    Event.DEFER: Situation.DEFERRED,
    Event.FAIL: Situation.GIVEN_UP,
    Event.DISCARD: Situation.REFUSED,
    Event.RELEASE: Situation.FAILED,
    Event.DOUBT: Situation.UNKNOWN,
}
_BY_STATE: Final = {
    State.COMPLETED: Situation.DUPLICATE,
    State.FAILED: Situation.GIVEN_UP,
    State.PENDING: Situation.DEFERRED,
    State.UNKNOWN: Situation.UNKNOWN,
    State.IN_PROGRESS: Situation.IN_FLIGHT,
}

Body = bytes | bytearray | memoryview | str | dict[str, Any] | list[Any]


class Queue:
    """The settings of one queue. ``Queue(once, "payments").message(id, body)`` is one delivery.

    ``unknown`` and ``max_attempts`` are those of :class:`oncekey.consumers.Consumer`.
    """

    def __init__(
        self,
        once: OnceKey,
        name: str,
        *,
        policy: Policy | None = None,
        unknown: OnUnknown = "park",
        max_attempts: int | None = 10,
    ) -> None:
        if not (type(name) is str and 1 <= len(name) <= MAX_NAME_LENGTH and name.isprintable()):
            raise ConfigurationError(f"the name of a queue has 1 to {MAX_NAME_LENGTH} printable characters")
        check_settings(once, policy, unknown, max_attempts)
        if policy is None:
            policy = replace(once.default_policy, ttl=max(once.default_policy.ttl, KEPT))
        elif not policy.ttl_is_stated:
            policy = replace(policy, ttl=KEPT)
        self.once = once
        self.name = name
        self.unknown: OnUnknown = unknown
        self.max_attempts = max_attempts
        # An id belongs to its queue. A duplicate in flight goes back to the broker, so that it holds up no other.
        self.route = Route(f"{OF_MESSAGES}{name}", replace(policy, key_per="endpoint", in_flight="conflict"))
        once.declarations.policies[self.route.operation] = self.route.policy  # once.ingest(…, operation=…) needs it

    def message(
        self, message_id: object, body: Body, *, scope: str | None = None, content_type: str | None = None
    ) -> Message:
        return Message(self, message_id, body, scope=scope, content_type=content_type)


def check_settings(once: OnceKey, policy: object, unknown: object, max_attempts: object) -> None:
    """ConfigurationError says what to write."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigurationError("policy=…: it takes a Policy, such as Policy(effects='transactional')")
    if unknown not in ("park", "keep"):
        raise ConfigurationError(f"unknown={unknown!r}: it takes 'park' or 'keep'")
    if max_attempts is not None and (type(max_attempts) is not int or max_attempts < 1):
        raise ConfigurationError(f"max_attempts={max_attempts!r}: it takes a whole number from 1, or None")
    once.check_policy(policy)


class Message:
    """One delivery, as ``async with`` or ``with``. Entering raises MessageNotRun if the block must not run."""

    outcome: Outcome | None = None
    """What to tell the broker. None: the block has not ended."""

    def __init__(
        self, queue: Queue, message_id: object, body: Body, *, scope: str | None, content_type: str | None
    ) -> None:
        self.queue = queue
        self.body = body
        self._given_id = message_id
        self._scope = scope
        self._content_type = content_type
        self._attempt: Attempt | None = None

    @property
    def operation(self) -> Operation:
        """The operation of this delivery, as :func:`oncekey.current` in the block: enlist, phase, effect, enqueue."""
        if self._attempt is None or not self._attempt.runs:
            raise NoOperation("this message does not run: its operation exists inside of `with` or `async with`")
        return self._attempt.operation

    @property
    def attempt(self) -> int:
        """1 at the first run, 2 if the message runs again after a failure."""
        return self.operation.attempt

    @property
    def name(self) -> str:
        """For log lines: the masked id and its queue."""
        key = id_text(self._given_id)
        return f"{'a message' if key is None else f'message {redact(key)}'} of {self.queue.name}"

    @property
    def show_command(self) -> str | None:
        """How an operator looks at this message's key. None: the store has no such key, as far as is known."""
        attempt = self._attempt
        if attempt is None or (attempt.record is None and not attempt.runs):
            return None
        return show_command(attempt.wanted.scope, attempt.wanted.key)

    # -- async and blocking

    async def __aenter__(self) -> Self:
        attempt = self._prepared()
        try:
            await attempt.__aenter__()
        except (InProgress, OutcomeUnknown, KeyReused, PersonalKey, OperatorError) as error:
            raise self._not_run(_refused(error, attempt.record), error) from error
        return self._entered(attempt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        attempt = self._running()
        try:
            return await attempt.__aexit__(kind, error, trace)
        finally:
            self._ended(attempt, error)

    def __enter__(self) -> Self:
        attempt = self._prepared()
        try:
            attempt.__enter__()
        except (InProgress, OutcomeUnknown, KeyReused, PersonalKey, OperatorError) as error:
            raise self._not_run(_refused(error, attempt.record), error) from error
        return self._entered(attempt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        attempt = self._running()
        try:
            return attempt.__exit__(kind, error, trace)
        finally:
            self._ended(attempt, error)

    # -- both

    def _prepared(self) -> Attempt:
        if self._attempt is not None or self.outcome is not None:
            raise RuntimeError("this message was entered before: make a new once.message(…) for every delivery")
        queue, policy = self.queue, self.queue.route.policy
        key = id_text(self._given_id)
        if key is None:
            raise self._not_run(Situation.BAD_ID)
        body, content_type = _as_bytes(self.body, self._content_type)
        if len(body) > policy.max_request_bytes:
            raise self._not_run(Situation.TOO_LARGE)
        tenant = self._scope or queue.once.single_tenant
        if tenant is None:
            raise ConfigurationError(
                "a message needs to belong to a tenant, because OnceKey(scope=…) is a function of a request: pass "
                "scope='…' with the message, the same at every delivery"
            )
        self._attempt = Attempt(
            *(queue.once, queue.route),
            tenant=tenant,
            key=key,
            body=body,
            content_type=content_type,
            kind="MESSAGE",
        )
        return self._attempt

    def _entered(self, attempt: Attempt) -> Self:
        if attempt.runs:
            return self
        given_up = attempt.record is not None and attempt.record.state is State.FAILED
        raise self._not_run(Situation.GIVEN_UP if given_up else Situation.DUPLICATE)

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("this message was not entered: write `async with once.message(…)` or `with`")
        return self._attempt

    def _not_run(self, situation: Situation, error: Exception | None = None) -> MessageNotRun:
        detail = ""
        if isinstance(error, PersonalKey):
            detail = f"its id looks like {Personal(error.kind).words}, and ids are kept in plain text. {_WRITE_AN_ID}"
        elif isinstance(error, NotLookedUp):
            detail = f"{TABLE[situation].reason}: {' '.join(error.reason.split())}"
        elif situation is Situation.BAD_ID:
            detail = f"it has no usable id. {_WRITE_AN_ID}"
        self.outcome = self._outcome(situation, detail=detail)
        if isinstance(error, InProgress) and situation is Situation.IN_FLIGHT:
            self.outcome = replace(self.outcome, delay=max(self.outcome.delay, error.retry_after))
        told = (
            f"{self.queue.route.operation} was not run: {self.outcome.reason}. Tell the broker: {self.outcome.action}"
        )
        return MessageNotRun(told, self.outcome)

    def _ended(self, attempt: Attempt, error: BaseException | None) -> None:
        refused = isinstance(error, Refused) and attempt.owns(error)
        situation = ended(attempt.move, attempt.finished, refused=refused)
        tries, most = attempt.operation.attempt, self.queue.max_attempts
        if situation is Situation.FAILED and most is not None and tries >= most:
            situation = Situation.EXHAUSTED
        detail = ""
        if error is not None and situation in _ABOUT_AN_ERROR:
            detail = f"the handler raised {type(error).__name__}"
        self.outcome = self._outcome(situation, attempt=tries, detail=detail)

    def _outcome(self, situation: Situation, *, attempt: int = 1, detail: str = "") -> Outcome:
        short = self.queue.route.policy.retry_after.total_seconds()
        return outcome(situation, self.queue.unknown, attempt=attempt, short=short, detail=detail)


_ABOUT_AN_ERROR: Final = frozenset({Situation.FAILED, Situation.EXHAUSTED, Situation.REFUSED, Situation.GIVEN_UP})


def ended(move: Move | None, finished: Finished | None, *, refused: bool) -> Situation:
    """How a delivery ended whose block ran. ``refused``: the block raised Refused."""
    if move is None or finished is None:
        return Situation.NOT_STORED
    if finished.undone:
        return Situation.FAILED
    if finished.stored:
        released = move.event is Event.RELEASE
        return Situation.REFUSED if released and refused else _BY_EVENT[move.event]
    # Another attempt has the key, or had it: this delivery's own result does not count.
    return Situation.IN_FLIGHT if finished.record is None else _by_state(finished.record)


def _by_state(record: Record) -> Situation:
    return _BY_STATE.get(record.state, Situation.IN_FLIGHT)


def _refused(error: Exception, record: Record | None) -> Situation:
    """Why an attempt did not begin."""
    match error:
        case KeyReused():
            return Situation.OTHER_BODY
        case PersonalKey():
            return Situation.BAD_ID
        case AnswerLost():
            return Situation.ANSWER_LOST
        case OutcomeUnknown():
            return Situation.UNKNOWN
        case InProgress():
            deferred = record is not None and record.state is State.PENDING
            return Situation.DEFERRED if deferred else Situation.IN_FLIGHT
    return Situation.NO_STORE if record is None else Situation.NOT_COMPARABLE


def id_text(given: object) -> str | None:
    """The id as a key; None: it cannot be one."""
    if isinstance(given, bytes | bytearray | memoryview):
        given = bytes(given).decode("utf-8", "replace")
    if type(given) is int or isinstance(given, UUID):
        given = str(given)
    return given if isinstance(given, str) and _ID.fullmatch(given) and not given.isspace() else None


def _as_bytes(body: Body, content_type: str | None) -> tuple[bytes, str | None]:
    if isinstance(body, bytes):
        return body, content_type
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass"), content_type
    if isinstance(body, bytearray | memoryview):
        return bytes(body), content_type
    try:
        return orjson.dumps(body), content_type or "application/json"
    except TypeError as error:
        raise ConfigurationError(f"the body of a message is bytes, text or a JSON value: {error}") from None
