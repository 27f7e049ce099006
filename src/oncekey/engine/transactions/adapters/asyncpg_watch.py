"""Watches an asyncpg connection beneath SQLAlchemy: shows every statement to a guard before it is sent.

asyncpg tells its query loggers of statements after they ran, and not of prepared ones and of COPY. SQLAlchemy prepares
all. But everything is sent through the connection's protocol object, so the watch puts its own in that place.

A COMMIT or ROLLBACK that is refused becomes a ROLLBACK. SQLAlchemy's and asyncpg's own objects count their transaction
as ended after an error of its end, so it must be. After it asyncpg would commit each statement on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncekey.engine.transactions.adapters.base import Link
from oncekey.engine.transactions.adapters.texts import Judge

_SENDS = frozenset({"query", "bind", "bind_execute", "bind_execute_many", "copy_in", "copy_out"})
_ROLLBACK = "ROLLBACK"


class _Protocol:
    """In the place of asyncpg's own protocol object."""

    def __init__(self, beneath: Any, link: Link, judge: Judge) -> None:
        self.beneath = beneath
        self._link = link
        self._judge = judge

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.beneath, name)
        return self._judged(found) if name in _SENDS else found

    def _judged(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def judged(*args: Any, **options: Any) -> Any:
            given = args[0] if args else options.get("state")  # a text, or a prepared statement
            text = str(getattr(given, "query", given))
            instead = self._judge.sees(text)
            if instead is None:
                self._link.ended = True
                await self.beneath.query(_ROLLBACK, None)
                raise self._judge.refused()
            if instead != text:
                return await self.beneath.query(instead, None)
            return await send(*args, **options)

        return judged


class AsyncpgWatch:
    """The guards on one use of a connection: ``adapted`` is SQLAlchemy's object around it."""

    def __init__(self, connection: Any, adapted: Any, link: Link, judge: Judge) -> None:
        self._connection = connection
        self._adapted, self._before = adapted, adapted.readonly
        adapted.readonly = True  # SQLAlchemy begins every later transaction READ ONLY
        self._protocol = _Protocol(connection._protocol, link, judge)
        connection._protocol = self._protocol
        self.lost = False  # SQLAlchemy knows it
        self.later_reads_only = False

    def bypassed(self) -> bool:
        return False

    def stop(self) -> None:
        if self._adapted is not None:
            self._adapted.readonly, self._adapted = self._before, None
        if self._connection._protocol is self._protocol:
            self._connection._protocol = self._protocol.beneath
