"""The end of a request that enlisted a transaction: one commit for business writes, stored response and key.

If the handler *returns* a response with a status under 500, the transaction commits: its last statement completes the
key, then it is committed, then the response is sent. Everything else (raised, 5xx, released) is rolled back first and
then stored as without enlisting.

The engine never guesses how a transaction ended: ``stages.py`` says what each stage proves, and whether the key's row
or the server can tell the rest. A request runs again only if it is proven that nothing happened.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core import judgment
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Actor, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.engine import process
from oncekey.engine.flows import Call, Finished, Flow, Pause
from oncekey.engine.transactions.adapters.base import LEAVE_IT, USE_A_SAVEPOINT, Rows
from oncekey.engine.transactions.enlistment import Enlisted
from oncekey.engine.transactions.stages import PROVES, TO_BE_ENDED, Happened, Proof, Stage, after
from oncekey.errors import EnlistError, OperatorError, StoreUnavailable
from oncekey.telemetry.redaction import describe

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.keeper import Unfinished
    from oncekey.engine.operation import Operation

_log = logging.getLogger("oncekey")

SETTLE_TRIES = 5
COMMITTING = frozenset({Event.COMPLETE, Event.FAIL, Event.DEFER})
_FATES = {"aborted": Happened.SERVER_ABORTED, "committed": Happened.SERVER_COMMITTED}
FINISHERS = 32
"""Threads that end the transactions of sync handlers under ASGI."""


def finish(
    engine: Engine, operation: Operation, event: Event, response: StoredResponse | None, reason: str | None
) -> Flow[Finished]:
    """As Engine.finish, for an operation that has enlisted."""
    enlisted = operation.enlisted
    assert enlisted is not None  # noqa: S101 - the caller has checked
    if PROVES[enlisted.stage] is Proof.ROW_TELLS:
        return (yield from settle(engine, operation, event, response, reason))
    if enlisted.stage is Stage.NOT_AWAITED and event is not Event.DISCARD:
        why = "op.enlist(…) was not awaited, so nothing was enlisted: write `await op.enlist(…)`"
        _log.error("%s. What the handler committed itself stays committed, so the key is unknown", why)
        return (yield from _instead(engine, operation, Event.DOUBT, why))
    if enlisted.is_open and operation.commits and event in COMMITTING:
        return (yield from _commit(engine, operation, enlisted, event, response, reason))
    if enlisted.stage in TO_BE_ENDED:
        ended = yield from roll_back(enlisted)
        if enlisted.link.caller and ended is Stage.ENDED:
            enlisted.saw(Happened.LEFT_TO_APP)
            return Finished(True, operation.record)
    return (yield from _ended(engine, operation, enlisted, event, response, reason))


def _commit(
    engine: Engine,
    operation: Operation,
    enlisted: Enlisted,
    event: Event,
    response: StoredResponse | None,
    reason: str | None,
) -> Flow[Finished]:
    link = enlisted.link
    change = swap(operation.record, event, Actor.OWNER, response=response, last_error=reason)
    rows: Any = []
    try:
        rows = yield Call(partial(link.complete, link.database.transaction_statements.complete, _parameters(change)))
    except Exception as error:
        if event is not Event.FAIL:
            _log.error(
                "%s: the enlisted transaction failed at its end, in %s, so the response is not stored. If a statement "
                "failed and the handler went on: %s. If the handler has closed its session or connection: %s",
                operation.name,
                describe(error),
                USE_A_SAVEPOINT,
                LEAVE_IT,
            )
    else:
        if not rows and not enlisted.held_too_long and event is not Event.FAIL:
            _log.error(
                "%s: the enlisted transaction had ended before the response was stored, so it is not stored. If a "
                "statement failed and the handler went on: %s. Otherwise: %s",
                operation.name,
                USE_A_SAVEPOINT,
                LEAVE_IT,
            )
    if not rows:
        yield from roll_back(enlisted)
        return (yield from _ended(engine, operation, enlisted, event, response, reason))
    moved = _moved(change, operation.record, rows[0])
    if link.caller:
        enlisted.saw(Happened.KEY_WRITTEN)
        yield Call(link.let_go)
        return Finished(True, moved)
    enlisted.saw(Happened.COMMIT_SENT)
    try:
        yield Call(link.commit)
    except Exception as error:
        # The commit was refused (a deferred constraint, a serialization failure), or its answer was lost.
        _log.warning(
            "the commit of an enlisted transaction failed with %s: oncekey reads the key's row to see whether it "
            "happened",
            describe(error),
        )
        yield Call(link.roll_back)
        enlisted.release()
        return (yield from settle(engine, operation, event, response, reason))
    enlisted.saw(Happened.COMMIT_ANSWERED)
    enlisted.release()
    _let_go(operation)
    engine._finished(event, moved, response, reason)
    return Finished(True, moved)


def settle(
    engine: Engine, operation: Operation, event: Event, response: StoredResponse | None, reason: str | None
) -> Flow[Finished]:
    """Read in the key's row whether the commit happened: the transaction's last statement completes the key.

    If it did not happen, the key is released. That cannot be too early: the row is locked for as long as the commit may
    still happen. If the row alone proves nothing, the server is asked.
    """
    enlisted = operation.enlisted
    assert enlisted is not None  # noqa: S101 - the caller has checked
    enlisted.release()
    at, stage = (operation.record.scope, operation.record.key), enlisted.stage
    for tries in range(SETTLE_TRIES):
        seen: Record | None = yield at
        if seen is None or seen.owner != operation.record.owner:
            _let_go(operation)
            return engine._lost(operation, event, seen)
        if seen.state is State.IN_PROGRESS:
            why, event_instead = "the enlisted transaction was not committed", _undone(operation)
            unfinished = after(stage, Happened.ROW_IN_PROGRESS)
            if not (yield from nothing_written(engine, enlisted, unfinished)):
                why, event_instead = "the end of the enlisted transaction was cut off", Event.DOUBT
            elif enlisted.link.may_have_written_later:
                why, event_instead = "the enlisted transaction was not committed, but a later one may be", Event.DOUBT
            lease = operation.doubt_lease if event_instead is Event.DOUBT else None
            moved: Record | None = yield swap(seen, event_instead, Actor.OWNER, last_error=why, lease_seconds=lease)
            if moved is None:  # the row is still locked, so the commit is undecided
                yield Pause(at, 0.01 * 4**tries)
                continue
            if enlisted.link.caller:
                _log.error("enlist(commit='caller'): the app has returned and did not commit")
            _let_go(operation)
            engine._finished(event_instead, moved, None, why)
            return Finished(False, moved, undone=event_instead is Event.RELEASE)
        _let_go(operation)
        if seen.state in (State.FAILED_RETRYABLE, State.UNKNOWN):  # the lease ran out, and a sweeper moved it
            return Finished(False, seen, undone=seen.state is State.FAILED_RETRYABLE)
        if event is not Event.DEFER and seen.response != response:  # a verdict settled it since
            return engine._lost(operation, event, seen)
        engine._finished(event, seen, response, reason)
        return Finished(True, seen)
    raise StoreUnavailable("it is not known yet whether the enlisted transaction was committed")


def roll_back(enlisted: Enlisted) -> Flow[Stage]:
    """Roll back, and return the stage that follows: what is proven by it."""
    yield Call(enlisted.link.roll_back)
    enlisted.release()
    enlisted.saw(Happened.ROLLED_BACK if enlisted.link.rollback_proven else Happened.ENDED)
    return enlisted.stage


def nothing_written(engine: Engine, enlisted: Enlisted, stage: Stage) -> Flow[bool]:
    """Whether it is proven that a transaction in this stage committed nothing. The server is asked if it can tell."""
    if PROVES[stage] is Proof.SERVER_TELLS:
        stage = after(stage, (yield from _ask_server(engine, enlisted)))
    return PROVES[stage] is Proof.NOTHING_WRITTEN


def _ask_server(engine: Engine, enlisted: Enlisted) -> Flow[Happened]:
    """The server needs a moment to notice that a client has disconnected. If the transaction stays open,
    StoreUnavailable is raised."""
    if enlisted.number is None or enlisted.link.may_have_written_later:
        return Happened.SERVER_CANNOT_TELL
    for tries in range(SETTLE_TRIES):
        fate: str = yield Call(partial(_ask_fate, engine, enlisted, enlisted.number))
        if fate != "in progress":
            return _FATES.get(fate, Happened.SERVER_CANNOT_TELL)
        yield Pause(enlisted.at, 0.01 * 4**tries)
    raise StoreUnavailable("the enlisted transaction is still open in the database")


def _ended(
    engine: Engine,
    operation: Operation,
    enlisted: Enlisted,
    event: Event,
    response: StoredResponse | None,
    reason: str | None,
) -> Flow[Finished]:
    """The transaction ended without completing the key. Make sure that it was rolled back, and store ``event``."""
    if not (yield from nothing_written(engine, enlisted, enlisted.stage)):
        why = "the handler ended its enlisted transaction itself, and its writes may be committed"
        _log.error("%s: the key is unknown. %s", why, LEAVE_IT)
        return (yield from _instead(engine, operation, Event.DOUBT, why))
    if operation.commits and event in COMMITTING and (event is not Event.FAIL or enlisted.held_too_long):
        # A success is never stored without its rows (hazard 33). A 4xx is stored: if the handler rolled back or a
        # statement failed, it has no rows to lose.
        why = enlisted.held_too_long or "the enlisted transaction was rolled back"
        return (yield from _instead(engine, operation, _undone(operation), why))
    finished = yield from engine.move(operation, event, response, reason)
    _let_go(operation)
    return finished


def _undone(operation: Operation) -> Event:
    """The event of an attempt that returned, if its transaction is proven to be rolled back: as if it had raised. With
    an open effect it is a doubt, because the rollback undoes only the effects in the database."""
    return Event.DOUBT if operation.has_open_effect else judgment.undone(operation.policy).event


def _instead(engine: Engine, operation: Operation, event: Event, why: str) -> Flow[Finished]:
    """Store ``event`` in place of the handler's response. The transaction is let go only after that, so that the key
    cannot be completed in another way before."""
    finished = yield from engine.move(operation, event, None, why)
    _let_go(operation)
    return Finished(False, finished.record, undone=finished.stored and event is Event.RELEASE)


def _let_go(operation: Operation) -> None:
    """The key's end is stored: turn the guards off."""
    enlisted, operation.enlisted = operation.enlisted, None
    if enlisted is not None:
        enlisted.link.free()


