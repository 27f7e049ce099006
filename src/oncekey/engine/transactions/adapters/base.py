"""What the engine asks of a connection that a handler enlists. It is the same for every driver.

A **link** gives the engine access to the app's own transaction. It tells whether this still is the enlisted
transaction, runs statements in it, and ends it. Every method of a link to an asynchronous driver returns an awaitable.
``Engine.run`` awaits it, so the flows of ``engine/transactions/completion.py`` are the same for both kinds.

Links also keep the handler from ending the transaction itself. If the driver allows it, the link refuses an early
commit at once and rolls back what was written so far, so no half-done work can be committed later by accident. After a
rollback the handler may still read. Its writes are refused, because the end of the enlisted transaction says nothing
about a later one. If the driver does not allow a refusal, ``may_have_written_later`` remembers it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from oncekey.engine.transactions.adapters.lost import RECONNECT_REFUSED, says_connection_lost
from oncekey.engine.transactions.stages import Happened
from oncekey.errors import EnlistError
from oncekey.stores.api import Transactions, TransactionStatements

Rows = list[tuple[Any, ...]]
Saw = Callable[[Happened], None]
AT_ONCE: Rows = [()]
"""What ``end`` returns if it sent the completion and the COMMIT as one message. The key is completed, and the answer
has no rows."""

_PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]+)")

LEAVE_IT = (
    "the transaction is enlisted, so oncekey ends it: it commits your writes together with the stored response when "
    "the handler has returned. Take the commit() or rollback() out of the handler, keep the session or connection open "
    "until the response is sent (a dependency with yield does), and raise to undo"
)


COMMITS_BY_ITSELF = (
    "on MySQL this statement commits the open transaction without saying so, and the transaction is enlisted: it would "
    "commit your writes without the stored response. Run the statement outside of the handler (DDL in a migration, for "
    "example), or on another connection"
)
_SAYS_SO = frozenset({"COMMIT", "ROLLBACK", "END", "ABORT", "PREPARE"})


USE_A_SAVEPOINT = (
    "a failed statement rolls back the whole transaction; put what may fail into a savepoint (SQLAlchemy: "
    "`with session.begin_nested():`), or raise"
)


ONE_THREAD = (
    "{} may be used in its own thread only, and under ASGI the request of a plain function ends in another: open it "
    "with check_same_thread=False"
)


DOOM = ("SELECT 1 / 0",)
"""A statement that fails, for a block that only the app may end. After it nothing can be written in the transaction,
and its COMMIT is a ROLLBACK."""


class Link:
    """One enlisted session or connection. A subclass knows its driver; ``completion.py`` orders the calls."""

    dialect: str
    database: Transactions
    """The store, in whose database the transaction must be."""
    is_async = False
    in_another_loop = "under WSGI use a synchronous session, and under ASGI the server's own loop"
    """What to change in a handler that enlists an asynchronous link in another event loop than that of the request."""
    what: str
    """The name of the enlisted object in messages."""
    caller = False
    """The app commits, not the engine: ``commit="caller"``."""
    end_allowed = False
    """The engine is ending the transaction, or lets the app end it: the guards allow that."""
    ended = False
    """The handler ended the enlisted transaction, or a guard rolled it back when it refused a commit."""
    rollback_proven = False
    """Proven: the enlisted transaction was rolled back, and nothing was written after it. A rollback by the link proves
    this only if the mark showed just before that this was the enlisted transaction."""
    may_have_written_later = False
    """A statement that no guard could refuse may have ended the enlisted transaction and written after it. Then the
    server's answer about the enlisted transaction proves nothing."""
    end_refused = False
    """A guard refused a COMMIT or ROLLBACK and did not send it. The transaction is still open, and oncekey will not
    commit it."""
    may_have_ended_unseen = True
    """The transaction may have ended without a guard that saw it: by a statement that does not show it, or because
    there is no guard for that."""
    kept_writes = False
    """The server said that its rollback left writes behind: those in tables without transactions (MySQL's MyISAM)."""
    savepoint = "with session.begin_nested():"
    """How a savepoint is written with this driver."""
    leave_it = LEAVE_IT
    """What to change in a handler that ended the transaction, for messages."""
    use_a_savepoint = USE_A_SAVEPOINT
    """What to change in a handler that went on after a failed statement, for messages."""
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop in which the link must be used, if it was enlisted in one."""
    mark: tuple[Sequence[str], Mapping[str, Any]] = ((), {})
    """PostgreSQL: the query that tells whether this still is the enlisted transaction."""

    in_its_thread: Callable[..., Awaitable[Any]] | None = None
    """Under ASGI: calls a function in the thread that the connection belongs to, if it may be used only there."""

    ends_here: Callable[[], bool] | None = None
    """Tells whether this thread ends the request (``Operation.in_its_thread``)."""

    opened = False
    """``open`` has succeeded, so there is a transaction to roll back."""

    def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Any:
        """Open the transaction, run the statements that lock the key's row, and guard it. No rows: the key is not
        there, and nothing is guarded. ``ends_elsewhere``: another thread will end the transaction."""
        self.open()
        self.opened = True
        if ends_elsewhere and not self.usable_from_other_threads():
            raise EnlistError(ONE_THREAD.format(self.what))
        rows = self.execute(statements, key)
        if rows:
            self.guard()
        return rows

    def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Any:
        """``complete`` and then, if that found the key, ``commit``. No rows: nothing is committed.

        ``saw`` is told COMMIT_SENT between the two: what is raised after it may mean that the transaction is committed.
        A link that sends both at once tells it CUT_OFF if the answer is lost."""
        rows = self.complete(statements.complete, parameters)
        if rows:
            saw(Happened.COMMIT_SENT)
            self.commit()
        return rows

    def prepared_name(self) -> str:
        """The name of the prepared statement that ends the transaction (``one_message.py``); empty: there is none."""
        return ""

    def open(self) -> Any:
        """Make sure that a transaction is open. Raise EnlistError if this cannot be enlisted."""
        raise NotImplementedError

    def guard(self) -> Any:
        """From now on, refuse the handler's attempts to end the transaction."""
        raise NotImplementedError

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Any:
        """Run the statements (``:name`` placeholders) in turn, and return the rows of the last one."""
        raise NotImplementedError

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Any:
        """As execute, after a flush of the app's pending writes. No rows if this is another transaction by now."""
        raise NotImplementedError

    def let_go(self) -> Any:
        """Let the app end the transaction (``commit="caller"``). Its writes after a rollback are still refused."""
        raise NotImplementedError

    def free(self) -> None:
        """Turn the guards off: the request is over. Safe from any thread and more than once; never blocks."""

    def commit(self) -> Any:
        """Commit, and remove the guards in every case. Raises unless the enlisted transaction committed."""
        raise NotImplementedError

    def roll_back(self) -> Any:
        """Roll back if this still is the enlisted transaction, and remove the guards. Never raises. If only the app's
        own block can roll back (``caller``), make it do so, and leave ``rollback_proven`` as it is."""
        raise NotImplementedError

    runs_after_commit = False
    """There is something to run after the commit, when other writers may write again."""

    def run_after_commit(self) -> Any:
        """Run it. Never raises."""

    def watch_registry(self, registry: Any) -> None:
        """The handler gave a ``scoped_session``, which may return another session later."""

    def usable_from_other_threads(self) -> bool:
        return True

    def gone(self) -> None:
        """The connection cannot be reached any more. Set ``rollback_proven`` if that proves a rollback."""

    def interrupt(self) -> None:
        """Stop a transaction that has been open for too long. Called from any thread; must not block."""

    def mark_is_gone(self) -> None:
        """The database says that this is another transaction than the enlisted one. A guard that sees every end has
        let none through, so the server has rolled it back (a deadlock). Otherwise nothing proves what was committed."""
        if self.may_have_ended_unseen:
            self.may_have_written_later = True

    def connection_lost(self, error: BaseException | None) -> bool:
        """Whether the transaction ended because its connection was lost. ``error``: of oncekey's last statement."""
        return says_connection_lost(error)

    def refuse_to_reconnect(self) -> EnlistError:
        return EnlistError(RECONNECT_REFUSED.format(self.what))

    def refuse(self, verb: str) -> EnlistError:
        """The refusal of a statement or call that would end the transaction."""
        by_itself = self.dialect == "mysql" and verb.rstrip("()").upper().split()[0] not in _SAYS_SO
        advice = COMMITS_BY_ITSELF if by_itself else self.leave_it
        return EnlistError(f"{verb} of {self.what} was refused, and nothing of it is committed: {advice}")

    def refuse_later(self, verb: str, ended: str = "was rolled back") -> EnlistError:
        return EnlistError(
            f"{verb} on {self.what} was refused: its enlisted transaction {ended}, so this write would be "
            f"committed without the stored response, and a retry would write it again. Put what may fail into a "
            f"savepoint (`{self.savepoint}`) instead of rolling back, or raise to undo everything. Only reading is "
            "possible here until the response is stored"
        )


