"""The keeper interrupts a transaction in another thread's hands: never at the price of the whole process."""

from __future__ import annotations

import signal
import sqlite3
import threading
from pathlib import Path

import pytest

from oncekey.engine.transactions.adapters.sqlite import SqliteLink
from oncekey.testing.company import Child

STATEMENTS = 3_000


def test_while_its_thread_prepares_statements(tmp_path: Path) -> None:
    """SQLite asks the authorizer under the connection's lock, and that needs Python's. Two threads that take the two
    in different orders stop for ever, and everybody with them."""

    def work() -> int:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a process that has stopped can do nothing about it itself
        signal.alarm(20)
        connection = sqlite3.connect(tmp_path / "a.db", check_same_thread=False, cached_statements=0)
        connection.execute("CREATE TABLE t (a, b, c)")
        link = SqliteLink(connection)
        denied = 0
        over = threading.Event()

        def keep() -> None:
            while not over.wait(0.0005):
                link.interrupt()
                link._overdue = False

        link.guard()
        keeper = threading.Thread(target=keep)
        keeper.start()
        for number in range(STATEMENTS):
            try:
                connection.execute(f"SELECT a, b, c, {number} FROM t WHERE a = 1 AND b = 2").fetchall()
            except sqlite3.Error:
                denied += 1
        over.set()
        keeper.join()
        return denied

    assert Child(work).result() >= 0


@pytest.mark.parametrize("own", [True, False])
def test_only_its_own_thread_rolls_back(tmp_path: Path, own: bool) -> None:
    connection = sqlite3.connect(tmp_path / "a.db", check_same_thread=False)
    link = SqliteLink(connection)
    connection.execute("BEGIN IMMEDIATE")
    link.guard()
    if own:
        link.interrupt()
    else:
        thread = threading.Thread(target=link.interrupt)
        thread.start()
        thread.join()
    assert connection.in_transaction is not own
    with pytest.raises(sqlite3.DatabaseError):
        connection.execute("SELECT 1")  # nothing more runs in it
    link.roll_back()
    assert (connection.in_transaction, link.rollback_proven) == (False, True)
    assert connection.execute("SELECT 1").fetchone() == (1,)
    connection.close()
