"""Connections to PostgreSQL: one for each thread and process, and none left behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncekey.errors import StoreUnavailable
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.company import Child
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer
from tests import databases
from tests.engine.doubles import PATIENCE, eventually
from tests.engine.forked_process import FORK_RESULT, FORK_SCRIPT
from tests.stores.postgres import backend, opened, row


def test_every_thread_has_a_connection_of_its_own(store: PostgresStore) -> None:
    """Two threads are two backends; one that disconnects does not disturb the other."""
    mine = backend(store)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(backend, store).result(PATIENCE)
        assert theirs != mine
        store.disconnect()
        assert pool.submit(backend, store).result(PATIENCE) == theirs
        pool.submit(store.disconnect).result(PATIENCE)
    assert backend(store) != mine


def test_closing_closes_the_connections_of_all_threads(
    postgres_server: PostgresServer, store: PostgresStore, ready_url: str
) -> None:
    """No backend is left, and a verb after the close simply connects again."""
    store.close()
    eventually(lambda: databases.connected(postgres_server, ready_url) == 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend, store).result(PATIENCE)
        backend(store)
        assert databases.connected(postgres_server, ready_url) == 2
        store.close()
        eventually(lambda: databases.connected(postgres_server, ready_url) == 0)
        assert pool.submit(row, store, "x").result(PATIENCE) is None
        pool.submit(store.disconnect).result(PATIENCE)


def test_closing_beside_a_verb_that_hangs(store: PostgresStore, proxy: TcpProxy, ready_url: str) -> None:
    """Closing from another thread while a verb waits for a hung server: the verb ends with StoreUnavailable."""
    with ThreadPoolExecutor(1) as pool, opened(proxy.rewrite(ready_url), timeout=1.0) as lane:
        pool.submit(row, lane, "x").result(PATIENCE)
        proxy.hang()
        hung = pool.submit(row, lane, "x")
        eventually(hung.running)
        lane.close()
        with pytest.raises(StoreUnavailable):
            hung.result(PATIENCE)
        proxy.pass_through()
        assert pool.submit(row, lane, "x").result(PATIENCE) is None
        pool.submit(lane.disconnect).result(PATIENCE)


def test_a_forked_child_has_connections_of_its_own(ready_url: str) -> None:
    """Parent and child go on with the same OnceKey, each over its own sockets (hazard 26)."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_SCRIPT, ready_url], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stderr, done.stdout.strip()) == ("", FORK_RESULT)


@pytest.mark.parametrize("first", ["ask", "disconnect"])
def test_a_child_uses_and_closes_nothing_of_its_parents(store: PostgresStore, first: str) -> None:
    """In the thread that forked: whether the child asks or disconnects first, the parent's connection lives on."""
    before = backend(store)

    def work() -> bool:
        if first == "disconnect":
            store.disconnect()
            store.close()
        own = backend(store)
        seen = row(store, "x")
        store.close()
        return seen is None and own != before

    assert Child(work).result() is True
    assert backend(store) == before
    assert row(store, "x") is None
