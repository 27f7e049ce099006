"""A connection that answers before its deadline or is closed, and the texts of its errors.

A stopped server keeps its sockets open and sends nothing, so each wait on the socket has a limit. After it the
connection is closed: a late answer must not be read as that of the next statement.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
from pymysql.constants import CLIENT, CR, ER

from oncekey.errors import ConfigurationError, OnceKeyError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.mysql.address import FILES, Address
from oncekey.stores.sql import queries
from oncekey.stores.url_files import require_files
from oncekey.telemetry.redaction import describe

# Session settings of a lane, each with its reason. MariaDB alone reads the text between /*M! and */.
_SETTINGS = """
SET SESSION
    sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',  -- nothing is cut to fit; packets.py escapes for it
    time_zone = '+00:00',
    innodb_lock_wait_timeout = {lock_seconds},              -- a lane never waits long for one row
    lock_wait_timeout = {seconds},                          -- nor for a table that is being altered
    group_concat_max_len = 1048576                          -- MariaDB: also for json_arrayagg
    /*M! , max_statement_time = {seconds}                   -- the server gives up with us
    , in_predicate_conversion_threshold = 0 */;             -- a long list of keys stays a list of index ranges
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
SELECT @@max_allowed_packet;
SHOW SESSION VARIABLES LIKE 'wsrep_on';
SHOW STATUS LIKE 'wsrep_ready'
"""
_COMMIT = "COMMIT"
_THEN_COMMIT = f";\n{_COMMIT}"
_CAUSAL_READS = "SET SESSION wsrep_sync_wait = 7"
"""In a Galera cluster, reads and writes first wait until this node has what was committed on the others."""

LOST_RACE = ER.DUP_ENTRY
DEADLOCK, LOCK_TIMEOUT = ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT
NOT_WHOLE = ER.SP_DOES_NOT_EXIST
"""The transaction ended before its packet did (`whole` of keys.sql)."""
NOTHING_DONE = frozenset({DEADLOCK, LOCK_TIMEOUT, NOT_WHOLE})
"""The transaction is rolled back, or can be: it can be tried again. In a Galera cluster COMMIT raises it, too."""
ALREADY_THERE = frozenset({ER.TABLE_EXISTS_ERROR, ER.DUP_FIELDNAME, ER.DUP_KEYNAME, ER.CANT_DROP_FIELD_OR_KEY})

_TOO_BIG = frozenset({ER.NET_PACKET_TOO_LARGE})
_READ_ONLY = frozenset({ER.OPTION_PREVENTS_STATEMENT, 1792, 1836})
_LATE = frozenset({LOCK_TIMEOUT, 1969, 3024})  # the last two: max_statement_time, max_execution_time
_NOT_PRIMARY = 1047  # WSREP has not yet prepared node for application use
_GONE: dict[int, str] = {
    # What a client can do nothing about but wait, by the server's or the driver's number; with advice for an operator.
    0: "",
    CR.CR_SERVER_LOST: "",
    CR.CR_SERVER_GONE_ERROR: "",
    CR.CR_CONN_HOST_ERROR: "start it, or correct the address",
    CR.CR_CONNECTION_ERROR: "start it, or correct the address",
    CR.CR_UNKNOWN_HOST: "correct the name of the host",
    CR.CR_SSL_CONNECTION_ERROR: "it speaks no TLS, and the ssl_… options of the URL ask for it",
    CR.CR_AUTH_PLUGIN_CANNOT_LOAD: "its login needs TLS or the package cryptography: pip install 'oncekey[mysql]'",
    ER.CON_COUNT_ERROR: "it takes no more connections: raise max_connections, or run fewer processes",
    ER.TOO_MANY_USER_CONNECTIONS: "its user may have no more connections: raise max_user_connections",
    ER.USER_LIMIT_REACHED: "its user may have no more connections: raise max_user_connections",
    ER.ACCESS_DENIED_ERROR: "correct the user's name or password",
    ER.DBACCESS_DENIED_ERROR: "its user may not use that database: docs/stores.md says what it needs to be granted",
    ER.BAD_DB_ERROR: "create that database, or correct its name",
    ER.DISK_FULL: "free some room on its disk",
    ER.RECORD_FILE_FULL: "free some room on its disk",
    ER.GET_ERRNO: "see its error log",
    ER.ERROR_DURING_COMMIT: "",
    ER.SERVER_SHUTDOWN: "",
    ER.QUERY_INTERRUPTED: "",
    ER.NEW_ABORTING_CONNECTION: "",
    ER.CANT_CREATE_THREAD: "",
    DEADLOCK: "",
    NOT_WHOLE: "",
    1927: "",  # MariaDB: the connection was killed
    4031: "",  # MySQL: it was idle for too long
    _NOT_PRIMARY: "this node is not in the primary component of its cluster: name the other nodes in the URL, too",
}
_ADVICE = {
    ER.TABLEACCESS_DENIED_ERROR: "its user may not do that: docs/stores.md says what it needs to be granted",
    ER.COLUMNACCESS_DENIED_ERROR: "its user may not do that: docs/stores.md says what it needs to be granted",
    ER.DATA_TOO_LONG: "a key, scope or name is longer than 1024 bytes",
}


_tls_contexts: dict[tuple[Any, ...], Any] = {}


class Written(int):
    """How many rows a statement matched, or inserted."""

    time: int
    """The time of the statement in microseconds, if it asked for it (``returns_time`` of keys.sql)."""


class Connection(pymysql.Connection):
    """One lane's connection."""

    max_packet = 0
    galera = False
    _deadline = 0.0

    def _create_ssl_ctx(self, sslp: Any) -> Any:
        """PyMySQL makes one for each connection, which takes longer than all the rest of connecting."""
        key = tuple(sorted(sslp.items())) if isinstance(sslp, dict) else None
        if key is None:
            return super()._create_ssl_ctx(sslp)  # type: ignore[misc]
        if key not in _tls_contexts:
            made = super()._create_ssl_ctx(sslp)  # type: ignore[misc]
            if sslp.get("check_hostname"):
                made.check_hostname = True  # PyMySQL does not check the host if no ssl_ca is named
            _tls_contexts[key] = made
        return _tls_contexts[key]

    @property
    def deadline(self) -> float:
        """Every wait for the server ends about then, a time.monotonic()."""
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._deadline = deadline
        self._read_timeout = self._write_timeout = max(0.001, deadline - time.monotonic())

    @property
    def closed(self) -> bool:
        return not self.open

    def close(self) -> None:
        """Say goodbye, without a wait for a server that hangs."""
        self.deadline = time.monotonic() + 0.1
        with suppress(OSError, ValueError):
            super().close()

    def run(self, text: str) -> list[Any]:
        """Send one packet. Return, for each of its statements, the rows, or the number of rows that it matched.

        In a Galera cluster COMMIT is a packet of its own. A write of another node can end a transaction between two
        statements of a packet without a word, and COMMIT would then succeed with nothing to commit. Between two
        packets the server says so: the next one fails with 1213.
        """
        if self.galera and text.endswith(_THEN_COMMIT):
            return [*self._run(text.removesuffix(_THEN_COMMIT)), *self._run(_COMMIT)]
        return self._run(text)

    def _run(self, text: str) -> list[Any]:
        results: list[Any] = []
        with self.cursor() as cursor:
            cursor.execute(text.encode("utf-8", "surrogateescape"))  # type: ignore[call-overload]
            while True:
                if cursor.description:
                    results.append(cursor.fetchall())
                else:
                    written = Written(cursor.rowcount)
                    written.time = cursor.lastrowid or 0
                    results.append(written)
                if not cursor.nextset():
                    return results


