"""What ``oncekey doctor`` asks a PostgreSQL server. It only reads, and its cost does not grow with the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.stores.postgres.connection import explain
from oncekey.stores.postgres.statements import PACKAGE, SLIM, statement
from oncekey.stores.sql import diagnosis, probes

if TYPE_CHECKING:
    from oncekey.stores.postgres.connection import DeadlineConnection

CONNECTIONS_OF_A_PROCESS = 4
"""Two lanes, and two connections of the event loop. An app that is not async has only the two lanes."""
_SPARE_PROCESSES = 2

_INDEXES, _SETTINGS, _CONNECTIONS, _TIMES = (
    statement(f"probe_{name}") for name in ("indexes", "settings", "connections", "times")
)
_CLOCK = "SELECT date_part('epoch', clock_timestamp())"


class Probes:
    """A part of :class:`oncekey.stores.postgres.store.PostgresStore`, which has the connection."""

    if TYPE_CHECKING:
        _where: str

        def _start_clock(self) -> None: ...
        def _connection(self, *, checked: bool = True) -> DeadlineConnection: ...
        def check(self) -> None: ...
        def disconnect(self) -> None: ...

    def diagnose(self) -> list[Diagnosis]:
        found = probes.diagnose(PACKAGE, self.check, self._of_the_tables, self._server_clock)
        return [*found, *durability(dict(self._ask(_SETTINGS))), self._connections()]

    def _of_the_tables(self) -> Iterator[Diagnosis]:
        indexes = self._ask(_INDEXES)
        yield diagnosis.indexes(PACKAGE, {name for name, _ in indexes}, {name for name, valid in indexes if not valid})
        yield diagnosis.plans({name: self._indexes_used(name) for name in diagnosis.USES})
        yield diagnosis.leases((str(name), took, leased) for name, took, leased in self._ask(_TIMES, diagnosis.SAMPLE))

    def _indexes_used(self, name: str) -> set[str]:
        ((plan,),) = self._ask("EXPLAIN (FORMAT JSON) " + statement(name, SLIM), 1)
        return set(_indexes_in(plan))

    def _server_clock(self) -> float:
        ((there,),) = self._ask(_CLOCK)
        return float(there)

    def _connections(self) -> Diagnosis:
        ((most, all_of_them, of_database, in_database, of_role, by_role),) = self._ask(_CONNECTIONS)
        limits = [(most, all_of_them, "max_connections of the server")]
        limits += [(of_database, in_database, "CONNECTION LIMIT of the database")] if of_database >= 0 else []
        limits += [(of_role, by_role, "CONNECTION LIMIT of the role")] if of_role >= 0 else []
        return connections(min(limits, key=lambda limit: limit[0] - limit[1]))

    def _ask(self, asked: LiteralString, limit: int | None = None) -> list[tuple[Any, ...]]:
        """Ask on a connection without a schema check: ``doctor`` must also work where the tables are wrong."""
        self._start_clock()
        try:
            parameters = {"limit": limit, "state": "unknown", "after": ""} if limit else None
            return self._connection(checked=False).execute(asked, parameters).fetchall()
        except psycopg.Error as error:
            self.disconnect()
            raise explain(error, self._where) from error


def durability(settings: dict[str, str]) -> Iterator[Diagnosis]:
    """Judges the server's settings, which ``probe_settings.sql`` reads."""
    if settings["standby"] == "true":
        yield Diagnosis(
            "primary", Level.FAIL, "this server is a standby and takes no writes", "point --store at the primary"
        )
    shown = ", ".join(f"{name} {settings[name]}" for name in ("synchronous_commit", "fsync", "full_page_writes"))
    if settings["fsync"] == "off":
        yield Diagnosis(
            "durability",
            Level.FAIL,
            f"{shown}: a crash of the host can lose answers that clients have seen, or all of the database",
            "set fsync = on in postgresql.conf, and reload",
        )
    elif settings["full_page_writes"] == "off":
        yield Diagnosis(
            "durability",
            Level.WARN,
            f"{shown}: a crash of the host can tear a page, unless the file system cannot",
            "set full_page_writes = on in postgresql.conf, unless the disk is ZFS or the like",
        )
    else:
        yield Diagnosis("durability", Level.OK, shown)


def connections(limit: tuple[int, int, str]) -> Diagnosis:
    """Judges the tightest limit: the allowed number, the present number, and the name of the limit."""
    most, used, what = limit
    found = f"{used} of {most} are in use ({what}); each process of the app takes up to {CONNECTIONS_OF_A_PROCESS}"
    if most - used >= CONNECTIONS_OF_A_PROCESS * _SPARE_PROCESSES:
        return Diagnosis("connections", Level.OK, found)
    return Diagnosis(
        "connections",
        Level.WARN,
        f"{found}: a deploy may find none left, and requests then get 503",
        "raise the limit, or run fewer processes",
    )


def _indexes_in(plan: Any) -> Iterator[str]:
    """Every index that a plan names, at any depth."""
    if isinstance(plan, dict):
        if "Index Name" in plan:
            yield plan["Index Name"]
        plan = list(plan.values())
    if isinstance(plan, list):
        for part in plan:
            yield from _indexes_in(part)
