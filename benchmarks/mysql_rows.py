"""The store alone on MariaDB, beside the same two statements with one row per transaction, in one run.

``python -m benchmarks.mysql_rows`` starts a durable MariaDB (``make servers`` fetches one), on the disk of TMPDIR. The
yardstick is the form that costs the server least: an INSERT and an UPDATE by primary key, each in autocommit mode, from
32 connections in several processes. It does not read before it inserts, and skips no locked row: the ratio errs
against us. Beside the rate stands what a pair costs the server in CPU time, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql

from benchmarks import store_alone
from benchmarks.pgbench import BODY, CLIENTS, FINGERPRINT, HEADERS
from oncekey.testing.servers import MysqlServer

PROCESSES = 4
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


def connect(url: str) -> Any:
    parts = urlsplit(url)
    place: dict[str, Any] = {"host": parts.hostname, "port": parts.port, "user": parts.username}
    return pymysql.connect(**place, database=parts.path[1:], autocommit=True, ssl_disabled=True, binary_prefix=True)


def one_by_one(url: str, seconds: float) -> float:
    """Pairs per second of ``CLIENTS`` connections, each with one row per transaction."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        rates = pool.starmap(_process, [(url, seconds, CLIENTS // PROCESSES)] * PROCESSES)
    return sum(rates)


def _process(url: str, seconds: float, clients: int) -> float:
    counted = [0] * clients
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
    return sum(counted) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mysql_rows", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    seconds = min(max(parser.parse_args().seconds, 0.5), 60.0)
    with MysqlServer() as server:
        url = server.database("bench")
        store_alone.prepare(url)
        ways: dict[str, Callable[[], float]] = {
            "one row per transaction": lambda: one_by_one(url, seconds),
            "lanes, 128 callers": lambda: store_alone.run(url, "lanes", seconds),
            "batches of 64": lambda: store_alone.run(url, "raw", seconds),
        }
        told: dict[str, dict[str, float]] = {}
        for name, way in ways.items():
            rows, cpu = _rows(server), _cpu_seconds(server.pid)
            rate = way()
            spent = (_cpu_seconds(server.pid) - cpu) / (_rows(server) - rows)
            told[name] = {"pairs_per_second": round(rate), "server_microseconds_a_pair": round(spent * 1e6, 1)}
    base = told["one row per transaction"]
    for each in told.values():
        each["ratio"] = round(each["pairs_per_second"] / base["pairs_per_second"], 2)
        each["cpu_ratio"] = round(base["server_microseconds_a_pair"] / each["server_microseconds_a_pair"], 2)
    print(json.dumps(told, indent=2))


def _rows(server: MysqlServer) -> int:
    return int(server.execute("SELECT count(*) FROM idempotency_keys", database="bench")[0][0])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