def connect(address: Address, *, timeout: float, lock_timeout: float, deadline: float) -> Connection:
    """Open a lane's connection: to the first host that answers, and that takes writes."""
    trouble: BaseException | None = None
    for number, (host, port) in enumerate(address.hosts):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        share = left / (len(address.hosts) - number)  # one host that is silent must not use up the time of all
        try:
            return _connect(address, host, port, timeout, lock_timeout, time.monotonic() + share)
        except pymysql.Error as error:
            trouble = error
    raise trouble or pymysql.OperationalError(CR.CR_SERVER_LOST, "timed out")


def check_options(address: Address) -> None:
    """Raise ConfigurationError if the driver cannot use what the URL says. It does not connect."""
    require_files(dict(address.options), FILES)
    try:
        _made(address, *address.hosts[0], deadline=time.monotonic() + 1.0)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(
            f"the TLS files of the MySQL URL cannot be used ({describe(error)}): ssl_ca=, ssl_cert= and ssl_key= take "
            "PEM files, and ssl_key_password= the password of the key"
        ) from error
    except UnicodeEncodeError:  # its text quotes the password
        raise ConfigurationError("the password in the MySQL URL has characters that PyMySQL cannot send") from None


def _made(address: Address, host: str, port: int, deadline: float) -> Connection:
    return Connection(
        host=host,
        port=port,
        user=address.user,
        password=address.password,
        database=address.database,
        charset="utf8mb4",
        autocommit=True,
        client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
        connect_timeout=max(0.1, deadline - time.monotonic()),
        defer_connect=True,
        **address.driver_options(),
    )


