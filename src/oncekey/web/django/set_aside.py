"""Sets Django's transaction on SQLite aside while a view that begins its request itself reserves the key.

A view of REST framework authenticates its caller inside of the block of ``ATOMIC_REQUESTS``. The first read in it
takes a snapshot of the file. oncekey then reserves the key on another connection, so the file changes, and SQLite
refuses the first write of the block ("database is locked"). With ``transaction_mode`` IMMEDIATE the block holds the
file, and the key cannot be reserved.

The block has only read until then, so nothing is lost if it is ended and begun again. Django's own state stays as it
is. If the block has written, the view is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import OperationalError

from oncekey.engine.engine import Engine
from oncekey.engine.transactions.adapters.django_entry import entered
from oncekey.errors import ConfigurationError


@contextmanager
def set_aside(engine: Engine) -> Iterator[None]:
    """Around the reservation. Blocks that were open before the view stay open: middleware or a ``TestCase`` may have
    written in them."""
    wrapper = None if engine.own_connection is None else engine.own_connection()
    before = None if wrapper is None or wrapper.vendor != "sqlite" else entered(wrapper.alias)
    if wrapper is None or before is None or before.blocks or not wrapper.in_atomic_block or wrapper.needs_rollback:
        yield
        return
    raw = wrapper.connection
    if before.has_written(raw):
        raise ConfigurationError(
            "the authentication, the permissions or the throttling of this view wrote to Django's connection "
            f"{wrapper.alias!r} in a transaction (ATOMIC_REQUESTS), so it holds the SQLite file in which oncekey must "
            "reserve the key: nothing ran. Set ATOMIC_REQUESTS to False and use transaction.atomic() in the views, or "
            "use PostgreSQL or MySQL"
        )
    if raw.in_transaction:
        raw.execute("ROLLBACK")
    try:
        yield
    finally:
        _begin_again(wrapper)


def _begin_again(wrapper: Any) -> None:
    try:
        wrapper._start_transaction_under_autocommit()  # as Django begins it, with ``transaction_mode``
    except OperationalError:  # another writer holds the file: the view waits for it at its first write
        wrapper.connection.execute("BEGIN")
    for sid in filter(None, wrapper.savepoint_ids):
        wrapper._savepoint(sid)
