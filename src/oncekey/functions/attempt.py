"""One attempt at one key, without HTTP: begin, then run or take the first result, and finish.

This is the core of ``once.function`` and ``once.message``. It is a context manager, blocking (``with``) and async
(``async with``)::

    attempt = Attempt(once, Route("charge", policy), tenant="acme", key="order-42", body=b'{"amount":5}')
    async with attempt:                 # may raise, see below: then nothing ran
        if attempt.runs:                # this attempt owns the key: do the work
            value = await charge(5)     # current() is the Operation here
            attempt.keep(orjson.dumps(value))
    attempt.answer                      # the StoredResponse: of this attempt, or of the first one

Entering raises

* ``InProgress``      another attempt has the key, or a job in the outbox will settle it
* ``OutcomeUnknown``  the key is unknown
* ``KeyReused``       the key belongs to another ``body``, ``kind`` or operation
* ``PersonalKey``     the policy has ``pii="refuse"``, and the key is not known and looks like personal data
* ``EnlistError``     its caller holds the database file of the keys (Django on SQLite)
* ``StoreUnavailable``  the store cannot be asked, or has no tables; the message has the reason

If the key has ended, ``runs`` is False and ``answer`` is what it ended with; the body of the ``with`` must then do
nothing. ``answer.status`` of 400 or more means that the key has failed for good (``refusals.failed`` makes its
exception). ``answer.body`` None is a tombstone.

At the end of the ``with``, the key is completed with what :meth:`Attempt.keep` was given (by default JSON ``null``). If
the body raised, ``core/judgment.py`` judges it like an exception of a handler: by ``effects``, and by the word of
``NotExecuted``, ``OutcomeUnknown`` and ``Refused``; then the exception goes on to the caller. Leaving raises

* ``StoreUnavailable``  the body ran, and the store did not take its end: the keeper goes on trying
* ``NotExecuted``       the enlisted transaction was rolled back
* ``StepError``         a verb of the operation was not awaited, so the work is not whole
* ``TimeoutError``      ``Policy(max_run=…)`` is over (async only)
* what entering raises  another attempt took the key over, and has not ended with an answer

An attempt that lost its key to one that has ended takes that one's ``answer``. The async form stores the end also if
the caller is cancelled.

Every exception that leaves an attempt, its own or the body's, is marked as this attempt's (``core/evidence.py``). If
the caller is a protected operation itself, the exception says nothing about the caller's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from oncekey.core.decision import Claim, Decision, Execute, Replay, decide
from oncekey.core.evidence import Leaving, is_of, leaves
from oncekey.core.judgment import Move
from oncekey.core.kept_request import kept_request
from oncekey.core.recipe import ReadLines, Recipe
from oncekey.core.record import Record, StoredResponse
from oncekey.core.routes import Route
from oncekey.core.states import Event
from oncekey.engine import last_move, personal_keys
from oncekey.engine.admission import Admission
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.keeper import Unfinished
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, _current
from oncekey.errors import LeaseLost, OperatorError, StepError
from oncekey.functions.refusals import NotStored, asked, refused, rolled_back
from oncekey.web import endings

JSON = "application/json"
NULL = StoredResponse(200, (("content-type", JSON),), b"null")
_WITH_ANSWER = frozenset({Event.COMPLETE, Event.FAIL, Event.DEFER})
_T = TypeVar("_T")
TOO_LARGE = (
    "%s returned more than %s bytes (max_response_bytes), so its result is not kept. The first caller gets it, and a "
    "repeated call gets an error in its place: return less, such as an id. This is said once per {unit}"
)


class Attempt:
    """Use it once, as ``with`` or as ``async with``; the module says how.

    ``route``        the operation's name and its policy
    ``body``         what is asked, as bytes: the fingerprint is made of it. ``content_type`` says how it is compared;
                     JSON by its values, and everything else byte by byte
    ``kind``         a part of the fingerprint, so that a function and a queue of one name differ
    ``recipe``       which arguments ``body`` was made of; ``read_lines`` is then a ``Call`` (``core/recipe.py``)
    ``kept_body``    the body for ``keep_request``, if it is another one: the fingerprint leaves out the key's argument
    """

    runs = False
    """This attempt owns the key."""
    answer: StoredResponse | None = None
    """What the key has ended with. None: not ended yet, or ended without a response, by an operator."""
    answered_by_this = False
    """``answer`` is what this attempt kept."""
    record: Record | None = None
    """The key's row, as the store last returned it."""
    operation: Operation
    move: Move | None = None
    """How the body was judged. None: it did not run, or has not ended."""
    finished: Finished | None = None
    """What the store made of ``move``. None: it did not take it, and the keeper retries."""

    def __init__(
        self,
        once: OnceKey,
        route: Route,
        *,
        tenant: str,
        key: str,
        body: bytes,
        content_type: str | None = JSON,
        kind: str = "CALL",
        recipe: Recipe | None = None,
        read_lines: ReadLines = lambda names: (),
        kept_body: Callable[[], bytes] | None = None,
    ) -> None:
        self.once = once
        self.route = route
        self.policy = route.policy
        self._tenant = tenant
        self._kept = NULL
        self._failure: BaseException | None = None
        self._kept_body = kept_body
        self._task: _Body | None = None
        self._admission: Admission | None = None
        if self.policy.pii is not None and (refused := personal_keys.refused(once, route, tenant, key)) is not None:
            self._admission = Admission(self.policy, once.limiter, tenant, refused)
        self.wanted = once.reservation(
            route,
            tenant=tenant,
            key=key,
            owner=once.engine.owners.new(),
            parts=(kind, route.operation, b"", content_type, body, read_lines),
            lines=(),
            recipe=recipe,
        )
        self.leaving = Leaving(self.wanted.owner)

    def keep(self, body: bytes | None, content_type: str = JSON) -> None:
        """The result that the key is completed with. None, or more than the policy allows: a tombstone."""
        if body is not None and len(body) > (most := self.policy.max_response_bytes):
            self.once.engine.tell_once(self.route.operation, TOO_LARGE, f"{most:,}")
            body = None
        self._kept = StoredResponse(200, (("content-type", content_type),), body)

    def fail(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...], error: BaseException) -> None:
        """The body ended with an error that has a status, as the HTTP exception of a framework has: it is judged by it.

        The enlisted transaction is rolled back. With a final 4xx the key fails with this answer. Otherwise ``move``
        says what became of it, and ``answer`` is None.
        """
        self._kept = StoredResponse(status, headers, body)
        self._failure = error

    # -- blocking ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        engine = self.once.engine
        with self.leaving:
            self._decided(engine.run_blocking(self._begin(), self.policy.begin_seconds), None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.runs:
            return False
        with self.leaving:
            move = self._judged(error)
            return self._ended(move, self._store_blocking(move), error)

    def _store_blocking(self, move: Move) -> Finished | None:
        """Make the owner's move; None: the store did not take it, and the keeper retries."""
        engine, operation, seconds = self.once.engine, self.operation, self.policy.begin_seconds
        try:
            flow = engine.finish(operation, move.event, move.response, move.reason)
            finished = engine.run_blocking(flow, seconds)
        except OperatorError:
            engine.adopt(Unfinished(operation, move.event, move.response, move.reason))
            return None
        except BaseException:
            engine.keeper.unwatch(operation)  # the lease runs out, and ``effects`` says what that means
            raise
        finally:
            if operation.enlisted is not None:
                operation.enlisted.release()
        engine.keeper.unwatch(operation)
        return finished

    # -- async ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        engine = self.once.engine
        with self.leaving:
            decision = await engine.run(self._begin(), self.policy.begin_seconds)
            self._decided(decision, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self.runs:
            return False
        timed_out = self._task is not None and self._task.ended(error)
        with self.leaving:
            move = self._judged(error)
            ended = self._ended(move, await self._whole(self._store(move)), error)
            if timed_out:
                raise TimeoutError(f"{self.route.operation} ran longer than max_run={self.policy.max_run}") from error
            return ended

    def _store(self, move: Move) -> Coroutine[Any, Any, Finished | None]:
        """As :meth:`_store_blocking`."""
        item = Unfinished(self.operation, move.event, move.response, move.reason)
        return last_move.make(self.once.engine, item, self.policy.begin_seconds, app_has_returned=False)

    async def _whole(self, storing: Coroutine[Any, Any, _T]) -> _T:
        """Await the storing in a task of its own. A cancelled caller waits for its end, which is bounded in time."""
        tasks = self.once.engine.tasks
        task = asyncio.get_running_loop().create_task(storing)
        tasks.add(task)  # type: ignore[arg-type]  # so that drain() waits for it
        task.add_done_callback(tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # seen: the caller gets its own cancellation
            raise

    # -- both ----------------------------------------------------------------------------------------------------

    def owns(self, error: BaseException) -> bool:
        """Whether the exception is about this attempt, and not about an operation that its body called."""
        return is_of(error, self.wanted.owner)

    def _begin(self) -> Flow[Decision]:
        in_own_block = self.once.engine.in_own_block
        self._in_callers_block = in_own_block is not None and in_own_block(self.route.operation)
        return asked(self.once.engine.begin(self.wanted, self.policy, None, self._admission), self.route.operation)

    def _decided(self, decision: Decision, loop: asyncio.AbstractEventLoop | None) -> None:
        self.record = decision.record
        if isinstance(decision, Replay):
            self.answer = decision.record.response
            return
        if not isinstance(decision, Execute):
            raise refused(decision, self.route, self.wanted.key)
        policy, engine = self.policy, self.once.engine
        self.operation = operation = Operation(decision.record, policy, self._tenant, engine, loop, covered=True)
        operation.is_request = False
        if policy.keep_request:
            operation.request = kept_request(self.wanted.parts, policy.recipe.headers)
            if operation.request is not None and self._kept_body is not None:
                operation.request = replace(operation.request, body=self._kept_body())
        if loop is not None:
            self._task = _Body()
            operation.task = cast("asyncio.Task[None]", self._task)
        operation.evidence.entered()
        engine.keeper.watch(operation)
        self.runs = True
        self._outer = operation.around = _current.get()
        operation.in_callers_block = self._in_callers_block
        engine.enter(operation)

    def _judged(self, error: BaseException | None) -> Move:
        """The owner's move. From here on, ``current()`` is again what it was around this attempt."""
        operation, once = self.operation, self.once
        _current.set(self._outer)  # not by its token: the end of an async generator may be in another context
        if error is not None:
            operation.evidence.raised_with(error, None)
            move = endings.raised(operation, error, once)[0]
            leaves(error, operation.owner)
            return move
        if self._failure is not None:
            operation.evidence.raised_with(self._failure, self._kept.status)
        else:
            operation.evidence.returned_with(self._kept.status)
        move, _ = endings.answered(operation, self._kept.status, (), self._kept.body, once)
        if move.event not in _WITH_ANSWER:
            return move
        reason = None if self._kept.body is not None else "the result was not kept"
        return Move(move.event, self._kept, reason)

    def _ended(self, move: Move, finished: Finished | None, error: BaseException | None) -> bool:
        """Set ``answer``, or raise. True: the body's exception is answered by another attempt's answer."""
        self.move, self.finished = move, finished
        if error is not None and not (isinstance(error, LeaseLost) and finished is not None and not finished.stored):
            return False  # it goes on to the caller
        name = self.route.operation
        if self._failure is not None and move.event not in _WITH_ANSWER:
            return False
        if error is None and move.event not in _WITH_ANSWER:
            raise StepError(f"{name}: {move.reason}, so it did not happen, and the result is not stored")
        if finished is None:
            raise NotStored(
                f"{name} ran, and the store did not take its result within {self.policy.begin_seconds:g} s: oncekey "
                "goes on trying while this process lives. Call it again with the same key"
            )
        self.record = finished.record
        if finished.stored:
            self.answer, self.answered_by_this = move.response, True
            return False
        if finished.undone:
            raise rolled_back(name)
        decision = decide(finished.record, self.wanted)
        if isinstance(decision, Claim) or decision.record is None:  # released by upkeep, or removed by an operator
            raise NotStored(
                f"{name} ran, and lost its key before its result was stored: call it again with the same key"
            ) from error
        if not isinstance(decision, Replay):
            raise refused(decision, self.route, self.wanted.key) from error
        self.answer = decision.record.response
        return True


class _Body:
    """What the keeper sees of the body of an ``async with``: it may cancel it, and only while it runs.

    The task is the caller's own. Without this, a cancellation by ``max_run`` that comes a moment too late would hit
    what the caller does next.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        self._task = task
        self._before = task.cancelling()
        self._running = True
        self._timed_out = False

    def done(self) -> bool:
        return self._task.done()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._task.get_loop()

    def cancel(self, message: str) -> None:
        if self._running:
            self._timed_out = True
            self._task.cancel(message)

    def ended(self, error: BaseException | None) -> bool:
        """The body is over. True: ``max_run`` cancelled it, and nothing else did."""
        self._running = False
        if not self._timed_out:
            return False
        return self._task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)
