"""What PostgreSQL tells about an enlisted transaction by its number."""

from __future__ import annotations

from typing import Any

import psycopg

from oncekey.stores.registry import open_store


def test_number_that_the_server_never_gave_is_of_a_transaction_that_is_gone(ready_url: str) -> None:
    """A server that crashed has forgotten the numbers that were not on its disk. A commit writes its own there."""
    store: Any = open_store(ready_url)
    with psycopg.connect(ready_url) as connection:
        (open_number,) = connection.execute("SELECT txid_current()").fetchone() or (0,)
        answers = [store.fate(number) for number in (open_number + 1_000_000, open_number)]
        connection.commit()
    answers.append(store.fate(open_number))
    store.disconnect()
    store.close()
    assert answers == ["aborted", "in progress", "committed"]
