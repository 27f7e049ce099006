"""The life of a protected request, once for every kind of server, without I/O: ``request → refuse | run``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from oncekey.core.decision import Decision, Execute
from oncekey.core.kept_request import kept_request
from oncekey.core.problems import Answer, Situation
from oncekey.core.recipe import Parts
from oncekey.core.record import Record, Reservation
from oncekey.core.routes import Route
from oncekey.engine.flows import Flow
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation
from oncekey.errors import NotAuthenticated, NotAuthorized
from oncekey.web.responses import UNAVAILABLE_RETRY_SECONDS, answer_to, read_key, refusal


class Exchange:
    """One protected request."""

    __slots__ = ("key", "key_header", "once", "operation", "policy", "record", "route", "tenant", "wanted")

    def __init__(self, once: OnceKey, route: Route) -> None:
        self.once = once
        self.route = route
        self.policy = route.policy
        self.key: str
        self.tenant: str
        self.wanted: Reservation
        self.operation: Operation
        self.key_header: bytes | None = None
        """The key as the client wrote it, for the response. None: the request has no valid key."""
        self.record: Record | None = None
        """The key's record as the store last returned it, for the headers of the response."""

    # -- request → refuse | run ----------------------------------------------------------------------------------

    def refuse_caller(self, error: NotAuthenticated | NotAuthorized) -> Answer:
        """The answer to a caller that the app's scope or authorize function refused."""
        unknown = isinstance(error, NotAuthenticated)
        situation = Situation.NOT_AUTHENTICATED if unknown else Situation.NOT_AUTHORIZED
        return refusal(self.once, situation, detail=str(error) or None)

    def admit(self, keys: Sequence[bytes], length: int | None) -> Answer | None:
        """Check the lines of the Idempotency-Key header, and the length that the body is said to have.

        None: read the body.
        """
        key = read_key(keys, self.policy, self.once)
        if isinstance(key, Answer):
            return key
        self.key = key
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
            self.route, tenant=tenant, key=self.key, owner=once.engine.owners.new(), parts=parts, lines=lines
        )

    def begin(self) -> Flow[Decision]:
        """The one round trip before the handler. If it raises an OperatorError, send :meth:`unavailable`."""
        return self.once.engine.begin(self.wanted, self.policy)

    def unavailable(self) -> Answer:
        """The store cannot be asked, so the app is not called."""
        return refusal(self.once, Situation.STORE_UNAVAILABLE, retry_after=UNAVAILABLE_RETRY_SECONDS)

    def answer_to(self, decision: Decision) -> Answer:
        """The answer to a request that does not run: a replay, or why it is refused. Send it with ``record``."""
        self.record = decision.record
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
        return operation
