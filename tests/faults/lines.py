"""An exception, and a cancellation, at every line of the engine that a request comes by.

Each scenario is run once with a tracer that only looks, and so says which lines there are, in the event loop and in the
threads (lanes, keeper, the pools). Then it is run once for each of them and each error, with a store and a OnceKey of
its own, and the error is raised when execution first comes to that line. Afterwards the same OnceKey must still serve
another key, and the client retries by the rules, in the same process or beside it, until it knows how it stands.

The clients of a few hundred faults wait for their leases together, so a fault costs its request and not its lease.
"""

from __future__ import annotations

import asyncio
import dis
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import oncekey
from oncekey.testing.company import Child
from tests.faults.asgi_request import quiet
from tests.faults.breakable_stores import make_store, template, without_a_disk
from tests.faults.campaign import Fault, Run
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.scenes import (
    HANGS,
    KINDS,
    PATIENCE,
    Scene,
    Story,
    blemishes,
)

ROOT = os.path.dirname(oncekey.__file__) + os.sep  # noqa: PTH120 - compared with co_filename, a thousand times
WEB = ("asgi.py", "asgi_shell.py", "asgi_call.py", "asgi_response.py", "exchange.py", "endings.py", "endpoints.py")
TRACED = (
    ROOT + "engine" + os.sep,
    ROOT + os.path.join("stores", "sqlite", "transactions.py"),  # noqa: PTH118 - compared with co_filename
    *(ROOT + "web" + os.sep + name for name in WEB),
    *(ROOT + "core" + os.sep + name for name in ("evidence.py", "judgment.py", "situations.py")),
)
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, asyncio.CancelledError)
TOGETHER = 60
"""Faults of one process whose clients wait for their leases at the same time."""
PROCESSES = 4
TRIES = 3
"""A line that a thread comes by only sometimes is given so many chances."""

EVERYTHING = {"memory": 9_500, "sqlite": 14_000}
"""About as many there are. A run with this count takes all of them."""

Place = tuple[str, str, int]
"""In the loop or in a thread, the file, the line."""

HARMLESS = frozenset({
    "NOP", "RESUME", "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST", "PUSH_NULL",
    "JUMP_FORWARD", "JUMP_BACKWARD", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "IS_OP",
    "BUILD_LIST", "BUILD_MAP", "BUILD_TUPLE", "COPY", "SWAP", "RERAISE", "POP_EXCEPT", "PUSH_EXC_INFO",
})  # fmt: skip
"""Instructions that raise nothing, whatever happens: ``try:``, ``pass``, ``while more:``. A line of nothing but
these is no place for an exception to come from."""


@cache
def _lines(code: CodeType) -> frozenset[int]:
    """The lines of a function at which something can be raised."""
    found, line = set(), 0
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if line and instruction.opname not in HARMLESS:
            found.add(line)
    return frozenset(found)


class Tracer:
    """Looks at every line of the engine while it is armed, and raises at one of them if it was told to."""

    def __init__(self, place: Place | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.seen: dict[Place, None] = {}
        self.fired = False
        self._armed = False
        self._place = place
        self._error = error
        self._loop_thread = threading.get_ident()

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace(), threading.gettrace()
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])

    def arm(self) -> None:
        self._armed = True

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(TRACED) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._armed and event == "line":
            where = "loop" if threading.get_ident() == self._loop_thread else "thread"
            place = (where, frame.f_code.co_filename, frame.f_lineno)
            if self._place is None:
                if frame.f_lineno in _lines(frame.f_code):
                    self.seen[place] = None
            elif place == self._place:
                self._armed, self.fired = False, True
                raise self._error("a fault of the campaign")
        return self._line


Injected = tuple[Scenario, Place, type[BaseException]]


@dataclass
class Case:
    """One fault: a scenario, with an error at a place."""

    scenario: Scenario
    scene: Scene
    story: Story
    fired: bool = True
    hung: bool = False
    asked: int = 0
    """Requests so far."""


