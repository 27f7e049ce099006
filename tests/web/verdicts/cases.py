"""The table of section "what was seen" as cases: how an app ends a request, and what becomes of its key.

A row of the table is a ``Row``: one ``Verdict`` for each of the four ``effects``. A ``Case`` is one concrete way to get
to that row, with the frameworks in which it can be had. ``does`` is the end of the endpoint, after its work:

``return 402`` · ``raise 402`` (the framework's own exception) · ``plain 201``, ``inject 402`` (FastAPI's injected
response) · ``Declined``, ``Forgiven`` (an exception with an error handler that answers 409, 200) · ``crash`` ·
``crash at first`` · ``stream`` (breaks off) · ``unserializable`` · ``model mismatch`` · ``wait`` · ``NotExecuted``,
``OutcomeUnknown`` · ``op.not_executed, return 503``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OURS = frozenset({409, 500, 503})
"""What a client sees instead of an answer that could not be kept. (The issue names the 500 of an error handler's 200
only; each of the three says that the success was not one.)"""

ASYNC = ("fastapi", "starlette", "litestar")
SYNC = ("fastapi-sync", "starlette-sync", "litestar-sync")
STARLETTES = ("fastapi", "starlette")
WRAPPED = (*ASYNC, "flask")
NOT_WRAPPED = ("asgi", "wsgi", "mounted")
GATED = ("fastapi", "litestar", "flask")
"""Frameworks with a place before the endpoint: a dependency, a guard, ``before_request``."""


@dataclass(frozen=True)
class Verdict:
    """What is expected of three sends of one key."""

    state: str | None
    """Of the key after the first send; None: no row."""
    again: str
    """What a later send gets: the ``replay`` of the first answer, another ``run``, or 409 ``unknown``."""
    committed: bool = False
    """Whether the rows of an enlisted transaction are there."""
    seen: frozenset[int] | None = None
    """What the client may see at first; None: the status of the case."""


UNUSED = Verdict(None, "run")
COMPLETED = Verdict("completed", "replay", committed=True)
FAILED = Verdict("failed", "replay")
FAILED_WITH_ROWS = Verdict("failed", "replay", committed=True)
RETRYABLE = Verdict("failed_retryable", "run")
UNKNOWN = Verdict("unknown", "unknown")


@dataclass(frozen=True)
class Row:
    external: Verdict
    transactional: Verdict
    phased: Verdict
    repeatable: Verdict

    def hidden(self, *visible: int) -> Row:
        """The same, and the client gets an error of ours, or one of these of the app's own."""
        seen = OURS | frozenset(visible)
        return Row(*(replace(each, seen=seen) for each in self))

    def __iter__(self) -> Any:
        return iter((self.external, self.transactional, self.phased, self.repeatable))


def every(verdict: Verdict) -> Row:
    return Row(verdict, verdict, verdict, verdict)


NEVER_ENTERED = every(UNUSED)
SUCCESS = every(COMPLETED)
RETURNED_4XX = Row(FAILED, FAILED_WITH_ROWS, FAILED, FAILED)
RAISED_4XX = every(FAILED)
NOT_PROCESSED = every(RETRYABLE)
SERVER_ERROR = Row(UNKNOWN, RETRYABLE, RETRYABLE, RETRYABLE)
LOST_SUCCESS = SERVER_ERROR.hidden()
"""A success that was not stored as one: no client may see it, since what a client has seen must replay."""
EFFECT_IN_DOUBT = every(UNKNOWN)


@dataclass(frozen=True)
class Case:
    name: str
    does: str
    row: Row
    status: int
    """What the app answers."""
    where: tuple[str, ...] = WRAPPED
    effects: tuple[str, ...] = ("external", "transactional", "phased", "repeatable")
    enters: bool = True
    runs_at_first: int = 1
    around: str = ""
    gate: int | str | None = None
    path: str = "/payments"
    method: str = "POST"
    body: str = "ok"
    validation_handler_crashes: bool = False
    propagates: bool = False
    """Flask lets exceptions pass, as it does in tests and under a debugger."""
    work: str = "effect"
    policy: Mapping[str, Any] = field(default_factory=dict)
    postgres: bool = False
    """Whether it is run on PostgreSQL too, with an enlisted transaction."""


def never(name: str, row: Row, status: int, where: tuple[str, ...], **more: Any) -> Case:
    """The endpoint is never entered."""
    return Case(f"never entered: {name}", "return 201", row, status, where, enters=False, **more)


