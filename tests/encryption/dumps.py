"""All bytes that a database has of our rows."""

from __future__ import annotations

from pathlib import Path

import psycopg
import redis

from tests.stores import dynamo_rows, mysql

TABLES = ("idempotency_keys", "idempotency_steps", "idempotency_outbox", "idempotency_audit")


def of_sqlite(path: Path) -> bytes:
    """The file, its write-ahead log and whatever else lies beside it."""
    return b"".join(each.read_bytes() for each in path.parent.glob(f"{path.name}*"))


def of_postgres(url: str) -> bytes:
    """COPY of all tables, with bytea as it is and as hex."""
    found = b""
    with psycopg.connect(url) as own:
        for table in TABLES:
            with own.cursor().copy(f"COPY {table} TO STDOUT (FORMAT binary)".encode()) as rows:
                found += b"".join(bytes(each) for each in rows)
    return found


def of_mysql(url: str) -> bytes:
    rows = [row for table in TABLES for row in mysql.run(url, f"SELECT * FROM {table}")]
    return b"\n".join(cell if isinstance(cell, bytes) else str(cell).encode() for row in rows for cell in row)


def of_redis(url: str) -> bytes:
    """Every value, as Redis itself packs it: DUMP compresses long texts, so the values are read by their type."""
    found: list[bytes] = []
    with redis.Redis.from_url(url) as client:
        for name in client.keys("*"):
            found.append(name)
            match client.type(name):
                case b"hash":
                    found += [part for pair in client.hgetall(name).items() for part in pair]
                case b"zset":
                    found += client.zrange(name, 0, -1)
                case b"list":
                    found += client.lrange(name, 0, -1)
                case b"set":
                    found += client.smembers(name)
                case b"string":
                    found.append(client.get(name))
                case other:
                    raise AssertionError(f"a type that this dump does not read: {other!r}")
    return b"\n".join(found)


def of_dynamodb(url: str) -> bytes:
    """All items; binary attributes as they are."""

    def bytes_of(value: object) -> bytes:
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if isinstance(value, dict):
            return b"\n".join(bytes_of(each) for pair in value.items() for each in pair)
        if isinstance(value, list):
            return b"\n".join(map(bytes_of, value))
        return bytes(value) if hasattr(value, "__bytes__") else str(value).encode()

    return bytes_of(dynamo_rows.all_items(url))
