"""Real servers for the tests that ask for one; nothing is started otherwise.

Each pytest-xdist worker has servers of its own: a start takes about a second, and a test that pauses or kills
its server then does not harm the other worker. The shared PostgreSQL runs without fsync: what a test kills
is a process, and the kernel keeps what it wrote. A test about durability starts its own PostgresServer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import settings

from oncekey.stores.redis import RedisStore
from oncekey.stores.registry import open_store
from oncekey.testing.servers import (
    DynaliteServer,
    MotoServer,
    MysqlServer,
    NatsServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    chosen_mysql,
)
from oncekey.testing.servers.dynamodb import CREDENTIALS
from oncekey.testing.servers.packages import unpacked
from tests import databases
from tests.running import running

_numbers = count(1)
_given = {name: os.environ.get(name) for name in CREDENTIALS}

# A property that took long on a crowded machine is not broken.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

if (client_library := unpacked("libmariadb")) is not None:
    # `make mysqlclient` builds the driver with it. It looks for its plugins where Debian installs them, else here.
    for plugins in client_library.glob("usr/lib/*/libmariadb3/plugin"):
        os.environ.setdefault("MARIADB_PLUGIN_DIR", str(plugins))

pytest.register_assert_rewrite("tests.web.checks")  # tests of stores import it, too


def pytest_configure(config: pytest.Config) -> None:
    """A file that is named on the command line runs whole, with its tests in depth (markers, pyproject.toml)."""
    words = config.invocation_params.args
    if "-m" not in words and any(".py" in word for word in words):
        config.option.markexpr = "not faults"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL per worker. A test that pauses or kills it leaves it running again."""
    with running(PostgresServer(fsync=False)) as server:
        try:
            yield server
        finally:
            databases.let_go()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, empty database for this test alone."""
    name = f"test_{next(_numbers)}"
    yield postgres_server.database(name)
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def _ready_database(postgres_server: PostgresServer) -> str:
    return databases.ready(postgres_server, "ready")


@pytest.fixture
def ready_url(_ready_database: str) -> str:
    """A database with our tables, and nothing in them. For tests that leave the tables as they are."""
    databases.empty(_ready_database)
    return _ready_database


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MysqlServer]:
    """One MariaDB per worker, or MySQL (``ONCEKEY_MYSQL``). A test that pauses or kills it leaves it running again."""
    with running(chosen_mysql(fsync=False)) as server:
        yield server


@pytest.fixture
def mysql_url(mysql_server: MysqlServer) -> Iterator[str]:
    """A fresh, empty database for this test alone."""
    name = f"test_{next(_numbers)}"
    yield mysql_server.database(name)
    mysql_server.drop_database(name)


@pytest.fixture(scope="session")
def _ready_mysql(mysql_server: MysqlServer) -> Iterator[str]:
    url = mysql_server.database("ready")
    store = open_store(url)
    store.migrate()
    store.close()
    yield url
    mysql_server.drop_database("ready")


@pytest.fixture
def ready_mysql(_ready_mysql: str) -> str:
    """A database with our tables, and nothing in them."""
    from tests.stores.mysql import empty

    empty(_ready_mysql)
    return _ready_mysql


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis per worker."""
    with running(RedisServer()) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty Redis; its keys are those of this test alone."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def ready_redis_url(redis_url: str) -> str:
    """An empty Redis that `oncekey migrate --init` has set up."""
    store = RedisStore(redis_url)
    store.init()
    store.close()
    return redis_url


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """One RabbitMQ per worker. A test that kills it starts it again."""
    with running(RabbitServer()) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """One NATS with JetStream per worker."""
    with running(NatsServer()) as server:
        yield server


@pytest.fixture(scope="session")
def _sdk() -> Iterator[None]:
    """Credentials, which the servers ignore and the SDK insists on; and one client for all stores of a server with the
    same time-outs, because to make one takes a third of a second."""
    from oncekey.stores.dynamodb import client

    make = client._make
    made: dict[tuple[int, str | None, float], object] = {}

    def shared(settings: Any) -> object:
        key = (os.getpid(), settings.endpoint, settings.timeout)
        if settings.endpoint is None or key not in made:
            made[key] = make(settings)
        return made[key]

    with pytest.MonkeyPatch.context() as patched:
        for name, value in CREDENTIALS.items():
            patched.setenv(name, value)
        patched.setattr(client, "_make", shared)
        yield


@pytest.fixture
def given_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's environment that pytest was started with, for tests on Amazon: ``_sdk`` replaces it in the worker."""
    for name, value in _given.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def dynalite_server(_sdk: None) -> Iterator[DynaliteServer]:
    """One dynalite per worker. Its tables do not survive a kill."""
    with running(DynaliteServer()) as server:
        yield server


@pytest.fixture
def ready_dynamodb_url(dynalite_server: DynaliteServer) -> str:
    """An empty table."""
    url = dynalite_server.new_url()
    store = open_store(url)
    store.migrate()
    store.close()
    return url


@pytest.fixture(scope="session")
def moto_server(_sdk: None) -> Iterator[MotoServer]:
    """One moto per worker, behind a lock. Its tables do not survive a kill."""
    with running(MotoServer()) as server:
        yield server
