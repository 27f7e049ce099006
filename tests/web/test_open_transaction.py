"""An open transaction holds the row of one key: other keys do not wait for it, and its owner only for a moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from starlette.requests import Request
from starlette.responses import Response

from tests.web.apps import SECONDS, Api, Gate, World, paid, same, soon


@contextmanager
def open_transaction(url: str, key: str) -> Iterator[psycopg.Connection]:
    """A transaction that has updated a key's row, as an enlisted one has; rolled back at the end."""
    with psycopg.connect(url) as connection:
        done = connection.execute("UPDATE idempotency_keys SET last_error = 'x' WHERE key = %s", [key])
        assert done.rowcount == 1
        yield connection
        connection.rollback()


@contextmanager
def watching_for_locks(url: str) -> Iterator[list[str]]:
    """Every statement that is seen waiting for a lock, looked at all the time."""
    seen: list[str] = []
    end = threading.Event()

    def look() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not end.wait(0.002):
                waiting = connection.execute(
                    "SELECT query FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
                seen.extend(row[0] for row in waiting)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        end.set()
        thread.join(SECONDS)


async def test_open_transaction_does_not_slow_other_keys(ready_url: str) -> None:
    """One transaction has updated one key's row: 64 clients on other keys are served as before, none waits for its
    lock, and a duplicate of that key gets its 409 at once."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if request.url.query == "hold":
            await gate.wait()
        return paid(request, run)

    api = Api(World(ready_url), "starlette", respond, migrate=False)
    first = api.start("held", "/payments?hold")
    await soon(gate.entered.wait())

    async def client(name: str) -> Counter[int]:
        return Counter([(await api.post(f"{name}-{number}")).status_code for number in range(3)])

    async def wave(name: str) -> tuple[float, float]:
        """How long 64 clients take, and how long the slowest of 8 duplicates in their midst."""

        async def duplicate() -> float:
            asked = time.monotonic()
            answer = await api.post("held", "/payments?hold")
            assert answer.status_code == 409
            assert "retry-after" in answer.headers
            return time.monotonic() - asked

        began = time.monotonic()
        clients = [asyncio.create_task(client(f"{name}-{number}")) for number in range(64)]
        duplicates = [asyncio.create_task(duplicate()) for _ in range(8)]
        slowest = max([await task for task in duplicates])
        assert sum([await task for task in clients], Counter()) == {201: 192}
        return time.monotonic() - began, slowest

    try:
        await wave("warm")
        without, _ = await wave("without")
        with open_transaction(ready_url, "held"), watching_for_locks(ready_url) as waits:
            # Waiting would slow every wave; a busy machine may slow one.
            waves = [await wave(f"with-{number}") for number in range(3)]
        assert waits == []
        assert min(with_it for with_it, _ in waves) < 5 * without + 0.2
        assert min(slowest for _, slowest in waves) < without + 0.4
        gate.go.set()
        assert (await first).status_code == 201
    finally:
        await api.close()


async def test_a_finish_waits_for_a_row_that_is_held_for_a_moment(ready_url: str) -> None:
    """The owner tries again while another transaction holds its row, and the client gets its answer, not an error. The
    finishes of other requests do not wait."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        if request.url.query == "hold":
            await gate.wait()
        return paid(request, run)

    api = Api(World(ready_url), "starlette", respond, migrate=False)
    first = api.start("held", "/payments?hold")
    await soon(gate.entered.wait())
    try:
        with open_transaction(ready_url, "held"), watching_for_locks(ready_url) as waits:
            gate.go.set()
            for number in range(20):
                assert (await api.post(f"k-{number}")).status_code == 201
            assert not first.done()
        assert waits == []
        answer = await first
        assert answer.status_code == 201
        assert same(answer, await api.post("held", "/payments?hold"))
    finally:
        await api.close()
