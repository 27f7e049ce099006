"""What a request can meet on its way: the scenarios of ``lines.py``, each a place to put a fault in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tests.faults.asgi_request import AsgiRequest
from tests.faults.linearizable import Saw
from tests.faults.scenes import BODY, OTHER_BODY, PATIENCE, Scene, Story

Act = Callable[[Scene, Story], Awaitable[None]]


async def _nothing(scene: Scene, story: Story) -> None:
    """Not even a request before: lanes are opened by the one with the fault."""


async def _warm(scene: Scene, story: Story) -> None:
    """The OnceKey has served a request."""
    await replace(story, key="another", kind="plain", seen=[]).ask(scene.app)


async def _asked(scene: Scene, story: Story) -> None:
    """The key has been asked for once, with whatever end."""
    await _warm(scene, story)
    await story.ask(scene.app)


async def _in_flight(scene: Scene, story: Story) -> None:
    """A request is in the handler, and stays there."""
    await _warm(scene, story)
    scene.gate.clear()
    while not scene.charged[story.key]:
        asked = AsgiRequest(f"/{story.kind}", story.key, BODY)
        story.seen.append(asked)
        task = asked.start(scene.app)
        while not scene.charged[story.key] and not task.done():  # done: a time-out, where the machine is busy
            await asyncio.sleep(0.001)


async def _abandoned(scene: Scene, story: Story) -> None:
    """An owner has died, and its lease is over."""
    await _warm(scene, story)
    route = scene.once.routes.match("POST", f"/{story.kind}")
    assert route is not None
    wanted = scene.once.reservation(
        route,
        tenant="single-tenant",
        key=story.key,
        owner="dead",
        parts=("POST", f"/{story.kind}", b"", "application/json", BODY, lambda names: []),
        lines=(),
    )
    await asyncio.to_thread(scene.store.reserve, [replace(wanted, lease_seconds=0.001)])
    await asyncio.sleep(0.002)


async def _ask(scene: Scene, story: Story) -> None:
    await story.ask(scene.app)


async def _ask_other(scene: Scene, story: Story) -> None:
    await story.ask(scene.app, OTHER_BODY)


async def _ask_and_wait(scene: Scene, story: Story) -> None:
    """It waits for the first, which is let go a moment later."""
    asyncio.get_running_loop().call_later(0.01, scene.gate.set)
    await story.ask(scene.app)


async def _ask_and_leave(scene: Scene, story: Story) -> None:
    """Cancelled in the handler, which goes on to its end."""
    scene.gate.clear()
    asked = AsgiRequest(f"/{story.kind}", story.key, BODY)
    story.seen.append(asked)
    task = asked.start(scene.app)
    await asyncio.wait([task], timeout=0.01)
    asked.leave()
    task.cancel()
    scene.gate.set()
    await _quiet(scene)


async def _leave_the_store(scene: Scene, story: Story) -> None:
    """Cancelled while the lane asks the store: what it reserves then has no caller."""
    scene.store.slow_reserve = 0.02
    asked = AsgiRequest(f"/{story.kind}", story.key, BODY)
    story.seen.append(asked)
    task = asked.start(scene.app)
    await asyncio.wait([task], timeout=0.01)
    asked.leave()
    task.cancel()
    await asyncio.sleep(0.03)
    scene.store.slow_reserve = 0.0


async def _store_fails(scene: Scene, story: Story) -> None:
    """The outcome cannot be stored at once: the keeper does it."""
    scene.store.fail_swaps = 3 if scene.path else 2  # by the loop's own way, and by the lane twice
    try:
        await story.ask(scene.app)
        await asyncio.sleep(0.05)
    finally:
        scene.store.fail_swaps = 0


async def _quiet(scene: Scene) -> None:
    """Handlers of clients that have left are done."""
    async with asyncio.timeout(PATIENCE):
        while any(not task.done() for task in list(scene.once.engine.tasks)):
            await asyncio.sleep(0.001)


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    kind: str
    before: Act = _warm
    act: Act = _ask
    sees: Saw | None = Saw.EXECUTED
    """What the client of the act sees where there is no fault: otherwise it is not the scenario that it says."""
    after: bool = False
    """Only from the handler on: up to there it is as ``first``."""
    only_new: bool = False
    """Only at lines that no scenario before it came by: it is slow, or much like another."""
    prefix: str = "key"


SCENARIOS = (
    Scenario("first", "plain"),
    Scenario("first of all", "plain", _nothing),
    Scenario("replay", "plain", _asked, sees=Saw.REPLAYED),
    Scenario("first, the general way", "unmeasured"),
    Scenario("replay, the general way", "unmeasured", _asked, sees=Saw.REPLAYED),
    Scenario("mismatch", "plain", _asked, _ask_other, Saw.MISMATCH, only_new=True),
    Scenario("in flight", "held", _in_flight, sees=Saw.BUSY),
    Scenario("waits", "waited", _in_flight, _ask_and_wait, Saw.REPLAYED),
    Scenario("in pieces", "pieces", after=True),
    Scenario("too large to store", "large", after=True),
    Scenario("raises", "raises", sees=Saw.LOST, after=True),
    Scenario("not wrapped", "raw", after=True),
    Scenario("not wrapped, raises", "raw-raises", sees=Saw.LOST, after=True),
    Scenario("is unknown", "raises", _asked, sees=Saw.UNKNOWN, only_new=True),
    Scenario("not executed", "not-executed", sees=Saw.RELEASED, after=True),
    Scenario("retry", "not-executed", _asked),
    Scenario("client error", "client-error", after=True),
    Scenario("server error", "server-error", sees=Saw.DOUBTED, after=True),
    Scenario("refused", "refused", sees=Saw.LOST, after=True),
    Scenario("harmless", "stumbles", sees=Saw.LOST, after=True),
    Scenario("taken over", "repeatable", _abandoned),
    Scenario("found dead", "plain", _abandoned, sees=Saw.UNKNOWN),
    Scenario("left in the handler", "held", act=_ask_and_leave, sees=Saw.LOST, after=True),
    Scenario("left at the store", "plain", act=_leave_the_store, sees=Saw.LOST),
    Scenario("left at the store, the general way", "unmeasured", act=_leave_the_store, sees=Saw.LOST),
    Scenario("not stored", "plain", act=_store_fails, sees=Saw.LOST, after=True),
    Scenario("not stored, the general way", "unmeasured", act=_store_fails, sees=Saw.LOST, after=True),
    Scenario("renewed", "slow", only_new=True),
    Scenario("enlisted", "enlisted", after=True),
    Scenario("enlisted, replay", "enlisted", _asked, sees=Saw.REPLAYED, only_new=True),
    Scenario("enlisted, raises", "enlisted-raises", sees=Saw.LOST, after=True),
    Scenario("enlisted in a thread", "enlisted-thread", after=True),
    Scenario("enlisted, the app commits", "enlisted-caller", after=True),
    Scenario("phased", "phased", after=True),
    Scenario("phased, resumed", "phased", _asked, prefix="resumed"),
    Scenario("deferred", "deferred", after=True),
)
