"""kill -9 of SQLite's writer process under load, of the app that has it, and of both at once.

Two app processes with ``?writer=process`` serve payments of every kind. Each strike waits for a writer process, and
then kills it, or its app, or both in either order. A killed writer process may have had a batch
that was not read, half written, committed, or half answered. One effect per key, identical answers, no key that stays
stuck; never two writer processes of one app, and none without an app.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from oncekey.engine.batching import loop_lane
from oncekey.stores.sqlite import writer_process
from tests.faults import app
from tests.faults.campaign import Fault, Run
from tests.faults.checker import check
from tests.faults.clients import Name
from tests.faults.fork_server import Process
from tests.faults.load import Load
from tests.faults.shop import Shop
from tests.stores.writers import alive, children_of

QUARANTINE = 5.0
SETTLED = 100
"""From so many kills on, unknown outcomes are settled; a short run does not wait for the quarantine."""
AGAIN = 0.05
"""The pause of the loop lane and of the next start after a failure: in the product they take a second."""
PATIENCE = 30.0

Victim = Literal["writer", "app", "writer, then app", "app, then writer"]
VICTIMS: tuple[Victim, ...] = ("writer", "writer", "writer", "app", "writer, then app", "app, then writer")


def make_app(**options: Any) -> Any:
    writer_process.AGAIN_SECONDS = AGAIN
    loop_lane.PAUSE_SECONDS = AGAIN
    return app.make_app(**options)


def kill_writers(run: Run) -> None:
    resolves = run.count >= SETTLED
    url = f"{run.url()}?writer=process"
    options = {"thinks": 0.01, "upkeep": True, "resolves": resolves, "quarantine": QUARANTINE}
    with Shop(run, url=url, make_app=make_app, **options) as shop:
        load = Load(run, shop, waits_for_unknown=resolves, counts_strikes=True)

        async def kill(servers: list[Process]) -> set[Name]:
            writers = await _writers(run, servers)
            victim = run.random.choice(VICTIMS)
            place = run.random.choice(list(writers))
            in_flight = load.history.in_flight()
            for one in victim.split(", then "):
                if one == "writer":
                    _kill(writers[place])
                else:
                    servers[place].kill()
            if not servers[place].alive:
                servers[place] = shop.start()
            await _gone(run, writers[place])
            return {each.ask.name for each in in_flight}

        asyncio.run(load.work(kill))
        shop.settle_down()
        evidence = shop.evidence(load.history)
        file = Path(shop.file)
    check(run, evidence, drained=True)
    for pid in _with_open(file):
        run.violated("I4", f"process {pid} has {file} open, and every app is gone")
    for name in load.history.of("unknown") if resolves else ():
        run.violated("I4", f"no actor settled it\n{evidence.text(name)}")
    again = sum(record.attempt > 1 for record in evidence.tables.records.values())
    run.notes.append(f"{load.strikes} kills, {again} of {len(evidence.tables.records):,} keys ran again")


async def _writers(run: Run, servers: list[Process]) -> dict[int, int]:
    """The places of apps that have a writer process, and these. An app that gets no requests has none.

    Two of one app are a violation: they could write behind each other's back.
    """
    end = time.monotonic() + PATIENCE
    while True:
        found = [[pid for pid in children_of(server.pid) if alive(pid)] for server in servers]
        for pids in found:
            if len(pids) > 1:
                run.violated("I1", f"one app has the writer processes {pids}")
        if any(found):
            return {place: pids[0] for place, pids in enumerate(found) if pids}
        assert time.monotonic() < end, "an app has no writer process"
        await asyncio.sleep(0.005)


async def _gone(run: Run, pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while alive(pid):
        if time.monotonic() > end:
            run.violated("I4", f"the writer process {pid} outlived its app")
            return
        await asyncio.sleep(0.005)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended with its app
        os.kill(pid, signal.SIGKILL)


def _with_open(file: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [os.readlink(each) for each in (entry / "fd").iterdir()]  # noqa: PTH115 - cuts " (deleted)"
        except OSError:
            continue
        if str(file) in links:
            found.append(int(entry.name))
    return found


FAULTS = (
    Fault(
        "kill -9 of SQLite's writer process under load",
        kill_writers,
        {"sqlite": 300},
        short=8,
        promises=("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8"),
        unit="kills",
        seconds=120,
    ),
)
