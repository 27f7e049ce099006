"""What a lane's connection to MySQL is set to, and which errors make it send a packet again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pymysql
import pytest

from oncekey.core.states import State
from oncekey.errors import StoreUnavailable
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.mysql.connection import Connection
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, MysqlServer
from tests.engine.doubles import reservation
from tests.stores.mysql import complete, opened, put, run

pytestmark = pytest.mark.stores

_ISOLATION = "SHOW SESSION VARIABLES WHERE variable_name IN ('tx_isolation', 'transaction_isolation')"


@pytest.fixture
def store(ready_mysql: str) -> Iterator[MysqlStore]:
    with opened(ready_mysql, timeout=3.0) as store:
        yield store


def test_lane_is_read_committed_whatever_the_default_of_the_server(ready_mysql: str) -> None:
    run(ready_mysql, "SET GLOBAL TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    try:
        with opened(ready_mysql) as store:
            (found,) = store._connection().run(_ISOLATION)
    finally:
        run(ready_mysql, "SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert {value for _, value in found} == {"READ-COMMITTED"}


def test_update_that_changes_nothing_counts_the_rows_that_it_matched(store: MysqlStore) -> None:
    """A lease that is renewed within one microsecond keeps its value, and its owner must not seem to have lost it."""
    put(store, "key-1", "key-2")
    assert store._connection().run("UPDATE idempotency_keys SET owner = owner") == [2]


@pytest.mark.parametrize("code", [1213, 1205, 1305], ids=["deadlock", "lock time-out", "transaction ended early"])
def test_packet_that_was_rolled_back_is_sent_again(
    store: MysqlStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A lock time-out ends one statement and leaves the transaction open, so the lane rolls it back first: the next
    START TRANSACTION would commit what the packet had written so far."""
    real = Connection.run
    record, other = put(store, "key-1", "key-2")
    packets: list[str] = []

    def fail_first(self: Connection, text: str) -> list[object]:
        packets.append(text)
        if len(packets) == 1:
            real(self, f"START TRANSACTION; UPDATE idempotency_keys SET attempt = 9 WHERE `key` = '{other.key}'")
            raise pymysql.OperationalError(code, "the server's text")
        return real(self, text)

    monkeypatch.setattr(Connection, "run", fail_first)
    (moved,) = store.swap([complete(record)])
    assert moved is not None
    assert len(packets) == 2
    assert packets[0] == packets[1]
    ended, untouched = store.read([(each.scope, each.key) for each in (record, other)])
    assert ended is not None
    assert untouched is not None
    assert (ended.state, untouched.attempt) == (State.COMPLETED, 1)


def test_packet_whose_answer_is_lost_is_not_sent_again(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been committed. The engine finds out by the owner's token."""
    (record,) = put(store, "key-1")
    packets: list[str] = []

    def lose(self: Connection, text: str) -> list[object]:
        packets.append(text)
        raise pymysql.OperationalError(2013, "Lost connection to MySQL server during query")

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "run", lose)
        with pytest.raises(StoreUnavailable):
            store.swap([complete(record)])
    assert len(packets) == 1


# -- Galera --------------------------------------------------------------------------------------------------------


@pytest.fixture
def galera(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, str]], list[tuple[int, str]]]:
    """Makes servers say that they are nodes of a cluster: by port, whether each one is ready. Returns the packets that
    they are sent after that."""
    real = Connection.run

    def pretend(ready: dict[int, str]) -> list[tuple[int, str]]:
        packets: list[tuple[int, str]] = []

        def answer(self: Connection, text: str) -> list[object]:
            port = int(self.port)
            if "wsrep_ready" in text:
                *rest, _, _ = real(self, text)
                return [*rest, (("wsrep_on", "ON"),), (("wsrep_ready", ready[port]),)]
            packets.append((port, text))
            return [0] if "wsrep_sync_wait" in text else real(self, text)  # MySQL has no such setting

        monkeypatch.setattr(Connection, "run", answer)
        return packets

    return pretend


def test_connection_to_a_galera_node_waits_for_the_commits_of_other_nodes(
    ready_mysql: str, mysql_server: MysqlServer, galera: Callable[[dict[int, str]], list[tuple[int, str]]]
) -> None:
    packets = galera({mysql_server.port: "ON"})
    with opened(ready_mysql) as store:
        assert store._connection().galera
    assert packets[0] == (mysql_server.port, "SET SESSION wsrep_sync_wait = 7"), "before anything is read or written"


def test_galera_node_that_is_not_primary_is_unavailable(
    ready_mysql: str, mysql_server: MysqlServer, galera: Callable[[dict[int, str]], list[tuple[int, str]]]
) -> None:
    packets = galera({mysql_server.port: "OFF"})
    with opened(ready_mysql) as store, pytest.raises(StoreUnavailable, match="not in the primary component"):
        store.reserve([reservation("key-1")])
    assert packets == []


def test_galera_node_that_is_not_primary_is_passed_over_for_the_next_host_of_the_url(
    ready_mysql: str, mysql_server: MysqlServer, galera: Callable[[dict[int, str]], list[tuple[int, str]]]
) -> None:
    with TcpProxy(HOST, mysql_server.port) as cut_off:  # a second address of the same server
        packets = galera({cut_off.port: "OFF", mysql_server.port: "ON"})
        name = ready_mysql.rpartition("/")[2]
        with opened(f"mysql://root@{HOST}:{cut_off.port},{HOST}:{mysql_server.port}/{name}") as store:
            assert put(store, "key-1")
    assert {port for port, _ in packets} == {mysql_server.port}
