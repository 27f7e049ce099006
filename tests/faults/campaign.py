"""A fault of the campaign, and one run of it on one store.

``make faults`` runs every :class:`Fault` with its long count, each in a process of its own, and prints a table of them;
``make test`` runs each with its short count. Both call the same function, which gets a :class:`Run`: where it may work,
how many keys the fault is to hit, and whom to tell what it did and what it found.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest import SkipTest

from oncekey.stores.mysql import MysqlStore
from oncekey.stores.postgres import PostgresStore
from oncekey.stores.redis import RedisStore
from oncekey.testing.servers import (
    DynaliteServer,
    MysqlServer,
    PostgresServer,
    RedisServer,
    ServerUnavailable,
    chosen_mysql,
)
from oncekey.testing.servers.dynamodb import CREDENTIALS

ON_REQUEST = ("mysql", "redis", "dynamodb")
"""Stores whose rows run only with ``--store``: the whole campaign would take twice as long. Faults of Redis or DynamoDB
alone always run."""
WITHOUT_OUTBOX = ("memory", "redis", "dynamodb")
"""Stores on which I8 is not tried."""
PROMISES = ("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8")


class NotHere(SkipTest):
    """This machine cannot do it (mount a file system, compile); the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table."""

    name: str
    """As the table prints it."""
    run: Callable[[Run], None]
    counts: Mapping[str, int]
    """Store ("memory", "sqlite", "postgres", "mysql", "redis", "dynamodb", "-": none) -> how many keys the long form
    hits."""
    short: int
    """How many are hit on each store with every ``make test``. 0: only in the long form."""
    promises: tuple[str, ...]
    """Which of I1 to I8 are tried."""
    unit: str = "keys"
    """What is counted."""
    seconds: float = 60.0
    """About how long the long form takes on the store where it takes longest: the longest are run first."""

    @property
    def usual_stores(self) -> list[str]:
        """The stores of a run without ``--store``."""
        usual = [store for store in self.counts if store not in ON_REQUEST]
        return usual or [store for store in self.counts if store != "mysql"]


def on_a_server(url: str, **options: float) -> PostgresStore | MysqlStore:
    """The store at this address, with time limits of its own."""
    kind = MysqlStore if url.startswith("mysql") else PostgresStore
    return kind(url, **options)


@dataclass
class Run:
    """One fault on one store."""

    store: str
    count: int
    seed: int
    folder: Path
    """Empty, and this run's alone."""
    make_database: Callable[[], str] | None = None
    """Gives the URL of a new, empty database on a running PostgreSQL that is shared: not to be stopped or paused."""
    told: Callable[[Run], None] = lambda run: None
    """Called whenever a number has changed: the progress display."""
    hits: int = 0
    requests: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader of the table should know: how many ended unknown, how often a process was killed."""

    @property
    def pace(self) -> float:
        """How many times slower than the others this store is here: its leases are so much longer. dynalite and the SDK
        take ten milliseconds of this machine for each request."""
        return 4.0 if self.store == "dynamodb" else 1.0

    @cached_property
    def random(self) -> random.Random:
        return random.Random(f"{self.seed} {self.store}")

    def url(self) -> str:
        """Of a new, empty store of this run's kind. For memory: each OnceKey has its own."""
        if self.store == "memory":
            return "memory://"
        if self.store == "sqlite":
            return f"sqlite:///{self.folder / f'keys-{self.random.randrange(2**32):08x}.db'}"
        if self.store == "redis":
            return self.own_redis.url
        if self.store == "dynamodb":
            return self.own_dynalite.new_url()
        if self.store == "mysql":
            return self.own_mysql.database(f"fault_{self.random.randrange(2**32):08x}")
        assert self.make_database is not None, f"no database for {self.store}"
        return self.make_database()

    @cached_property
    def own_redis(self) -> RedisServer:
        """A durable Redis of this run's own, set up. ``close`` stops it."""
        server = RedisServer(durable=True)
        server.start()
        store = RedisStore(server.url)
        store.init()
        store.close()
        return server

    @cached_property
    def own_mysql(self) -> MysqlServer:
        """A MariaDB of this run's own, or MySQL (``ONCEKEY_MYSQL``). ``close`` stops it."""
        server = chosen_mysql(fsync=False, settings={"max-connections": "300"})
        try:
            server.start()
        except ServerUnavailable as error:
            raise NotHere(str(error)) from error
        return server

    @cached_property
    def own_dynalite(self) -> DynaliteServer:
        """A dynalite of this run's own, whose tables survive a kill. ``close`` stops it."""
        os.environ.update(CREDENTIALS)
        server = DynaliteServer(durable=True)
        try:
            server.start()
        except ServerUnavailable as error:
            raise NotHere(str(error)) from error
        return server

    def close(self) -> None:
        """Stop what this run has started."""
        for name in ("own_redis", "own_dynalite", "own_mysql"):
            if name in self.__dict__:
                self.__dict__[name].stop()

    def own_postgres(self, **options: object) -> PostgresServer:
        """A server of this run's own, which it may stop, pause, fill and restart. Use it as a ``with`` block."""
        return PostgresServer(**options)  # type: ignore[arg-type]  # handed on as they are

    def hit(self, keys: int = 1) -> None:
        """The fault has hit so many keys."""
        self.hits += keys
        self.told(self)

    def asked(self, requests: int = 1) -> None:
        """Clients have sent so many requests."""
        self.requests += requests
        self.told(self)

    def violated(self, promise: str, what: str) -> None:
        """A promise was broken. ``what`` has the key's history: it is all that there is to find the bug."""
        assert promise in PROMISES, promise
        self.violations.append(f"{promise}: {what}")
        self.told(self)

    @property
    def wanting(self) -> bool:
        """There are keys left to hit."""
        return self.hits < self.count
