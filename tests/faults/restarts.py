"""The database's server is restarted at once (nothing is said, nothing is finished) under load, again and again."""

from __future__ import annotations

import asyncio

from oncekey.testing.servers import MysqlServer, PostgresServer
from tests.faults.campaign import Fault, Run, on_a_server
from tests.faults.local_app import PATIENCE_SECONDS, LocalApp, gather
from tests.faults.local_app_check import checked, prepare

CLIENTS = 24
REQUESTS_EACH = 300
"""That are served between two restarts; with those that are refused there are far more than 20,000 with 50 of them."""
SHORT_REQUESTS = 40


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
    each = SHORT_REQUESTS if run.count < 10 else REQUESTS_EACH
    stop = False

    async def client() -> None:
        while not stop:
            await local.pay(local.story(seconds=run.random.choice((0, 0, 0, 0.02, 0.1))))

    async with local.open():
        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        try:
            while run.wanting:
                before = local.served
                while local.served < before + each and not any(task.done() for task in clients):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(run.random.uniform(0.0, 0.2))
                restarts[0] += 1
                await asyncio.to_thread(_restart, server)
                run.hit()
                run.asked(sum(local.statuses.values()) - run.requests)
            await asyncio.sleep(0.3)
        finally:
            stop = True
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await gather(clients)
    await checked(run, local, url)
    run.notes += [f"{len(local.stories)} keys, {local.served} requests served, {local.statuses[503]} refused"]


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