def _ask_fate(engine: Engine, enlisted: Enlisted, number: int) -> Any:
    """Ask the server what became of the transaction. This blocks, so it never runs in the request's event loop."""

    def ask() -> str:
        try:
            return str(enlisted.link.database.fate(number))
        finally:
            engine.store.disconnect()

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return ask()
    return loop.run_in_executor(_finishers.pool(), ask) if loop is enlisted.loop else ask()


def _parameters(change: Swap) -> dict[str, Any]:
    response = change.response
    to_state = change.to_state
    assert to_state is not None  # noqa: S101 - no enlisted move deletes
    return {
        "scope": change.scope,
        "key": change.key,
        "owner": change.owner,
        "to_state": to_state.value,
        "final": to_state in FINAL,
        "status": response and response.status,
        "headers": response and _headers(response),
        "body": response and response.body,
        "schema_version": response and response.schema_version,
        "last_error": change.last_error,
        "now": time(),
    }


def _headers(response: StoredResponse) -> str:
    return orjson.dumps(response.headers).decode()


def _moved(change: Swap, record: Record, row: tuple[Any, ...]) -> Record:
    lease_until, recovery_point, finished_at, expires_at, now = row
    return replace(
        change.moved(record, now),
        lease_until=lease_until,
        recovery_point=recovery_point,
        finished_at=finished_at,
        expires_at=expires_at,
    )


