"""One question for the status of a key, and its answer. ``status.py`` has the apps that read and send."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from oncekey.core import binding
from oncekey.core.decision import Claim, Replay, Unknown, Unreadable, decide
from oncekey.core.guards import Bind
from oncekey.core.header import BadKey, as_header, parse_key
from oncekey.core.problems import WHICH_KEY, Answer, Situation
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, Event, State
from oncekey.engine.flows import Call, Flow
from oncekey.engine.once import OnceKey
from oncekey.engine.request import Request
from oncekey.errors import NotAuthorized
from oncekey.limits import RatesDown
from oncekey.telemetry.events import TurnedAway
from oncekey.web.responses import answer_headers, busy_seconds, refusal, replay, unknown

MAX_KEY_LENGTH = 255
MAX_OPERATION_LENGTH = 400
TOO_MANY_MISSES = "More keys that do not exist were asked for than this API allows in this time, or too many at once."
_CACHING = frozenset({b"cache-control", b"expires", b"etag", b"last-modified"})


class Question:
    """One question. ``StatusApp`` and ``StatusWsgi`` read and send; this class answers."""

    def __init__(self, once: OnceKey, request: Request, here: str, root: str, operation: str | None) -> None:
        self.once = once
        self.request = request
        self.method = request.method
        self.here = here
        self.operation = operation
        self.endpoint = f"GET {root or '/'}"
        self.authorized = operation or self.endpoint
        """The operation that ``authorize`` gets before the look-up."""
        self.key: str | None = None
        self.record: Record | None = None
        self.refused: Answer | None = None
        """Why the row was not looked up."""
        self.others = 0
        """How many look-ups of this tenant were in flight when this one came."""
        self.begun = time.perf_counter()

    def read_key(self, path: str) -> Answer | None:
        """Find the key in the path, or otherwise in the header. Returns an Answer if there is none."""
        raw = self.request.headers.get("idempotency-key")
        self.key = path.removeprefix("/")
        if not self.key:
            try:
                self.key = parse_key([] if raw is None else [raw.encode("latin-1")])
            except BadKey as error:
                if error.rule == "missing":
                    return refusal(self.once, Situation.KEY_MISSING, detail=WHICH_KEY)
                return refusal(self.once, Situation.KEY_MALFORMED, detail=str(error))
        named = self.operation or ""
        known = self.key.isascii() and self.key.isprintable() and len(self.key) <= MAX_KEY_LENGTH
        if not known or not (named.isprintable() and len(named) <= MAX_OPERATION_LENGTH):
            self.key = None  # no request can have such a key, so do not look for it
            return refusal(self.once, Situation.STATUS_NOT_FOUND)
        return None

    @contextmanager
    def in_flight(self, tenant: str) -> Iterator[None]:
        """From before the row is read until a miss is counted: meanwhile this look-up takes a place under the limit."""
        limiter = self.once.limiter
        if limiter.lookups is None:
            yield
            return
        with limiter.in_flight.entered(tenant) as self.others:
            yield

    def look(self, tenant: str) -> Flow[Record | None]:
        """Read the row, unless this tenant has asked for too many keys that do not exist."""
        limiter = self.once.limiter
        if limiter.lookups is not None:
            try:
                wait: float | None = yield Call(partial(limiter.lookup, tenant, self.others))
            except RatesDown:
                self.refused = refusal(self.once, Situation.STORE_UNAVAILABLE)
                return None
            if wait is not None:
                self.refused = refusal(self.once, Situation.LIMITED, detail=TOO_MANY_MISSES, retry_after=wait)
                # Of the endpoint, not of the operation: the caller chooses that one, and it is a label of a metric.
                self.once.engine.emitter.emit(TurnedAway(tenant, self.endpoint, reason=Situation.LIMITED))
                return None
        record: Record | None = yield (self.once.key_scope(tenant, self.operation), self.key or "")
        return record

    def missed(self, answer: Answer) -> bool:
        """Whether the look-up found nothing that this caller may see."""
        return self.refused is None and answer.status == 404

    def miss(self, answer: Answer, tenant: str) -> Flow[None]:
        """Count a look-up that missed. If the storage of limits is down, the answer stays what it is: the next question
        is refused."""
        if self.once.limiter.lookups is not None and self.missed(answer):
            with suppress(RatesDown):
                yield Call(partial(self.once.limiter.missed, tenant))

    def binds(self, record: Record) -> Bind | None:
        """The function that says to what this caller's keys are bound; None: this key is not bound."""
        if binding.binding_of(record.fingerprint_recipe) is None:
            return None
        bind = self.once.policy_of(record.operation).bind
        if bind is None:
            raise NotAuthorized("the key is bound, and its route no longer says to what")
        return bind

    def bound(self, record: Record, bound_to: str) -> Record | None:
        """The row, if it is bound to this caller. Otherwise None, as for a key that was never seen."""
        hashes = binding.hashes(self.once.bind_secrets, record.scope, record.key, bound_to)
        return record if binding.is_bound_to(record.fingerprint_recipe, hashes) else None

    def answer(self, record: Record | None) -> Answer:
        """The answer for this row."""
        if self.refused is not None:
            return self.refused
        answer = self._meaning(record)
        if answer.status in (404, 410):
            self.record = None
        return answer

    def _meaning(self, record: Record | None) -> Answer:
        if record is None:
            return refusal(self.once, Situation.STATUS_NOT_FOUND)
        self.record = record
        match decide(record, _the_same_again(record)):
            case Replay():
                return _uncached(replay(record, self.once))
            case Unreadable() as unreadable:
                self.once.engine.emitter.decided(unreadable, self.once.policy_of(record.operation))
                return refusal(self.once, Situation.UNREADABLE)
            case Unknown() | Claim(_, Event.DOUBT):
                self.record = replace(record, state=State.UNKNOWN)  # as a retry would make it
                return unknown(self.once, record.key)
            case Claim(_, Event.RESERVE):
                finished = record.state is State.EXPIRED or record.state in FINAL
                return refusal(self.once, Situation.STATUS_EXPIRED if finished else Situation.STATUS_NOT_FOUND)
            case Claim():
                return refusal(self.once, Situation.STATUS_RETRYABLE)
        policy = self.once.policy_of(record.operation)
        wait = busy_seconds(policy, self.once.engine.overdue_lease(record, policy))
        situation = Situation.DEFERRED if record.state is State.PENDING else Situation.ACCEPTED
        return refusal(self.once, situation, retry_after=wait, location=self.here)

    def wire(self, answer: Answer) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the answer."""
        # Echo the key only if the look-up found it for this caller.
        key = as_header(self.key) if self.record is not None and self.key is not None else None
        headers = answer_headers(answer, key, self.record)
        return answer.status, headers, b"" if self.method == "HEAD" else answer.body


def _the_same_again(record: Record) -> Reservation:
    """A retry of the request that made this row."""
    return Reservation(
        record.scope,
        record.key,
        record.operation,
        record.fingerprint,
        record.fingerprint_version,
        record.effects,
        "",
        0.0,
        record.retention_seconds,
        record.fingerprint_recipe,
    )


def _uncached(answer: Answer) -> Answer:
    """Without caching headers: they were for the response to a POST, and the answer to this GET changes."""
    headers = [item for item in answer.headers if item[0] not in _CACHING]
    return Answer(answer.status, (*headers, (b"cache-control", b"no-store")), answer.body)
