"""The database's server is restarted at once (nothing is said, nothing is finished) under load, again and again."""

from __future__ import annotations

import asyncio

from oncekey.testing.servers import MysqlServer, PostgresServer
from tests.faults.campaign import Fault, Run, on_a_server
from tests.faults.local_app import LocalApp
from tests.faults.local_app_check import checked, prepare
from tests.faults.strikes import under_load


def restarted_under_load(run: Run) -> None:
    with run.own_postgres() as server:
        url = server.database("local_app")
        prepare(url)
        asyncio.run(_load(run, server, url))


def killed_under_load(run: Run) -> None:
    """MySQL has no signal that ends it at once, so it is killed."""
    url = run.url()
    prepare(url)
    asyncio.run(_load(run, run.own_mysql, url))


async def _load(run: Run, server: PostgresServer | MysqlServer, url: str) -> None:
    local = LocalApp(on_a_server(url, timeout=2.0), url=url, works=True, upkeep=True)
    restarts = [0]
    local.outage = lambda: None if server.running else restarts[0]

    async def strike() -> None:
        restarts[0] += 1
        await asyncio.to_thread(_restart, server)

    await under_load(run, local, strike)
    await checked(run, local, url)


def _restart(server: PostgresServer | MysqlServer) -> None:
    if isinstance(server, PostgresServer):
        server.restart("immediate")  # SIGQUIT
    else:
        server.kill()
        server.start()


FAULTS = (
    Fault(
        "PostgreSQL restarted under load",
        restarted_under_load,
        {"postgres": 50},
        short=1,
        promises=("I1", "I2", "I4", "I7", "I8"),
        unit="restarts",
        seconds=150.0,
    ),
    Fault(
        "MySQL killed and started again under load",
        killed_under_load,
        {"mysql": 20},
        short=1,
        promises=("I1", "I2", "I4", "I7", "I8"),
        unit="restarts",
        seconds=150.0,
    ),
)
