"""kill -9 at every named point, before and after it, on the transactional, phased and deferred ways.

Each case is one key, one app process that dies at its point (``oncekey.testing.faults``), and later a process without a
fault, in which clients retry by the rules and the worker runs. With a provider that does not honour keys: never two
charges, and the key is unknown exactly where the process died between the intent and the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from oncekey.core.steps import Step, StepKind, StepState
from oncekey.testing import faults
from tests.faults.app import WITHOUT_ROWS
from tests.faults.campaign import Fault, Run
from tests.faults.checker import check, check_doubt
from tests.faults.clients import Ask, Client, History, pay_all
from tests.faults.shop import Shop
from tests.upkeep.rides import KILLED_AT

LEASE = 1.5
"""Renewed after a third of it, which should not be the swap that a case counts."""
SHORT_LEASE = 0.3
"""Where nothing is counted."""
TIMES = 20
DIES_WITHIN = 20.0

TRANSACTIONAL = (
    "request.begin", "store.reserve", "enlist", "enlist.open", "enlist.lock", "enlist.guard", "outbox.enqueue",
    "request.finish", "enlist.complete", "enlist.commit", "enlist.release",
)  # fmt: skip
PHASED = (
    "store.reserve", "phase", "enlist.open", "enlist.lock", "enlist.guard", "phase.work", "enlist.complete",
    "phase.commit", "enlist.commit", "enlist.release", "effect.intent", "store.swap", "effect.call", "effect.result",
    "store.swap:2", "phase.work:2", "enlist.complete:2", "phase.commit:2", "enlist.commit:2", "request.finish",
    "store.swap:3",
)  # fmt: skip
AROUND_THE_CHARGE = ("phase.commit", "effect.intent", "store.swap", "effect.call", "effect.result", "store.swap:2")
RESUMED = ("store.swap", "steps.read", "effect.intent", "effect.result")
DEFERRED = ("outbox.enqueue", "enlist.complete", "enlist.commit", "request.finish")
WORKER = ("outbox.claim", "outbox.task", "outbox.note", "outbox.renew", "outbox.conclude", "outbox.settle")
UPKEEP = ("upkeep.sweep", "store.swap", "upkeep.reap", "upkeep.ask", "upkeep.settle")
WHEN = ("before", "after")

IN_DOUBT = {
    ("effect.intent", "after"),
    ("effect.call", "before"),
    ("effect.call", "after"),
    ("effect.result", "before"),
}
"""Of the phased way: the intent is on disk, and the result is not."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    point: str
    """``store.swap:2``: the second time."""
    when: str
    also: tuple[tuple[str, Any], ...] = ()
    """Members of the body."""
    works: bool = False
    """It is the worker that dies, with the job of a request that was answered before."""
    before: str = ""
    """Another fault that leads to the point."""

    @property
    def fault(self) -> str:
        name, _, nth = self.point.partition(":")
        kill = f"{name}:{self.when}:kill:{nth or 1}"
        return f"{self.before},{kill}" if self.before else kill

    @property
    def asked_before(self) -> bool:
        """A process without a fault takes the request first: what dies is the next attempt, or the job."""
        return self.works or ("stumbles", True) in self.also

    def doubtful(self, steps: Sequence[Step]) -> bool:
        """Whether it died between the intent and the result. Where it died at a swap, what is remembered tells: on a
        machine that is busy, one of those counted may have renewed the lease."""
        if self.kind == "once" and self.point.startswith("store.swap"):
            return any(step.kind is StepKind.EFFECT and step.state is StepState.INTENDED for step in steps)
        return self.kind == "once" and (self.point, self.when) in IN_DOUBT


def every_case() -> tuple[Case, ...]:
    cases = [Case("transactional", *at) for at in product(TRANSACTIONAL, WHEN)]
    cases += [Case("transactional", "enlist.roll_back", when, (("fails", True),)) for when in WHEN]
    # Its commit fails or loses its answer; the process dies when it asks what became of the commit.
    cases += [
        Case("transactional", "enlist.settle", when, before=f"enlist.commit:{first}:raise")
        for first, when in product(WHEN, WHEN)
    ]
    cases += [Case("phased", *at) for at in product(PHASED, WHEN)]
    cases += [Case("once", *at) for at in product(AROUND_THE_CHARGE, WHEN)]
    cases += [Case("phased", *at, (("stumbles", True),)) for at in product(RESUMED, WHEN)]
    cases += [Case("deferred", *at) for at in product(DEFERRED, WHEN)]
    cases += [
        Case("deferred", point, when, (("seconds", LEASE / 2 if "renew" in point else 0.0),), works=True)
        for point, when in product(WORKER, WHEN)
    ]
    tried = {case.point.partition(":")[0] for case in cases}
    assert tried | set(UPKEEP) | set(KILLED_AT) == set(faults.POINTS), "a point is not tried"
    return tuple(cases)


CASES = every_case()
ALONE = ("request.begin", "store.reserve", "request.finish", "store.swap")
"""The points of a request without steps."""
WITHOUT_A_TRANSACTION = (
    *(Case("repeatable", *at) for at in product(ALONE, WHEN)),
    *(
        case
        for case in CASES
        if case.kind in WITHOUT_ROWS and not case.point.startswith(("phase", "enlist", "outbox")) and not case.before
    ),
)
"""Of stores that the app keeps no rows in."""


