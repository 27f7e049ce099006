"""Whether Django's connection can be enlisted here: in this thread, and in the blocks that are open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.db import connections

from oncekey.engine.transactions.adapters.django_entry import Entered, own_blocks, seen_now
from oncekey.errors import EnlistError

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine


async def in_its_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in the thread of this request, to which Django's connection belongs."""
    return await sync_to_async(function)(*arguments)


async def seen_in_thread(engine: Engine, function: str = "") -> Mapping[str, Entered] | None:
    """In async code: Django's connections, as the thread of the request sees them. Asking it costs a switch of threads,
    so it is asked only for SQLite, which tells what was written before ``enlist()``.

    ``function``: EnlistError is raised if this function cannot run in the blocks that are open there.
    """
    if engine.transactions is None or engine.transactions.dialect != "sqlite":
        return None

    def see() -> Mapping[str, Entered]:
        if function and engine.in_own_block is not None:
            engine.in_own_block(function)
        return seen_now()

    seen: Mapping[str, Entered] = await in_its_thread(see)
    return seen


def in_block(alias: str, function: str) -> bool:
    """Whether this connection is in a block of ``atomic()``, before a protected function runs.

    On SQLite the function is refused there. What it writes through Django would hold the file until its caller commits,
    so oncekey could not store its result. If the caller then rolled back, oncekey would still store the result, without
    its rows.
    """
    wrapper = connections[alias]
    if not wrapper.in_atomic_block or wrapper.vendor != "sqlite":
        return bool(wrapper.in_atomic_block)
    if any(getattr(block, "_from_testcase", False) for block in wrapper.atomic_blocks):
        where, instead = "the transaction of a django.test.TestCase", "use TransactionTestCase for tests that call it"
    else:
        where = "a transaction of its caller (transaction.atomic() or ATOMIC_REQUESTS)"
        instead = (
            "call it outside of the block (a view under ATOMIC_REQUESTS needs @transaction.non_atomic_requests for "
            "that), take @once.function off, so that its writes belong to the caller's key, or keep the keys in "
            "PostgreSQL or MySQL"
        )
    raise EnlistError(
        f"{function} was called in {where}, on Django's connection {alias!r}, a SQLite file that keeps the keys, too. "
        "SQLite has one writer, so the function's result could not be stored until that transaction ends, and the "
        f"function was not run: {instead}"
    )


def thread_of_request() -> Callable[[], bool]:
    """Call it in the task that ends the request (ASGI). The result tells, in any thread, whether ``in_its_thread`` of
    that task uses this thread, as asgiref chooses it."""
    parent = getattr(AsyncToSync.executors, "current", None)  # of sync code that waits for this task
    context = SyncToAsync.thread_sensitive_context.get(None)

    def is_this_one() -> bool:
        thread, executors = threading.current_thread(), SyncToAsync.context_to_thread_executor
        if parent is not None:
            return getattr(parent, "_work_thread", None) is thread
        executor = executors.get(context) if context else SyncToAsync.single_thread_executor
        return thread in getattr(executor, "_threads", ())

    return is_this_one


def refuse(wrapper: Any, what: str) -> None:
    """Raise EnlistError if the view's transaction on this connection cannot have one commit with its key."""
    if any(getattr(block, "_from_testcase", False) for block in wrapper.atomic_blocks):
        raise EnlistError(
            f"{what} is in the transaction of a django.test.TestCase, which is never committed: use "
            "TransactionTestCase for views that enlist"
        )
    if not (wrapper.commit_on_exit if wrapper.in_atomic_block else wrapper.get_autocommit()):
        raise EnlistError(
            f"{what} has autocommit turned off, so that a block of transaction.atomic() commits nothing: take "
            "AUTOCOMMIT out of DATABASES, and set_autocommit() out of the view"
        )
    others = [each.alias for each in connections.all(initialized_only=True) if own_blocks(each)]
    if others and not own_blocks(wrapper):
        raise EnlistError(
            f"the view is in a transaction of Django's connection {others[0]!r}, and the keys are kept in that of "
            f"{wrapper.alias!r}: one commit needs one database, so keep the keys where the view writes"
        )
    if wrapper.needs_rollback:
        raise EnlistError(f"{what} is in a failed transaction: enlist at the beginning of the block")