@lru_cache(maxsize=64)
def for_format(sql: str) -> str:
    """Turn ``:name`` into psycopg's ``%(name)s``."""
    return _PLACEHOLDER.sub(r"%(\1)s", sql.replace("%", "%%"))


@lru_cache(maxsize=64)
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Turn ``:name`` into asyncpg's ``$n``, and return the names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return _PLACEHOLDER.sub(number, sql), tuple(names)


@lru_cache(maxsize=64)
def names_in(sql: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))


class AsyncLink(Link):
    """A link to a driver whose calls are awaited."""

    is_async = True

    async def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        del ends_elsewhere  # it is used in its loop only
        await self.open()
        self.opened = True
        rows: Rows = await self.execute(statements, key)
        if rows:
            await self.guard()
        return rows

    async def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Rows:
        rows: Rows = await self.complete(statements.complete, parameters)
        if rows:
            saw(Happened.COMMIT_SENT)
            await self.commit()
        return rows


class ForwardingLink(Link):
    """A link whose calls run where its connection lives: in a greenlet, or in the driver's own thread."""

    is_async = True

    def __init__(self, inner: Link, run: Callable[..., Any]) -> None:
        self.inner = inner
        self.dialect = inner.dialect
        self.what, self.leave_it, self.use_a_savepoint = inner.what, inner.leave_it, inner.use_a_savepoint
        self._run = run

    async def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        inner = self.inner
        inner.caller, inner.database, inner.mark = self.caller, self.database, self.mark
        rows: Rows = await self._run(partial(inner.enlist, statements, key, ends_elsewhere=ends_elsewhere))
        return rows

    @property
    def opened(self) -> bool:  # type: ignore[override]
        return self.inner.opened

    async def end(self, statements: TransactionStatements, parameters: Mapping[str, Any], saw: Saw) -> Rows:
        rows: Rows = await self._run(self.inner.end, statements, parameters, saw)
        return rows

    async def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = await self._run(self.inner.execute, statements, parameters)
        return rows

    async def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = await self._run(self.inner.complete, statements, parameters)
        return rows

    async def let_go(self) -> None:
        await self._run(self.inner.let_go)

    def free(self) -> None:
        self.inner.free()

    async def commit(self) -> None:
        await self._run(self.inner.commit)

    async def roll_back(self) -> None:
        try:
            await self._run(self.inner.roll_back)
        except Exception:  # the connection is closed
            self.inner.gone()
        self.rollback_proven = self.inner.rollback_proven

    @property
    def end_refused(self) -> bool:  # type: ignore[override]
        return self.inner.end_refused

    @property
    def may_have_written_later(self) -> bool:  # type: ignore[override]
        return self.inner.may_have_written_later

    @property
    def kept_writes(self) -> bool:  # type: ignore[override]
        return self.inner.kept_writes

    def connection_lost(self, error: BaseException | None) -> bool:
        return self.inner.connection_lost(error)

    def interrupt(self) -> None:
        self.inner.interrupt()
        if self.loop is not None:  # and once more, where the connection lives
            self.loop.call_soon_threadsafe(self._interrupt_there)

    def _interrupt_there(self) -> None:
        async def interrupt() -> None:
            with suppress(Exception):  # closed by now
                await self._run(self.inner.interrupt)

        self._interrupting = asyncio.ensure_future(interrupt())
