"""kill -9 at every named point of the transactional, phased and deferred ways.

After the restart clients retry by the rules and the worker runs: one charge per key, one business row, identical
answers. With a bank that does not honour keys: never two charges, and the key is unknown exactly where the process died
between the intent and the result. Each point once with every ``make test``; 20 times with ``make faults``.
"""

from __future__ import annotations

from itertools import count, product

import pytest

from oncekey.core.states import State
from oncekey.testing.company import Child
from tests.faults.pointed import LEASE, Case, Town, fault, one_request, settle

AT_ONCE = 4
_numbers = count(1)

ORDERS = (
    "request.begin", "store.reserve", "enlist", "enlist.open", "enlist.lock", "enlist.guard", "outbox.enqueue",
    "request.finish", "enlist.complete", "enlist.commit", "enlist.release",
)  # fmt: skip
RIDES = (
    "store.reserve", "phase", "enlist.open", "enlist.lock", "enlist.guard", "phase.work", "enlist.complete",
    "phase.commit", "enlist.commit", "enlist.release", "effect.intent", "store.swap", "effect.call", "effect.result",
    "store.swap:2", "phase.work:2", "enlist.complete:2", "phase.commit:2", "enlist.commit:2", "request.finish",
    "store.swap:3",
)  # fmt: skip
AROUND_THE_CHARGE = ("phase.commit", "effect.intent", "store.swap", "effect.call", "effect.result", "store.swap:2")
RESUMED = ("store.swap", "steps.read", "effect.intent", "effect.result")
BACKGROUND = ("outbox.enqueue", "enlist.complete", "enlist.commit", "request.finish")
WORKER = ("outbox.claim", "outbox.task", "outbox.note", "outbox.renew", "outbox.conclude", "outbox.settle")

IN_DOUBT = {
    ("effect.intent", "after"), ("store.swap", "after"), ("effect.call", "before"), ("effect.call", "after"),
    ("effect.result", "before"), ("store.swap:2", "before"),
}  # fmt: skip
"""Of the phased way: the intent is on disk, and the result is not."""


class Campaign:
    def __init__(self, town: Town) -> None:
        self.town = town
        self.cases: list[tuple[Case, str, str]] = []
        self.running: list[tuple[Child, str]] = []

    def kill(self, path: str, point: str, when: str, *, works: bool = False, **body: object) -> None:
        case = (path, f"key-{next(_numbers):05d}", body)
        self.cases.append((case, point, when))
        if body.get("stumbles"):
            assert one_request(self.town, case).result()[0] == 503
        self.running.append((one_request(self.town, case, fault(point, when), works=works), f"{path} {when} {point}"))
        if len(self.running) == AT_ONCE or works:  # one worker at a time: two would take each other's jobs
            self.collect()

    def collect(self) -> None:
        running, self.running = self.running, []
        survived = [what for child, what in running if not child.killed()]
        assert not survived, f"never came to its point: {survived}"

    def check(self) -> None:
        """Restart, retry, run the worker, and compare what clients saw with the tables and the bank's ledger."""
        self.collect()
        town, answers = self.town, settle(self.town, [case for case, _, _ in self.cases])
        charges = town.bank.charges()
        rows = {path: town.rows(path.removeprefix("/")) for path in ("/orders", "/rides", "/background")}
        receipts = town.rows("receipts")
        for (path, key, body), point, when in self.cases:
            what = f"{path} killed {when} {point}, {body}"
            doubtful = body.get("honours") is False and (point, when) in IN_DOUBT
            assert rows[path][key] == 1, f"{what}: {rows[path][key]} rows"
            if doubtful:
                assert answers[key] == [[409, "unknown"]], what
                assert town.state(key) is State.UNKNOWN, what
                assert charges[key] <= 1, f"{what}: {charges[key]} charges"
                continue
            assert charges[key] == 1, f"{what}: {charges[key]} charges"
            assert town.state(key) is State.COMPLETED, what
            first, second = answers[key]
            assert first == second, what
            assert receipts[key] == (path == "/rides"), what


def every_point(run: Campaign) -> None:
    for point, when in product(ORDERS, ("before", "after")):
        run.kill("/orders", point, when)
    for when in ("before", "after"):
        run.kill("/orders", "enlist.roll_back", when, fails=True)
    for point, when in product(RIDES, ("before", "after")):
        run.kill("/rides", point, when, honours=True)
    for point, when in product(AROUND_THE_CHARGE, ("before", "after")):
        run.kill("/rides", point, when, honours=False)
    for point, when in product(RESUMED, ("before", "after")):
        run.kill("/rides", point, when, honours=True, stumbles=True)
    for point, when in product(BACKGROUND, ("before", "after")):
        run.kill("/background", point, when)
    run.collect()
    for point, when in product(WORKER, ("before", "after")):
        run.kill("/background", point, when, works=True, seconds=LEASE.total_seconds() / 2 if "renew" in point else 0.0)


@pytest.mark.timeout(180)
def test_killed_at_every_point(town: Town) -> None:
    run = Campaign(town)
    every_point(run)
    run.check()


@pytest.mark.faults
@pytest.mark.parametrize("turn", range(20))
def test_killed_at_every_point_often(town: Town, turn: int) -> None:
    run = Campaign(town)
    every_point(run)
    run.check()
    print(f"\nturn {turn}: {len(run.cases)} kills")
