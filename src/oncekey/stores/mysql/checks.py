"""What ``oncekey doctor`` asks a MySQL server. It only reads, and its cost does not grow with the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.stores.mysql.packets import NOW, PACKAGE, Text, filled, slim, statement
from oncekey.stores.sql import diagnosis, probes

CONNECTIONS_OF_A_PROCESS = 2
"""Two lanes."""
_SPARE_PROCESSES = 4
_NAMED_TABLES = 5
ENOUGH_PACKET = 4 * 1024 * 1024
"""A response of the default limit, 1 MiB, escaped, and with it a few others of its batch."""

_USES: Mapping[str, frozenset[str]] = {
    "due": frozenset({"idempotency_keys_due"}),
    "due_resumable": frozenset({"idempotency_keys_resumable"}),
    "fair_scopes": frozenset({"idempotency_keys_turns"}),
}
"""The statements that upkeep repeats, each with the indexes that serve it."""


class Probes:
    """A part of :class:`oncekey.stores.mysql.store.MysqlStore`, which has the connection."""

    if TYPE_CHECKING:

        def _start_clock(self) -> None: ...
        def _packet(self, packet: str, *, checked: bool = True) -> list[Any]: ...
        def check(self) -> None: ...

    def diagnose(self) -> list[Diagnosis]:
        found = probes.diagnose(PACKAGE, self.check, self._of_the_tables, self._server_clock)
        settings = {name.lower(): value for name, value in self._ask("probe_settings")}
        tables = [(str(name), str(engine)) for name, engine in self._ask("probe_engines")]
        return [*found, *durability(settings), engines(tables), *of_packets(settings), self._connections()]

    def _of_the_tables(self) -> Iterator[Diagnosis]:
        there = {name for (name,) in self._ask("probe_indexes")}
        yield diagnosis.indexes(PACKAGE, there)
        if there.issuperset(diagnosis.wanted_indexes(PACKAGE)):  # the statements name their index
            yield diagnosis.plans({name: self._indexes_used(name) for name in _USES}, _USES)
        yield diagnosis.leases(self._ask("probe_times", limit=diagnosis.SAMPLE))

    def _indexes_used(self, name: str) -> set[str]:
        asked = {"limit": 1, "duty": Text("'unknown'"), "state": Text("'unknown'"), "after": ""}
        self._start_clock()
        (plan,) = self._packet(
            "EXPLAIN FORMAT = TRADITIONAL " + filled(statement(name, slim(NOW)), asked), checked=False
        )
        return {str(row[5] if len(row) == 10 else row[6]) for row in plan}  # MySQL has a column for partitions

    def _server_clock(self) -> float:
        ((there,),) = self._ask("probe_clock")
        return float(there / 1e6)

    def _connections(self) -> Diagnosis:
        ((most, of_user),) = self._ask("probe_connections")
        ((_, used),) = self._ask("probe_connected")
        return connections(min(most, of_user or most), int(used))

    def _ask(self, name: str, **values: Any) -> list[tuple[Any, ...]]:
        """Ask on a connection without a schema check: ``doctor`` must also work where the tables are wrong."""
        self._start_clock()
        return list(self._packet(filled(statement(name), values), checked=False)[0])


def durability(settings: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Judges the server's settings. No session can turn them on: oncekey can only say that they are off."""
    if settings.get("read_only", "OFF") not in ("OFF", "0"):
        yield Diagnosis("primary", Level.FAIL, "this server is read-only (a replica?)", "point --store at the primary")
    shown = ", ".join(
        f"{name} {settings[name]}" for name in ("innodb_flush_log_at_trx_commit", "sync_binlog") if name in settings
    )
    galera = settings.get("wsrep_on") == "ON"
    isolation = settings.get("transaction_isolation") or settings.get("tx_isolation", "")
    if settings.get("innodb_flush_log_at_trx_commit") != "1":
        yield Diagnosis(
            "durability",
            Level.WARN if galera else Level.FAIL,
            f"{shown}: a crash of the host can lose answers that clients have seen"
            + (" if all nodes crash at once" if galera else ""),
            "set innodb_flush_log_at_trx_commit = 1",
        )
    elif settings.get("log_bin") == "ON" and settings.get("sync_binlog") != "1":
        yield Diagnosis(
            "durability",
            Level.WARN,
            f"{shown}: after a crash of the host, replicas may lack what this server has, and a failover forgets keys",
            "set sync_binlog = 1",
        )
    else:
        yield Diagnosis("durability", Level.OK, shown)
    if isolation == "READ-UNCOMMITTED":
        yield Diagnosis(
            "isolation",
            Level.WARN,
            "the default of connections is READ-UNCOMMITTED; oncekey's own are READ COMMITTED, your app's are not",
            "set transaction_isolation = READ-COMMITTED or REPEATABLE-READ",
        )
    else:
        yield Diagnosis("isolation", Level.OK, f"READ-COMMITTED on oncekey's connections, {isolation} by default")


def engines(tables: Sequence[tuple[str, str]]) -> Diagnosis:
    """``tables``: some of those without transactions."""
    if not tables:
        return Diagnosis("engines", Level.OK, "all tables of this database have transactions")
    named = ", ".join(f"{name} ({engine})" for name, engine in tables[:_NAMED_TABLES])
    return Diagnosis(
        "engines",
        Level.WARN,
        f"{named}{', …' if len(tables) > _NAMED_TABLES else ''}: a rollback does not undo what a handler wrote there",
        "ALTER TABLE … ENGINE=InnoDB for each table that a handler with effects='transactional' writes",
    )


def of_packets(settings: Mapping[str, str]) -> Iterator[Diagnosis]:
    size = int(settings["max_allowed_packet"])
    found = f"max_allowed_packet {size:,} bytes"
    if size >= ENOUGH_PACKET:
        yield Diagnosis("packets", Level.OK, found)
    else:
        yield Diagnosis(
            "packets",
            Level.WARN,
            f"{found}: responses of more than half of it are not kept, and retries get a note instead of the body",
            f"set max_allowed_packet to {ENOUGH_PACKET:,} or more",
        )


def connections(most: int, used: int) -> Diagnosis:
    found = f"{used} of {most} are in use; each process of the app takes up to {CONNECTIONS_OF_A_PROCESS}"
    if most - used >= CONNECTIONS_OF_A_PROCESS * _SPARE_PROCESSES:
        return Diagnosis("connections", Level.OK, found)
    return Diagnosis(
        "connections",
        Level.WARN,
        f"{found}: a deploy may find none left, and requests then get 503",
        "raise max_connections, or run fewer processes",
    )
