"""Clients pay all the time, and every few hundred requests something strikes the database's server or its network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Protocol

from oncekey.stores.registry import open_store
from oncekey.testing.proxy import TcpProxy
from tests.faults.campaign import Run
from tests.faults.local_app import PATIENCE_SECONDS, LocalApp, gather
from tests.faults.local_app_check import check

CLIENTS = 24
REQUESTS_EACH = 300
"""That are served between two strikes; with those that are refused there are far more than 20,000 with 50 of them."""
SHORT_REQUESTS = 40
Strike = Callable[[], Awaitable[None]]


class Server(Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


def killed(run: Run, server: Server) -> Strike:
    """The server is killed, and started again."""

    async def strike() -> None:
        server.kill()
        await asyncio.sleep(run.random.uniform(0.0, 0.1))
        server.start()  # in this thread: a server ends with the thread that started it

    return strike


def bad_network(run: Run, proxy: TcpProxy) -> Strike:
    """For up to a second, the server refuses, hangs, is cut off or is slow."""

    async def strike() -> None:
        run.random.choice([proxy.refuse, proxy.hang, proxy.cut, lambda: proxy.delay(0.3)])()
        await asyncio.sleep(run.random.uniform(0.1, 1.0))
        proxy.pass_through()

    return strike


async def under_load(run: Run, local: LocalApp, strike: Strike, clients_at_once: int = CLIENTS) -> None:
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
                await strike()
                run.hit()
                run.asked(sum(local.statuses.values()) - run.requests)
            await asyncio.sleep(0.3)
        finally:
            stop = True
            async with asyncio.timeout(2 * PATIENCE_SECONDS):
                await gather(clients)
    run.notes += [f"{len(local.stories)} keys, {local.served} requests served, {local.statuses[503]} refused"]


def under_load_and_checked(
    run: Run, local: LocalApp, strike: Strike, patient_url: str, clients_at_once: int = CLIENTS
) -> None:
    """Then the keys are read at ``patient_url``, and compared with what the clients were told."""
    asyncio.run(under_load(run, local, strike, clients_at_once))
    with closing(open_store(patient_url)) as patient:
        check(run, local, patient, {})
