"""A PostgreSQL that does not answer, is cut off, goes away, or refuses connections.

The faults are real: a server that is stopped or killed, a network that hangs or is cut.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.core.states import State
from oncekey.errors import SchemaError, StoreUnavailable
from oncekey.stores.postgres import PostgresStore
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, PostgresServer, ServerUnavailable, free_port
from tests.engine.doubles import PATIENCE, RESPONSE, eventually, reservation
from tests.stores.postgres import VERBS, backend, complete, opened, put, row

pytestmark = pytest.mark.stores


def took(call: Callable[[], Any]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


# ---------------------------------------------------------------- a server that does not answer


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_stopped_server_is_left_in_time(postgres_server: PostgresServer, ready_url: str, verb: str) -> None:
    """Every verb ends within its limit with StoreUnavailable; the next one works, on another connection."""
    with opened(ready_url, timeout=0.4) as store:
        store.migrate()
        put(store, "there")
        before = backend(store)
        postgres_server.pause()
        begun = time.monotonic()
        try:
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                VERBS[verb](store)
            seconds = time.monotonic() - begun
        finally:
            postgres_server.resume()
        assert seconds < 10, "a server that is stopped never answers"
        VERBS[verb](store)
        assert backend(store) != before


def test_a_network_that_hangs_is_left_in_time_from_the_first_byte(proxy: TcpProxy, ready_url: str) -> None:
    """Also connecting has a limit: the kernel accepts, and the server does not answer."""
    proxy.hang()
    with opened(proxy.rewrite(ready_url), timeout=2.0) as store:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.check()
        assert time.monotonic() - begun < 15, "a network that hangs never answers"
        proxy.pass_through()
        store.migrate()


def test_a_verb_has_one_limit_however_many_round_trips_it_needs(
    store: PostgresStore, proxy: TcpProxy, ready_url: str
) -> None:
    """On a slow network connecting, checking and asking share the verb's time limit: they do not add up."""
    proxy.delay(0.2)
    with opened(proxy.rewrite(ready_url), timeout=1.0) as slow:

        def ask() -> None:
            try:
                slow.read([("tenant-1", "x")])
            except StoreUnavailable:
                return

        assert took(ask) < 1.9


def test_a_late_answer_is_never_the_answer_to_the_next_question(
    store: PostgresStore, proxy: TcpProxy, ready_url: str
) -> None:
    """The answer to the first question arrives after its deadline: the second question gets its own."""
    put(store, "first", "second")
    with opened(proxy.rewrite(ready_url), timeout=0.3) as lane:
        lane.check()
        before = backend(lane)
        lane.read([("tenant-1", "warm")])
        proxy.hang("to_client")
        with pytest.raises(StoreUnavailable, match="did not answer in time"):
            lane.read([("tenant-1", "first")])
        proxy.pass_through()
        found = row(lane, "second")
        assert found is not None
        assert found.key == "second"
        assert backend(lane) != before


# ---------------------------------------------------------------- a network that is cut


@pytest.mark.parametrize(("when", "happened"), [("before", False), ("after", True)])
def test_a_reservation_that_is_cut_can_be_asked_for_again(
    store: PostgresStore, proxy: TcpProxy, ready_url: str, when: Any, happened: bool
) -> None:
    """The same error whether it happened or not; asked again, the row carries our own token (hazards 8 and 9)."""
    with opened(proxy.rewrite(ready_url)) as lane:
        lane.check()
        wanted = reservation("cut-this-key")
        cut = proxy.cut_on("to_server", b"cut-this-key", when=when)
        with pytest.raises(StoreUnavailable, match="is unavailable"):
            lane.reserve([wanted])
        assert cut.wait(PATIENCE)
        if happened:
            eventually(lambda: row(store, "cut-this-key"))
        else:
            assert row(store, "cut-this-key") is None
        found = lane.reserve([wanted])[0].record
        assert found is not None
        assert found.owner == wanted.owner


