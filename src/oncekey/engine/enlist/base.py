"""What the engine asks of a connection that a handler enlists, whoever's driver it is.

A **link** is the engine's hand on the app's own transaction: it can say whether it still is the transaction that was
enlisted, run a statement in it, and end it. Every method of a link to an asynchronous driver returns an awaitable; the
flows of ``engine/enlisted.py`` do not care, the two drivers of flows do.

Links also keep the handler from ending the transaction itself. Where a driver lets us, an early commit is refused at
once, and what was written so far is rolled back, so that nothing half done can be committed later by accident. A
handler that rolls back may read on; what it would write then is refused, because the end of the enlisted transaction
says nothing about a later one. Where a driver does not let us refuse, ``may_have_written_later`` remembers that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from oncekey.errors import EnlistError

Dialect = Literal["postgresql", "sqlite"]
Rows = list[tuple[Any, ...]]

_PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]+)")

LEAVE_IT = (
    "the transaction is enlisted, so oncekey ends it: it commits your writes together with the stored response when "
    "the handler has returned. Take the commit() or rollback() out of the handler, keep the session or connection open "
    "until the response is sent (a dependency with yield does), and raise to undo"
)


USE_A_SAVEPOINT = (
    "a failed statement rolls back the whole transaction; put what may fail into a savepoint (SQLAlchemy: "
    "`with session.begin_nested():`), or raise"
)


DOOM = ("SELECT 1 / 0",)
"""In a block that is the app's to end, nobody else may roll back. After an error nothing can be written in it, and its
COMMIT is a ROLLBACK."""


class Link:
    """One enlisted session or connection. Subclasses say how; the order of calls is ``engine/enlisted.py``'s."""

    dialect: Dialect
    is_async = False
    what: str
    """The thing that was enlisted, as messages name it."""
    caller = False
    """The app commits, not the engine: ``commit="caller"``."""
    ending = False
    """The engine itself is ending the transaction, or lets the app do so: the guards let it through."""
    ended = False
    """The handler ended the enlisted transaction, or a guard rolled it back when it refused a commit."""
    rolled_back = False
    """Proven: the enlisted transaction was rolled back, and nothing was written after it. Our own rollback proves that
    only of a transaction that said just before, by its mark, that it is the enlisted one."""
    may_have_written_later = False
    """A statement that no guard could refuse may have ended the enlisted transaction and written after it. Then the
    server's word about the enlisted transaction proves nothing."""
    savepoint = "with session.begin_nested():"
    """How a savepoint is written with this driver."""
    loop: asyncio.AbstractEventLoop | None = None
    """Where it is to be used, if it was enlisted in an event loop's thread."""
    mark: tuple[Sequence[str], Mapping[str, Any]] = ((), {})
    """PostgreSQL: the question whether this still is the transaction that was enlisted."""
    file: str | None = None
    """SQLite: the file that must be the connection's."""

    def open(self) -> Any:
        """Refuse what cannot be enlisted, with an EnlistError, and see to it that a transaction is open."""
        raise NotImplementedError

    def guard(self) -> Any:
        """From now on the handler does not end it."""
        raise NotImplementedError

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Any:
        """Run the statements (``:name`` placeholders) in turn; the rows of the last one."""
        raise NotImplementedError

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Any:
        """As execute, after what the app still has to write; no rows when it is another transaction by now."""
        raise NotImplementedError

    def let_go(self) -> Any:
        """The app ends it from here (``commit="caller"``). What it writes after a rollback is still refused."""
        raise NotImplementedError

    def free(self) -> None:
        """The request is over: no guard may act any more. From any thread, any number of times; never blocks."""

    def commit(self) -> Any:
        """Commit it, and take the guards away, whatever happens. Raises unless the enlisted transaction committed."""
        raise NotImplementedError

    def roll_back(self) -> Any:
        """Roll it back if it still is ours, and take the guards away. Never raises. Where only the app's own block can
        do that (``caller``), see to it that it does, and leave ``rolled_back`` as it is."""
        raise NotImplementedError

    def watch_registry(self, registry: Any) -> None:
        """It was given as a ``scoped_session``, which may hand out another session later."""

    def usable_from_other_threads(self) -> bool:
        return True

    def gone(self) -> None:
        """It cannot be reached any more: set ``rolled_back`` if that is a proof."""

    def interrupt(self) -> None:
        """It has been open for too long. From any thread; must not block."""

    def refuse(self, verb: str) -> EnlistError:
        return EnlistError(f"{verb} of {self.what} was refused, and nothing of it is committed: {LEAVE_IT}")

    def refuse_later(self, verb: str) -> EnlistError:
        return EnlistError(
            f"{verb} on {self.what} was refused: its enlisted transaction was rolled back, so this write would be "
            f"committed without the stored response, and a retry would write it again. Put what may fail into a "
            f"savepoint (`{self.savepoint}`) instead of rolling back, or raise to undo everything. Only reading is "
            "possible here until the response is stored"
        )


@lru_cache(maxsize=64)
def for_format(sql: str) -> str:
    """``:name`` as psycopg's ``%(name)s``."""
    return _PLACEHOLDER.sub(r"%(\1)s", sql.replace("%", "%%"))


@lru_cache(maxsize=64)
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """``:name`` as asyncpg's ``$n``, and the names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return _PLACEHOLDER.sub(number, sql), tuple(names)


@lru_cache(maxsize=64)
def names_in(sql: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))


class Elsewhere(Link):
    """A link whose calls run where its connection lives: in a greenlet, or in a thread of its driver's own."""

    is_async = True

    def __init__(self, inner: Link, run: Callable[..., Any]) -> None:
        self.inner = inner
        self.dialect = inner.dialect
        self.what = inner.what
        self._run = run

    async def open(self) -> None:
        self.inner.caller, self.inner.file, self.inner.mark = self.caller, self.file, self.mark
        await self._run(self.inner.open)

    async def guard(self) -> None:
        await self._run(self.inner.guard)

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
        except Exception:  # closed
            self.inner.gone()
        self.rolled_back = self.inner.rolled_back

    @property
    def may_have_written_later(self) -> bool:  # type: ignore[override]
        return self.inner.may_have_written_later

    def interrupt(self) -> None:
        self.inner.interrupt()
        if self.loop is not None:  # and once more, where the connection lives
            self.loop.call_soon_threadsafe(self._interrupt_there)

    def _interrupt_there(self) -> None:
        async def interrupt() -> None:
            with suppress(Exception):  # closed by now
                await self._run(self.inner.interrupt)

        self._interrupting = asyncio.ensure_future(interrupt())
