"""Finds out whether an enlisted transaction was committed, when its own answer does not tell.

The engine never guesses how a transaction ended: ``stages.py`` says what each stage proves, and whether the key's row
or the server can tell the rest. A request runs again only if it is proven that nothing happened.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from oncekey.core import judgment
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.engine.flows import Call, Finished, Flow, Pause
from oncekey.engine.transactions import finishers
from oncekey.engine.transactions.enlistment import Enlisted
from oncekey.engine.transactions.stages import PROVES, Happened, Proof, Stage, after
from oncekey.errors import StoreUnavailable

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.operation import Operation

_log = logging.getLogger("oncekey")

SETTLE_TRIES = 5
_FATES = {"aborted": Happened.SERVER_ABORTED, "committed": Happened.SERVER_COMMITTED}


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
            let_go(operation)
            return engine._lost(operation, event, seen)
        if seen.state is State.IN_PROGRESS:
            why, event_instead = "the enlisted transaction was not committed", undone(operation)
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
            let_go(operation)
            engine._finished(event_instead, moved, None, why)
            return Finished(False, moved, undone=event_instead is Event.RELEASE)
        let_go(operation)
        if seen.state in (State.FAILED_RETRYABLE, State.UNKNOWN):  # the lease ran out, and a sweeper moved it
            return Finished(False, seen, undone=seen.state is State.FAILED_RETRYABLE)
        if event is not Event.DEFER and seen.response != response:  # a verdict settled it since
            return engine._lost(operation, event, seen)
        engine._finished(event, seen, response, reason)
        return Finished(True, seen)
    raise StoreUnavailable("it is not known yet whether the enlisted transaction was committed")


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


def _ask_fate(engine: Engine, enlisted: Enlisted, number: int | str) -> Any:
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
    return loop.run_in_executor(finishers.pool(), ask) if loop is enlisted.loop else ask()


def undone(operation: Operation) -> Event:
    """The event of an attempt that returned, if its transaction is proven to be rolled back: as if it had raised. With
    an open effect it is a doubt, because the rollback undoes only the effects in the database."""
    return Event.DOUBT if operation.has_open_effect else judgment.undone(operation.policy).event


def let_go(operation: Operation) -> None:
    """The key's end is stored: turn the guards off."""
    enlisted, operation.enlisted = operation.enlisted, None
    if enlisted is not None:
        enlisted.link.free()