NEVER = (
    never("unknown path", NEVER_ENTERED, 404, ("fastapi", "starlette", "flask"), path="/nowhere"),
    never("wrong method", NEVER_ENTERED, 405, ("fastapi", "starlette", "flask"), method="PATCH"),
    never("redirect to the path without its slash", NEVER_ENTERED, 307, STARLETTES, path="/payments/"),
    never("validation 422", NEVER_ENTERED, 422, ("fastapi", "fastapi-sync"), body="invalid", postgres=True),
    never("validation 400", NEVER_ENTERED, 400, ("litestar", "litestar-sync"), body="invalid"),
    never("a check answers 401", NEVER_ENTERED, 401, GATED, gate=401),
    never("a check answers 403", NEVER_ENTERED, 403, GATED, gate=403),
    never("a check answers 429", NEVER_ENTERED, 429, GATED, gate=429),
    never("middleware answers 403", NEVER_ENTERED, 403, WRAPPED, around="answer 403"),
    never("middleware answers 429", NEVER_ENTERED, 429, WRAPPED, around="answer 429"),
    never("middleware answers 303", NEVER_ENTERED, 303, WRAPPED, around="answer 303"),
    never("NaN crashes FastAPI's validation handler", NEVER_ENTERED, 500, ("fastapi",), body="NaN"),
    never(
        "the app's validation handler crashes",
        NEVER_ENTERED,
        500,
        ("fastapi", "litestar"),
        body="invalid",
        validation_handler_crashes=True,
    ),
    never("a check crashes", SERVER_ERROR, 500, GATED, gate="crash"),
    never("a check answers 503", SERVER_ERROR, 503, GATED, gate=503),
    never("a check answers 408", SERVER_ERROR, 408, GATED, gate=408),
    never("middleware answers 503", SERVER_ERROR, 503, WRAPPED, around="answer 503"),
    never("middleware answers 200", SUCCESS, 200, WRAPPED, around="answer 200"),
    never("before_request answers 200", SUCCESS, 200, ("flask",), gate=200),
)

RETURNED = (
    Case("returned 201", "return 201", SUCCESS, 201, (*WRAPPED, *SYNC), postgres=True),
    Case("returned 303", "return 303", SUCCESS, 303),
    Case("returned 201 that middleware makes 200", "return 201", SUCCESS, 200, around="turn into 200"),
    Case("returned a plain dict", "plain 201", SUCCESS, 201, ("fastapi", "fastapi-sync")),
    Case("returned 201, and its session was closed", "return 201", LOST_SUCCESS, 201, WRAPPED, ("transactional",),
         work="closed session", postgres=True),
    Case("returned what JSON cannot hold", "unserializable", LOST_SUCCESS, 500, WRAPPED),
    Case("returned what JSON cannot hold, caught as 400", "unserializable", SERVER_ERROR.hidden(400), 400,
         (*STARLETTES, "flask"), around="catch 400"),
    Case("returned another shape than its model", "model mismatch", LOST_SUCCESS, 500, ("fastapi", "fastapi-sync")),
    Case("returned a stream that breaks off", "stream", LOST_SUCCESS, 500, (*WRAPPED, "starlette-sync")),
    Case("returned 201 that middleware makes 500", "return 201", LOST_SUCCESS, 500, around="turn into 500",
         postgres=True),
    Case("returned 201 that middleware makes 404", "return 201", SERVER_ERROR.hidden(404), 404,
         around="turn into 404", postgres=True),
    Case("returned 201 that a hook makes 200", "return 201", SUCCESS, 200, ("flask", "litestar"), around="hook 200"),
    Case("returned 201 that a hook makes 404", "return 201", SERVER_ERROR.hidden(404), 404, ("flask", "litestar"),
         around="hook 404"),
    Case("returned 201, and a hook crashes", "return 201", LOST_SUCCESS, 500, ("flask", "litestar"),
         around="crashing hook 0"),
    *(Case(f"returned {status}", f"return {status}", RETURNED_4XX, status) for status in (400, 401, 403, 404, 409)),
    Case("returned 402", "return 402", RETURNED_4XX, 402, (*WRAPPED, *SYNC), postgres=True),
    Case("returned a dict with the injected 402", "inject 402", RETURNED_4XX, 402, ("fastapi", "fastapi-sync")),
    Case("returned 425", "return 425", NOT_PROCESSED, 425),
    Case("returned 429", "return 429", NOT_PROCESSED, 429, (*WRAPPED, *SYNC), postgres=True),
    Case("returned 408", "return 408", SERVER_ERROR, 408),
    Case("returned 500", "return 500", SERVER_ERROR, 500, (*WRAPPED, *SYNC), postgres=True),
    Case("returned 503", "return 503", SERVER_ERROR, 503),
    Case("returned 504", "return 504", SERVER_ERROR, 504),
    Case("returned 503 that middleware makes 200", "return 503", LOST_SUCCESS, 200, around="turn into 200"),
    Case("returned 503 that middleware makes 400", "return 503", SERVER_ERROR.hidden(400), 400,
         around="turn into 400"),
)  # fmt: skip