@pytest.mark.parametrize(("when", "happened"), [("before", False), ("after", True)])
def test_a_completion_that_is_cut_can_be_read(
    store: PostgresStore, proxy: TcpProxy, ready_url: str, when: Any, happened: bool
) -> None:
    """Cut before: the row is in progress, and the swap works again. Cut after: it is completed, and by us."""
    (record,) = put(store, "cut-this-key")
    with opened(proxy.rewrite(ready_url)) as lane:
        lane.check()
        cut = proxy.cut_on("to_server", b"cut-this-key", when=when)
        with pytest.raises(StoreUnavailable):
            lane.swap([complete(record)])
        assert cut.wait(PATIENCE)
        if happened:
            eventually(lambda: row(store, "cut-this-key").state is State.COMPLETED)  # type: ignore[union-attr]
            assert lane.swap([complete(record)]) == [None]
        else:
            assert lane.swap([complete(record)]) != [None]
        after = row(store, "cut-this-key")
        assert after is not None
        assert (after.owner, after.response) == (record.owner, RESPONSE)


def test_a_connection_that_the_server_ended_is_replaced(store: PostgresStore, ready_url: str) -> None:
    """An operator or a timeout ends the backend: one StoreUnavailable, then a new connection."""
    before = backend(store)
    with psycopg.connect(ready_url, autocommit=True) as own:
        own.execute("SELECT pg_terminate_backend(%s)", [before])
    with pytest.raises(StoreUnavailable):
        eventually(lambda: store.read([("tenant-1", "x")]) is None)
    assert row(store, "x") is None
    assert backend(store) != before


# ---------------------------------------------------------------- a server of its own


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A durable server for these tests alone, on which the role ``guarded`` needs a password."""
    rules = Path(tempfile.gettempdir()) / f"oncekey-hba-{os.getpid()}"
    rules.write_text(f"host all guarded {HOST}/32 scram-sha-256\nhost all all {HOST}/32 trust\n")
    rules.chmod(0o644)
    server = PostgresServer(settings={"hba_file": str(rules)})
    try:
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()
        rules.unlink()


def test_reserved_rows_survive_a_killed_server(own_server: PostgresServer) -> None:
    """Every process of the server is killed right after reserve and swap returned: the rows are there (I1, I2)."""
    with opened(own_server.database("kept")) as store:
        store.migrate()
        first, second = put(store, "first", "second")
        assert store.swap([complete(second)]) != [None]
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            store.read([("tenant-1", "first")])
        own_server.start()
        found = store.read([("tenant-1", "first"), ("tenant-1", "second")])
        assert [record and record.owner for record in found] == [first.owner, second.owner]
        assert [record and record.state for record in found] == [State.IN_PROGRESS, State.COMPLETED]


def test_a_server_that_cannot_be_used_is_named_in_one_sentence(own_server: PostgresServer) -> None:
    """Wrong password, no such database, no server on the port, no such host: one sentence, never the password."""
    own_server.execute("CREATE ROLE guarded LOGIN PASSWORD 'open-sesame'")
    at = f"{HOST}:{own_server.port}"
    urls = {
        f"postgresql://guarded:wrong-sesame@{at}/postgres": "PostgreSQL database postgres at 127.0.0.1:",
        f"postgresql://guarded:open-sesame@{at}/missing": "PostgreSQL database missing at 127.0.0.1:",
        f"postgresql://guarded:open-sesame@{HOST}:{free_port()}/x": "PostgreSQL database x at 127.0.0.1:",
        "postgresql://guarded:open-sesame@no-such-host.invalid/x": "database x at no-such-host.invalid",
    }
    for url, name in urls.items():
        with opened(url, timeout=2.0) as store, pytest.raises(StoreUnavailable) as caught:
            store.reserve([reservation()])
        sentence = str(caught.value)
        assert name in sentence
        assert "sesame" not in f"{sentence} {caught.value.__cause__}"
        assert "\n" not in sentence
    with opened(f"postgresql://guarded:open-sesame@{at}/postgres") as store, pytest.raises(SchemaError):
        store.check()