class Campaign:
    """Some of the faults, in one process."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        folder.mkdir()
        self.kept: Path | None = template(folder) if run.store == "sqlite" else None
        self.number = 0
        self.requests = 0
        self.violations: list[tuple[str, str]] = []
        self.unknown = 0
        self.missed: list[str] = []

    async def play(self, scenario: Scenario, tracer: Tracer, what: str) -> Case:
        """Run a scenario; its faults come with what ``tracer`` does."""
        self.number += 1
        with tracer:
            scene = Scene(make_store(self.kept, self.number))
            story = Story(f"{scenario.prefix}-{self.number}", scenario.kind, what)
            case = Case(scenario, scene, story)
            await scenario.before(scene, story)
            if scenario.after:
                scene.entered = tracer.arm
            else:
                tracer.arm()
            try:
                await scenario.act(scene, story)
            except TimeoutError:
                case.hung = True
            if not tracer.fired:
                await asyncio.sleep(0.003)  # threads have still to put their things away
            case.asked = len(story.seen)
        scene.entered = lambda: None  # a handler that runs later, for a client's retry, arms nothing
        scene.gate.set()
        case.fired = tracer.fired
        return case

    async def places(self, scenario: Scenario, times: int) -> list[Place]:
        """The lines of a scenario without a fault: those that most of some runs came by. What else a thread does in one
        of them by chance has a scenario of its own."""
        places: Counter[Place] = Counter()
        told, enough = "", times // 2
        for _ in range(5 * times):
            tracer = Tracer()
            case = await self.play(scenario, tracer, "no fault")
            await asyncio.sleep(0.005)
            await self.afterwards(case)
            if case.story.seen[case.asked - 1].saw is scenario.sees:  # else a time-out: the machine is busy
                places.update(tracer.seen.keys())
                times -= 1
            if not times:
                return [place for place, seen in places.items() if seen > enough]
            told = case.story.told()
        raise AssertionError(f"{scenario.name} without a fault: {told}")

    async def afterwards(self, case: Case) -> None:
        """The same OnceKey serves another key, and the client of this one gets to know how it stands."""
        story, scene, found = case.story, case.scene, self.violations
        other = Story(f"other-{story.key}", "plain", story.what)
        if case.hung:
            found.append(("I4", f"its caller hung for {HANGS:g} s: {story.told()}"))
        try:
            await other.until_ended(scene, scene.app)
            await story.until_ended(scene, scene.beside if len(story.what) % 2 else scene.app)
        except TimeoutError:
            found.append(("I4", f"a caller hung for {PATIENCE:g} s, after {story.told()}"))
        if not other.ended or other.unknown:
            found.append(("I4", f"another key is not served any more: {other.told()}"))
        found += blemishes(scene, story)
        self.unknown += story.unknown
        self.requests += len(story.seen) + len(other.seen)
        await scene.close()
        if scene.path is not None:
            for file in scene.path.parent.glob(f"{scene.path.name}*"):
                file.unlink(missing_ok=True)

    async def inject(self, faults: Iterable[Injected]) -> None:
        """Each fault in turn, since a tracer sees all of a thread; and then their clients, all at once."""
        cases = []
        for scenario, place, error in faults:
            what = f"{scenario.name}: {error.__name__} at {place[1].removeprefix(ROOT)}:{place[2]} in the {place[0]}"
            for _ in range(TRIES):
                cases.append(await self.play(scenario, Tracer(place, error), what))
                if cases[-1].fired:
                    break
            else:
                self.missed.append(what)
        await asyncio.gather(*map(self.afterwards, cases))

    async def plan(self) -> list[Injected]:
        """Every line that there is; or, for a few, those of some of the scenarios."""
        scenarios = [each for each in SCENARIOS if self.kept is not None or not KINDS[each.kind].needs_tables]
        few = self.run.count < EVERYTHING[self.run.store]
        if few:
            scenarios = self.run.random.sample(scenarios, min(len(scenarios), 1 + self.run.count // 15))
        planned: list[Injected] = []
        known: set[Place] = set()
        for scenario in scenarios:
            places = await self.places(scenario, 1 if few else 3)
            fresh = [place for place in places if not (scenario.only_new and place in known)]
            planned += [(scenario, place, error) for place in fresh for error in ERRORS]
            known.update(places)
        self.run.random.shuffle(planned)
        return planned


def _in_its_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    """A loop, and threads, in which faults are no news."""

    async def quietly() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        return await work()

    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of coroutines that were not awaited: a fault came before
            return asyncio.run(quietly())
    finally:
        threading.excepthook = hook


def every_line(run: Run) -> None:
    with without_a_disk(run.folder) as folder:
        _every_line(run, folder)


def _every_line(run: Run, folder: Path) -> None:
    """Most of the time a fault waits for a time-out, so a few processes share the work."""
    planned = _in_its_loop(Campaign(run, folder / "plan").plan)
    everything = run.count >= EVERYTHING[run.store]
    unknown, start, missed = 0, 0, []
    while start < len(planned) and (everything or run.wanting):
        size = PROCESSES * TOGETHER if everything else min(PROCESSES * TOGETHER, run.count - run.hits)
        turn = planned[start : start + size]
        parts = [turn[number::PROCESSES] for number in range(min(PROCESSES, len(turn)))]

        def work(name: str, part: list[Injected]) -> Any:
            campaign = Campaign(run, folder / name)
            _in_its_loop(lambda: campaign.inject(part))
            return campaign.requests, campaign.violations, campaign.unknown, campaign.missed

        children = [Child(partial(work, f"{start}-{n}", part)) for n, part in enumerate(parts)]
        start += size
        for child, part in zip(children, parts, strict=True):
            requests, violations, doubted, passed_by = child.result()
            run.asked(requests)
            for promise, what in violations:
                run.violated(promise, what)
            unknown += doubted
            missed += passed_by
            run.hit(len(part) - len(passed_by))
    scenarios = len({scenario.name for scenario, _, _ in planned})
    run.notes.append(f"{scenarios} scenarios; {unknown} keys ended unknown; {len(missed)} faults missed their line")
    if len(missed) > max(20, run.hits // 10):  # other threads come by when they like
        raise AssertionError(f"{len(missed)} faults did not come to their lines: {missed[:10]}")


FAULTS = (
    Fault(
        "exception and CancelledError at every line",
        every_line,
        counts=EVERYTHING,
        short=30,
        promises=("I1", "I2", "I4"),
        unit="lines",
        seconds=240.0,
    ),
)
