"""A client and upkeep want to go on with the same request: one of them does, and the client gets its response."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.core.states import State
from oncekey.encryption import Keyring
from oncekey.engine.resumption import Answer, Resumption
from oncekey.upkeep import Resumer, Upkeep
from tests.encryption.rings import ring
from tests.upkeep.rides import Rides, StumbledRides


class Site(StumbledRides):
    """And upkeep beside them."""

    async def post(self, number: int = 0) -> httpx.Response:
        transport = httpx.ASGITransport(self.rides.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://rides") as http:
            sent = {"ride": number, "cents": 100}
            return await http.post("/rides", headers={"Idempotency-Key": f"k-{number}"}, json=sent)

    async def stumble(self, number: int = 1) -> None:
        """So many half-done rides, and all of them due."""
        assert {(await self.post(each)).status_code for each in range(number)} == {500}
        self.rides.stumbles = False
        self.past("reconcile_at")

    def upkeep(self, rides: Rides) -> dict[str, int]:
        resumer = Resumer(rides.once)
        try:
            return {name: number for name, number in resumer.run().as_json().items() if number}
        finally:
            resumer.close()
            rides.once.store.disconnect()


@pytest.fixture(params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path / 'rides.db'}" if request.param == "sqlite" else request.getfixturevalue("ready_url")
    made = Site(url, tmp_path, honours=False)
    yield made
    for table in ("rides", "receipts"):
        made.ask(f"DROP TABLE {table}")
    made.rides.once.close()


async def test_upkeep_goes_on_with_the_kept_request(site: Site) -> None:
    """What the client asked for is in the row: it is not sent again."""
    await site.stumble()
    assert await asyncio.to_thread(site.upkeep, site.rides) == {"due": 1, "completed": 1}
    ((ride, cents, charge),) = site.ask("SELECT id, cents, charge FROM rides")
    assert (ride, cents, site.ask("SELECT ride FROM receipts")) == (0, 100, [(0,)])
    answer = await site.post()
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
    assert answer.json() == {"ride": 0, "charge": charge}
    assert len(site.rides.charges()) == 1


async def test_retry_gets_409_while_upkeep_has_the_key_and_the_response_after_it(site: Site) -> None:
    await site.stumble()
    began, may_end = threading.Event(), threading.Event()
    book = site.rides.book

    def slow(op: Any, asked: dict[str, int]) -> dict[str, Any]:
        began.set()
        assert may_end.wait(10)
        return book(op, asked)

    site.rides.book = slow  # type: ignore[method-assign]
    upkeep = asyncio.create_task(asyncio.to_thread(site.upkeep, site.rides))
    assert await asyncio.to_thread(began.wait, 10)
    refused = await site.post()
    assert (refused.status_code, "in-flight" in refused.json()["type"]) == (409, True)
    may_end.set()
    assert await upkeep == {"due": 1, "completed": 1}
    answer = await site.post()
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
    assert (len(site.rides.charges()), site.ask("SELECT count(*) FROM receipts")) == (1, [(1,)])


async def test_retries_race_with_two_upkeeps_and_each_ride_is_charged_once(site: Site) -> None:
    number = 24
    await site.stumble(number)
    other = Rides(**site.told)
    upkeeps = [asyncio.to_thread(site.upkeep, rides) for rides in (site.rides, other)]

    async def client(each: int) -> httpx.Response:
        while True:
            answer = await site.post(each)
            if answer.status_code != 409:
                return answer
            await asyncio.sleep(0.01)

    ended = await asyncio.gather(*upkeeps, *(client(each) for each in range(number)))
    other.once.close()
    for each, answer in enumerate(ended[2:]):
        assert isinstance(answer, httpx.Response)
        assert (answer.status_code, answer.json()["ride"]) == (201, each)
    charged = site.rides.charges()
    assert len(charged) == len(set(charged)) == number
    assert site.ask("SELECT count(*), count(DISTINCT ride) FROM receipts") == [(number, number)]


async def test_owner_that_lost_its_key_cannot_write(site: Site) -> None:
    """Upkeep was paused past its lease, and another attempt has the key: its late steps and its end are refused."""
    await site.stumble()

    def go_on(op: Resumption) -> Answer:
        site.ask("UPDATE idempotency_keys SET owner = 'a-thief', attempt = attempt + 1")
        return 201, op.blocking.effect("charge", lambda: site.rides.charge("twice"), repeatable=False)

    site.rides.once.resumes = type(site.rides.once.resumes)("resume function")
    site.rides.once.resume("POST /rides", lambda op: (op.result("ride_created"), go_on(op))[1])
    assert await asyncio.to_thread(site.upkeep, site.rides) == {"due": 1}
    (record,) = site.rides.once.store.read([("single-tenant", "k-0")])
    assert record is not None
    assert (record.state, record.owner) == (State.IN_PROGRESS, "a-thief")
    assert site.rides.charges() == []


async def test_function_may_end_with_an_enlisted_transaction(site: Site) -> None:
    """Its last writes, the response and the key are one commit, as in a handler."""
    await site.stumble()
    opened: list[Any] = []

    def go_on(op: Resumption) -> Answer:
        op.result("ride_created")
        db = site.rides.connect()
        opened.append(db)
        op.blocking.enlist(db)
        db.execute("INSERT INTO receipts (ride) VALUES (0)")
        return 201, {"enlisted": True}

    site.rides.once.resumes = type(site.rides.once.resumes)("resume function")
    site.rides.once.resume("POST /rides", go_on)
    assert await asyncio.to_thread(site.upkeep, site.rides) == {"due": 1, "completed": 1}
    opened[0].close()
    assert site.ask("SELECT ride FROM receipts") == [(0,)]
    assert (await site.post()).json() == {"enlisted": True}


async def test_verdict_that_the_charge_happened_lets_upkeep_end_the_ride(site: Site) -> None:
    """One round of upkeep: the resolver finds the charge, and the resumer goes on after it. No client is needed."""
    await site.stumble()
    charge = site.rides.charge

    def cut(downstream_key: str) -> dict[str, str]:
        charge(downstream_key)
        raise ConnectionError("the line was cut after the charge")

    site.rides.charge = cut  # type: ignore[method-assign]
    assert await asyncio.to_thread(site.upkeep, site.rides) == {"due": 1, "unknown": 1}
    site.rides.charge = charge  # type: ignore[method-assign]
    turns = await asyncio.to_thread(Upkeep(site.rides.once).run_once)
    (resumed,) = [turn.result.as_json() for turn in turns if turn.duty == "resume" and turn.result]
    assert resumed["completed"] == 1
    assert (await site.post()).status_code == 201
    assert len(site.rides.charges()) == 1
    assert site.ask("SELECT count(charge) FROM rides") == site.ask("SELECT count(*) FROM receipts") == [(1,)]


@pytest.mark.parametrize("before", [None, ring(1)], ids=str)
async def test_ride_is_resumed_and_replayed_after_the_keyring_has_changed(site: Site, before: Keyring | None) -> None:
    """A deploy switches encryption on, or replaces its key. The row keeps its fingerprint, and both know it."""
    site.rides.once.close()
    site.rides = Rides(stumbles=True, encryption=before, **site.told)
    await site.stumble()
    made = site.ask("SELECT fingerprint, fingerprint_version FROM idempotency_keys")
    site.rides.once.close()
    site.rides = Rides(encryption=ring(2, 1), **site.told)
    assert await asyncio.to_thread(site.upkeep, site.rides) == {"due": 1, "completed": 1}
    assert site.ask("SELECT fingerprint, fingerprint_version FROM idempotency_keys") == made
    answer = await site.post()
    assert (answer.status_code, answer.headers["idempotency-replayed"], answer.json()["ride"]) == (201, "true", 0)
    assert (len(site.rides.charges()), site.ask("SELECT count(*) FROM receipts")) == (1, [(1,)])
