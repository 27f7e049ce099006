"""The end of a request that enlisted a transaction: one commit for business writes, stored response and key.

If the handler *returns* a response with a status under 500, the transaction commits: its last statement completes the
key, then it is committed, then the response is sent. Everything else (raised, 5xx, released) is rolled back first and
then stored as without enlisting.

If the answer to the commit is lost, ``outcome.py`` finds out how the transaction ended. ``finishers.py`` runs the end
of a request under ASGI.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from math import ceil
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import orjson

from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Actor, Event
from oncekey.core.swaps import Swap, swap
from oncekey.engine.flows import Call, Finished, Flow
from oncekey.engine.transactions import outcome
from oncekey.engine.transactions.adapters.base import AT_ONCE
from oncekey.engine.transactions.adapters.lost import LOST
from oncekey.engine.transactions.enlistment import Enlisted
from oncekey.engine.transactions.stages import PROVES, TO_BE_ENDED, Happened, Proof, Stage
from oncekey.telemetry.redaction import describe

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.operation import Operation

_log = logging.getLogger("oncekey")

KEPT_WRITES = "the rollback did not undo what the handler wrote to a table without transactions"
USE_INNODB = (
    "Find out what is there, and settle the key (`oncekey keys resolve`). Then convert the table: ALTER TABLE … "
    "ENGINE=InnoDB; `oncekey doctor` names such tables"
)
MAY_BE_COMMITTED = (
    "the enlisted transaction ended without oncekey, and its writes may be committed: the handler ended it itself, or "
    "the database server stopped and cannot tell any more"
)
RETURN_REDIRECTS = (
    "the response is a redirect. If the handler raised it, let it return the redirect: a dependency with yield sees a "
    "raised one as an error, and closes the session before oncekey can commit"
)
COMMITTING = frozenset({Event.COMPLETE, Event.FAIL, Event.DEFER})


def finish(
    engine: Engine, operation: Operation, event: Event, response: StoredResponse | None, reason: str | None
) -> Flow[Finished]:
    """As Engine.finish, for an operation that has enlisted."""
    enlisted = operation.enlisted
    assert enlisted is not None  # noqa: S101 - the caller has checked
    if PROVES[enlisted.stage] is Proof.ROW_TELLS:
        return (yield from outcome.settle(engine, operation, event, response, reason))
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
    # At least one second from now. The clock is the server's at enlist, and the time since: this host's may be wrong.
    soon = ceil(enlisted.server_time + monotonic() - enlisted.opened_at) + 1.0
    statements = link.database.transaction_statements
    parameters = _parameters(engine.sealing.sealed_swap(change), soon + operation.record.retention_seconds)
    rows: Any = []
    try:
        if link.caller:
            rows = yield Call(partial(link.complete, statements.complete, parameters))
        else:
            rows = yield Call(partial(link.end, statements, parameters, enlisted.saw))
    except Exception as error:
        if PROVES[enlisted.stage] is Proof.ROW_TELLS:
            # The commit was refused (a deferred constraint, a serialization failure), or its answer was lost.
            _log.warning(
                "the commit of an enlisted transaction failed with %s: oncekey reads the key's row to see whether it "
                "happened",
                describe(error),
            )
            yield Call(link.roll_back)
            enlisted.release()
            return (yield from outcome.settle(engine, operation, event, response, reason))
        if event is not Event.FAIL:
            _say_why(operation, enlisted, response, error)
    else:
        if not rows and not enlisted.held_too_long and event is not Event.FAIL:
            _say_why(operation, enlisted, response, None)
    if not rows:
        yield from roll_back(enlisted)
        return (yield from _ended(engine, operation, enlisted, event, response, reason))
    moved = change.moved(operation.record, soon) if rows is AT_ONCE else _moved(change, operation.record, rows[0])
    if link.caller:
        enlisted.saw(Happened.KEY_WRITTEN)
        yield Call(link.let_go)
        return Finished(True, moved)
    enlisted.saw(Happened.COMMIT_ANSWERED)
    enlisted.release()
    outcome.let_go(operation)
    engine._finished(event, moved, response, reason)
    if link.runs_after_commit:
        yield Call(link.run_after_commit)
    return Finished(True, moved)


def _say_why(
    operation: Operation, enlisted: Enlisted, response: StoredResponse | None, error: Exception | None
) -> None:
    """Log why a response is not stored. ``error``: what oncekey's last statement raised; None: it found no key."""
    link = enlisted.link
    if link.connection_lost(error):
        _log.error(
            "%s: the connection to the database was lost before the response was stored, so it is not stored. %s",
            operation.name,
            LOST,
        )
    elif link.end_refused:
        _log.error(
            "%s: the handler tried to end its enlisted transaction and caught the error, so the response is not "
            "stored and the transaction is rolled back: %s",
            operation.name,
            link.leave_it,
        )
    elif error is not None:
        _log.error(
            "%s: the enlisted transaction failed at its end, in %s, so the response is not stored. If a statement "
            "failed and the handler went on: %s. If the handler has closed its session or connection: %s",
            operation.name,
            describe(error),
            link.use_a_savepoint,
            link.leave_it,
        )
    else:
        _log.error(
            "%s: the enlisted transaction had ended before the response was stored, so it is not stored. If a "
            "statement failed and the handler went on: %s. Otherwise: %s",
            operation.name,
            link.use_a_savepoint,
            RETURN_REDIRECTS if response is not None and 300 <= response.status < 400 else link.leave_it,
        )


def roll_back(enlisted: Enlisted) -> Flow[Stage]:
    """Roll back, and return the stage that follows: what is proven by it."""
    yield Call(enlisted.link.roll_back)
    enlisted.release()
    enlisted.saw(Happened.ROLLED_BACK if enlisted.link.rollback_proven else Happened.ENDED)
    return enlisted.stage


def _ended(
    engine: Engine,
    operation: Operation,
    enlisted: Enlisted,
    event: Event,
    response: StoredResponse | None,
    reason: str | None,
) -> Flow[Finished]:
    """The transaction ended without completing the key. Make sure that it was rolled back, and store ``event``."""
    if not (yield from outcome.nothing_written(engine, enlisted, enlisted.stage)):
        why, advice = MAY_BE_COMMITTED, None
        if enlisted.link.kept_writes:
            why, advice = KEPT_WRITES, USE_INNODB
        _log.error("%s: the key is unknown. %s", why, advice or enlisted.link.leave_it)
        return (yield from _instead(engine, operation, Event.DOUBT, why))
    if operation.commits and event in COMMITTING and (event is not Event.FAIL or enlisted.held_too_long):
        # A success is never stored without its rows (hazard 33). A 4xx is stored: if the handler rolled back or a
        # statement failed, it has no rows to lose.
        why = enlisted.held_too_long or "the enlisted transaction was rolled back"
        return (yield from _instead(engine, operation, outcome.undone(operation), why))
    finished = yield from engine.move(operation, event, response, reason)
    outcome.let_go(operation)
    return finished


def _instead(engine: Engine, operation: Operation, event: Event, why: str) -> Flow[Finished]:
    """Store ``event`` in place of the handler's response. The transaction is let go only after that, so that the key
    cannot be completed in another way before."""
    finished = yield from engine.move(operation, event, None, why)
    outcome.let_go(operation)
    return Finished(False, finished.record, undone=finished.stored and event is Event.RELEASE)


def _parameters(change: Swap, expires_at: float) -> dict[str, Any]:
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
        "expires_at": expires_at,
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
