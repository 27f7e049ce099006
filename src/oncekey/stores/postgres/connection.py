"""A connection that answers before its deadline or is closed, and the texts of its errors.

A stopped server keeps its sockets open and sends nothing. Neither ``statement_timeout`` (it runs on the server) nor TCP
keep-alive (the kernel still answers) ends the wait. So this client sets a deadline on the wait itself.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors

from oncekey.errors import OnceKeyError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.postgres import arrays
from oncekey.stores.sql import queries

# Session settings of a lane, each with its reason. The user's database, role and search_path stay as they are.
_SETTINGS = """
SET default_transaction_isolation = 'read committed';  -- the statements are written for it
SET default_transaction_read_only = off;
SET statement_timeout = {statement_ms};                -- the server gives up with us
SET lock_timeout = {lock_ms};                          -- a lane never waits long for one row
SET plan_cache_mode = force_generic_plan;              -- arrays of any length, one plan
SET enable_seqscan = off;                              -- an empty table must not pick a plan for empty tables
SET enable_bitmapscan = off;                           -- what has an order is read in it, and not sorted as a whole
SET enable_sort = off;                                 -- the same, after statistics of a moment when nothing waited
SET enable_incremental_sort = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET jit = off;
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""

NOTICE_LOST_CLIENTS = "SET client_connection_check_interval = '1s'"
NOT_NOTICED = (errors.UndefinedObject, errors.InvalidParameterValue, errors.FeatureNotSupported)
"""The setting needs PostgreSQL 14 and not every platform has it. Without it the lane still discards late rows."""

_NO_SLOT = "it takes no more connections: raise max_connections, or put a pooler in front of it"
_ADVICE = {
    # By SQLSTATE. Why a connection failed is only in the driver's text: we search that text, and do not quote it.
    "53300": _NO_SLOT,
    "too many clients already": _NO_SLOT,
    "remaining connection slots": _NO_SLOT,
    "53100": "free some room on its disk",
    "Connection refused": "start it, or correct the address",
    "password authentication failed": "correct the user's name or password",
    "no pg_hba.conf entry": "its pg_hba.conf does not let this user in from here",
    'database "': "create that database, or correct its name",
    'role "': "create that role, or correct the user's name",
    "could not translate host name": "correct the name of the host",
    "Name or service not known": "correct the name of the host",
    "failed to resolve host": "correct the name of the host",
    "port number": "correct the port",
    'connection option "port"': "correct the port",
    "root certificate file": "sslrootcert= names the authority of its certificate, and that file is not there",
    "certificate verify failed": "its certificate is not trusted: sslrootcert= names the authority",
    "does not match host name": "its certificate is for another host: use a name in the URL that the certificate has",
    "server does not support SSL": "it speaks no TLS, and sslmode= asks for it",
    "private key file": "sslkey= takes a key that others cannot read (chmod 600), and that belongs to sslcert=",
    "certificate file": "sslcert= takes a certificate in PEM",
    "42501": "its user may not do that: docs/stores.md says what it needs to be granted",
    "42P07": "there is a table of that name that oncekey did not make: give oncekey a schema of its own",
    "no error details available": "is this process at its limit of open files (ulimit -n)?",  # libpq got no socket
}

_GONE = ("08", "53", "57")  # connection exceptions, out of resources, operator intervention (SQLSTATE classes)


class DeadlineConnection(psycopg.Connection[tuple[Any, ...]]):
    """Every wait for the server ends at ``deadline``, a time.monotonic()."""

    deadline: float = 0.0

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if self.deadline:
            timeout = max(0.001, self.deadline - time.monotonic())
        return super().wait(gen, interval, timeout)


def options(timeout: float) -> dict[str, Any]:
    """How a lane connects: autocommit (one statement, one commit), and prepared from the second time on."""
    return {
        "autocommit": True,
        "client_encoding": "utf8",  # arrays.py sends it, so it overrides the database and the URL
        "prepare_threshold": 1,
        "connect_timeout": max(2, int(timeout)),
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }


def settings(timeout: float, lock_timeout: float) -> str:
    return _SETTINGS.format(statement_ms=int(timeout * 1000), lock_ms=int(lock_timeout * 1000))


def connect(url: str, *, timeout: float, lock_timeout: float, deadline: float | None = None) -> DeadlineConnection:
    """Open a lane's connection; raises if it is not ready before ``deadline``."""
    connection = DeadlineConnection.connect(url, **options(timeout))
    try:
        connection.deadline = deadline or time.monotonic() + timeout
        connection.execute(settings(timeout, lock_timeout))
        arrays.register(connection.adapters)
        _notice_lost_clients(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _notice_lost_clients(connection: DeadlineConnection) -> None:
    """Let the server stop the work of a client that is gone. Otherwise an abandoned INSERT still commits later."""
    with suppress(*NOT_NOTICED):
        connection.execute(NOTICE_LOST_CLIENTS)


def explain(error: psycopg.Error, where: str) -> OnceKeyError:
    """oncekey's error for an error of the driver. It never quotes values: they may be keys or bodies."""
    state = error.sqlstate or ""
    if isinstance(error, errors.UndefinedTable):
        return SchemaError(f"{where} {queries.TABLE_GONE}")
    if isinstance(error, errors.UndefinedColumn):
        return SchemaError(f"{where} has an older oncekey schema: run `oncekey migrate`")
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return StoreUnavailable(f"{where} is read-only (a standby?): point oncekey at the primary")
    if isinstance(error, errors._WaitTimeout) or state in ("57014", "55P03"):
        return StoreUnavailable(f"{where} did not answer in time")
    if not state or state[:2] in _GONE or isinstance(error, psycopg.InterfaceError):
        said = str(error)
        advice = next((f": {words}" for sign, words in _ADVICE.items() if sign == state or sign in said), "")
        return StoreUnavailable(f"{where} is unavailable ({type(error).__name__}){advice}")
    advice = f": {_ADVICE[state]}" if state in _ADVICE else ""
    return StoreError(f"{where} refused a statement ({type(error).__name__}, SQLSTATE {state}){advice}")
