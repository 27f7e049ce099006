"""Upkeep is killed with kill -9 at each step of a request that it goes on with: one charge, and the key completes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from oncekey.core.states import State
from tests.faults.fork_server import ForkServer
from tests.upkeep.rides import KILLED_AT, StumbledRides, tidy

pytestmark = pytest.mark.stores

CASES = [f"{point}:{when}:kill" for point in KILLED_AT for when in ("before", "after")]
ROUNDS = 4
"""After a kill: a round of the sweeper, one of the reconciler where the charge is in doubt, and one that ends it."""


class House(StumbledRides):
    """And processes of upkeep."""

    def __init__(self, url: str, folder: Path, forks: ForkServer, *, honours: bool) -> None:
        super().__init__(url, folder, honours=honours)
        self.folder = folder
        self.forks = forks

    def past_of(self, column: str, key: str) -> None:
        self.past(column, f"key = '{key}'")

    def upkeep(self, fault: str = "") -> bool:
        """Run one process of upkeep to its end; whether it survived."""
        survived = self.folder / "survived"
        survived.unlink(missing_ok=True)
        self.forks.spawn("upkeep", survived=str(survived), fault=fault, **self.told).wait()
        return survived.exists()

    def state(self, key: str) -> tuple[State, int]:
        (record,) = self.rides.once.store.read([("single-tenant", key)])
        assert record is not None
        return record.state, record.attempt

    async def send(self, cases: int) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.rides.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://rides") as http:
            return [
                await http.post(
                    "/rides", headers={"Idempotency-Key": f"k-{each}"}, json={"ride": each, "cents": 100 + each}
                )
                for each in range(cases)
            ]


@pytest.mark.parametrize(
    ("kind", "honours"),
    [
        ("sqlite", True),
        ("sqlite", False),
        ("postgres", True),
        pytest.param("postgres", False, marks=pytest.mark.faults),
    ],
)
def test_upkeep_killed_at_each_step_charges_once(
    kind: str, honours: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'rides.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with ForkServer(roles={"upkeep": tidy}, log=tmp_path / "log") as forks:
        house = House(url, tmp_path, forks, honours=honours)
        assert {answer.status_code for answer in asyncio.run(house.send(len(CASES)))} == {500}
        for number, fault in enumerate(CASES):
            key = f"k-{number}"
            assert house.state(key) == (State.FAILED_RETRYABLE, 1)
            house.past_of("reconcile_at", key)
            assert not house.upkeep(fault), f"{fault} was never passed"
            for _ in range(ROUNDS):
                if house.state(key)[0] is State.COMPLETED:
                    break
                house.past_of("lease_until", key)
                house.past_of("reconcile_at", key)
                assert house.upkeep(), (tmp_path / "log").read_text()
            assert house.state(key)[0] is State.COMPLETED, fault
        charged = house.rides.charges()
        assert len(charged) == len(set(charged)) == len(CASES)
        assert house.ask("SELECT count(*), count(charge) FROM rides") == [(len(CASES), len(CASES))]
        assert sorted(ride for (ride,) in house.ask("SELECT ride FROM receipts")) == list(range(len(CASES)))
        for number, answer in enumerate(asyncio.run(house.send(len(CASES)))):
            assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
            assert answer.json()["ride"] == number
        house.rides.once.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("point", ["effect.intent:after:stop", "effect.call:after:stop"])
def test_upkeep_paused_past_its_lease_cannot_write(
    kind: str, point: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Another upkeep ends the ride meanwhile. The first wakes up, and what it writes is refused."""
    url = f"sqlite:///{tmp_path / 'rides.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with ForkServer(roles={"upkeep": tidy}, log=tmp_path / "log") as forks:
        house = House(url, tmp_path, forks, honours=True)
        assert [answer.status_code for answer in asyncio.run(house.send(1))] == [500]
        house.past_of("reconcile_at", "k-0")
        late = forks.spawn("upkeep", survived=str(tmp_path / "late"), fault=point, **house.told)
        until = time.monotonic() + 20
        while not late.paused:
            assert time.monotonic() < until, f"{point} was never passed"
            time.sleep(0.01)  # another process: nothing here can be waited at
        for _ in range(2):  # the sweeper's pause for the client, and then it is due
            house.past_of("lease_until", "k-0")
            house.past_of("reconcile_at", "k-0")
            assert house.upkeep(), (tmp_path / "log").read_text()
        assert house.state("k-0") == (State.COMPLETED, 3), (tmp_path / "log").read_text()
        late.resume()
        late.wait()
        assert (tmp_path / "late").exists(), (tmp_path / "log").read_text()
        assert house.state("k-0") == (State.COMPLETED, 3)
        assert len(house.rides.charges()) == 1
        assert house.ask("SELECT ride FROM receipts") == [(0,)]
        house.rides.once.close()
