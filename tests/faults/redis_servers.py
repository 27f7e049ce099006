"""Redis is killed and started again under load, or refuses, hangs and crawls behind a bad network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing

from oncekey.stores.redis import RedisStore
from oncekey.stores.registry import open_store
from oncekey.testing.proxy import TcpProxy
from tests.faults.campaign import Fault, Run
from tests.faults.local_app import PATIENCE_SECONDS, LocalApp, gather
from tests.faults.local_app_check import check

CLIENTS = 24
REQUESTS_EACH = 300
"""That are served between two strikes."""
SHORT_REQUESTS = 40


def killed_under_load(run: Run) -> None:
    """With appendfsync always, a server that is killed comes back with all that it has answered."""
    server = run.own_redis

    async def strike(local: LocalApp) -> None:
        del local
        server.kill()
        await asyncio.sleep(run.random.uniform(0.0, 0.1))
        server.start()  # in this thread: a server ends with the thread that started it

    asyncio.run(under_load(run, _app(f"{server.url}?timeout=2"), strike, f"{server.url}?timeout=60"))


def behind_a_bad_network(run: Run) -> None:
    with TcpProxy("127.0.0.1", run.own_redis.port) as proxy:

        async def strike(local: LocalApp) -> None:
            del local
            run.random.choice([proxy.refuse, proxy.hang, proxy.cut, lambda: proxy.delay(0.3)])()
            await asyncio.sleep(run.random.uniform(0.1, 1.0))
            proxy.pass_through()

        url = f"{proxy.rewrite(run.own_redis.url)}?timeout=0.6&replicas_timeout=0.1"
        asyncio.run(under_load(run, _app(url), strike, f"{run.own_redis.url}?timeout=60"))


def _app(url: str) -> LocalApp:
    return LocalApp(RedisStore(url), upkeep=True, transactions=False)


async def under_load(
    run: Run,
    local: LocalApp,
    strike: Callable[[LocalApp], Awaitable[None]],
    patient_url: str,
    clients_at_once: int = CLIENTS,
) -> None:
    """Clients pay all the time, and every few hundred requests something strikes. Then the keys are read at
    ``patient_url``, and compared with what the clients were told."""
    each = SHORT_REQUESTS if run.count < 10 else REQUESTS_EACH
    stop = False

    async def client() -> None:
        while not stop:
            await local.pay(local.story(seconds=run.random.choice((0, 0, 0, 0.02, 0.1))))

    async with local.open():
        clients = [asyncio.create_task(client()) for _ in range(clients_at_once)]
        try:
            while run.wanting:
                before = local.served
                while local.served < before + each and not any(task.done() for task in clients):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(run.random.uniform(0.0, 0.2))
                await strike(local)
                run.hit()
                run.asked(sum(local.statuses.values()) - run.requests)
            await asyncio.sleep(0.3)
        finally:
            stop = True
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await gather(clients)
    with closing(open_store(patient_url)) as patient:
        check(run, local, patient, {})
    run.notes += [f"{len(local.stories)} keys, {local.served} requests served, {local.statuses[503]} refused"]


FAULTS = (
    Fault(
        "Redis killed under load, appendfsync always",
        killed_under_load,
        {"redis": 50},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="kills",
        seconds=90.0,
    ),
    Fault(
        "Redis refused, hung, cut or slow under load",
        behind_a_bad_network,
        {"redis": 50},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="outages",
        seconds=120.0,
    ),
)