def cases_of(store: str) -> tuple[Case, ...]:
    return WITHOUT_A_TRANSACTION if store in ("redis", "dynamodb") else CASES


def kill_at_every_point(run: Run) -> None:
    """Each case as often as the count says; with a smaller count, cases by chance."""
    every = cases_of(run.store)
    times, rest = divmod(run.count, len(every))
    cases = [*every * times, *run.random.sample(every, rest)]
    asks = {Ask(case.kind, f"key-{number:05d}", number, also=case.also): case for number, case in enumerate(cases)}
    history = History()
    with Shop(run, lease=LEASE * run.pace, works=False) as shop:
        asyncio.run(_die(run, shop, history, asks))
        shop.start(works=True)
        asyncio.run(pay_all(shop.port, history, asks, run.seed, asked=run.asked))
        shop.settle_down()
        evidence = shop.evidence(history)
    check(run, evidence, drained=True)
    for ask, case in asks.items():
        doubtful = case.doubtful(evidence.tables.steps.get(ask.name, []))
        check_doubt(run, evidence, ask.name, doubtful=doubtful, what=str(case))


async def _die(run: Run, shop: Shop, history: History, asks: dict[Ask, Case]) -> None:
    """One process after another."""
    server = shop.start()
    with Client(shop.port, history, asked=run.asked) as client:
        for ask, case in asks.items():
            if case.asked_before:
                await _until(client, ask, 202 if case.works else 503)
    server.kill()
    for ask, case in asks.items():
        server = shop.start(fault=case.fault, works=case.works, concurrency=1)
        try:
            if not case.works:
                with Client(shop.port, history, timeout=DIES_WITHIN, asked=run.asked) as client:
                    await _until(client, ask, None)
            server.wait(DIES_WITHIN)
        except TimeoutError as error:
            raise RuntimeError(f"{case} never came to its point: {shop.last_words()}") from error
        run.hit()


async def _until(client: Client, ask: Ask, status: int | None) -> None:
    """Send it until it ends as it should; None: with the process. On a machine that is busy, a 503 may come first."""
    deadline = time.monotonic() + DIES_WITHIN
    while (answer := await client.send(ask)).status != status:
        assert answer.status is not None, f"it died too early: {answer.text()}"
        assert answer.again, f"it survived: {answer.text()}"
        assert time.monotonic() < deadline, f"it goes on for too long: {answer.text()}"
        await asyncio.sleep(0.05)
    assert status is not None or "lost" in str(answer.error), f"it neither died nor answered: {answer.text()}"


# -- upkeep ------------------------------------------------------------------------------------------------------------


def kill_upkeep(run: Run) -> None:
    """For each case a process dies right after its charge, and the one that tidies up behind it dies at its point.

    The provider is asked what became of the charge, so that every key ends with its answer, of one charge.
    """
    cases = list(product(UPKEEP, WHEN))
    cases = [*cases * (run.count // len(cases)), *run.random.sample(cases, run.count % len(cases))]
    asks = [Ask("external" if number % 2 else "once", f"key-{number:05d}", number) for number in range(len(cases))]
    history = History()
    lease = SHORT_LEASE * run.pace
    with Shop(run, lease=lease, quarantine=lease, resolves=True) as shop:
        asyncio.run(_die_tidying(run, shop, history, list(zip(asks, cases, strict=True))))
        shop.start(upkeep=True)
        asyncio.run(pay_all(shop.port, history, asks, run.seed, asked=run.asked, waits_for_unknown=True))
        shop.settle_down()
        evidence = shop.evidence(history)
    check(run, evidence, drained=True)


async def _die_tidying(run: Run, shop: Shop, history: History, cases: list[tuple[Ask, tuple[str, str]]]) -> None:
    for ask, (point, when) in cases:
        lead = "effect.call:after:kill" if ask.kind == "once" else "request.finish:before:kill"
        with Client(shop.port, history, timeout=DIES_WITHIN, asked=run.asked) as client:
            first = shop.start(fault=lead)
            await _until(client, ask, None)
        first.wait(DIES_WITHIN)
        await asyncio.sleep(SHORT_LEASE * run.pace)  # its key is due
        try:
            shop.start(fault=f"{point}:{when}:kill", upkeep=True).wait(DIES_WITHIN)
        except TimeoutError as error:
            raise RuntimeError(f"it never came to {point}: {shop.last_words()}") from error
        run.hit()


FAULTS = (
    Fault(
        "kill -9 at every named point",
        kill_at_every_point,
        {
            **dict.fromkeys(("sqlite", "postgres"), len(CASES) * TIMES),
            "redis": len(WITHOUT_A_TRANSACTION) * TIMES,
            "dynamodb": len(WITHOUT_A_TRANSACTION),
            "mysql": len(CASES) * 2,
        },
        short=12,
        promises=("I1", "I2", "I3", "I4", "I7", "I8"),
        seconds=180,
    ),
    Fault(
        "kill -9 at every point of upkeep",
        kill_upkeep,
        {
            **dict.fromkeys(("sqlite", "postgres", "redis"), len(UPKEEP) * len(WHEN) * TIMES),
            "dynamodb": len(UPKEEP) * len(WHEN),
            "mysql": len(UPKEEP) * len(WHEN) * 4,
        },
        short=4,
        promises=("I1", "I2", "I3", "I4", "I7"),
        seconds=120,
    ),
)
