"""The life of a protected request, once for every kind of server, without I/O.

``request → refuse | run``, and ``ending → send | hold | replace``. A *shell* (``asgi_shell.py``, ``wsgi_shell.py``)
moves the bytes: it knows one kind of server, and decides nothing about a key. What a shell does, in this order:

1. Read the headers. Without a key, if the policy does not require one, call the app unprotected.
2. Ask the app's ``scope`` and ``authorize`` functions. If they refuse the caller, send :meth:`Exchange.refuse_caller`.
3. :meth:`~Exchange.admit`; then read the body, and refuse one that is too large or incomplete. If the policy is
   ``guarded``, ask ``admission.check``.
4. :meth:`~Exchange.reserve`, and drive :meth:`~Exchange.begin`. If the store fails, send :meth:`~Exchange.unavailable`.
5. Send :meth:`~Exchange.answer_to` the decision, or :meth:`~Exchange.execute`: call the app with the operation, and let
   the keeper watch it.
6. When the app's response is complete, :meth:`~Exchange.answered`; when the app raised or left no response,
   :meth:`~Exchange.raised`. Then *store*: :meth:`~Exchange.start_storing`, drive :meth:`~Exchange.finish`, and report
   how it ended: :meth:`~Exchange.finished`, :meth:`~Exchange.not_stored`, :meth:`~Exchange.cut_off` or
   :meth:`~Exchange.abandon`.
7. If the stage is HELD, keep the response, and store again when the app has returned. If ``instead`` is set, send it in
   place of the app's response. Otherwise send that response, with :meth:`~Exchange.first_headers`.

This is the general way. ASGI has a shorter one for ordinary requests, the **flat way** (``asgi.py``). It does the same
without these calls, and hands every other request over to this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from oncekey.core.decision import Decision, Execute, TurnedAway
from oncekey.core.header import BadKey
from oncekey.core.judgment import Move, is_false_success
from oncekey.core.kept_request import kept_request
from oncekey.core.problems import Answer, Situation
from oncekey.core.recipe import Parts
from oncekey.core.record import Found, Record, Reservation, tenant_of
from oncekey.core.routes import Route
from oncekey.core.states import Event
from oncekey.engine import personal_keys
from oncekey.engine.admission import Admission
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import NotAuthenticated, NotAuthorized
from oncekey.web import endings
from oncekey.web.responses import (
    UNAVAILABLE_RETRY_SECONDS,
    Headers,
    answer_to,
    first_headers,
    read_key,
    refusal,
    refused_caller,
)


class Stage(Enum):
    """Where a protected request is. ``may_follow`` has the stages to which it may go from here."""

    READING = "its key is not decided yet"
    RUNNING = "the app runs, and its end is not judged yet"
    STORING = "its end is judged, and the key's move is under way"
    HELD = "its response waits for the app's return: the app must still end its transaction"
    CUT_OFF = "the app's own timeout cancelled the storing, and the client has no answer yet"
    ENDED = "the key's move is made, or left to the keeper or the lease; the client gets its answer"

    may_follow: tuple[Stage, ...]


READING, RUNNING, STORING, HELD, CUT_OFF, ENDED = Stage  # constants: an enum's member costs more by its class
READING.may_follow = (RUNNING,)
RUNNING.may_follow = (STORING, HELD)
STORING.may_follow = (ENDED, HELD, CUT_OFF)
HELD.may_follow = (STORING,)
CUT_OFF.may_follow = (ENDED,)
ENDED.may_follow = ()

_DISCARD: Final = Event.DISCARD


class Exchange:
    """One protected request."""

    stage = READING
    key: str
    tenant: str
    wanted: Reservation
    operation: Operation
    bound_to: str | None = None
    """What the route's bind function returned."""
    refused_if_new: TurnedAway | None = None
    """The answer to this request if its key is not known: the request is too old for a new one, or the key is not of
    the form that this route takes. A known key is from before the route had that rule, and is answered as always."""
    key_header: bytes | None = None
    """The key as the client wrote it in Idempotency-Key, for the response. None: it has no valid one there."""
    record: Record | None = None
    """The key's record as the store last returned it, for the headers of the response."""
    # of the end
    move: Move
    judged_status: int | None = None
    """The status of the response that was judged. None: the app raised, or nothing is judged yet."""
    instead: Answer | None = None
    """The answer in place of the app's response, which the client must not get."""
    streams = False
    """A part of the app's response is with the client already, because it cannot be stored."""

    def __init__(self, once: OnceKey, route: Route) -> None:
        self.once = once
        self.route = route
        self.policy = route.policy

    # -- request → refuse | run ----------------------------------------------------------------------------------

    def refuse_caller(self, error: NotAuthenticated | NotAuthorized) -> Answer:
        """The answer to a caller that the app's scope or authorize function refused."""
        return refused_caller(self.once, self.route.operation, error)

    def admit(self, keys: Sequence[bytes], length: int | None) -> Answer | None:
        """Check the lines of the Idempotency-Key header, and the length that the body is said to have.

        None: read the body. If the policy has a ``key_from``, ``admission.check`` finds the key after that.
        """
        if self.policy.key_from is None:
            try:
                self.key = read_key(keys, self.policy)
            except BadKey as error:
                if error.rule == "missing":
                    return self.refuse(Situation.KEY_MISSING)
                if error.key is None:
                    return self.refuse(Situation.KEY_MALFORMED, str(error))
                self.key, self.refused_if_new = error.key, TurnedAway(Situation.KEY_MALFORMED, str(error))
            self.key_header = keys[0].strip()
        if length is not None and length > self.policy.max_request_bytes:
            return self.refuse(Situation.BODY_TOO_LARGE)  # before the server says 100 Continue
        return None

    def refuse(self, situation: Situation, detail: str | None = None) -> Answer:
        return refusal(self.once, situation, detail=detail)

    def reserve(self, tenant: str, parts: Parts, lines: Sequence[tuple[bytes, bytes]]) -> None:
        """Compute what the store is asked for. ``lines``: the headers that the route's recipe names.

        This hashes the body: a shell with an event loop calls it in a thread if the body is large.
        """
        self.tenant = tenant
        once = self.once
        self.wanted = once.reservation(
            self.route,
            tenant=tenant,
            key=self.key,
            owner=once.engine.owners.new(),
            parts=parts,
            lines=lines,
            bound_to=self.bound_to,
        )

    def begin(self, first: Found | None = None) -> Flow[Decision]:
        """The one round trip before the handler. If it raises an OperatorError, send :meth:`unavailable`.

        ``first``: what the store has answered already.
        """
        once, policy, refused = self.once, self.policy, self.refused_if_new
        if policy.pii is not None:
            refused = personal_keys.refused(once, self.route, self.tenant, self.key) or refused
        admission = None
        if refused is not None or policy.rate is not None or once.max_active_keys is not None:
            admission = Admission(policy, once.limiter, self.tenant, refused)
        return once.engine.begin(self.wanted, policy, first, admission)

    def unavailable(self) -> Answer:
        """The store cannot be asked, so the app is not called."""
        return refusal(self.once, Situation.STORE_UNAVAILABLE, retry_after=UNAVAILABLE_RETRY_SECONDS)

    def answer_to(self, decision: Decision) -> Answer:
        """The answer to a request that does not run: a replay, or why it is refused. Send it with ``record``."""
        self.record = decision.record
        if isinstance(decision, TurnedAway) and decision.personal is not None:
            self.key_header = None  # the answer does not repeat the key
        return answer_to(decision, self.policy, self.once)

    def execute(self, decision: Execute, *, covered: bool, loop: asyncio.AbstractEventLoop | None = None) -> Operation:
        """This request owns its key: the operation with which the app runs.

        ``covered``: every endpoint that this request can reach is wrapped. ``loop``: the one that ends the request.
        """
        policy = self.policy
        self.operation = operation = Operation(
            decision.record, policy, self.tenant, self.once.engine, loop, covered=covered
        )
        if policy.keep_request:
            operation.request = kept_request(self.wanted.parts, policy.recipe.headers)
        self._enter(RUNNING)
        return operation

    # -- ending → send | hold | replace --------------------------------------------------------------------------

    def cannot_store(self, size: int, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a response that goes on after ``size`` bytes must stream: it is too large, or an event stream."""
        return size > self.policy.max_response_bytes or any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )

    def stream(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The response passes through, and its key becomes a tombstone: the headers to send now.

        The last piece still waits for the store, so a client that has seen the end knows that the key is completed.
        """
        self.streams = True
        record = self.record or self.operation.record
        return first_headers(self.operation, status, headers, None, self.key_header, record)

    def answered(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes | None) -> bool:
        """Judge a complete response; ``body`` None: it was streamed. True: store now. False: it is HELD."""
        operation = self.operation
        self.move, self.instead = endings.answered(operation, status, headers, body, self.once)
        self.judged_status = status
        if operation.enlisted is not None and operation.evidence.running:
            # Middleware answered while the endpoint still runs with its transaction open. After a rollback now, the
            # endpoint could begin another transaction and commit it. So the answer waits for the app's return.
            self._enter(HELD)
            return False
        return True

    def raised(self, error: BaseException) -> Answer | None:
        """Judge an app that raised, or that left no whole response. Store after this, and settle what is HELD.

        Returns oncekey's answer, unless ``instead`` is set by the storing. None: the exception must reach the server.
        """
        self.move, answer = endings.raised(self.operation, error, self.once)
        return answer

    def start_storing(self) -> None:
        """From here until the shell reports how the storing ended, ``finish`` is under way."""
        self._enter(STORING)

    def finish(self) -> Flow[Finished]:
        """The key's move, as judged."""
        move = self.move
        return self.once.engine.finish(self.operation, move.event, move.response, move.reason)

    def unfinished(self) -> Unfinished:
        """The same as a value: for the keeper, and for a shell that ends an enlisted transaction in a loop."""
        move = self.move
        return Unfinished(self.operation, move.event, move.response, move.reason)

    def finished(self, finished: Finished) -> None:
        """The store answered ``finish``."""
        operation = self.operation
        self.record = finished.record
        if operation.enlisted is not None:  # written, and the app must still commit it
            self._enter(HELD)
            return
        self.once.engine.keeper.unwatch(operation)
        if not finished.stored:
            self.instead = endings.answer_instead(finished, operation, self.wanted, self.once)
        elif self.move.event is _DISCARD:
            self.record = None  # an unused key has no expiry to show
            if (caps := self.once.limiter.caps) is not None:
                caps.discarded(tenant_of(operation.record.scope))
        self._enter(ENDED)

    def not_stored(self) -> None:
        """The handler ran, and the store does not have the result. The keeper retries; the client must ask again."""
        self.once.engine.adopt(self.unfinished())
        self._replace_by_not_stored()

    def cut_off(self, *, adopt: bool) -> None:
        """The app's own timeout around its sending cancelled the storing. ``adopt``: the keeper must store it."""
        if adopt:
            self.once.engine.keeper.adopt(self.unfinished())
        self._enter(CUT_OFF)

    def answer_cut_off(self) -> None:
        """The app answers in place of the response that it cut off: the client gets ``instead``."""
        self._replace_by_not_stored()

    def abandon(self) -> None:
        """The storing failed unexpectedly. The key is left to its lease, and ``effects`` says what that means."""
        self._enter(ENDED)

    def changed_to(self, status: int) -> None:
        """Middleware may have changed the response after it was judged. A success is sent only if it was stored."""
        event = self.move.event
        if self.instead is None and is_false_success(event, self.judged_status, status):
            self.instead = endings.in_place_of(event, self.operation, self.once)

    def check_stream(self) -> None:
        """Before the last piece of a response that streams."""
        if self.instead is not None:
            raise RuntimeError("the response could not be stored: its end is withheld, so that the client retries")

    def first_headers(self, status: int, headers: Iterable[tuple[bytes, bytes]], size: int) -> Headers:
        """The headers of the app's whole response, with oncekey's own."""
        return first_headers(self.operation, status, headers, size, self.key_header, self.record)

    def _replace_by_not_stored(self) -> None:
        self.record = self.operation.record
        self.instead = refusal(self.once, Situation.NOT_STORED, retry_after=UNAVAILABLE_RETRY_SECONDS)
        self._enter(ENDED)

    def _enter(self, stage: Stage) -> None:
        if stage not in self.stage.may_follow:
            raise RuntimeError(f"a bug of oncekey: a request went from {self.stage.name} to {stage.name}")
        self.stage = stage
