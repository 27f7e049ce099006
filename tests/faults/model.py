"""Every interleaving of a few requests, upkeep, crashes and time over one key, on the real code.

What is real: the state table, ``decide()``, ``judge()``, begin, finish and effect as the engine's own flows, verdicts
and how they are settled, the sweeper's choice, and the dictionary that every store is compared with. What is modelled:
the order in which things happen. A flow stops wherever it asks the store or calls another service, and at each stop
any other request, the sweeper, the reaper, the reconciler, the clock, or a crash may come first. A request that is not
moved is a paused one: all that it does later is done late.

Breadth first, and a state that was seen is not looked at again: row, steps, lock, where each request and each actor
stands, what happened outside, what clients were told. Three clients: one gives up waiting and sends again, one sends
the same, one sends another body under the same key. Those with the same body start in a fixed order, since only their
names differ. Time is what it is compared with: the lease, the quarantine, the retention, over or not.

The quarantine is assumed to be long enough: it does not pass while an owner stands before its call. That an owner
paused for longer is charged twice is the residue which the promises name, and ``held=False`` shows it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.campaign import Fault, Run
from tests.faults.model_flows import CHANGED, KINDS, RESUMED
from tests.faults.model_machine import Broken, Machine, World


@dataclass
class Searched:
    kind: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    exhausted: bool = False
    broken: tuple[str, str] | None = None
    """The promise, and the shortest way to break it."""


class Search:
    """Layer by layer, so that what is said of a depth is said of all of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        first = machine.start()
        self.layer = [first]
        self.came: dict[World, tuple[World, str] | None] = {first: None}
        self.result = Searched(machine.kind.name, states=1)

    def deeper(self, told: Callable[[int], None] = lambda states: None) -> bool:
        """One layer more; False: there is none, or a promise is broken."""
        result, came = self.result, self.came
        after: list[World] = []
        for world in self.layer:
            last = world
            try:
                for words, then in self.machine.moves(world):
                    result.transitions += 1
                    if then not in came:
                        came[then] = (world, words)
                        after.append(then)
                        last = then
                        self.machine.check(then)
                        last = world
            except Broken as broken:
                result.broken = (broken.promise, f"{broken} ({result.kind})\n{self._way(last)}")
                return False
        told(len(after))
        result.states += len(after)
        result.depth += bool(after)
        result.exhausted = not after
        self.layer = after
        return bool(after)

    def _way(self, world: World) -> str:
        lines: list[str] = []
        at: World | None = world
        while at is not None and (step := self.came[at]) is not None:
            at, words = step
            lines.append(f"  {words}")
        return "\n".join(reversed(lines))


def search(machine: Machine, *, states: int) -> Searched:
    """To the depth at which so many states were seen."""
    found = Search(machine)
    while found.result.states < states and found.deeper():
        pass
    return found.result


SIZES = ((2, 0), (3, 1))
"""Requests with the same body, and others: the small world is searched to its end where that is in reach."""
FEW = 20_000
"""Of so few states a share for each pair of declarations would be too small to find anything: one pair is tried."""


def run(run: Run) -> None:
    """Each kind of route, in both sizes; what one search leaves of its share goes to the next."""
    logger = logging.getLogger("oncekey")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    gc.disable()  # millions of tuples, and not one cycle among them
    try:
        changed = CHANGED if run.count > FEW else run.random.sample(CHANGED, 1)
        left = [(kind, size) for size in SIZES for kind in KINDS] + [(kind, SIZES[0]) for kind in changed]
        left += [(kind, (3, 0)) for kind in RESUMED]
        searches = len(left)
        while left:
            kind, (same, other) = left.pop(0)
            share = max(-(-(run.count - run.hits) // (len(left) + 1)), run.count // searches)
            found = Search(Machine(kind, same=same, other=other))
            run.hit()
            while found.result.states < share and found.deeper(run.hit):
                pass
            result = found.result
            run.asked(result.transitions)
            end = "to the end" if result.exhausted else f"to depth {result.depth}"
            run.notes.append(
                f"{kind.name}, {same + other} requests: {result.states:,} states, {result.transitions:,} steps, {end}"
            )
            if result.broken is not None:
                run.violated(*result.broken)
            del found
            gc.collect()
    finally:
        gc.enable()
        logger.setLevel(level)


FAULTS = (
    Fault(
        "model: every interleaving",
        run,
        {"-": 2_000_000},
        short=2_000,
        promises=("I1", "I2", "I3", "I4", "I5"),
        unit="states",
        seconds=200.0,
    ),
)
