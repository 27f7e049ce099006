"""Enlists the handler's own transaction: ``op.enlist(session)``.

From then to the end of the request that transaction locks the key's row. The lock acts as the lease: no other attempt
can take the key over, and renewals are not needed. ``completion.py`` ends the transaction; ``adapters/`` has the
drivers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.engine.flows import Call, Flow
from oncekey.engine.transactions.adapters import Link, link_to
from oncekey.engine.transactions.stages import Happened, Stage, after
from oncekey.errors import EnlistError, LeaseLost, NoOperation, StoreUnavailable
from oncekey.stores.api import Hold, Transactions
from oncekey.stores.registry import DATABASES

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.operation import Operation

_log = logging.getLogger("oncekey")

Commit = Literal["engine", "caller"]

_CALLERS = (
    "this function was called in a transaction of its caller, and would commit or roll back the caller's writes with "
    "its own: call the function outside of that transaction, give it a session or connection of its own, or take the "
    "protection off the function, so that its writes belong to the caller's key"
)


class Enlisted:
    """The transaction that an operation has enlisted."""

    def __init__(self, operation: Operation, target: Any, link: Link, hold: Hold | None) -> None:
        self.target = target
        """The session or connection, as the app passed it."""
        self.link = link
        self.hold = hold
        self.stage = Stage.NOT_AWAITED
        """What happened to it so far (``stages.py``)."""
        self.number: int | str | None = None
        """What the database calls the transaction. By it, the server tells whether the transaction committed."""
        self.opened_at = 0.0
        """When the transaction was opened, as a time of time.monotonic()."""
        self.server_time = 0.0
        """The time of the server's clock at that moment, if a prepared statement will end the transaction."""
        self.held_too_long = ""
        """The reason, if oncekey ended the transaction because it was open for too long; otherwise empty."""
        self.at = (operation.record.scope, operation.record.key)
        self.thread = threading.get_ident()
        self.loop = operation.loop

    def saw(self, happened: Happened) -> None:
        """Move to the stage that follows."""
        self.stage = after(self.stage, happened)

    @property
    def is_open(self) -> bool:
        return self.stage is Stage.OPEN

    def release(self) -> None:
        """Let other transactions write again (SQLite)."""
        if self.hold is not None:
            self.hold.release()

    def overdue(self, operation: Operation, seconds: float) -> None:
        """It has been open for a third of its lease. On SQLite it blocks all other writers, so oncekey ends it."""
        if self.hold is None or not self.is_open:
            return
        if not self.held_too_long:
            phase = operation.steps and operation.steps.phase
            what = f"phase '{phase}'" if phase else "the enlisted transaction"
            self.held_too_long = f"{what} held the database longer than {seconds:g} s"
            _log.error(self.hold.too_long, operation.name, what, f"{seconds:g}")
        self.link.interrupt()
        if self.loop is not None and not self.link.is_async:
            self.loop.call_soon_threadsafe(self._interrupt_in_loop)
        self.hold.release()  # this connection cannot write any more, so other writers need not wait for it

    def _interrupt_in_loop(self) -> None:
        if self.is_open and self.thread == threading.get_ident():
            self.link.interrupt()


class Enlisting:
    """What ``op.enlist(x)`` returns. Await it in async code; in sync code it is done already."""

    __slots__ = ("_engine", "_flow", "_timeout")

    def __init__(self, engine: Engine, flow: Flow[None] | None, timeout: float) -> None:
        self._engine = engine
        self._flow = flow
        self._timeout = timeout

    def __await__(self) -> Generator[Any, None, None]:
        flow, self._flow = self._flow, None
        if flow is not None:
            yield from self._engine.run(flow, self._timeout).__await__()


def start(operation: Operation, target: Any, commit: Commit, *, blocking: bool = False) -> Enlisting:
    """Enlist ``target`` at once, or return what must be awaited: an event loop must not block."""
    engine = operation.engine
    if engine is None:
        raise NoOperation("this operation belongs to no request, so there is nothing to enlist in")
    if commit not in ("engine", "caller"):
        raise EnlistError(f"enlist(commit={commit!r}): it takes 'engine' or 'caller'")
    if commit == "caller" and not operation.is_request:
        raise EnlistError(
            "enlist(commit='caller') is for HTTP requests, where code around the handler commits before the response "
            "is sent. A function or a message has ended when it returns: leave commit='caller' out, and oncekey commits"
        )
    if operation.enlisted is not None:
        raise EnlistError("this operation has enlisted a transaction already: one request, one transaction")
    if operation.steps is not None and operation.steps.under_way is not None:
        raise EnlistError("a step is under way, and an effect must not hold a transaction open: enlist after it")
    operation.enlisted = enlisted = prepare(engine, operation, target, commit, blocking=blocking)
    link, hold, loop, timeout = enlisted.link, enlisted.hold, _running_loop(), operation.policy.begin_seconds
    if link.is_async:
        return Enlisting(engine, enlist(operation, enlisted, waits=True), timeout)
    if loop is not None and hold is not None and not hold.try_now():
        # The transaction that holds the file may end only if this loop runs, so the loop must not block.
        if blocking:
            operation.enlisted = None
            raise StoreUnavailable("the database file is being written: in async code, use `await op.enlist(…)`")
        return Enlisting(engine, enlist(operation, enlisted, waits=True), timeout)
    engine.run_blocking(enlist(operation, enlisted), timeout)
    return Enlisting(engine, None, timeout)


