"""The outbox against job queues on the same PostgreSQL: enqueue no-op jobs, then execute them.

``python -m benchmarks.queues NAME URL`` prints one line of JSON; the benchmark starts it as a child, so that nothing
else shares the interpreter. Everyone is asked the same: 16 producers on 16 connections add one job per transaction, as
requests do; then one worker process runs them, 32 at a time, until none is left. Its clock starts when it is told to
run and stops when it returns, with every job's end committed. uvloop for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import module
from benchmarks.serving import ROOT, child_environment

JOBS = 5000
PRODUCERS = 16
CONCURRENCY = 32
LONGEST_SECONDS = 300.0


class QueueFailed(Exception):
    """Not every job was executed exactly once: the number would mean nothing."""


@dataclass(frozen=True, slots=True)
class Executed:
    enqueued_per_second: float
    executed_per_second: float


class Queue(ABC):
    """One contestant: its tables, its producers, its worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ran = 0

    @abstractmethod
    async def prepare(self) -> None:
        """Create the tables, open what producers need."""

    @abstractmethod
    async def producer(self) -> Callable[[int], Awaitable[Any]]:
        """A function that adds one job, in a transaction of its own."""

    @abstractmethod
    async def execute(self) -> None:
        """Run a worker until nothing is left."""

    @abstractmethod
    async def close(self) -> None: ...


class OnceKeyQueue(Queue):
    """The statement of ``op.enqueue``, on a psycopg connection of the app's, as in an enlisted transaction."""

    async def prepare(self) -> None:
        from oncekey.outbox import Worker  # here, as the others: an import takes 0.15 s, and is no part of a job
        from oncekey.stores.registry import open_store

        store = open_store(self.url)
        store.migrate()
        store.close()
        self._connections: list[Any] = []
        self._worker = Worker(self.url, concurrency=CONCURRENCY)

    async def producer(self) -> Callable[[int], Awaitable[Any]]:
        import psycopg

        from oncekey.core.jobs import NewJob
        from oncekey.engine.process import Owners
        from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters

        statement = re.sub(r"(?<!:):(\w+)", r"%(\1)s", enqueue_statement("postgresql"))
        connection = await psycopg.AsyncConnection.connect(self.url, autocommit=True)
        self._connections.append(connection)
        owners = Owners()

        async def add(number: int) -> None:
            job = NewJob(
                id=owners.new(),
                scope="bench",
                key=str(number),
                key_owner=owners.new(),
                operation="POST /payments",
                task="nothing",
                payload=b"{}",
                downstream_key=owners.new(),
                settles=False,
                run_at=None,
            )
            await connection.execute(statement, job_parameters(job))

        return add

    async def execute(self) -> None:
        @self._worker.task("nothing")
        async def nothing(ctx: Any, payload: Any) -> None:
            self.ran += 1

        await self._worker.serve(until="drained")

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class Procrastinate(Queue):
    """A pool as large as its concurrency, as its page about concurrency asks for; everything else is its default."""

    async def prepare(self) -> None:
        procrastinate = module("procrastinate")
        size = CONCURRENCY + 2
        connector = procrastinate.PsycopgConnector(conninfo=self.url, min_size=size, max_size=size)
        self._app = procrastinate.App(connector=connector)
        self._task = self._app.task(name="nothing")(self._nothing)
        await self._app.open_async()
        found = await connector.execute_query_one_async("SELECT to_regclass('procrastinate_jobs') IS NOT NULL AS there")
        if not found["there"]:
            await self._app.schema_manager.apply_schema_async()

    async def _nothing(self) -> None:
        self.ran += 1

    async def producer(self) -> Callable[[int], Awaitable[Any]]:
        async def add(number: int) -> None:
            await self._task.defer_async()

        return add

    async def execute(self) -> None:
        await self._app.run_worker_async(concurrency=CONCURRENCY, wait=False, install_signal_handlers=False)

    async def close(self) -> None:
        await self._app.close_async()


class PgQueuerQueue(Queue):
    """An asyncpg pool; batches of half the concurrency, the largest that it allows."""

    async def prepare(self) -> None:
        import asyncpg

        self._pool = await asyncpg.create_pool(self.url, min_size=PRODUCERS, max_size=PRODUCERS)
        self._queries = module("pgqueuer.queries").Queries(module("pgqueuer.db").AsyncpgPoolDriver(self._pool))
        [(there,)] = await self._pool.fetch("SELECT to_regclass('pgqueuer') IS NOT NULL")
        if not there:
            await self._queries.install()

    async def producer(self) -> Callable[[int], Awaitable[Any]]:
        async def add(number: int) -> None:
            await self._queries.enqueue("nothing", b"{}")

        return add

    async def execute(self) -> None:
        queuer = module("pgqueuer").PgQueuer.from_asyncpg_pool(self._pool)
        queuer.entrypoint("nothing")(self._nothing)
        drain = module("pgqueuer.domain.types").QueueExecutionMode.drain
        await queuer.run(batch_size=CONCURRENCY // 2, max_concurrent_tasks=CONCURRENCY, mode=drain)

    async def _nothing(self, job: Any) -> None:
        self.ran += 1

    async def close(self) -> None:
        await self._pool.close()


QUEUES: dict[str, type[Queue]] = {
    "oncekey": OnceKeyQueue,
    "procrastinate": Procrastinate,
    "pgqueuer": PgQueuerQueue,
}


async def measure(queue: Queue, jobs: int) -> Executed:
    """Enqueue, then execute, and see that everything ran once."""
    await queue.prepare()
    left = iter(range(jobs))
    producers = [await queue.producer() for _ in range(PRODUCERS)]

    async def produce(add: Callable[[int], Awaitable[Any]]) -> None:
        for number in left:
            await add(number)

    began = time.perf_counter()
    await asyncio.gather(*(produce(add) for add in producers))
    enqueued = time.perf_counter()
    await asyncio.wait_for(queue.execute(), LONGEST_SECONDS)
    executed = time.perf_counter()
    if queue.ran != jobs:
        raise QueueFailed(f"{queue.ran} jobs were executed, and {jobs} were added")
    await queue.close()
    return Executed(jobs / (enqueued - began), jobs / (executed - enqueued))


def run(name: str, url: str, jobs: int = JOBS) -> Executed:
    """Measure in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.queues", name, url, "--jobs", str(jobs)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=child_environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=2 * LONGEST_SECONDS,
    )
    if ended.returncode != 0:
        raise QueueFailed(f"{name}:\n{ended.stderr[-3000:]}")
    return Executed(**json.loads(ended.stdout.splitlines()[-1]))


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues", description=__doc__)
    parser.add_argument("name", choices=list(QUEUES))
    parser.add_argument("url")
    parser.add_argument("--jobs", type=int, default=JOBS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    executed = uvloop.run(measure(QUEUES[options.name](options.url), options.jobs))
    print(json.dumps({name: round(getattr(executed, name), 1) for name in Executed.__dataclass_fields__}))


if __name__ == "__main__":
    main()