def execute(operation: Operation, statement: str, parameters: Mapping[str, Any]) -> Flow[Rows]:
    """Run one more statement (``:name`` placeholders) in the enlisted transaction, in the handler's own thread."""
    enlisted = operation.enlisted
    if enlisted is None or not enlisted.is_open:
        raise EnlistError("this operation has no transaction open: op.enlist(session) comes first")
    rows: Rows = yield Call(partial(enlisted.link.execute, (statement,), parameters))
    return rows


# -- running it under ASGI ---------------------------------------------------------------------------------------------


class _Finishers:
    """Threads of oncekey's own. All threads of the loop's default pool may be waiting for the lock that we release."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        process.enroll(self)

    def pool(self) -> ThreadPoolExecutor:
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(FINISHERS, "oncekey-finish")
            return self._pool

    def after_fork(self) -> None:
        self._pool = None
        self._lock = threading.Lock()


_finishers = _Finishers()


async def run(engine: Engine, item: Unfinished, timeout: float) -> Finished:
    """Finish in a task of its own, so that a cancelled request does not cancel a commit half-way."""
    enlisted = item.operation.enlisted
    assert enlisted is not None  # noqa: S101 - the caller has checked
    flow = engine.finish(item.operation, item.event, item.response, item.reason)
    loop = asyncio.get_running_loop()

    async def work() -> Finished:
        if enlisted.link.is_async or enlisted.thread == threading.get_ident():
            return await engine.run(flow, timeout)
        return await loop.run_in_executor(_finishers.pool(), engine.run_blocking, flow, timeout)

    task = loop.create_task(work())
    engine.tasks.add(task)  # type: ignore[arg-type]
    task.add_done_callback(engine.tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(_left_alone, engine, item))
        await asyncio.wait([task])  # the app closes its session next: it must not be in use then
        raise


def _left_alone(engine: Engine, item: Unfinished, task: asyncio.Task[Finished]) -> None:
    """The request was cancelled: leave what is unfinished to the keeper."""
    enlisted = item.operation.enlisted
    if task.cancelled() and enlisted is not None:
        # The app closes its connection next, and a thread of the app may be using it. So the keeper does not touch the
        # connection, and asks the key's row and the server.
        enlisted.saw(Happened.CUT_OFF)
    if task.cancelled() or isinstance(task.exception(), OperatorError):
        engine.keeper.adopt(item)
    elif (error := task.exception()) is not None:
        _log.error("an enlisted transaction could not be ended", exc_info=error)
    else:
        engine.keeper.unwatch(item.operation)
