"""What ``oncekey doctor`` says about a MySQL server: durability, isolation, packets, connections."""

from __future__ import annotations

from contextlib import closing

import pytest

from oncekey.core.diagnosis import Level
from oncekey.stores.mysql import MysqlStore, checks
from oncekey.stores.mysql.checks import ENOUGH_PACKET
from tests.stores.mysql import run

GOOD = {
    "innodb_flush_log_at_trx_commit": "1",
    "sync_binlog": "0",
    "log_bin": "OFF",
    "read_only": "OFF",
    "tx_isolation": "REPEATABLE-READ",
}
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


@pytest.mark.parametrize(
    ("changed", "levels"),
    [
        ({}, {"durability": OK, "isolation": OK}),
        ({"innodb_flush_log_at_trx_commit": "2"}, {"durability": FAIL, "isolation": OK}),
        ({"innodb_flush_log_at_trx_commit": "0"}, {"durability": FAIL, "isolation": OK}),
        # The other nodes of a Galera cluster have what one of them loses.
        ({"innodb_flush_log_at_trx_commit": "0", "wsrep_on": "ON"}, {"durability": WARN, "isolation": OK}),
        ({"log_bin": "ON", "sync_binlog": "0"}, {"durability": WARN, "isolation": OK}),
        ({"log_bin": "ON", "sync_binlog": "1"}, {"durability": OK, "isolation": OK}),
        ({"read_only": "ON"}, {"primary": FAIL, "durability": OK, "isolation": OK}),
        ({"tx_isolation": "READ-UNCOMMITTED"}, {"durability": OK, "isolation": WARN}),
        # MySQL's name of the same setting.
        ({"tx_isolation": "", "transaction_isolation": "READ-UNCOMMITTED"}, {"durability": OK, "isolation": WARN}),
    ],
)
def test_mysql_durability_and_isolation_are_judged(changed: dict[str, str], levels: dict[str, Level]) -> None:
    found = list(checks.durability(GOOD | changed))
    assert {each.check: each.level for each in found} == levels
    assert all(each.advice for each in found if each.level is not OK)


@pytest.mark.parametrize(("size", "level"), [(ENOUGH_PACKET, OK), (ENOUGH_PACKET - 1, WARN)])
def test_small_max_allowed_packet_is_a_warning_with_the_size_to_set(size: int, level: Level) -> None:
    (found,) = checks.of_packets({"max_allowed_packet": str(size)})
    assert (found.check, found.level) == ("packets", level)
    assert level is OK or f"{ENOUGH_PACKET:,}" in str(found.advice)


@pytest.mark.stores
def test_tables_without_transactions_are_named(ready_mysql: str) -> None:
    with closing(MysqlStore(ready_mysql)) as store:
        assert {each.check: each.level for each in store.diagnose()}["engines"] is OK
        for number in range(7):
            run(ready_mysql, f"CREATE TABLE notes_{number} (id int) ENGINE = MyISAM")
        (found,) = [each for each in store.diagnose() if each.check == "engines"]
    assert found.level is WARN
    assert "notes_0 (MyISAM)" in found.found
    assert "notes_4 (MyISAM), …:" in found.found


def test_few_free_connections_are_a_warning() -> None:
    assert checks.connections(100, 92).level is OK
    assert checks.connections(100, 93).level is WARN


@pytest.mark.stores
def test_doctor_reads_the_settings_of_the_server_and_not_of_its_own_session(ready_mysql: str) -> None:
    """The tests' server has ``innodb_flush_log_at_trx_commit = 2``, so a crash of the host loses commits. oncekey's own
    sessions are READ COMMITTED; the doctor reports the default, which the app's sessions have."""
    before = run(ready_mysql, "SELECT @@global.max_allowed_packet")[0][0]
    run(
        ready_mysql,
        "SET GLOBAL max_allowed_packet = 1048576",
        "SET GLOBAL TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
    )
    try:
        with closing(MysqlStore(ready_mysql)) as store:
            found = {each.check: each for each in store.diagnose()}
    finally:
        run(
            ready_mysql,
            f"SET GLOBAL max_allowed_packet = {before}",
            "SET GLOBAL TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        )
    assert (found["schema"].level, found["indexes"].level, found["connections"].level) == (OK, OK, OK)
    assert found["durability"].level is FAIL
    assert "innodb_flush_log_at_trx_commit 2, sync_binlog" in found["durability"].found
    assert found["isolation"].level is WARN
    assert found["packets"].level is WARN
    assert "1,048,576" in found["packets"].found