RAISED_303_CLOSED = every(replace(RETRYABLE, seen=OURS))

RAISED = (
    *(Case(f"raised {status}", f"raise {status}", RAISED_4XX, status) for status in (400, 401, 403, 404, 409)),
    Case("raised 402", "raise 402", RAISED_4XX, 402, (*WRAPPED, *SYNC), postgres=True),
    Case("raised what an error handler makes 409", "Declined", RAISED_4XX, 409, (*WRAPPED, *SYNC), postgres=True),
    Case("raised 425", "raise 425", NOT_PROCESSED, 425),
    Case("raised 429", "raise 429", NOT_PROCESSED, 429, (*WRAPPED, *SYNC)),
    Case("raised 408", "raise 408", SERVER_ERROR, 408),
    Case("raised 303", "raise 303", SUCCESS, 303, (*WRAPPED, *SYNC), postgres=True),
    Case("raised 303, and its session was closed", "raise 303", RAISED_303_CLOSED, 303, WRAPPED, ("transactional",),
         work="closed session", postgres=True),
    Case("raised what an error handler makes 200", "Forgiven", LOST_SUCCESS, 200, (*WRAPPED, *SYNC), postgres=True),
    Case("raised 503", "raise 503", SERVER_ERROR, 503),
    Case("raised RuntimeError", "crash", SERVER_ERROR, 500, (*WRAPPED, *SYNC), postgres=True),
    # Litestar makes a response of every exception before middleware of a handler can catch it.
    Case("raised RuntimeError, caught as 200", "crash", LOST_SUCCESS, 200, (*STARLETTES, "flask"), around="catch 200",
         postgres=True),
    # By the letter of the table, "raised something that became 4xx".
    Case("raised RuntimeError, caught as 400", "crash", RAISED_4XX, 400, (*STARLETTES, "flask"), around="catch 400"),
    Case("raised RuntimeError, caught as 500", "crash", SERVER_ERROR, 500, (*STARLETTES, "flask"),
         around="catch 500"),
    # 425 and 429 are retryable "by the endpoint itself": this is middleware's.
    Case("raised RuntimeError, caught as 429", "crash", SERVER_ERROR.hidden(429), 429, (*STARLETTES, "flask"),
         around="catch 429"),
    Case("raised RuntimeError that middleware makes 200", "crash", LOST_SUCCESS, 200, ("litestar",),
         around="turn into 200"),
    Case("raised RuntimeError that Flask lets pass, caught as 200", "crash", LOST_SUCCESS, 200, ("flask",),
         around="catch 200", propagates=True),
    Case("raised RuntimeError that Flask lets pass, caught as 500", "crash", SERVER_ERROR, 500, ("flask",),
         around="catch 500", propagates=True),
)  # fmt: skip

IN_ITS_PLACE = tuple(
    Case(
        f"{how} answers {status} while it runs{', copied scope' if copied else ''}",
        "wait",
        SERVER_ERROR if status in (504, 408) else SERVER_ERROR.hidden(*([400] if status == 400 else [])),
        status,
        ASYNC,
        around=f"{verb} {status}{', copied scope' if copied else ''}",
        postgres=status == 202,
    )
    for how, verb in (("a timeout", "timeout"), ("middleware that does not wait", "abandon"))
    for status in (504, 408, 202, 400)
    for copied in (False, True)
    if not copied or (verb == "timeout" and status in (408, 202))
)

SAID = (
    Case("NotExecuted", "NotExecuted", NOT_PROCESSED, 503, (*WRAPPED, *NOT_WRAPPED), postgres=True),
    Case("NotExecuted, caught as 500", "NotExecuted", NOT_PROCESSED.hidden(), 500, (*STARLETTES, "flask"),
         around="catch 500"),
    Case("OutcomeUnknown", "OutcomeUnknown", every(UNKNOWN), 409, (*WRAPPED, *NOT_WRAPPED)),
    Case("op.not_executed(), then returned 503", "op.not_executed, return 503", NOT_PROCESSED, 503,
         (*WRAPPED, *NOT_WRAPPED, *SYNC)),
    Case("on_server_error=retry, returned 503", "return 503", NOT_PROCESSED, 503, policy={"on_server_error": "retry"}),
    Case("on_server_error=retry, raised 503", "raise 503", NOT_PROCESSED, 503, policy={"on_server_error": "retry"}),
    Case("on_server_error=retry, raised RuntimeError", "crash", SERVER_ERROR, 500,
         policy={"on_server_error": "retry"}),
    Case("on_server_error=retry, a timeout answers 504", "wait", SERVER_ERROR, 504, ASYNC, around="timeout 504",
         policy={"on_server_error": "retry"}),
    # Rolled back, although it is stored: a 5xx never commits.
    Case("on_server_error=replay, returned 500", "return 500", RAISED_4XX, 500, policy={"on_server_error": "replay"}),
    Case("on_server_error=unknown, returned 500", "return 500", every(UNKNOWN), 500,
         effects=("external", "phased", "repeatable"), policy={"on_server_error": "unknown"}),
    *(Case(f"retryable_statuses with 503, {does}", does, NOT_PROCESSED, 503,
           policy={"retryable_statuses": {425, 429, 503}}) for does in ("return 503", "raise 503")),
    Case("retryable_statuses without 429, returned 429", "return 429", RETURNED_4XX, 429,
         policy={"retryable_statuses": {425}}),
    Case("retryable_statuses with 409, returned 409", "return 409", NOT_PROCESSED, 409,
         policy={"retryable_statuses": {409}}),
)  # fmt: skip