def _connect(
    address: Address, host: str, port: int, timeout: float, lock_timeout: float, deadline: float
) -> Connection:
    connection = _made(address, host, port, deadline)
    connection.deadline = deadline
    try:
        connection.connect()
    except RuntimeError as error:  # so PyMySQL says that it cannot encrypt a password: MySQL 8's default, without TLS
        raise pymysql.OperationalError(CR.CR_AUTH_PLUGIN_CANNOT_LOAD, "the login needs a package") from error
    try:
        settings = _SETTINGS.format(seconds=max(1, round(timeout)), lock_seconds=max(1, round(lock_timeout)))
        *_, ((packet,),), wsrep_on, wsrep_ready = connection.run(settings)
        connection.max_packet = packet
        if dict(wsrep_on).get("wsrep_on") == "ON":
            if dict(wsrep_ready).get("wsrep_ready") != "ON":
                raise pymysql.OperationalError(_NOT_PRIMARY, "WSREP is not ready")
            connection.galera = True
            connection.run(_CAUSAL_READS)
    except BaseException:
        connection._force_close()  # type: ignore[attr-defined]
        raise
    return connection


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turns errors of the driver into oncekey's."""
    try:
        yield
    except pymysql.Error as error:
        raise explain(error, where) from error


def code_of(error: pymysql.Error) -> int:
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


def explain(error: pymysql.Error, where: str) -> OnceKeyError:
    """oncekey's error for an error of the driver. It never quotes values: they may be keys or bodies."""
    code = code_of(error)
    if code == ER.NO_SUCH_TABLE:
        return SchemaError(f"{where} {queries.TABLE_GONE}")
    if code == ER.BAD_FIELD_ERROR:
        return SchemaError(f"{where} has an older oncekey schema: run `oncekey migrate`")
    if code in _READ_ONLY:
        return StoreUnavailable(f"{where} is read-only (a replica?): point oncekey at the primary")
    if code in _LATE or (code in (CR.CR_SERVER_LOST, CR.CR_SERVER_GONE_ERROR) and "timed out" in str(error)):
        return StoreUnavailable(f"{where} did not answer in time")
    if code in _TOO_BIG:
        return StoreError(f"{where} refused a packet that is larger than its max_allowed_packet: raise that setting")
    if code in _GONE or isinstance(error, pymysql.InterfaceError):
        advice = f": {words}" if (words := _tls_advice(error) or _GONE.get(code)) else ""
        return StoreUnavailable(f"{where} is unavailable ({type(error).__name__} {code}){advice}")
    advice = f": {_ADVICE[code]}" if code in _ADVICE else ""
    return StoreError(f"{where} refused a statement ({type(error).__name__} {code}){advice}")


def _tls_advice(error: pymysql.Error) -> str | None:
    """What to correct if a connection failed in TLS. The driver's number says only that there is no connection."""
    cause = getattr(error, "original_exception", None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "its certificate is not trusted, or is for another host: ssl_ca= names the authority"
    return "correct the ssl_… options of the URL" if isinstance(cause, ssl.SSLError) else None
