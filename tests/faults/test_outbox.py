"""The outbox under kill -9: four workers, late commits, a poison task, and a provider that honours keys.

Nothing is lost, nothing is charged twice under one downstream key, every deferred key gets the answer of its one
charge, and the poison is in the dead letters with its error and history (promises I1 and I8). The long form is
``make faults`` (10,000 rows per store); a short one runs with every ``make test``. Prints its seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import psycopg
import pytest

from oncekey.core.jobs import JobState, NewJob
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.outbox.staging import job_parameters
from tests.outbox.boxes import POSTGRES_ENQUEUE, Box, errors
from tests.outbox.jobs import Provider

WORKERS = 4
LEASE = 2.0
POISON = 5
BATCH = 100


class Campaign:
    def __init__(self, url: str, folder: Path, rows: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.box = Box(url)
        self.provider = Provider(folder / "provider")
        self.log = folder / "workers.log"
        self.environ = os.environ | {
            "ONCEKEY_TEST_LEDGER": str(self.provider.folder),
            "ONCEKEY_TEST_LEASE": str(LEASE),
            "ONCEKEY_TEST_CONCURRENCY": "16",
        }
        self.rows = rows
        self.keys: dict[str, Record] = {}
        self.jobs: list[NewJob] = []
        self.poison: list[str] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self.kills = 0

    # rows

    def make_rows(self) -> list[NewJob]:
        """Charges, every tenth of which settles a deferred key, and a few rows of poison, in random order."""
        pending = iter(self.box.pending(self.rows // 10))
        poison = set(self.random.sample(range(self.rows), POISON))
        for number in range(self.rows):
            if number in poison:
                job = self.box.job("poison")
                self.poison.append(job.id)
            else:
                key = next(pending, None) if number % 10 == 0 else None
                job = self.box.job(
                    "charge_in_thread" if number % 3 == 0 else "charge", {"flaky": number % 20 == 0}, of=key
                )
                if key is not None:
                    self.keys[job.downstream_key] = key
            self.jobs.append(job)
        return self.jobs

    def add_late(self, jobs: list[NewJob]) -> psycopg.Connection | None:
        """A transaction that inserts first and commits last. SQLite has one writer: there it could only come first."""
        if self.box.is_sqlite:
            self.box.insert(jobs)
            return None
        late = psycopg.connect(self.box.url)
        late.cursor().executemany(POSTGRES_ENQUEUE, [job_parameters(job) for job in jobs])
        return late

    # workers

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "oncekey", "worker", "tests.outbox.jobs:worker", "--store", self.box.url]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)

    def kill_one(self) -> None:
        place = self.random.randrange(WORKERS)
        self.workers[place].send_signal(signal.SIGKILL)
        self.workers[place].wait()
        self.kills += 1
        self.workers[place] = self.start()

    def run(self, kills: int, patience: float) -> None:
        jobs = self.make_rows()
        late = self.add_late(jobs[: len(jobs) // 20])
        rest = jobs[len(jobs) // 20 :]
        self.workers = [self.start() for _ in range(WORKERS)]
        deadline = time.monotonic() + patience
        try:
            while rest or late or self.left():
                assert time.monotonic() < deadline, f"{self.left()} jobs are not done"
                died = [worker.poll() for worker in self.workers if worker.poll() is not None]
                assert not died, f"workers ended by themselves with {died}: {self.log.read_text()[-2_000:]}"
                if rest:
                    self.box.insert(rest[:BATCH])
                    del rest[:BATCH]
                elif late is not None:
                    late.commit()
                    late.close()
                    late = None
                # Not before they work: most kills fall into the middle of jobs.
                time.sleep(self.random.uniform(0.0, 0.6 * self.rows / (BATCH * kills) if rest else 0.2))
                if self.kills < kills and self.provider.count():
                    self.kill_one()
                print(f"\r{self.kills}/{kills} kills, {self.provider.count()} charges", end="")
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()

    def left(self) -> int:
        return len(self.jobs) - self.box.count(JobState.DONE) - self.box.count(JobState.DEAD)

    # what must hold

    def check(self) -> None:
        box, charges = self.box, self.provider.charges()
        wanted = {job.downstream_key for job in self.jobs if job.id not in self.poison}
        assert set(charges) == wanted, "a charge is missing, or one too many"
        assert len(set(charges.values())) == len(charges), "two charges share an id"
        for job in box.store.jobs(JobState.DONE, self.rows):
            assert job.provider_id == charges[job.downstream_key], "done, and another charge is recorded"
        for downstream_key, key in self.keys.items():
            row = box.key(key)
            assert row.state is State.COMPLETED, f"a deferred key is {row.state}"
            assert row.response is not None
            assert row.response.body == orjson.dumps({"charge": charges[downstream_key]})
        dead = box.store.jobs(JobState.DEAD, 100)
        assert sorted(job.id for job in dead) == sorted(self.poison)
        for job in dead:
            assert errors(job), "a dead letter without a history"
            assert job.last_error is not None
            assert "cannot be digested" in job.last_error or "used up" in job.last_error
        calls = self.provider.lines("calls")
        print(f"\n{self.kills} kills, {len(charges)} charges by {len(calls)} calls, {len(dead)} dead letters")


def campaign(
    kind: str, request: pytest.FixtureRequest, folder: Path, *, rows: int, kills: int, patience: float
) -> None:
    seed = int(os.environ.get("ONCEKEY_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"\nseed {seed}: ONCEKEY_SEED={seed} repeats it")
    url = f"sqlite:///{folder / 'keys.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    run = Campaign(url, folder, rows, seed)
    try:
        run.run(kills, patience)
        run.check()
    finally:
        run.box.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.timeout(180)
def test_a_few_hundred_rows(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """300 rows, four workers, four kills."""
    campaign(kind, request, tmp_path, rows=300, kills=4, patience=120)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_ten_thousand_rows(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """10,000 rows, four workers, 100 kills."""
    campaign(kind, request, tmp_path, rows=10_000, kills=int(os.environ.get("ONCEKEY_KILLS", "100")), patience=1_800)
