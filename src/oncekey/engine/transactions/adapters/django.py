"""Links to Django's connections, on PostgreSQL, MySQL and SQLite: takes the view's own ``transaction.atomic()``.

A block of ``atomic()`` commits when it ends, and the response is known only after that. So the link puts a block of its
own *around* the view's: for Django, the outermost block of the view, or that of ``ATOMIC_REQUESTS``, is then one inside
of another. It ends as such blocks do, with a savepoint, and commits nothing. The link's own block ends with the
request: oncekey completes the key in it, and leaves it, which commits. So Django itself commits, and ``on_commit``
hooks run after that commit, once. Outside of a block, ``enlist()`` opens one that lasts to the end of the request.

Django refuses ``commit()`` and ``rollback()`` inside of a block. The guards of the driver beneath (``psycopg.py``,
``mysql.py``, ``sqlite.py``) refuse COMMIT and ROLLBACK in SQL.

On MySQL a savepoint is the mark of the enlisted transaction, and it ends with every older savepoint that Django
releases or rolls back to. Both fail in another transaction, so the link sets the mark again after them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from django.db import connections, transaction

from oncekey.engine.transactions.adapters import link_to, sqlite
from oncekey.engine.transactions.adapters.base import ForwardingLink, Link, Rows
from oncekey.engine.transactions.adapters.django_checks import in_its_thread, refuse, thread_of_request
from oncekey.engine.transactions.adapters.django_entry import entered, own_blocks
from oncekey.errors import EnlistError, OutcomeUnknown

_log = logging.getLogger("oncekey")

_VENDORS = {"postgresql": "postgresql", "sqlite": "sqlite", "mysql": "mysql"}
"""Django's names of databases -> ours. MariaDB is ``mysql``, too."""
_WROTE = "SELECT pg_current_xact_id_if_assigned() IS NOT NULL"


def link_to_wrapper(wrapper: Any) -> Link:
    """A link to ``connections[alias]``."""
    return _link(wrapper.alias, wrapper.vendor)


def link_to_proxy(proxy: Any) -> Link:
    """A link to ``django.db.connection``."""
    return _link(proxy._alias, proxy.vendor)


def _link(alias: str, vendor: str) -> Link:
    link = DjangoLink(alias, vendor)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return link
    return AsyncDjangoLink(link, in_its_thread)


class AsyncDjangoLink(ForwardingLink):
    """For ``await op.enlist()`` in an async view: Django's connections live in the thread of the request."""

    in_another_loop = (
        "`await current().enlist()` is for ASGI; under WSGI, enlist in the function that you give to sync_to_async"
    )

    @property
    def runs_after_commit(self) -> bool:  # type: ignore[override]
        return self.inner.runs_after_commit

    async def run_after_commit(self) -> None:
        await self._run(self.inner.run_after_commit)


