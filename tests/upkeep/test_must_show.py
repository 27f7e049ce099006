"""A process killed with a request in every state: upkeep and the provider's ledger settle all of it, and no human."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.core.downstream import downstream_key
from oncekey.core.states import FINAL, State
from oncekey.demo.provider import Ledger, Provider, make_server
from oncekey.stores.api import Outbox
from oncekey.stores.registry import open_store
from tests.upkeep.every_state import EFFECTS, LEASE, POINTS, SWEEPS, connect, make_worker

SCOPE = "single-tenant"


class House:
    """The app in a process of its own, and the provider in ours, where it is not killed."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.stands = folder / "stands"
        self.stands.mkdir()
        self._sweeps = folder / SWEEPS
        self.ledger = Ledger(folder / "charges.jsonl")
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.server = make_server(listener, self.ledger, honours=False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.provider = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # We hold the port: clients wait for the next process instead of being refused.
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.listener.getsockname()[1]}", timeout=30)
        self.store = open_store(url)
        self.store.migrate()
        with closing(connect(url)) as db:
            db.execute("CREATE TABLE entries (key text, what text)")
            db.commit()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, upkeep: bool) -> None:
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.upkeep.every_state:make_app"]
        told = {"STORE": self.url, "STANDS": str(self.stands), "PROVIDER": self.provider}
        told["UPKEEP"] = "yes" if upkeep else "no"
        self.process = subprocess.Popen(
            [*command, "--fd", str(fd), "--log-level", "critical"],
            env=os.environ | {f"ONCEKEY_TEST_{name}": text for name, text in told.items()},
            pass_fds=[fd],
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        self.http.close()
        self.listener.close()
        self.server.shutdown()
        self.server.server_close()
        self.ledger.close()
        self.store.disconnect()
        self.store.close()

    def send(self, kind: str, key: str, **query: str) -> httpx.Response:
        return self.http.post(f"/{kind}", params=query, headers={"Idempotency-Key": key}, json={"key": key})

    def keys(self, *states: State) -> dict[str, State]:
        found = [record for state in states for record in self.store.listing(state, limit=10_000)]
        return {record.key: record.state for record in found}

    def sweeps(self) -> list[tuple[float, int]]:
        """When each sweep began, and how many keys it found with a lease that was over."""
        lines = self._sweeps.read_text().splitlines() if self._sweeps.exists() else []
        return [(float(began), int(found)) for began, found in map(str.split, lines)]

    def entries(self) -> Counter[tuple[str, str]]:
        with closing(connect(self.url)) as db:
            return Counter((key, what) for key, what in db.execute("SELECT key, what FROM entries").fetchall())

    def charged(self) -> Counter[str]:
        """How often each key was charged."""
        names: dict[str, str] = {}
        for record in (record for state in State for record in self.store.listing(state, limit=10_000)):
            assert isinstance(self.store, Outbox)
            jobs = self.store.jobs_of(record.scope, record.key, 10)
            names |= {job.downstream_key: record.key for job in jobs}
            names[downstream_key(record, "charge")] = record.key
        return Counter(names[charge["downstreamKey"]] for charge in self.ledger.charges())


def until(holds: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.faults)])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    url = f"sqlite:///{tmp_path / 'house.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    made = House(url, tmp_path)
    yield made
    made.close()


def test_process_killed_in_every_state_charges_once(house: House) -> None:
    """One process, one kill, a key in every state and at every point; then a process with upkeep, and retries."""
    ways = {"done": 201, "declined": 402, "error": 500, "lost before": 409, "lost after": 409}
    points = [(kind, point) for kind in sorted(POINTS) for point in POINTS[kind]]
    standing = {f"{kind}-{point}": kind for kind, point in points}
    assert set(POINTS) == set(EFFECTS)
    house.start(upkeep=False)
    for how, status in ways.items():
        assert house.send("external", f"external-{how.replace(' ', '-')}", how=how).status_code == status
    assert house.send("deferred", "deferred-1").status_code == 202
    with ThreadPoolExecutor(len(points)) as pool:
        for kind, point in points:
            pool.submit(_lost, house, kind, f"{kind}-{point}", point)
            until((house.stands / f"{kind}-{point}").exists, f"{kind} never came to {point}")
        house.kill()
    over = time.time() + LEASE.total_seconds()
    assert set(house.keys(*State).values()) == set(State) - {State.EXPIRED}
    assert house.keys(State.IN_PROGRESS).keys() == standing.keys()

    house.start(upkeep=True)
    assert house.send("repeatable", "another-1").status_code == 201
    until(lambda: not house.keys(State.IN_PROGRESS), "stuck: it was not swept")
    until(lambda: sum(found for _, found in house.sweeps()) == len(standing), "not every key was found by a sweep")
    # By sweeps, not by time: a busy machine sweeps late, and takes no more sweeps for it.
    after = [found for began, found in house.sweeps() if began > over]
    assert sum(after[2:]) == 0, house.sweeps()
    make_worker(house.url, Provider(house.provider, honours=False)).run(until="drained")
    until(lambda: not house.keys(State.UNKNOWN, State.PENDING), "stuck: it was not settled")

    # Nothing was run again yet: what is final was settled from the ledger, all else waits for its client.
    settled = {
        *("external-charged", "external-lost-after"),
        *("external-done", "external-declined", "another-1", "deferred-1"),
    }
    assert house.keys(*FINAL).keys() == settled
    doubted = {"external-begun", "external-lost-before", "phased-asked", "phased-charged"}
    for key in house.keys(*State):
        moves = [(line.who, line.before, line.after) for line in house.store.audit(SCOPE, key, 10)]
        if key in doubted:
            assert moves == [("reconciler", "unknown", "failed_retryable")], key
        elif key in ("external-charged", "external-lost-after"):
            assert moves == [("reconciler", "unknown", "completed")], key
        else:
            assert moves == [], key

    for key in house.keys(*State):
        if key != "external-declined":
            kind = "repeatable" if key == "another-1" else key.partition("-")[0]
            query = {"at": key.partition("-")[2]} if key in standing else {}
            how = key.partition("-")[2].replace("-", " ")
            answer = house.send(kind, key, **(query or ({"how": how} if how in ways else {})))
            assert answer.status_code == 201, (key, answer.text)
            assert (answer.headers.get("idempotency-replayed") == "true") == (key in settled), key
    assert {*house.keys(*State).values()} == {State.COMPLETED, State.FAILED}
    external = {f"external-{how.replace(' ', '-')}" for how in ways} - {"external-declined"}
    phased = {key for key, kind in standing.items() if kind == "phased"}
    charged = {*external, *phased, "external-begun", "external-charged", "deferred-1"}
    assert house.charged() == dict.fromkeys(charged, 1)
    written = {key for key, kind in standing.items() if kind in ("transactional", "repeatable")}
    steps = {(key, what): 1 for key in phased for what in ("opened", "closed")}
    rows = {(key, "written"): 1 for key in (*written, "another-1", "deferred-1")}
    assert house.entries() == {**steps, **rows}


def _lost(house: House, kind: str, key: str, point: str) -> None:
    with suppress(httpx.TransportError):
        house.send(kind, key, at=point)
