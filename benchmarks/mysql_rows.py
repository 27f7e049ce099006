"""The store alone on MariaDB, beside the same two statements with one row per transaction, in one run.

``python -m benchmarks.mysql_rows`` starts a durable MariaDB (``make servers`` fetches one), on the disk of TMPDIR. The
yardstick is the form that costs the server least: an INSERT and an UPDATE by primary key, each in autocommit mode, from
32 connections. It does not read before it inserts, and skips no locked row: the ratio errs against us. It is driven in
three ways: by MariaDB's own client in C, a process for each connection (what pgbench is for PostgreSQL); by PyMySQL in
four processes; and by PyMySQL in one process with 32 threads, as an app would do it, which is what one process with
lanes replaces.

Beside the rate stands what a pair costs in CPU time, of the server and of its clients: a busy machine changes it less,
because a way with many threads gets more of a busy machine than one with three. Every way begins with an empty table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pymysql

from benchmarks import store_alone
from benchmarks.pgbench import BODY, CLIENTS, FINGERPRINT, HEADERS
from oncekey.stores.registry import open_store
from oncekey.testing.servers import MysqlServer, find_mariadb

PROCESSES = 4
MOST_PAIRS_A_SECOND = 300
"""Of one connection in C: so many are written into its script."""
_INSERT = """
INSERT INTO idempotency_keys (
    scope, `key`, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until, created_at,
    retention_seconds, expires_at
) VALUES (
    'bench', %s, 'POST /payments', %s, 2, 'external', 'in_progress', 1, %s, utc_timestamp(6) + INTERVAL 60 SECOND,
    utc_timestamp(6), 86400, utc_timestamp(6) + INTERVAL 86400 SECOND
)
"""
_COMPLETE = """
UPDATE idempotency_keys SET
    state = 'completed', response_status = 201, response_headers = %s, response_body = %s, response_schema_version = 1,
    finished_at = utc_timestamp(6), expires_at = utc_timestamp(6) + INTERVAL 86400 SECOND