class DjangoLink(Link):
    """The connection of one alias, in the thread that enlists it."""

    in_its_thread: Callable[..., Awaitable[Any]] | None = staticmethod(in_its_thread)
    savepoint = "with transaction.atomic():"
    leave_it = (
        "the transaction is enlisted, so oncekey ends it: it commits your writes together with the stored response "
        "when the view has returned. Leave COMMIT, ROLLBACK, connection.close(), del connections[…] and, on MySQL, DDL "
        "out of the view, and raise to undo"
    )
    use_a_savepoint = (
        "a failed statement rolls back the whole transaction; put what may fail into a block of its own "
        "(`with transaction.atomic():`) and catch the exception outside of that block, or raise"
    )
    _wrapper: Any
    _raw: Any
    """The driver's connection."""
    _inner: Link
    """The link to it."""
    _opened_block = False
    """The view was in no block, so the link's own block began the transaction."""
    _wrote = False
    """The view may have written in its transaction before it enlisted."""
    _thread: int | None = None
    _rows_gone = False
    """Django rolled the view's block back, and the view did not raise."""
    _left = False
    """The link's own block is no more."""

    def __init__(self, alias: str, vendor: str) -> None:
        if vendor not in _VENDORS:
            raise EnlistError(
                f"Django's database {alias!r} is on {vendor}: PostgreSQL, MySQL, MariaDB and SQLite can be enlisted"
            )
        self.dialect = _VENDORS[vendor]
        self.what = f"Django's connection {alias!r}"
        self._alias = alias
        self._block = transaction.atomic(using=alias)
        self._hooks: list[Any] = []

    def enlist(self, statements: Sequence[str], key: Mapping[str, Any], *, ends_elsewhere: bool) -> Rows:
        if ends_elsewhere and not (self.ends_here or thread_of_request())():
            raise EnlistError(
                f"{self.what} belongs to this thread, and another thread ends the request, so it cannot be committed "
                "there: enlist in the thread of the request. In an async view that is `await current().enlist()` under "
                "ASGI, or a function in sync_to_async(…), whose default is thread_sensitive=True"
            )
        self._locking = statements, key
        rows: Rows = super().enlist(statements, key, ends_elsewhere=ends_elsewhere)
        if rows and self.dialect == "mysql":  # locked again, the transaction keeps its number
            self._locking = statements, {**key, "number": int(str(rows[0][0]).rpartition(":")[2])}
        return rows

    def open(self) -> None:
        self._thread = threading.get_ident()
        self._wrapper = wrapper = connections[self._alias]
        if self.caller:
            raise EnlistError(f"{self.what} is committed by oncekey, when the view has returned: leave commit= out")
        refuse(wrapper, self.what)
        wrapper.ensure_connection()
        self._raw = wrapper.connection
        self._inner = inner = link_to(self._raw)
        inner.what, inner.database, inner.mark = self.what, self.database, self.mark
        inner.savepoint, inner.leave_it = self.savepoint, self.leave_it
        if not wrapper.in_atomic_block:
            self._block.__enter__()
            self._opened_block = True
        try:
            if self.dialect == "sqlite":
                self._begin_sqlite()
            elif self.dialect == "mysql":
                self._begin_mysql()
            else:
                self._begin_postgres()
        except BaseException:
            self._leave()
            raise

    def _begin_sqlite(self) -> None:
        """Begin again with the write lock. What the view has read so far is then not part of the transaction, as in
        PostgreSQL, where each statement sees what is committed."""
        raw, before = self._raw, entered(self._alias)
        sqlite.refuse_other_file(raw, self.database.file, self.what)
        if before is not None and before.has_written(raw):
            why = f"{self.what} has written already: enlist before the first write of the view"
            if before.atomic_requests:
                raise EnlistError(why)  # Django rolls all of it back
            # Outside of a block Django commits each statement. A retry would write it again, so no retry may run.
            _log.error("%s. Some of it may be committed, so the key is unknown", why)
            raise OutcomeUnknown(why)
        if self._opened_block or before is not None:
            if raw.in_transaction:
                raw.execute("ROLLBACK")
            sqlite.begin(raw)
            for sid in filter(None, self._wrapper.savepoint_ids):
                self._wrapper._savepoint(sid)
        elif raw.execute("PRAGMA synchronous").fetchone()[0] < 2:
            raise EnlistError(
                f"{self.what} does not wait for the disk, so a crash could lose what it commits: take PRAGMA "
                "synchronous out of init_command"
            )

    def _begin_postgres(self) -> None:
        self._inner.open()
        if self._raw.info.transaction_status and not self._opened_block:  # something was sent in this transaction
            self._wrote = self._inner.execute((_WROTE,), {}) == [(True,)]

    def _begin_mysql(self) -> None:
        """MySQL does not tell a view that has only read from one that has written."""
        self._inner.open()
        self._wrote = not self._opened_block and self._inner.ask_if_begun()  # type: ignore[attr-defined]

    def guard(self) -> None:
        """Put the link's own block around the blocks of the view, and guard the driver."""
        wrapper = self._wrapper
        self._inner.guard()
        if self._opened_block:
            return
        sid = None
        outermost = len(wrapper.atomic_blocks) == own_blocks(wrapper) == 1
        if outermost and not self._wrote:
            # If the view's block raises and the view goes on, all that it wrote since now is undone. If it wrote
            # before, or if Django's own block is around it, the whole transaction is undone instead.
            sid = wrapper.savepoint()
            wrapper.run_on_commit = [({*sids, sid}, *hook) for sids, *hook in wrapper.run_on_commit]
        self._watch(sid)
        wrapper.savepoint_ids.insert(0, sid)
        wrapper.atomic_blocks.insert(0, self._block)

    def _watch(self, sid: str | None) -> None:
        """See that Django rolls back to a savepoint that is not younger than the enlisting.

        It does so after an exception, which the view may catch: then the key's row is locked again. It also does so
        without one, after ``set_rollback(True)``, or if a block inside of it without a savepoint failed. Then the view
        may not know that its rows are gone.
        """
        wrapper, kind = self._wrapper, type(self._wrapper)
        older = {*wrapper.savepoint_ids} - {None}

        def savepoint_rollback(rolled_back: str) -> None:
            kind.savepoint_rollback(wrapper, rolled_back)
            lost = rolled_back in older and not self.execute(*self._locking)
            if lost or (rolled_back in {*older, sid} and sys.exc_info()[0] is None):
                self._rows_gone = True

        def savepoint_commit(released: str) -> None:
            kind.savepoint_commit(wrapper, released)
            if released in older:
                self.execute(self._locking[0][:1], self._locking[1])  # the savepoint that is the mark

        wrapper.savepoint_rollback = savepoint_rollback
        if self.dialect == "mysql":
            wrapper.savepoint_commit = savepoint_commit

    # -- using it --------------------------------------------------------------------------------------------------

    def execute(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        rows: Rows = self._inner.execute(statements, parameters)
        return rows

    def complete(self, statements: Sequence[str], parameters: Mapping[str, Any]) -> Rows:
        if not self._still():
            return []
        rows: Rows = self._inner.complete(statements, parameters)
        return rows

    def _still(self) -> bool:
        """Whether only the link's own block is open, on the same connection, and may commit."""
        wrapper = self._wrapper
        return (
            not self.ended
            and self._thread == threading.get_ident()
            and not self._replaced
            and not wrapper.closed_in_transaction
            and not wrapper.needs_rollback
            and not self._rows_gone
            and wrapper.atomic_blocks == [self._block]
        )

    @property
    def _replaced(self) -> bool:
        """Whether Django's connection is another one by now, on which no guard is: the view connected again, or took
        the connection out of ``connections``."""
        return self._wrapper.connection is not self._raw or self._taken_out

    @property
    def _taken_out(self) -> bool:
        """Every thread has its own ``connections``, so another thread cannot tell."""
        if self._thread != threading.get_ident():
            return False
        return getattr(connections._connections, self._alias, None) is not self._wrapper  # type: ignore[attr-defined]

    # -- ending it -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        wrapper, inner = self._wrapper, self._inner
        try:
            if inner.ended or not self._still():
                raise EnlistError(f"the enlisted transaction of {self.what} was ended before oncekey could commit it")
            hooks, wrapper.run_on_commit = wrapper.run_on_commit, []
            inner.free()  # after a COMMIT that fails Django rolls back: a guard's refusal would hide the error
            self._block.__exit__(None, None, None)
            self._hooks = hooks
        finally:
            inner.free()
            self.ended = True
            self._leave()

    @property
    def runs_after_commit(self) -> bool:  # type: ignore[override]
        return bool(self._hooks)

    def run_after_commit(self) -> None:
        """The view's ``on_commit`` hooks. The response is stored, so it is sent also if one of them raises."""
        wrapper, hooks = self._wrapper, self._hooks
        self._hooks = []
        wrapper.run_on_commit = [*hooks, *wrapper.run_on_commit]
        try:
            wrapper.run_and_clear_commit_hooks()
        except Exception:
            _log.exception(
                "an on_commit hook failed. The transaction is committed and its response is stored, so the client gets "
                "it, and a retry does not run the hook again. Hooks after it did not run: use on_commit(…, robust=True)"
            )

    def roll_back(self) -> None:
        replaced = not self.ended and self._replaced
        with suppress(Exception):
            self._inner.roll_back()
            self.kept_writes = self._inner.kept_writes
            self.may_have_written_later = self._inner.may_have_written_later or replaced
            self.rollback_proven = self._inner.rollback_proven and not self.may_have_written_later
        self.ended = True
        self._leave()

    def _leave(self) -> None:
        """Leave the link's own block, and those of the view that are still open in it. After this Django's connection
        is as it was before the request; a block of the view that is not ours to leave can only roll back."""
        wrapper = self._wrapper
        if self._left or self._thread != threading.get_ident():
            return
        self._left = True
        if self._taken_out:
            with suppress(Exception):
                self._raw.close()  # nothing else will: the view took it out of ``connections``
            return
        wrapper.__dict__.pop("savepoint_rollback", None)
        wrapper.__dict__.pop("savepoint_commit", None)
        if self._block in wrapper.atomic_blocks:
            del wrapper.atomic_blocks[1:], wrapper.savepoint_ids[:]
            with suppress(Exception):
                self._block.__exit__(EnlistError, None, None)
        elif wrapper.in_atomic_block:
            wrapper.needs_rollback = True

    def free(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.free()
            self._leave()

    def gone(self) -> None:
        self._inner.gone()
        self.rollback_proven = self._inner.rollback_proven

    def connection_lost(self, error: BaseException | None) -> bool:
        return self._inner.connection_lost(error)

    @property
    def end_refused(self) -> bool:  # type: ignore[override]
        return hasattr(self, "_inner") and self._inner.end_refused

    def interrupt(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.interrupt()