def prepare(engine: Engine, operation: Operation, target: Any, commit: Commit, *, blocking: bool) -> Enlisted:
    """Check that ``target`` can be enlisted. The transaction is not opened yet."""
    if target is None:
        target = _own_connection(engine)
        if operation.in_callers_block:
            raise EnlistError(_CALLERS)
    _refuse_transactions_around(operation, target)
    link = _link(target, engine.transactions)
    database = link.database
    link.caller = commit == "caller"
    loop = _running_loop()
    if link.is_async:
        _check_loop(operation, link, loop, blocking)
        link.loop = loop
    hold = database.hold(operation.policy.begin_seconds)
    return Enlisted(operation, target, link, hold)


def _refuse_transactions_around(operation: Operation, target: Any) -> None:
    around = operation.around
    while around is not None:
        if around.enlisted is not None and around.enlisted.target is target:
            raise EnlistError(_CALLERS)
        around = around.around


def _own_connection(engine: Engine) -> Any:
    """What ``enlist()`` without an argument enlists."""
    if engine.own_connection is None:
        raise EnlistError(
            "enlist() without an argument works only where oncekey knows the app's own connection "
            f"(docs/transactions.md): use {engine.how_to_enlist}"
        )
    return engine.own_connection()


def _link(target: Any, database: Transactions | None) -> Link:
    if database is None:
        raise EnlistError(
            "the keys are kept in a store that has no transactions to share: to enlist, keep them in the app's own "
            f"database ({DATABASES})"
        )
    link = link_to(target)
    if link.dialect != database.dialect:
        raise EnlistError(
            f"{link.what} is on {link.dialect} and the keys are kept in {database.dialect}: a common commit needs one "
            "database"
        )
    link.database = database
    return link


def _check_loop(operation: Operation, link: Link, loop: asyncio.AbstractEventLoop | None, blocking: bool) -> None:
    if blocking or loop is None:
        raise EnlistError(f"{link.what} is asynchronous: `await op.enlist(…)` in an async handler")
    if operation.loop is not loop:
        raise EnlistError(
            f"{link.what} lives in another event loop than the one that ends this request: {link.in_another_loop}"
        )


def enlist(operation: Operation, enlisted: Enlisted, *, waits: bool = False, ends_here: bool = False) -> Flow[None]:
    """Open the transaction and lock the key's row in it. After a failure nothing is enlisted and no gate is held."""
    link, record = enlisted.link, operation.record
    statements = link.database.transaction_statements
    key: dict[str, Any] = {"scope": record.scope, "key": record.key, "owner": record.owner, "number": None}
    key["statement"] = link.prepared_name()
    link.mark = (statements.still, key)
    enlisted.saw(Happened.STARTED)
    try:
        if enlisted.hold is not None:
            yield Call(enlisted.hold.take_async if waits else enlisted.hold.take)
        in_a_pool = operation.loop is not None and not waits and not ends_here and _running_loop() is None
        link.ends_here = operation.in_its_thread
        elsewhere = in_a_pool or (link.ends_here is not None and not link.ends_here())
        rows = yield Call(partial(link.enlist, statements.enlist, key, ends_elsewhere=elsewhere))
        if not rows:
            raise EnlistError(
                f"the key of this request cannot be seen through {link.what}: it is another database or schema than "
                "the one that keeps the keys, or (REPEATABLE READ, SERIALIZABLE) its snapshot is older than the "
                "request: enlist before the first statement"
            )
        enlisted.number = rows[0][0]
        enlisted.server_time = rows[0][1] if key["statement"] else 0.0
    except Exception as error:
        if link.opened:
            yield Call(link.roll_back)
        enlisted.release()
        operation.enlisted = None
        if link.opened:
            yield from _find_out(operation)
        if _says_no_such_table(error):
            raise EnlistError(
                f"{link.what} sees no oncekey tables: it is another database than the one that keeps the keys, or "
                "another search_path"
            ) from error
        raise
    enlisted.opened_at = time.monotonic()
    enlisted.saw(Happened.LOCKED)


def _find_out(operation: Operation) -> Flow[None]:
    """The row was not locked. Raise LeaseLost if the record shows that the key is no longer this owner's."""
    seen: Record | None = yield (operation.record.scope, operation.record.key)
    if seen is None or seen.owner != operation.record.owner or seen.state is not State.IN_PROGRESS:
        operation.lost = True
        raise LeaseLost("the key went to another attempt before this one wrote anything")


def _says_no_such_table(error: BaseException) -> bool:
    """Whether the error is SQLSTATE 42P01, or 1146 of MySQL, of any driver."""
    errors = (error, getattr(error, "orig", None))
    return any(getattr(at, "sqlstate", None) == "42P01" or getattr(at, "args", ())[:1] == (1146,) for at in errors)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