DOUBT = tuple(
    Case(
        f"unrepeatable effect failed, {does}",
        does,
        EFFECT_IN_DOUBT if status >= 400 else SUCCESS,
        status,
        (*WRAPPED, *NOT_WRAPPED) if does != "raise 402" else WRAPPED,
        ("phased",),
        work="failed effect",
    )
    for does, status in (
        ("return 402", 402),
        ("raise 402", 402),
        ("return 429", 429),
        ("return 500", 500),
        ("crash", 500),
        ("return 200", 200),
    )
)

IN_DOUBT_AND_ANSWERED = tuple(
    Case(
        f"unrepeatable effect failed, {name}",
        does,
        EFFECT_IN_DOUBT.hidden(),
        status,
        where,
        ("phased",),
        work="failed effect",
        around=around,
    )
    for name, does, status, where, around in (
        ("an error handler answers 200", "Forgiven", 200, WRAPPED, ""),
        ("a timeout answers 202", "wait", 202, ASYNC, "timeout 202"),
        ("a body that breaks off", "stream", 500, WRAPPED, ""),
    )
)

# For phased and repeatable the table says "as external's, with the steps' rules". What is declared to be harmless when
# repeated, or resumes behind its steps, is retryable after a 5xx as it is where the endpoint is wrapped.
RAW = (
    *(Case(f"not wrapped: {status}", f"return {status}", SUCCESS, status, NOT_WRAPPED, postgres=status == 201)
      for status in (200, 201, 303)),
    *(Case(f"not wrapped: {status}", f"return {status}", RAISED_4XX, status, NOT_WRAPPED, postgres=status == 402)
      for status in (400, 401, 402, 404)),
    *(Case(f"not wrapped: {status}", f"return {status}", NOT_PROCESSED, status, NOT_WRAPPED) for status in (425, 429)),
    *(Case(f"not wrapped: {status}", f"return {status}", SERVER_ERROR, status, NOT_WRAPPED)
      for status in (408, 500, 503)),
    Case("not wrapped: raised RuntimeError", "crash", SERVER_ERROR, 500, NOT_WRAPPED),
    Case("not wrapped: a body that breaks off", "stream", LOST_SUCCESS, 500, NOT_WRAPPED),
    Case("not wrapped: a timeout answers 504", "wait", SERVER_ERROR, 504, ("asgi",), around="timeout 504"),
    Case("not wrapped: caught as 500", "crash", SERVER_ERROR, 500, ("asgi", "wsgi"), around="catch 500"),
)  # fmt: skip

TRIED_TWICE = Case(
    "entered twice: the second try succeeds",
    "crash at first",
    SUCCESS,
    201,
    # Litestar answers every exception before middleware could try again. Under Flask the first try is concluded inside
    # the framework, before its teardown: the second success is answered by us (test_sequences.py).
    (*STARLETTES, "asgi", "wsgi"),
    ("external", "repeatable"),  # a step is taken once in an attempt: a second try in it is refused
    runs_at_first=2,
    around="retry once",
)

ELSEWHERE = tuple(
    # The endpoint is wrapped, and runs where our context variable is not: its route puts it back. (Not in Litestar,
    # whose routes cannot be reached.)
    Case(f"middleware calls the app in a fresh context, {does}", does, row, status, STARLETTES, ("external",),
         around="fresh context")
    for does, row, status in (("return 201", SUCCESS, 201), ("return 402", RETURNED_4XX, 402),
                              ("return 500", SERVER_ERROR, 500))
)  # fmt: skip

CASES = (
    *NEVER,
    *RETURNED,
    *RAISED,
    *IN_ITS_PLACE,
    *SAID,
    *DOUBT,
    *IN_DOUBT_AND_ANSWERED,
    *RAW,
    *ELSEWHERE,
    TRIED_TWICE,
)
