"""A client that leaves at each ASGI message: its response is stored and replayed to a retry, with one effect,
or the handler never begins.

For each kind of handler one request is spoken to its end, to count its messages: every piece of the body that is
received, every message that is sent. Then it is spoken once for each of them and each way to leave, a key of its own
each time, and its client comes back and retries by the rules.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.faults.asgi_request import AsgiRequest, quiet
from tests.faults.breakable_stores import make_store, template, without_a_disk
from tests.faults.campaign import Fault, Run
from tests.faults.linearizable import Saw
from tests.faults.scenes import BODY, KINDS, Scene, Story, blemishes

PIECES = (BODY[:4], BODY[4:9], BODY[9:])
"""The body comes in three messages."""
Way = Literal["gone", "gone after", "cancelled", "cancelled after"]
WAYS: tuple[Way, ...] = ("gone", "gone after", "cancelled", "cancelled after")
"""The client is gone (``receive`` says so, ``send`` raises) or the server cancels us; before the message, or after."""
AGAIN = 8
"""Every place so often: chance is in the threads."""
EVERYTHING = 2_600
"""About as many there are. A run with this count takes all of them."""


@dataclass(frozen=True, slots=True)
class Place:
    message: Literal["receive", "send"]
    nth: int


class Leaving(AsgiRequest):
    """A request whose client leaves at one of its messages."""

    def __init__(self, path: str, key: str, place: Place | None = None, way: Way = "gone") -> None:
        super().__init__(path, key, *PIECES)
        self.passed: list[Place] = []
        self._place = place
        self._way = way
        self.task: asyncio.Task[None] | None = None
        self.left = False

    async def receive(self) -> dict[str, Any]:
        here = self._pass("receive")
        if here and not self._way.endswith("after"):
            await self._leave()
        message = await super().receive()
        if here and self._way.endswith("after"):
            await self._leave()
        return message

    async def send(self, message: Any) -> None:
        here = self._pass("send")
        if here and not self._way.endswith("after"):
            await self._leave()
        await super().send(message)
        if here and self._way.endswith("after"):
            await self._leave()

    def _pass(self, message: Literal["receive", "send"]) -> bool:
        self.passed.append(Place(message, sum(place.message == message for place in self.passed)))
        return self.passed[-1] == self._place

    async def _leave(self) -> None:
        self.left = True
        self.leave()
        if self._way.startswith("cancelled"):
            assert self.task is not None
            self.task.cancel()
            await asyncio.sleep(0)  # where we are in the task that is cancelled, it ends here


async def _speak(scene: Scene, story: Story, place: Place | None = None, way: Way = "gone") -> Leaving:
    asked = Leaving(f"/{story.kind}", story.key, place, way)
    story.seen.append(asked)
    asked.task = asked.start(scene.app)
    await asyncio.wait([asked.task])
    async with asyncio.timeout(5.0):
        while scene.once.engine.tasks:  # a handler whose client has left
            await asyncio.sleep(0.001)
    return asked


async def _one(run: Run, scene: Scene, kind: str, place: Place, way: Way) -> bool:
    """One key; whether its client did leave."""
    story = Story(f"{kind}-{run.hits}", kind, f"{kind}: {way} at {place.message} {place.nth}")
    first = await _speak(scene, story, place, way)
    begun = scene.attempts[story.key]
    if place.message == "receive" and place.nth < len(PIECES) and way == "gone" and begun:
        run.violated("I1", f"begun without its body: {story.told()}")
    await story.until_ended(scene, scene.app)
    run.asked(len(story.seen))
    for promise, what in blemishes(scene, story):
        run.violated(promise, what)
    if story.unknown and kind not in ("raises", "raw-raises"):
        run.violated("I4", f"a client that left made its key unknown: {story.told()}")
    finished = begun == 1 and kind not in (
        "raises",
        "raw-raises",
        "not-executed",
        "refused",
        "stumbles",
        "server-error",
    )
    finished = finished and kind != "enlisted-raises"
    if finished and story.seen[1].saw is not Saw.REPLAYED and story.seen[1].status != 202:
        run.violated("I2", f"it had run, and was not replayed: {story.told()}")
    return first.left


async def _all(run: Run, folder: Path) -> None:
    scene = Scene(make_store(template(folder) if run.store == "sqlite" else None, 0))
    kinds = [name for name in KINDS if name not in ("slow", "held", "waited") and not _missing(run, name)]
    planned = []
    for kind in kinds:
        asked = await _speak(scene, Story(f"{kind}-clean", kind, "the client stays"))
        planned += [(kind, place, way) for place in asked.passed for way in WAYS]
    run.notes.append(f"{len(planned)} places and ways of {len(kinds)} kinds of handlers")
    planned = run.random.sample(planned, len(planned)) * AGAIN
    stayed = []
    for kind, place, way in planned if run.count >= EVERYTHING else planned[: run.count]:
        if not await _one(run, scene, kind, place, way):
            stayed.append(f"{kind} {way} at {place}")
        run.hit()
    await scene.close()
    if stayed:
        raise AssertionError(f"these did not leave: {stayed}")


def _missing(run: Run, kind: str) -> bool:
    return KINDS[kind].needs_tables and run.store == "memory"


def every_message(run: Run) -> None:
    with quiet(), without_a_disk(run.folder) as folder:
        asyncio.run(_all(run, folder))


FAULTS = (
    Fault(
        "disconnect at each ASGI receive and send",
        every_message,
        counts={"sqlite": EVERYTHING},
        short=40,
        promises=("I1", "I2", "I4"),
    ),
)
