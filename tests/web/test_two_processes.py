"""Two real uvicorn processes on one store: one effect, whichever of them is asked, and whichever of them is killed.

An effect is a line in a file, appended in one write. Handlers wait for a file before they answer, so that every
request is there before the first is done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.web.apps import World, until
from tests.web.processes import Process

LIMITS = httpx.Limits(max_connections=100)


class Pair:
    """Two processes, their store, and the folder where their effects are written."""

    def __init__(self, url: str, folder: Path) -> None:
        self.world = World(url)
        self.folder = folder
        self.processes = [Process(url, folder) for _ in range(2)]

    async def ready(self) -> None:
        for process in self.processes:
            await until(process.answers, "uvicorn listens", 30.0)

    def effects(self, name: str) -> list[int]:
        """The process ids of those that had the effect, in order."""
        file = self.folder / f"{name}.effects"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()


def _places(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{folder / 'keys.db'}"
    server = request.getfixturevalue("postgres_server")
    url: str = server.database("two_processes")
    return url


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("two")
    pair = Pair(_places(request, folder), folder)
    yield pair
    for process in pair.processes:
        process.stop()


async def ask(client: httpx.AsyncClient, process: Process, path: str, key: str) -> httpx.Response:
    return await client.post(f"{process.url}{path}", headers={"idempotency-key": key}, json={"amount": 1})


async def test_50_from_two_processes_are_one_effect(pair: Pair) -> None:
    """One of 50 runs, in one of the processes; the others get 409 with Retry-After, and then its answer from both."""
    await pair.ready()
    async with httpx.AsyncClient(limits=LIMITS, timeout=30.0) as client:
        tasks = [asyncio.create_task(ask(client, pair.processes[n % 2], "/conflict/a", "k-a")) for n in range(50)]
        await until(lambda: sum(task.done() for task in tasks) == 49, "49 are answered while the first runs", 30.0)
        assert len(pair.effects("a")) == 1
        pair.go("a")
        answers = [await task for task in tasks]
        assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 49}
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 409)
        winner = next(answer for answer in answers if answer.status_code == 201)
        for process in pair.processes:
            replay = await ask(client, process, "/conflict/a", "k-a")
            assert (replay.status_code, replay.content) == (201, winner.content)
            assert replay.headers["idempotency-replayed"] == "true"
            assert replay.headers["idempotency-expires"] == winner.headers["idempotency-expires"]
    assert len(pair.effects("a")) == 1


async def test_50_rounds_of_two_at_once_are_50_effects(pair: Pair) -> None:
    """Both processes get each key at the same moment, with nothing that slows the handler: one effect for each key."""
    await pair.ready()
    for number in range(50):
        pair.go(f"r{number}")
    async with httpx.AsyncClient(limits=LIMITS, timeout=30.0) as client:

        async def both(number: int) -> None:
            one, other = await asyncio.gather(
                *(ask(client, process, f"/conflict/r{number}", f"k-r{number}") for process in pair.processes)
            )
            assert {one.status_code, other.status_code} <= {201, 409}
            assert 201 in (one.status_code, other.status_code)
            if one.status_code == other.status_code:
                assert one.content == other.content

        await asyncio.gather(*(both(number) for number in range(50)))
    assert [len(pair.effects(f"r{number}")) for number in range(50)] == [1] * 50


async def test_waiting_across_processes_gives_all_the_same_answer(pair: Pair) -> None:
    """In ``wait`` mode those in the other process get the answer too, by looking again."""
    await pair.ready()
    async with httpx.AsyncClient(limits=LIMITS, timeout=30.0) as client:
        tasks = [asyncio.create_task(ask(client, pair.processes[n % 2], "/wait/b", "k-b")) for n in range(50)]
        await until(lambda: pair.effects("b"), "the first runs", 30.0)
        pair.go("b")
        answers = [await task for task in tasks]
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {201}
    assert len(pair.effects("b")) == 1


async def test_another_request_is_422_in_the_other_process_too(pair: Pair) -> None:
    """Fingerprints travel with the row."""
    await pair.ready()
    pair.go("f")
    async with httpx.AsyncClient(timeout=30.0) as client:
        assert (await ask(client, pair.processes[0], "/conflict/f", "k-f")).status_code == 201
        other = await client.post(
            f"{pair.processes[1].url}/conflict/f", headers={"idempotency-key": "k-f"}, json={"amount": 2}
        )
    assert other.status_code == 422
    assert len(pair.effects("f")) == 1


async def test_kill_9_in_the_middle(pair: Pair) -> None:
    """Killed with two requests in flight. Until the lease is over: 409. Then external work is unknown and is never
    repeated, and repeatable work runs again in the process that is left."""
    victim = Process(pair.world.url, pair.folder)
    try:
        await pair.ready()
        await until(victim.answers, "uvicorn listens", 30.0)
        async with httpx.AsyncClient(timeout=30.0) as client:
            doomed = [
                asyncio.create_task(ask(client, victim, "/conflict/x", "k-x")),
                asyncio.create_task(ask(client, victim, "/repeatable/y", "k-y")),
            ]
            await until(lambda: pair.effects("x") and pair.effects("y"), "both have had their effect", 30.0)
            victim.kill()
            lost = await asyncio.gather(*doomed, return_exceptions=True)
            assert all(isinstance(answer, httpx.TransportError) for answer in lost)
            pair.go("x")
            pair.go("y")
            survivor = pair.processes[0]
            busy = await ask(client, survivor, "/conflict/x", "k-x")
            assert (busy.status_code, busy.headers["retry-after"]) == (409, "1"), "its owner may live"
            assert (await ask(client, survivor, "/repeatable/y", "k-y")).status_code == 409
            assert pair.effects("y") == [victim.pid]
            for path, key in (("/conflict/x", "k-x"), ("/repeatable/y", "k-y")):
                pair.world.age(key, 33)
                busy = await ask(client, survivor, path, key)
                assert busy.status_code == 409
                assert 20 <= int(busy.headers["retry-after"]) <= 27, "no renewal: what is left of the lease"
                pair.world.age(key, 28)
            for process in pair.processes:
                unknown = await ask(client, process, "/conflict/x", "k-x")
                assert unknown.status_code == 409
                assert unknown.json()["type"] == "urn:oncekey:problem:outcome-unknown"
            again = await ask(client, survivor, "/repeatable/y", "k-y")
            assert again.status_code == 201
            assert again.json() == {"effect": 2, "by": survivor.pid}
            assert (await ask(client, pair.processes[1], "/repeatable/y", "k-y")).content == again.content
        assert pair.effects("x") == [victim.pid]
        assert pair.effects("y") == [victim.pid, survivor.pid]
    finally:
        victim.kill()
