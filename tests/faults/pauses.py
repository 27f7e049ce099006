"""SIGSTOP past the lease, another attempt, SIGCONT: an owner that lost its key writes nothing, and its client gets
the true outcome.

*At a point*: a process stands still at a named point of its one request. Meanwhile others take the key over, or find
that its outcome is unknown; then it goes on. Where its transaction holds the row (PostgreSQL), the lock outlives the
lease: no request takes over, and it ends as it would have. On SQLite it is not paused inside of a transaction there: it
would block every writer, and that is not promised. *At random*: one of two busy processes, wherever it is.

A memory store has one process. There the owner alone is held, inside of its handler, and its lease is not renewed.

No resolver runs: it could refute what a paused owner is about to do, and that is the residue that the docs state.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import cycle, islice, product

from tests.faults.app import HELD, PLACES, WITHOUT_ROWS
from tests.faults.campaign import Fault, Run
from tests.faults.checker import check, check_doubt
from tests.faults.clients import Ask, Attempt, Client, History, Name, pay_all
from tests.faults.fork_server import Process
from tests.faults.load import Load
from tests.faults.points import IN_DOUBT
from tests.faults.shop import Shop

LEASE = 0.8
SHORT_LEASE = 0.4
AT_ONCE = 20
PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    point: str
    when: str
    holds: bool = False
    """Its transaction has the row."""

    @property
    def doubtful(self) -> bool:
        return self.kind == "external" or (self.kind == "once" and (self.point, self.when) in IN_DOUBT)


FREE = (
    Case("external", "request.begin", "after"),
    Case("external", "request.finish", "before"),
    Case("repeatable", "request.begin", "after"),
    Case("repeatable", "request.finish", "before"),
    Case("transactional", "request.begin", "after"),
    Case("transactional", "enlist", "before"),
    Case("transactional", "enlist.open", "before"),
    Case("deferred", "enlist", "before"),
    Case("phased", "phase", "before"),
    Case("phased", "enlist.open", "before"),
    Case("phased", "phase.commit", "after"),
    Case("phased", "effect.intent", "before"),
    Case("phased", "effect.call", "before"),
    Case("phased", "effect.result", "before"),
    Case("phased", "request.finish", "before"),
    Case("once", "effect.intent", "before"),
    Case("once", "effect.intent", "after"),
    Case("once", "effect.call", "before"),
    Case("once", "effect.call", "after"),
    Case("once", "effect.result", "after"),
    Case("once", "enlist.open:2", "before"),
)
WITHOUT_A_TRANSACTION = tuple(
    case for case in FREE if case.kind in WITHOUT_ROWS and not case.point.startswith(("phase", "enlist"))
)
HOLDING = tuple(
    Case(kind, point, when, holds=True)
    for kind, (point, when) in product(
        ("transactional", "deferred", "phased"),
        (("enlist.guard", "after"), ("enlist.complete", "before"), ("enlist.commit", "before")),
    )
)


class _Paused:
    """A process that stands still, and the client that waits for it."""

    def __init__(self, case: Case, ask: Ask, server: Process, waiting: asyncio.Task[Attempt]) -> None:
        self.case = case
        self.ask = ask
        self.server = server
        self.waiting = waiting


def pause_at_a_point(run: Run) -> None:
    if run.store == "memory":
        hold_the_owner(run)
        return
    kinds = {"sqlite": FREE, "redis": WITHOUT_A_TRANSACTION, "dynamodb": WITHOUT_A_TRANSACTION}
    chosen = kinds.get(run.store, (*FREE, *HOLDING))
    cases = list(islice(cycle(run.random.sample(chosen, len(chosen))), run.count))
    asks = [Ask(case.kind, f"key-{number:05d}", number) for number, case in enumerate(cases)]
    history = History()
    with Shop(run, lease=LEASE * run.pace, works=False) as shop:
        for at in range(0, len(cases), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            asyncio.run(_pause(run, shop, history, list(zip(cases[some], asks[some], strict=True))))
        evidence = shop.evidence(history)
    check(run, evidence, drained=True)
    for case, ask in zip(cases, asks, strict=True):
        check_doubt(run, evidence, ask.name, doubtful=case.doubtful, what=str(case))


async def _pause(run: Run, shop: Shop, history: History, cases: list[tuple[Case, Ask]]) -> None:
    paused = []
    try:
        for case, ask in cases:
            paused.append(await _stand_still(run, shop, history, case, ask))
        await asyncio.sleep(LEASE * run.pace * 1.2)
        healthy = shop.start(works=True)
        await _go_round(run, shop, history, [each.ask for each in paused if not each.case.holds])
        for each in paused:
            if each.case.holds:
                with Client(shop.port, history, asked=run.asked) as client:
                    answer = await client.send(each.ask)
                if answer.status != 409:
                    run.violated("I3", f"its row was held by {each.case}, and another got {answer.text()}")
        for each in paused:
            each.server.resume()
        await asyncio.gather(*(each.waiting for each in paused))
        await _go_round(run, shop, history, [each.ask for each in paused if each.case.holds])
        await asyncio.to_thread(shop.settle_down)
        healthy.kill()
    finally:
        for each in paused:
            each.server.kill()
    run.hit(len(cases))


async def _stand_still(run: Run, shop: Shop, history: History, case: Case, ask: Ask) -> _Paused:
    """All others stand still already: the process that serves is the new one."""
    name, _, nth = case.point.partition(":")
    server = shop.start(fault=f"{name}:{case.when}:stop:{nth or 1}")
    waiting = asyncio.create_task(_send(run, shop, history, ask))
    try:
        async with asyncio.timeout(PATIENCE):
            while not server.paused:
                await asyncio.sleep(0.005)
                if waiting.done():  # a machine that is busy may answer 503 before it comes to anything
                    assert waiting.result().status == 503, f"{case} never came to its point: {waiting.result().text()}"
                    waiting = asyncio.create_task(_send(run, shop, history, ask))
    except TimeoutError as error:
        raise RuntimeError(f"{case} never came to its point: {shop.last_words()}") from error
    return _Paused(case, ask, server, waiting)


async def _send(run: Run, shop: Shop, history: History, ask: Ask) -> Attempt:
    with Client(shop.port, history, timeout=PATIENCE * 3, asked=run.asked) as client:
        return await client.send(ask)


async def _go_round(run: Run, shop: Shop, history: History, asks: list[Ask]) -> None:
    await pay_all(shop.port, history, asks, run.seed, asked=run.asked, patience=PATIENCE)


# -- a memory store: the owner alone -----------------------------------------------------------------------------------


def hold_the_owner(run: Run) -> None:
    held = list(islice(cycle(product(WITHOUT_ROWS, PLACES)), run.count))
    asks = [Ask(kind, f"key-{number:05d}", number, also=(("held", at),)) for number, (kind, at) in enumerate(held)]
    history = History()
    with Shop(run, lease=LEASE) as shop:
        shop.start()
        for at in range(0, len(asks), AT_ONCE):
            asyncio.run(_hold(run, shop, history, asks[at : at + AT_ONCE]))
        evidence = shop.evidence(history)
    check(run, evidence)
    for ask, (kind, place) in zip(asks, held, strict=True):
        doubtful = kind == "external" or (kind == "once" and place in ("asked", "charged"))
        check_doubt(run, evidence, ask.name, doubtful=doubtful, what=f"{kind} held at {place}")


async def _hold(run: Run, shop: Shop, history: History, asks: list[Ask]) -> None:
    waiting = [asyncio.create_task(_send(run, shop, history, ask)) for ask in asks]
    await asyncio.sleep(LEASE * 1.2)  # long enough for every lease, and no owner goes on yet
    assert not any(each.done() for each in waiting), "no request is held"
    await _go_round(run, shop, history, asks)
    await asyncio.gather(*waiting)
    run.hit(len(asks))


# -- at random ---------------------------------------------------------------------------------------------------------


def pause_at_random(run: Run) -> None:
    """A client gives up before the pause ends, and asks the other process. Hit: every client that had to."""
    lease = SHORT_LEASE * run.pace
    with Shop(run, thinks=0.01, upkeep=True, lease=lease) as shop:
        load = Load(run, shop, timeout=lease * 1.1)

        async def pause(servers: list[Process]) -> set[Name]:
            victim = run.random.choice(servers)
            victim.pause()
            in_flight = load.history.in_flight()
            await asyncio.sleep(lease * HELD)
            victim.resume()
            return {each.ask.name for each in in_flight if each.error and each.error.startswith("timeout")}

        asyncio.run(load.work(pause))
        shop.settle_down()
        evidence = shop.evidence(load.history)
    check(run, evidence, drained=True)
    unknown = len(load.history.of("unknown"))
    run.notes.append(f"{load.strikes} pauses, {unknown} of {len(evidence.tables.records):,} keys were unknown")


FAULTS = (
    Fault(
        "SIGSTOP at a point, past the lease",
        pause_at_a_point,
        {"memory": 200, "sqlite": 200, "postgres": 200, "redis": 200, "dynamodb": 60, "mysql": 60},
        short=6,
        promises=("I1", "I2", "I3", "I4", "I7", "I8"),
        seconds=60,
    ),
    Fault(
        "SIGSTOP at random under load",
        pause_at_random,
        {"sqlite": 200, "postgres": 200, "redis": 200, "dynamodb": 60, "mysql": 100},
        short=6,
        promises=("I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8"),
        seconds=60,
    ),
)