WHERE scope = 'bench' AND `key` = %s AND owner = %s AND state = 'in_progress'
"""
LANES = "lanes, 128 callers, one process"
YARDSTICKS = {
    "C": f"one row per transaction, C client, {CLIENTS} connections",
    "processes": f"one row per transaction, PyMySQL, {CLIENTS} connections in {PROCESSES} processes",
    "threads": f"one row per transaction, PyMySQL, {CLIENTS} threads of one process",
}


class Measured(NamedTuple):
    pairs_per_second: float
    client_seconds: float
    """CPU time of the clients, for all pairs: those of the warm-up, too."""


def connect(url: str) -> Any:
    parts = urlsplit(url)
    place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    return pymysql.connect(**place, database=parts.path[1:], autocommit=True, ssl_disabled=True, binary_prefix=True)


# -- one row per transaction ------------------------------------------------------------------------------------------


def by_pymysql(url: str, seconds: float, processes: int) -> Measured:
    """``CLIENTS`` connections, each in a thread, shared by so many processes."""
    return _in_children(_threads, [(url, seconds, CLIENTS // processes)] * processes)


def rate_of_rows(url: str, seconds: float) -> float:
    """The yardstick of ``python -m benchmarks``: as many processes as the best of PyMySQL has."""
    return by_pymysql(url, seconds, PROCESSES).pairs_per_second


def _threads(url: str, seconds: float, clients: int) -> Measured:
    counted = [0] * clients
    used = time.process_time()
    began = time.perf_counter() + min(1.0, seconds / 4)

    def client(place: int) -> None:
        connection = connect(url)
        with connection.cursor() as cursor:
            while (now := time.perf_counter()) < began + seconds:
                key, owner = str(uuid.uuid4()), uuid.uuid4().hex
                cursor.execute(_INSERT, (key, FINGERPRINT, owner))
                if cursor.execute(_COMPLETE, (HEADERS, BODY, key, owner)) != 1:
                    raise store_alone.PairFailed("a completion found no row")
                counted[place] += now >= began
        connection.close()

    threads = [threading.Thread(target=client, args=(place,)) for place in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Measured(sum(counted) / (time.perf_counter() - began), time.process_time() - used)


def by_c_client(url: str, seconds: float, count: Callable[[], int]) -> Measured:
    """``mariadb``, a process for each connection. Its statements are written beforehand, with their values."""
    warm_up = min(1.0, seconds / 4)
    parts = urlsplit(url)
    command = [
        *(_client_program(), "--no-defaults", f"--host={parts.hostname}", f"--port={parts.port}", "--skip-ssl"),
        *(f"--user={parts.username}", "--default-character-set=utf8mb4", parts.path[1:]),
    ]
    used = _children_seconds()
    with _scripts(url, round(MOST_PAIRS_A_SECOND * (warm_up + seconds))) as scripts:
        clients = [_start(command, script) for script in scripts]
        try:
            time.sleep(warm_up)
            began, before = time.perf_counter(), count()
            time.sleep(seconds)
            rate = (count() - before) / (time.perf_counter() - began)
            ended = sum(client.poll() is not None for client in clients)
        finally:
            for client in clients:
                client.terminate()
            for client in clients:
                client.wait()
    if ended:
        raise store_alone.PairFailed(f"{ended} of the clients in C ended before their time")
    return Measured(rate, _children_seconds() - used)


def _start(command: list[str], script: Path) -> subprocess.Popen[bytes]:
    with script.open("rb") as read:
        return subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL)


@contextmanager
def _scripts(url: str, pairs: int) -> Iterator[list[Path]]:
    connection = connect(url)
    folder = Path(tempfile.mkdtemp(prefix="oncekey-mysql-rows-"))
    try:
        with connection.cursor() as cursor:
            for number in range(CLIENTS):
                with (folder / str(number)).open("wb") as script:
                    for _ in range(pairs):
                        key, owner = str(uuid.uuid4()), uuid.uuid4().hex
                        insert = cursor.mogrify(_INSERT, (key, FINGERPRINT, owner))
                        complete = cursor.mogrify(_COMPLETE, (HEADERS, BODY, key, owner))
                        for text in (insert, complete):
                            script.write(text.encode("utf-8", "surrogateescape").replace(b"\n", b" ") + b";\n")
        yield [folder / str(number) for number in range(CLIENTS)]
    finally:
        connection.close()
        shutil.rmtree(folder)


def _client_program() -> str:
    found = find_mariadb() / "usr/bin/mariadb"
    return str(found) if found.is_file() else "mariadb"


# -- the store -------------------------------------------------------------------------------------------------------


def by_store(url: str, seconds: float, way: store_alone.Way) -> Measured:
    return _in_children(_store, [(url, seconds, way)])


def _store(url: str, seconds: float, way: store_alone.Way) -> Measured:
    used = time.process_time()
    if way == "raw":
        store = open_store(url)
        store.check()
        rate = store_alone.raw(store, seconds)
        store.close()
    else:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rate = runner.run(store_alone.through_lanes(url, seconds))
    return Measured(rate, time.process_time() - used)


def _in_children(work: Callable[..., Measured], calls: list[tuple[Any, ...]]) -> Measured:
    with multiprocessing.get_context("spawn").Pool(len(calls)) as pool:
        each = pool.starmap(work, calls, chunksize=1)
    return Measured(sum(one.pairs_per_second for one in each), sum(one.client_seconds for one in each))


# -- rounds ----------------------------------------------------------------------------------------------------------


def one_round(server: MysqlServer, url: str, seconds: float) -> dict[str, dict[str, float]]:
    def completed() -> int:
        ((count,),) = server.execute(
            "SELECT count(*) FROM idempotency_keys WHERE state = 'completed'", database="bench"
        )
        return int(count)

    ways: dict[str, Callable[[], Measured]] = {
        YARDSTICKS["C"]: lambda: by_c_client(url, seconds, completed),
        YARDSTICKS["processes"]: lambda: by_pymysql(url, seconds, PROCESSES),
        YARDSTICKS["threads"]: lambda: by_pymysql(url, seconds, 1),
        LANES: lambda: by_store(url, seconds, "lanes"),
        f"batches of {store_alone.RAW_BATCH}, one thread": lambda: by_store(url, seconds, "raw"),
    }
    results: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        server.execute("TRUNCATE TABLE idempotency_keys", database="bench")
        used = _cpu_seconds(server.pid)
        rate, client_seconds = way()
        server_seconds, pairs = _cpu_seconds(server.pid) - used, completed()
        results[name] = {
            "pairs_per_second": rate,
            "server_microseconds_a_pair": server_seconds / pairs * 1e6,
            "client_microseconds_a_pair": client_seconds / pairs * 1e6,
        }
    return results


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    def median(of: Callable[[Mapping[str, Mapping[str, float]]], float], digits: int) -> float:
        return round(statistics.median(of(each) for each in rounds), digits)

    results: dict[str, dict[str, float]] = {
        name: {what: median(lambda of, name=name, what=what: of[name][what], 1) for what in rounds[0][name]}  # type: ignore[misc]
        for name in rounds[0]
    }
    for short, yardstick in YARDSTICKS.items():  # the median of the ratios, since each is of one round
        results[LANES] |= {
            f"rate / {short}": median(lambda of, y=yardstick: _ratio(of, LANES, y, "pairs_per_second"), 2),  # type: ignore[misc]
            f"server CPU of {short} / ours": median(
                lambda of, y=yardstick: _ratio(of, y, LANES, "server_microseconds_a_pair"),  # type: ignore[misc]
                2,
            ),
            f"all CPU of {short} / ours": median(lambda of, y=yardstick: _all(of[y]) / _all(of[LANES]), 2),  # type: ignore[misc]
        }
    return results


def _ratio(of: Mapping[str, Mapping[str, float]], one: str, other: str, what: str) -> float:
    return of[one][what] / of[other][what]


def _all(way: Mapping[str, float]) -> float:
    return way["server_microseconds_a_pair"] + way["client_microseconds_a_pair"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mysql_rows", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    seconds = min(max(options.seconds, 0.5), 60.0)
    with MysqlServer() as server:
        url = server.database("bench")
        store_alone.prepare(url)
        rounds = [one_round(server, url, seconds) for _ in range(max(1, options.rounds))]
    print(json.dumps({"load": [round(load, 1) for load in os.getloadavg()], **medians(rounds)}, indent=2))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
