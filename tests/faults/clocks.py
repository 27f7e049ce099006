"""A wall clock that jumps by an hour, forward and back, while requests are in flight: the app's, or the database's.

PostgreSQL, MySQL and Redis measure leases on their own clock, so the app's may say what it will: nothing is taken over,
nothing becomes unknown (hazard 27). SQLite and memory have no clock but the host's, and the database's clock can be
wrong as well: then leases are over while their owners live, and ``effects`` says what follows. Never two effects.

The app whose clock is turned is a process of its own (``oncekey.testing.clock``), and so is the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import redis

from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.stores.memory import MemoryStore
from oncekey.stores.redis import RedisStore
from oncekey.stores.sqlite import SqliteStore
from oncekey.testing.clock import NoCompiler, TurnedClock
from oncekey.testing.servers import PostgresServer, RedisServer, chosen_mysql
from oncekey.testing.servers.server import Server
from tests.faults.campaign import Fault, NotHere, Run, on_a_server
from tests.faults.disks import open_folder
from tests.faults.local_app import LocalApp, Story, gather
from tests.faults.local_app_check import checked, prepare

WAVE = 16
HOUR = 3600
ROOT = Path(__file__).parents[2]

Turn = Callable[[int], None]
"""Makes the clock wrong by so many seconds."""


def of_the_app(run: Run) -> None:
    wrong = [0]

    def turn(seconds: int) -> None:
        wrong[0] = seconds

    if run.store == "memory":
        store = MemoryStore(lambda: time.time() + wrong[0])
        asyncio.run(_jumps(run, LocalApp(store), None, turn))
        return
    if run.store == "dynamodb":
        dynamo = DynamoStore(settings_of(run.url()), clock=lambda: time.time() + wrong[0])
        dynamo.migrate()
        asyncio.run(_jumps(run, LocalApp(dynamo, transactions=False), None, turn))
        return
    url = run.url()
    if run.store != "redis":
        prepare(url)
    with _clock() as clock:
        _in_child(run, url, clock)


def _in_child(run: Run, url: str, clock: TurnedClock) -> None:
    told = {"store": run.store, "count": run.count, "seed": run.seed, "folder": str(run.folder), "url": url}
    with subprocess.Popen(
        [sys.executable, "-c", "from tests.faults.clocks import in_child; in_child()", json.dumps(told)],
        env=os.environ | clock.environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            match json.loads(line):
                case {"turn": seconds}:
                    clock.turn(timedelta(seconds=seconds))
                case {"hits": hits, "requests": requests, "violations": violations, "notes": notes}:
                    run.hit(hits - run.hits)
                    run.asked(requests - run.requests)
                    run.violations += violations
                    run.notes += notes
    if child.returncode != 0:
        raise RuntimeError(f"the process with the turned clock ended with {child.returncode}")


def in_child() -> None:
    """In a process whose clock the parent turns, when it is told to by a line on standard output."""
    told = json.loads(sys.argv[1])
    url = told.pop("url")
    run = Run(**told | {"folder": Path(told["folder"])})
    right = time.time() - time.monotonic()

    def turn(seconds: int) -> None:
        print(json.dumps({"turn": seconds}), flush=True)
        deadline = time.monotonic() + 10.0
        while abs(time.time() - time.monotonic() - right - seconds) > 60.0:
            if time.monotonic() > deadline:
                raise TimeoutError("the clock was not turned: is the library preloaded?")
            time.sleep(0.001)

    if run.store == "redis":
        asyncio.run(_jumps(run, LocalApp(RedisStore(url), transactions=False), None, turn, stands=True))
    else:
        stands = run.store != "sqlite"
        store = on_a_server(url) if stands else SqliteStore(url.removeprefix("sqlite:///"))
        asyncio.run(_jumps(run, LocalApp(store, url=url), url, turn, stands=stands))
    numbers = {"hits": run.hits, "requests": run.requests, "violations": run.violations, "notes": run.notes}
    print(json.dumps(numbers), flush=True)


def of_redis(run: Run) -> None:
    with _clock() as clock, _turned(RedisServer(durable=True), clock.environment) as server:
        store = RedisStore(server.url)
        store.init()

        def turn(seconds: int) -> None:
            clock.turn(timedelta(seconds=seconds))
            with closing(redis.Redis.from_url(server.url)) as client:
                now: Any = client.time()
            if abs(now[0] - time.time() - seconds) > 60.0:
                raise RuntimeError(f"the server's clock was not turned by {seconds} s")

        asyncio.run(_jumps(run, LocalApp(store, transactions=False), None, turn))


def of_the_database(run: Run) -> None:
    if run.store == "redis":
        of_redis(run)
        return
    stopped = chosen_mysql(fsync=False) if run.store == "mysql" else PostgresServer(fsync=False)
    with _clock() as clock, _turned(stopped, clock.environment) as server:
        url = server.database("local_app")
        prepare(url)
        asked = "unix_timestamp(utc_timestamp(6))" if run.store == "mysql" else "extract(epoch FROM clock_timestamp())"

        def turn(seconds: int) -> None:
            clock.turn(timedelta(seconds=seconds))
            ((now,),) = server.execute(f"SELECT {asked}")
            if abs(float(now or 0) - time.time() - seconds) > 60.0:
                raise RuntimeError(f"the server's clock was not turned by {seconds} s")

        asyncio.run(_jumps(run, LocalApp(on_a_server(url), url=url), url, turn))


_Server = TypeVar("_Server", bound=Server)


def _turned(server: _Server, environment: Mapping[str, str]) -> _Server:
    """The server, with a wrong clock when it starts."""
    own = server._environment
    server._environment = lambda: own() | dict(environment)  # type: ignore[method-assign]
    return server


@contextmanager
def _clock() -> Iterator[TurnedClock]:
    with open_folder() as folder:
        try:
            clock = TurnedClock(folder)
        except NoCompiler as error:
            raise NotHere(str(error)) from error
        with closing(clock):
            yield clock


async def _jumps(run: Run, local: LocalApp, url: str | None, turn: Turn, *, stands: bool = False) -> None:
    """Jump while handlers are in flight. ``stands``: leases are measured on a clock that does not jump."""
    wrong = jumps = 0
    async with local.open():
        while run.wanting:
            local.gate, local.waiting = asyncio.Event(), 0
            stories = [_story(local, number) for number in range(min(WAVE, run.count - run.hits))]
            asking: list[Any] = [asyncio.create_task(local.pay(story)) for story in stories]
            held = sum("waits" in story.body for story in stories)
            async with asyncio.timeout(20):
                while local.waiting < held:
                    await asyncio.sleep(0.005)
            wrong = run.random.choice([each for each in (-HOUR, 0, HOUR) if each != wrong])
            await asyncio.to_thread(turn, wrong)
            jumps += 1
            asking += [asyncio.create_task(local.ask(story)) for story in stories]  # they find leases that ran out
            await asyncio.sleep(run.random.uniform(0.0, 0.4))
            local.gate.set()
            await gather(asking)
            run.hit(len(stories))
            run.asked(sum(local.statuses.values()) - run.requests)
        await asyncio.to_thread(turn, 0)
    await checked(run, local, url)
    if stands:
        for story in local.stories:
            if story.end == "unknown" or f"{story.key}.1" not in story.answers[0][1].decode():
                run.violated("I3", f"another attempt took over from an owner that was alive\n  {story.told()}")
    doubted = sum(any("outcome-unknown" in line for line in story.lines) for story in local.stories)
    again = sum(number > 1 for number in Counter(local.runs.values()).values())
    if run.count >= 100 and not stands and not (doubted and again):
        raise RuntimeError("the clock jumped, and no lease was over by it")
    run.notes += [f"{jumps} jumps: {doubted} in doubt meanwhile, {again} taken over"]


def _story(local: LocalApp, number: int) -> Story:
    """Its handler waits in the middle, unless it would hold the only write lock meanwhile."""
    kind = local.kinds[number % len(local.kinds)]
    alone = local.path is not None and kind in ("transactional", "deferred")
    return local.story(kind, **({} if alone or kind == "deferred" else {"waits": True}))


FAULTS = (
    Fault(
        "clock ±1 h on the app host",
        of_the_app,
        {"memory": 200, "sqlite": 200, "postgres": 200, "redis": 200, "dynamodb": 100, "mysql": 100},
        short=8,
        promises=("I1", "I2", "I3", "I4"),
    ),
    Fault(
        "clock ±1 h of the database",
        of_the_database,
        {"postgres": 200, "redis": 200, "mysql": 100},
        short=8,
        promises=("I1", "I2", "I3", "I4"),
    ),
)
