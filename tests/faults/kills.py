"""kill -9 at random times under load: one effect per key, identical answers, and no key that stays stuck.

Two app processes serve payments of every kind, with the worker, the sweeper and the reconciler inside; one after
another is killed and replaced. A key is hit when its request had reached the process that was killed: the client lost
the connection. The reconciler asks the provider about unknown outcomes, so every key must end with its answer.
"""

from __future__ import annotations

import asyncio

from tests.faults.campaign import Fault, Run
from tests.faults.checker import check
from tests.faults.clients import Name
from tests.faults.fork_server import Process
from tests.faults.load import Load
from tests.faults.shop import Shop

QUARANTINE = 5.0
"""Longer than an owner that lives is held up on a machine that is busy. Shorter, and what it is about to do is refuted
before it does it: seen once, with half a second, when the machine had ten times the work it could do."""
SETTLED = 100
"""From so many keys on, unknown outcomes are settled; a short run does not wait for the quarantine."""


def kill_at_random(run: Run) -> None:
    resolves = run.count >= SETTLED
    lease = 0.5 * run.pace
    with Shop(run, thinks=0.01, upkeep=True, resolves=resolves, quarantine=QUARANTINE, lease=lease) as shop:
        load = Load(run, shop, waits_for_unknown=resolves)

        async def kill(servers: list[Process]) -> set[Name]:
            place = run.random.randrange(len(servers))
            in_flight = load.history.in_flight()
            servers[place].kill()
            servers[place] = shop.start()
            await asyncio.sleep(0.05)  # until clients know that the connection is gone
            return {each.ask.name for each in in_flight if each.error and each.error.startswith("lost")}

        asyncio.run(load.work(kill))
        shop.settle_down()
        evidence = shop.evidence(load.history)
    check(run, evidence, drained=True)
    for name in load.history.of("unknown") if resolves else ():
        run.violated("I4", f"no process settled it\n{evidence.text(name)}")
    settled = sum(bool(lines) for lines in evidence.tables.audit.values())
    again = sum(record.attempt > 1 for record in evidence.tables.records.values())
    run.notes.append(f"{load.strikes} kills, {again} of {len(evidence.tables.records):,} keys ran again")
    run.notes.append(f"{settled} were settled by the ledger")


FAULTS = (
    Fault(
        "kill -9 at random under load",
        kill_at_random,
        {"sqlite": 2_000, "postgres": 1_000, "redis": 1_000, "dynamodb": 100, "mysql": 500},
        short=20,
        promises=("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8"),
        seconds=120,
    ),
)
