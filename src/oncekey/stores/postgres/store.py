"""The reference store: PostgreSQL by psycopg 3, one statement and one commit per batch.

``stores/sql/connections.py`` keeps the connections, one per thread and process. The .sql files say what the statements
do; ``core/states.py`` says what a transition means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.swaps import Swap
from oncekey.errors import ConfigurationError, SchemaError, StoreUnavailable
from oncekey.stores.api import Capabilities, Duty
from oncekey.stores.duties import FAIR, JobTurns, Turns
from oncekey.stores.postgres import migrate as migrations
from oncekey.stores.postgres import rows
from oncekey.stores.postgres.arrays import Text
from oncekey.stores.postgres.checks import Probes
from oncekey.stores.postgres.connection import DeadlineConnection, connect, explain
from oncekey.stores.postgres.in_loop import InLoop
from oncekey.stores.postgres.kept import PostgresKept
from oncekey.stores.postgres.lookups import Lookups
from oncekey.stores.postgres.outbox import PostgresOutbox
from oncekey.stores.postgres.statements import (
    COLUMNS,
    END,
    PACKAGE,
    RESERVE,
    RESERVE_POLITELY,
    SLIM,
    SWAP,
    statement,
)
from oncekey.stores.postgres.transactions import PostgresTransactions
from oncekey.stores.sql import queries
from oncekey.stores.sql.connections import Connections
from oncekey.stores.url_files import require_files

_THERE: LiteralString = "SELECT name, to_regclass(name) IS NOT NULL FROM unnest(%s::text[]) AS name"
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "sslcrldir")
_NO_FILES = ("system",)
"""sslrootcert=system: the authorities of this host."""
_TRIES = 5  # measured: a lost race needed at most five statements to see the winner's row


class _LostRace(Exception):
    """A rival inserted one of our keys at the same moment."""


class PostgresStore(
    Lookups, PostgresKept, PostgresOutbox, PostgresTransactions, Probes, Connections[DeadlineConnection]
):
    driver_error = psycopg.Error
    capabilities = Capabilities(durable=True, shared=True, server_clock=True, writers=2)

    def __init__(self, url: str, *, timeout: float = 5.0, lock_timeout: float = 0.5) -> None:
        super().__init__(url, timeout=timeout, lock_timeout=lock_timeout)
        self._where = _describe(url)
        self._swap_beside = statement("swap_beside", SLIM)
        self._restart = statement("restart", SLIM)
        # UPDATE skips a row that a business table references in an open transaction. A weaker lock would let the
        # DELETE wait for that transaction.
        self._remove = statement("remove", COLUMNS, lock="UPDATE")
        self._read = statement("read", COLUMNS)
        self._purge = statement("purge")
        self._purge_audit = statement("audit_purge")
        self._due = {duty: statement(f"due_{duty}", SLIM) for duty in Duty}
        self._fair_scopes, self._fair_keys = statement("fair_scopes"), statement("fair_keys", SLIM)
        self._turns = Turns()
        self._job_turns = JobTurns()

    # -- verbs ---------------------------------------------------------------------------------------------------

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._start_clock()
        found: dict[tuple[str, str], Record] = {}
        missing = {(wanted.scope, wanted.key): wanted for wanted in batch}
        statement = RESERVE
        for _ in range(_TRIES):
            try:
                answer = self._execute(statement, rows.reservation_columns(list(missing.values()))).fetchall()
            except _LostRace:
                statement = RESERVE_POLITELY
                continue
            found |= rows.reserved(missing, answer)
            missing = {at: wanted for at, wanted in missing.items() if at not in found}
            if not missing:
                break
        return [Found(found.get((wanted.scope, wanted.key))) for wanted in batch]

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self._start_clock()
        moved: dict[tuple[str, str], Record] = {}
        ends = [change for change in batch if change.ends]
        if ends:
            answer = self._execute(END, rows.end_columns(ends)).fetchall()
            for change, now in zip(ends, rows.times_ended(answer, len(ends)), strict=True):
                if now is not None:
                    moved[change.scope, change.key] = rows.ended(change, now)
        if len(ends) < len(batch):
            self._move_others([change for change in batch if not change.ends], moved)
        return [moved.get((change.scope, change.key)) for change in batch]

    def _move_others(self, batch: list[Swap], moved: dict[tuple[str, str], Record]) -> None:
        """Swaps that are not on a request's hot path: each kind is one statement and one commit."""
        responses = {(change.scope, change.key): change.response for change in batch}
        if moves := [change for change in batch if change.plain]:
            for row in self._execute(SWAP, rows.swap_columns(moves)):
                moved[row[0], row[1]] = rows.record(row, responses[row[0], row[1]])
        if beside := [change for change in batch if not (change.plain or change.to_state is None or change.restart)]:
            for row in self._execute(self._swap_beside, rows.beside_columns(beside)):
                moved[row[0], row[1]] = rows.record(row, responses[row[0], row[1]])
        if restarts := [change for change in batch if change.restart is not None]:
            for record in self._records(self._restart, rows.restart_columns(restarts)):
                moved[record.scope, record.key] = record
        if removals := [change for change in batch if change.to_state is None]:
            for record in self._records(self._remove, rows.removal_columns(removals)):
                moved[record.scope, record.key] = record

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self._start_clock()
        columns = {"scope": Text([scope for scope, _ in keys]), "key": Text([key for _, key in keys])}
        found = {(record.scope, record.key): record for record in self._records(self._read, columns)}
        return [found.get(at) for at in keys]

    def due(self, duty: Duty, limit: int) -> list[Record]:
        self._start_clock()
        oldest = self._records(self._due[duty], {"limit": limit})

        def visit(after: str, most: int) -> list[tuple[str, bool]]:
            asked = {"state": FAIR[duty].value, "after": after, "limit": most}
            return [(scope, is_due) for scope, is_due in self._execute(self._fair_scopes, asked)]

        def take(scopes: Sequence[str], most: int) -> list[Record]:
            asked = {"state": FAIR[duty].value, "scope": Text(list(scopes)), "limit": most}
            return self._records(self._fair_keys, asked)

        return self._turns.hand_out(duty, limit, oldest, visit, take)

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        self._start_clock()
        ((deleted,),) = self._execute(self._purge, {"limit": limit, "expired_state_only": expired_state_only})
        return int(deleted)

    def purge_audit(self, limit: int, keep_seconds: float) -> int:
        self._start_clock()
        return self._execute(self._purge_audit, {"limit": limit, "keep_seconds": float(keep_seconds)}).rowcount

    def in_loop(self) -> InLoop | None:
        return InLoop(self) if psycopg.Pipeline.is_supported() else None  # libpq 14

    # -- schema --------------------------------------------------------------------------------------------------

    def migrate(self) -> list[str]:
        self._start_clock()
        connection = self._connection(checked=False)
        try:
            ran = migrations.run(connection)
        except psycopg.Error as error:
            self.disconnect()
            raise explain(error, self._where) from error
        self.check()
        return ran

    def check(self) -> None:
        self._start_clock()
        self._check(self._connection(checked=False))

    def _check(self, connection: DeadlineConnection) -> None:
        try:
            asked = connection.execute(_THERE, [[*queries.tables(PACKAGE), "oncekey_schema"]])
            missing = {name for name, there in asked if not there}
            applied = queries.Applied(frozenset())
            if "oncekey_schema" not in missing:
                applied = migrations.applied(connection)
        except psycopg.Error as error:
            self.disconnect()
            raise explain(error, self._where) from error
        if sentence := queries.outdated(PACKAGE, applied, self._where, missing):
            raise SchemaError(sentence)
        self._local.checked = True

    # -- connections ---------------------------------------------------------------------------------------------

    def _records(self, statement: LiteralString, parameters: Any) -> list[Record]:
        return [rows.record(row) for row in self._execute(statement, parameters).fetchall()]

    def _execute(self, statement: LiteralString, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]:
        connection = self._connection()
        try:
            return connection.execute(statement, parameters, binary=True)
        except psycopg.errors.UniqueViolation as error:
            raise _LostRace from error
        except psycopg.Error as error:
            trouble = explain(error, self._where)
            if connection.broken or connection.closed or isinstance(trouble, StoreUnavailable):
                # After a deadline the answer may still arrive. The next statement must not read it as its own.
                self.disconnect()
            raise trouble from error

    def _connect(self, deadline: float) -> DeadlineConnection:
        try:
            return connect(self.url, timeout=self.timeout, lock_timeout=self.lock_timeout, deadline=deadline)
        except psycopg.Error as error:
            raise explain(error, self._where) from error


def _describe(url: str) -> str:
    """The name of the store in messages: host and database, never the password."""
    try:
        info = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            "the PostgreSQL URL cannot be read: use postgresql://user@host/database; options after '?' are those of "
            "libpq, such as sslmode=require"
        ) from None
    if info.get("sslmode") != "disable":
        require_files({name: path for name, path in info.items() if path not in _NO_FILES}, _FILES)
    at = info.get("host") or info.get("hostaddr") or "localhost"
    port = f":{info['port']}" if info.get("port") else ""
    return (
        f"PostgreSQL database {info.get('dbname') or 'of that name'} at {at}{port}"  # unquoted: see redaction.describe
    )
