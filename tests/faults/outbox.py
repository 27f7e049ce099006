"""The outbox under kill -9: four workers, late commits, a poison task, and a provider that honours keys.

Nothing is lost, nothing is charged twice under one downstream key, every deferred key gets the answer of its one
charge, and the poison is in the dead letters with its error and history.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import psycopg

from oncekey.core.jobs import Job, JobState, NewJob
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.sql.enqueue import job_parameters
from tests.faults.campaign import Fault, Run
from tests.faults.fork_server import ForkServer, Process
from tests.outbox import jobs as tasks
from tests.outbox.outbox_table import MYSQL_ENQUEUE, POSTGRES_ENQUEUE, OutboxTable, errors
from tests.stores import mysql

WORKERS = 4
CONCURRENCY = 16
LEASE = 1.0
POISON = 5
BATCH = 100
ROWS_PER_KILL = 100
PATIENCE = 60.0
"""Seconds without any progress, after which a row is stuck."""


def work(url: str, ledger: str) -> None:
    """A worker process."""
    tasks.provider = tasks.Provider(Path(ledger))
    tasks.worker.lease = LEASE
    tasks.worker.run(store=url, concurrency=CONCURRENCY)


def kill_workers(run: Run) -> None:
    outbox = OutboxTable(run.url())
    try:
        with ForkServer(roles={"worker": work}, log=run.folder / "workers.log") as forks:
            campaign = _Campaign(run, outbox, forks)
            campaign.work()
        campaign.check()
    finally:
        outbox.close()


class _Campaign:
    def __init__(self, run: Run, outbox: OutboxTable, forks: ForkServer) -> None:
        self.run = run
        self.outbox = outbox
        self.forks = forks
        self.provider = tasks.Provider(run.folder / "provider")
        self.keys: dict[str, Record] = {}
        """Of deferred requests, by the downstream key of the job that settles each."""
        self.jobs: list[NewJob] = []
        self.poison: set[str] = set()
        self.kills = 0

    # rows

    def _make_rows(self) -> None:
        """Charges, every tenth of which settles a deferred key, and a few rows of poison, in random order."""
        pending = iter(self.outbox.pending(self.run.count // 10))
        poison = set(self.run.random.sample(range(self.run.count), min(POISON, self.run.count)))
        for number in range(self.run.count):
            if number in poison:
                job = self.outbox.job("poison")
                self.poison.add(job.id)
            else:
                key = next(pending, None) if number % 10 == 0 else None
                task = "charge_in_thread" if number % 3 == 0 else "charge"
                job = self.outbox.job(task, {"flaky": number % 20 == 0}, of=key)
                if key is not None:
                    self.keys[job.downstream_key] = key
            self.jobs.append(job)

    def _add_late(self, jobs: list[NewJob]) -> Any:
        """A transaction that inserts first and commits last. SQLite has one writer: there it could only come first."""
        if self.outbox.is_sqlite:
            self.outbox.insert(jobs)
            return None
        if self.outbox.url.startswith("mysql"):
            rows = mysql.connect(self.outbox.url)
            rows.cursor().executemany(MYSQL_ENQUEUE, [job_parameters(job) for job in jobs])
            return rows
        late = psycopg.connect(self.outbox.url)
        late.cursor().executemany(POSTGRES_ENQUEUE, [job_parameters(job) for job in jobs])
        return late

    # workers

    def _start(self) -> Process:
        return self.forks.spawn("worker", url=self.outbox.url, ledger=str(self.provider.folder))

    def work(self) -> None:
        self._make_rows()
        late = self._add_late(self.jobs[: len(self.jobs) // 20])
        rest = self.jobs[len(self.jobs) // 20 :]
        workers = [self._start() for _ in range(WORKERS)]
        kills = max(2, self.run.count // ROWS_PER_KILL)
        progress, since = -1, time.monotonic()
        while True:
            if rest:
                self.outbox.insert(rest[:BATCH])
                del rest[:BATCH]
            elif late is not None:
                late.commit()
                late.close()
                late = None
            # Not before they work: most kills fall into the middle of jobs.
            time.sleep(self.run.random.uniform(0.0, 0.2))
            if self.kills < kills and self.provider.count():
                place = self.run.random.randrange(WORKERS)
                workers[place].kill()
                workers[place] = self._start()
                self.kills += 1
            over = self.outbox.count(JobState.DONE) + self.outbox.count(JobState.DEAD)
            self.run.hit(over - self.run.hits)
            if over == len(self.jobs):
                return
            if over > progress:
                progress, since = over, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                log = (self.run.folder / "workers.log").read_text()[-2_000:]
                self.run.violated("I8", f"{len(self.jobs) - over} jobs are neither done nor dead; workers: {log}")
                return
            if not all(worker.alive for worker in workers):
                raise RuntimeError(f"a worker ended: {(self.run.folder / 'workers.log').read_text()[-2_000:]}")

    # what must hold

    def check(self) -> None:
        charges, jobs = self.provider.charges(), {job.id: self.outbox.get(job.id) for job in self.jobs}
        for job in jobs.values():
            charge = charges.get(job.downstream_key)
            if job.id in self.poison:
                self._check_poison(job, charge)
            elif job.state is not JobState.DONE or charge is None:
                self._tell("I8", "not delivered", job, charge)
            elif job.provider_id != charge:
                self._tell("I1", "done, and another charge is recorded", job, charge)
        if more := charges.keys() - {job.downstream_key for job in self.jobs}:
            self.run.violated("I1", f"charges that no job asked for: {more}")
        if len(set(charges.values())) != len(charges):
            self.run.violated("I1", "two charges share an id")
        for downstream_key, key in self.keys.items():
            row, charge = self.outbox.key(key), charges.get(downstream_key)
            if row.state is not State.COMPLETED:
                self.run.violated("I4", f"a deferred key is {row.state}: {row}")
            elif row.response is None or row.response.body != orjson.dumps({"charge": charge}):
                self.run.violated("I2", f"its charge is {charge}, and its answer another: {row}")
        calls = len(self.provider.lines("calls"))
        self.run.notes.append(f"{self.kills} kills, {len(charges):,} charges by {calls:,} calls")
        self.run.notes.append(f"{len(self.poison)} poisoned rows are dead letters")

    def _check_poison(self, job: Job, charge: str | None) -> None:
        reason = job.last_error or ""
        if job.state is not JobState.DEAD or charge is not None:
            self._tell("I8", "poison, and no dead letter", job, charge)
        elif not errors(job) or not ("cannot be digested" in reason or "used up" in reason):
            self._tell("I8", "a dead letter without its history", job, charge)

    def _tell(self, promise: str, what: str, job: Job, charge: str | None) -> None:
        calls = self.provider.lines("calls").count(job.downstream_key)
        self.run.violated(promise, f"{what}: {charge} by {calls} calls\n    {job}")


FAULTS = (
    Fault(
        "outbox: kill, late commit, poison",
        kill_workers,
        {"sqlite": 10_000, "postgres": 10_000, "mysql": 10_000},
        short=150,
        promises=("I1", "I2", "I4", "I8"),
        unit="rows",
        seconds=120,
    ),
)
