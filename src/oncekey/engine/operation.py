"""The Operation: what a handler uses while its attempt owns the key."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from oncekey.core.downstream import downstream_key
from oncekey.core.evidence import Evidence
from oncekey.core.judgment import HandlerWord
from oncekey.core.kept_request import KeptRequest
from oncekey.core.policy import Policy
from oncekey.core.record import Record, Reservation
from oncekey.core.states import Effects
from oncekey.engine import steps
from oncekey.engine.flows import Flow, called, plain
from oncekey.engine.known_steps import Steps
from oncekey.engine.transactions import enlistment, jobs
from oncekey.engine.transactions.enlistment import Commit, Enlisted, Enlisting
from oncekey.engine.transactions.jobs import RunAt
from oncekey.errors import ApplicationError, NoOperation, NotExecuted, OutcomeUnknown, Refused

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine

_T = TypeVar("_T")
NOTHING: Final[dict[tuple[str, str], int]] = {}


class Operation:
    """One attempt at one key. Get it with :func:`current`, or in FastAPI with ``Depends``."""

    # The defaults are of the class: most operations change few of them.
    task: asyncio.Task[None] | None = None
    """The task that runs the handler (ASGI). If it is done before the operation, no code will end the operation."""
    enlisted: Enlisted | None = None
    """The transaction that the end of this request commits. None: the handler enlisted none, or it has ended."""
    steps: Steps | None = None
    request: KeptRequest | None = None
    """The first request of this key. None: the route's policy does not have ``keep_request``."""
    enqueued: dict[tuple[str, str], int] = NOTHING
    """How many jobs this attempt has added to the outbox, by phase and task."""
    unawaited: dict[Flow[Any], tuple[str, Coroutine[Any, Any, Any]]] | None = None
    """Verbs that were called and have not started yet: each flow with its verb and its coroutine. None: no async verb
    was called."""
    deferred = False
    """A job in the outbox will settle the key: the request ends as pending."""
    lost = False
    """Another attempt has the key: the result of this attempt will not be stored."""
    begun = False
    """The handler used a verb of this operation: from then on the request cannot be discarded."""
    commits = False
    """The judgment: the enlisted transaction is committed with the key's move."""
    is_request = True
    """False: it belongs to a function or a message, which has ended when its body has."""
    around: Operation | None = None
    """The operation whose handler called this function. None: there is none."""
    in_callers_block = False
    """The function was called in a transaction of its caller, on ``Engine.own_connection``."""
    judged_effects: Effects | None = None
    """The record's effects when the attempt was judged. If middleware answered, the handler may still run and begin an
    effect after that."""
    _word: HandlerWord | None = None
    renew_at = 0.0
    in_its_thread: Callable[[], bool] | None = None
    """Tells whether this thread ends the request. None: any thread may (all but Django)."""
    observed: Any = None
    """What exporters of metrics and traces keep of it. None: there is no exporter, or the handler has ended."""
    runs_until: float | None = None
    """When its ``max_run`` is over, as a time of time.monotonic()."""

    def __init__(
        self,
        record: Record | Reservation,
        policy: Policy,
        scope: str,
        engine: Engine | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        reserved_at: float = 0.0,
        *,
        covered: bool = False,
    ) -> None:
        """``record``: the key's row, or the reservation that inserted it at ``reserved_at``."""
        self._row = record
        self._reserved_at = reserved_at
        self.owner = record.owner
        self.policy = policy
        self.scope = scope
        self.engine = engine
        self.loop = loop
        """The event loop that ends the request. None: the thread that called the app ends it (WSGI)."""
        self.evidence = Evidence(record.owner) if not covered else Evidence(record.owner, covered=True)
        """What oncekey has seen of the handler."""

    @property
    def record(self) -> Record:
        """The key's row. It is made of the reservation when it is first looked at."""
        row = self._row
        if isinstance(row, Reservation):
            row = self._row = row.record(self._reserved_at)
        return row

    @record.setter
    def record(self, record: Record) -> None:
        self._row = record

    @property
    def is_plain(self) -> bool:
        """The handler has said and done nothing here, and its row is as it was reserved: not even looked at."""
        return type(self._row) is Reservation and not self.begun and self._word is None and self.unawaited is None

    @property
    def key(self) -> str:
        return self._row.key

    @property
    def attempt(self) -> int:
        return 1 if isinstance(self._row, Reservation) else self._row.attempt

    @property
    def name(self) -> str:
        """The route, e.g. ``POST /payments``."""
        return self._row.operation

    def downstream_key(self, name: str) -> str:
        """A key for a call to a provider: the same at every attempt, different for every ``name``.

        It is safe to show: the client's key cannot be computed from it. It depends on the fingerprint too: if a client
        reuses its key for another request after the expiry, the downstream key is another one.
        """
        self.begun = True
        return downstream_key(self.record, name)

    def enlist(self, target: Any = None, *, commit: Commit = "engine") -> Enlisting:
        """Enlist the transaction of this session or connection. Its writes, the stored response and the key's
        completion are one commit, before the response is sent. In Django, ``enlist()`` takes the connection of the
        database that keeps the keys.

        Await it in async code. Enlist before the first statement, and do not commit, roll back or close. A returned
        response under 500 commits; an exception rolls back. ``commit="caller"``: oncekey only writes into the
        transaction, and the app commits it after the handler has returned (for example a dependency with ``yield``).
        """
        self.begun = True
        return enlistment.start(self, target, commit)

    # The result of ``fn`` is typed. Its arguments are not: a ParamSpec leaves no place for ``on`` and ``repeatable``.
    @overload
    def phase(
        self, name: str, fn: Callable[..., Awaitable[_T]], /, *args: Any, on: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, _T]: ...
    @overload
    def phase(
        self, name: str, fn: Callable[..., _T], /, *args: Any, on: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, _T]: ...
    def phase(
        self, name: str, fn: Callable[..., Any], /, *args: Any, on: Any, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Run ``fn(*args, **kwargs)`` in the transaction of ``on``, once, and commit its writes with its result.

        ``fn`` may be async or plain. It writes through ``on``, and returns a value that JSON can hold. A later attempt
        gets that result and does not run ``fn`` again.
        """
        work = partial(fn, *args, **kwargs)
        return self._to_await("phase", steps.phase(self, name, work, on, blocking=False))

    @overload
    def effect(
        self,
        name: str,
        fn: Callable[..., Awaitable[_T]],
        /,
        *args: Any,
        repeatable: bool,
        provider_id: Callable[[_T], str] | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, _T]: ...
    @overload
    def effect(
        self,
        name: str,
        fn: Callable[..., _T],
        /,
        *args: Any,
        repeatable: bool,
        provider_id: Callable[[_T], str] | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, _T]: ...
    def effect(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        repeatable: bool,
        provider_id: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Make one call outside of the database. ``repeatable=True``: a second call is harmless, because the provider
        honours ``downstream_key(name)``. ``repeatable=False``: a crash during the call makes the request's key
        unknown.

        A plain function runs in a thread. ``provider_id`` takes the provider's id from the result, so that its webhook
        finds the key.
        """
        work = called(fn, args, kwargs)
        return self._to_await("effect", steps.effect(self, name, work, repeatable, provider_id))

    def enqueue(self, task: str, payload: Any = None, *, run_at: RunAt = None) -> Coroutine[Any, Any, str]:
        """Add a job to the outbox, in the enlisted transaction or the open phase, and return its id."""
        return self._to_await("enqueue", jobs.enqueue(self, task, payload, run_at, settles=False))

    def defer(self, task: str, payload: Any = None, *, run_at: RunAt = None) -> Coroutine[Any, Any, str]:
        """Add a job that settles this key with the final response. Answer 202 now."""
        return self._to_await("defer", jobs.enqueue(self, task, payload, run_at, settles=True))

    def _to_await(self, verb: str, flow: Flow[_T]) -> Coroutine[Any, Any, _T]:
        """The coroutine of a verb. It is in ``unawaited`` until it starts."""
        coroutine = self._run(flow)
        coroutine.__qualname__ = f"Operation.{verb}"  # type: ignore[attr-defined]  # read by warnings and tracebacks
        if self.unawaited is None:
            self.unawaited = {}
        self.unawaited[flow] = verb, coroutine
        return coroutine

    def close_unawaited(self) -> list[str]:
        """Close the coroutines of verbs that were called and never started. Return the names of these verbs.

        A coroutine that the handler cancelled or closed before it started does not count.
        """
        unawaited, self.unawaited = self.unawaited, None
        verbs = []
        for verb, coroutine in (unawaited or {}).values():
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
                verbs.append(verb)
        return verbs

    async def _run(self, flow: Flow[_T]) -> _T:
        if self.unawaited is not None:
            self.unawaited.pop(flow, None)
        return await self._begun().run(flow, self.policy.begin_seconds)

    def _begun(self) -> Engine:
        if self.engine is None:
            raise NoOperation("this operation belongs to no request")
        self.begun = True
        if self.enqueued is NOTHING:
            self.enqueued = {}
        return self.engine

    @property
    def doubt_lease(self) -> float:
        """For how many seconds a doubt keeps the lease. The quarantine begins after it, because a handler that may
        still run may still call a provider."""
        cut_off = self.steps is not None and self.steps.cut_off
        return 0.0 if self.evidence.ended and not cut_off else self.policy.lease_seconds

    @property
    def has_open_effect(self) -> bool:
        """An effect that may not be repeated was called, and its result is not known."""
        return self.record.effects is Effects.EXTERNAL and self.policy.effects_kind is not Effects.EXTERNAL

    @property
    def blocking(self) -> Blocking:
        """The verbs for sync handlers."""
        return Blocking(self)

    def refuse(self) -> None:
        """Tell oncekey that the handler refuses this request before anything happened: the key stays unused.

        It is for handlers that validate and answer with a 4xx of their own. ``raise Refused(...)`` does both.
        """
        if self.begun:
            raise ApplicationError("refuse() comes before any other verb: this operation has already begun")
        self._word = "refused"

    def not_executed(self) -> None:
        """Tell oncekey that nothing happened, before you return a 4xx or 5xx of your own: the same key may run again.

        ``raise NotExecuted(...)`` does the same, and oncekey answers.
        """
        self._word = "not_executed"

    @property
    def word(self) -> HandlerWord | None:
        """What the handler said about its request. A NotExecuted of a step is about that step only."""
        error = self.evidence.error
        if error is None:
            return self._word
        match error:
            case Refused():
                return "refused"
            case OutcomeUnknown():
                return "outcome_unknown"
            case NotExecuted() if self.steps is None or not any(said is error for said in self.steps.not_executed):
                return "not_executed"
        return self._word


class Blocking:
    """The verbs of an operation for handlers that are plain functions: they block instead of being awaited."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def enlist(self, target: Any = None, *, commit: Commit = "engine") -> None:
        """As :meth:`Operation.enlist`. It is done when it returns."""
        self._operation.begun = True
        enlistment.start(self._operation, target, commit, blocking=True)

    def phase(self, name: str, fn: Callable[..., _T], /, *args: Any, on: Any, **kwargs: Any) -> _T:
        work = plain(fn, args, kwargs)
        result: _T = self._run(steps.phase(self._operation, name, work, on, blocking=True))
        return result

    def effect(
        self,
        name: str,
        fn: Callable[..., _T],
        /,
        *args: Any,
        repeatable: bool,
        provider_id: Callable[[_T], str] | None = None,
        **kwargs: Any,
    ) -> _T:
        work = plain(fn, args, kwargs)
        result: _T = self._run(steps.effect(self._operation, name, work, repeatable, provider_id))
        return result

    def enqueue(self, task: str, payload: Any = None, *, run_at: RunAt = None) -> str:
        return self._run(jobs.enqueue(self._operation, task, payload, run_at, settles=False))

    def defer(self, task: str, payload: Any = None, *, run_at: RunAt = None) -> str:
        return self._run(jobs.enqueue(self._operation, task, payload, run_at, settles=True))

    def _run(self, flow: Flow[_T]) -> _T:
        return self._operation._begun().run_blocking(flow, self._operation.policy.begin_seconds)


_current: Final[ContextVar[Operation | None]] = ContextVar("oncekey_operation", default=None)


def current() -> Operation:
    """The Operation of the protected request that is running here."""
    operation = _current.get()
    if operation is None:
        raise NoOperation(
            "no protected request is running here: is the route protected, and is this its own thread or task?"
        )
    return operation
