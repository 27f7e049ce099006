"""The express: the loop asks by itself while all goes well, and the lanes take over when it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from oncekey.core.record import Audit, Found, Record, Reservation, Swap, swap
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.engine import batches, express
from oncekey.engine.lanes import Lanes
from oncekey.engine.tickets import AsyncTicket
from oncekey.errors import StoreError, StoreOverloaded, StoreUnavailable
from oncekey.stores.base import LostRace
from tests.engine.doubles import PATIENCE, RESPONSE, FakeStore, eventually, reservation


class Quick:
    """What a store gives an event loop; it can be held, and told to fail before or after it has done its work."""

    def __init__(self, store: FastStore) -> None:
        self.store = store
        self.abandoned = 0

    async def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        return await self._answer("reserve", batch, self.store.inner.reserve)

    async def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        return await self._answer("swap", batch, self.store.inner.swap)

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[Swap]
    ) -> tuple[list[Found], list[Record | None]]:
        def call(batch: Any) -> list[Any]:
            moved = self.store.inner.swap(ends)
            return [self.store.inner.reserve(begins), moved]

        found, moved = await self._answer("both", [*ends, *begins], call)
        return found, moved

    async def _answer(self, verb: str, batch: Any, call: Callable[[Any], list[Any]]) -> list[Any]:
        store = self.store
        store.asked_here.append((verb, list(batch)))
        store.arrived.set()
        if store.held is not None:
            await store.held.wait()
        if store.fails_before is not None:
            raise store.fails_before
        answer = call(batch)
        if store.fails_after is not None:
            raise store.fails_after
        return answer

    def abandon(self) -> None:
        self.abandoned += 1


class FastStore(FakeStore):
    def __init__(self) -> None:
        super().__init__(writers=2)
        self.capabilities = replace(self.capabilities, in_loop=True)
        self.asked_here: list[tuple[str, list[Any]]] = []
        self.arrived = asyncio.Event()
        self.held: asyncio.Event | None = None
        self.fails_before: BaseException | None = None
        self.fails_after: BaseException | None = None
        self.opened: list[Quick] = []

    def in_loop(self) -> Quick:
        self.opened.append(Quick(self))
        return self.opened[-1]


async def ask(lanes: Lanes, *work: Reservation | Swap, timeout: float = PATIENCE) -> list[Any]:
    loop = asyncio.get_running_loop()
    tickets = [AsyncTicket(item, loop, timeout) for item in work]
    for ticket in tickets:
        lanes.submit(ticket)
    return await asyncio.gather(*[ticket.wait() for ticket in tickets], return_exceptions=True)


async def warmed(store: FastStore, **options: Any) -> Lanes:
    """Lanes whose threads have prepared and checked the tables: from here on the express may run."""
    lanes = Lanes(store, **options)
    wanted = reservation("warm-up")
    (found,) = await ask(lanes, wanted)
    await ask(lanes, swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
    assert store.asked_here == []
    store.batches.clear()
    return lanes


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_the_first_of_each_verb_goes_by_the_lanes_and_the_rest_without_a_thread() -> None:
    """Lanes prepare and check the tables; from then on a reservation and its completion never touch a thread."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        (found,) = await ask(lanes, reservation("a"))
        (moved,) = await ask(lanes, swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
        assert moved.state is State.COMPLETED
        assert [verb for verb, _ in store.asked_here] == ["reserve", "swap"]
        assert store.batches == []
        await asyncio.to_thread(lanes.close, PATIENCE)
        assert [quick.abandoned for quick in store.opened] == [1]

    run(main)


def test_what_ends_and_what_begins_share_a_commit() -> None:
    """One question for both; the end comes first, so that who asks for the same key again finds its response."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        (found,) = await ask(lanes, reservation("a"))
        end = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        moved, again, new = await ask(lanes, end, reservation("a"), reservation("b"))
        assert [(verb, [work.key for work in batch]) for verb, batch in store.asked_here[1:]] == [
            ("both", ["a", "a", "b"])
        ]
        assert moved.state is State.COMPLETED
        assert again.record.response == RESPONSE
        assert new.record.state is State.IN_PROGRESS
        store.fails_after = StoreUnavailable("cut")
        end = swap(new.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        moved, newer = await ask(lanes, end, reservation("c"))
        assert moved is None, "it was moved before the cut: the lane says so, and its owner reads the row"
        assert newer.record.state is State.IN_PROGRESS
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_what_comes_while_a_batch_is_under_way_is_the_next_batch() -> None:
    """Group commit: one batch for all that waited, each key once, the same for callers of the same key."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.held = asyncio.Event()
        store.arrived.clear()
        first = asyncio.create_task(ask(lanes, reservation("a")))
        await store.arrived.wait()
        twins = [reservation("b"), reservation("b"), reservation("c")]
        rest = asyncio.create_task(ask(lanes, *twins))
        await asyncio.sleep(0)
        store.held.set()
        await first
        answers = await rest
        assert [[work.key for work in batch] for _, batch in store.asked_here] == [["a"], ["b", "c"]]
        assert [answer.record.owner for answer in answers] == [twins[0].owner, twins[0].owner, twins[2].owner]
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


@pytest.mark.parametrize("when", ["fails_before", "fails_after"])
def test_trouble_is_left_to_the_lanes(when: str) -> None:
    """Whether the lost batch had happened or not, the lane asks again, and the owner token tells; then it rests."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        setattr(store, when, StoreUnavailable("cut"))
        wanted = reservation("a")
        (found,) = await ask(lanes, wanted)
        assert found.record.owner == wanted.owner
        assert [verb for verb, _ in store.batches] == ["reserve"]
        await ask(lanes, reservation("b"))
        assert len(store.asked_here) == 1, "it did not rest after trouble"
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_after_its_rest_the_express_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble does not last, and is told, though the lanes got by."""
    monkeypatch.setattr(express, "REST_SECONDS", 0.0)
    told: list[tuple[str, str]] = []

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store, on_error=lambda verb, error: told.append((verb, str(error))))
        store.fails_before = StoreUnavailable("cut")
        await ask(lanes, reservation("a"))
        store.fails_before = None
        await ask(lanes, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        assert len(store.batches) == 1
        assert told == [("reserve", "cut")]
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_a_lost_race_is_no_trouble() -> None:
    """A rival was faster with one key: the lanes read its row, and the express does not rest, nor complain."""
    told: list[str] = []

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store, on_error=lambda verb, _: told.append(verb))
        store.fails_before = LostRace()
        await ask(lanes, reservation("a"))
        store.fails_before = None
        await ask(lanes, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        assert told == []
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_an_error_of_the_lanes_reaches_the_caller() -> None:
    """Down for the express and down for the lanes: the caller hears of it."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.fails_before = StoreUnavailable("cut")
        store.break_("reserve", lambda: StoreError("really"))
        (error,) = await ask(lanes, reservation("a"))
        assert isinstance(error, StoreError)
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_who_waits_too_long_gives_up_and_leaves_no_reservation() -> None:
    """One look for all: the overdue caller gets its 503 while the batch is under way, and its row is undone."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.held = asyncio.Event()
        late, waiting = reservation("late"), reservation("behind")
        store.arrived.clear()
        first = asyncio.create_task(ask(lanes, late, timeout=0.01))
        await store.arrived.wait()
        second = asyncio.create_task(ask(lanes, waiting, timeout=0.01))
        assert [type(end) for end in await first + await second] == [StoreUnavailable, StoreUnavailable]
        store.held.set()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))
        await asyncio.to_thread(lanes.close, PATIENCE)
        assert store.row("late") is None
        assert store.row("behind") is None
        assert len(store.asked_here) == 1, "nobody waited for it any more"

    run(main)


def test_who_left_a_batch_that_was_then_cut_is_undone_too() -> None:
    """It may have been reserved before the cut, and nobody will come back for it."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.held = asyncio.Event()
        store.fails_after = StoreUnavailable("cut")
        (error,) = await ask(lanes, reservation("late"), timeout=0.01)
        assert isinstance(error, StoreUnavailable)
        store.held.set()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))
        await asyncio.to_thread(lanes.close, PATIENCE)
        assert store.row("late") is None

    run(main)


def test_a_cancelled_loop_leaves_its_tickets_to_the_lanes() -> None:
    """asyncio.run cancels every task at its end: what the express had sent may have happened, and is undone."""
    store = FastStore()
    kept: list[Lanes] = []

    async def main() -> None:
        kept.append(await warmed(store))
        store.held = asyncio.Event()
        store.arrived.clear()
        asyncio.create_task(ask(kept[0], reservation("cut-off")))  # noqa: RUF006 - it is meant to be cancelled
        await store.arrived.wait()

    run(main)
    assert kept[0].close(PATIENCE)
    assert store.row("cut-off") is None


def test_what_it_cannot_carry_takes_the_lanes() -> None:
    """Whatever is not a reservation or the end of an attempt, and ends of rows that were not seen."""
    wanted = reservation("a")
    record = wanted.record(1_000.0)
    step = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True)
    end = swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    expired = replace(record, state=State.EXPIRED)
    loop = asyncio.new_event_loop()
    try:
        rides: dict[str, Reservation | Swap] = {
            "complete": end,
            "fail": swap(record, Event.FAIL, Actor.OWNER, response=RESPONSE),
            "reservation": wanted,
        }
        walks = {
            "renew": swap(record, Event.RENEW, Actor.OWNER, lease_seconds=1.0),
            "release": swap(record, Event.RELEASE, Actor.OWNER),
            "late": swap(replace(record, state=State.UNKNOWN), Event.COMPLETE, Actor.OWNER, response=RESPONSE),
            "discard": swap(record, Event.DISCARD, Actor.OWNER),
            "restart": swap(expired, Event.RESERVE, Actor.REQUEST, reservation=reservation("a")),
            "step": swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="started", step=step),
            "unseen": replace(end, seen=None),
            "with a step": replace(end, step=step),
            "audited": replace(end, audit=Audit("me", "because")),
            "with effects": replace(end, effects=record.effects),
            "with a point": replace(end, recovery_point="started"),
        }
        assert all(express.fits(work) for work in rides.values())
        assert not any(express.fits(work) for work in walks.values())
    finally:
        loop.close()


def test_a_full_express_refuses_who_begins() -> None:
    """The bound of the queue holds here as well."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store, max_queued=2)
        store.held = asyncio.Event()
        store.arrived.clear()
        tasks = [asyncio.create_task(ask(lanes, reservation("a")))]
        await store.arrived.wait()
        lane_gate = store.hold("reserve")
        tasks += [asyncio.create_task(ask(lanes, reservation(f"b{n}"))) for n in range(7)]
        await asyncio.sleep(0)
        refused = 0
        for number in range(5):
            try:
                lanes.submit(AsyncTicket(reservation(f"c{number}"), asyncio.get_running_loop(), PATIENCE))
            except StoreOverloaded:
                refused += 1
        assert refused == 5
        store.held.set()
        lane_gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_closing_waits_for_what_is_under_way() -> None:
    """A completion that the loop has sent is not cut off by the close."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.held = asyncio.Event()
        store.arrived.clear()
        asking = asyncio.create_task(ask(lanes, reservation("a")))
        await store.arrived.wait()
        closing = asyncio.create_task(asyncio.to_thread(lanes.close, PATIENCE))
        await asyncio.sleep(0.01)
        assert not closing.done()
        store.held.set()
        (found,) = await asking
        assert found.record.key == "a"
        assert await closing
        assert store.opened[0].abandoned == 1

    run(main)


def test_each_loop_has_its_own_and_a_dead_one_is_cleared_away() -> None:
    """A connection belongs to one loop; when that is closed, the next loop's first ticket lets go of it."""
    store = FastStore()
    kept: list[Lanes] = []

    async def first() -> None:
        kept.append(await warmed(store))
        await ask(kept[0], reservation("a"))

    async def second() -> None:
        await ask(kept[0], reservation("b"))

    asyncio.run(first())
    thread = threading.Thread(target=lambda: asyncio.run(second()))
    thread.start()
    thread.join(PATIENCE)
    assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
    assert [quick.abandoned for quick in store.opened] == [1, 0]
    assert kept[0].close(PATIENCE)


def test_a_store_that_leaves_most_keys_to_the_lanes_is_hardly_asked() -> None:
    """It steps aside but for a sample. Replays bring it back."""

    async def main() -> None:
        store = FastStore()
        known = reservation("known")
        store.put(known)
        here: list[str] = []

        class Reads(Quick):
            async def reserve(self, batch: Sequence[Reservation]) -> list[Any]:
                here.extend(work.key for work in batch)
                found = self.store.inner.read([(work.scope, work.key) for work in batch])
                return [Found(record) if record is not None else None for record in found]

        store.in_loop = lambda: Reads(store)  # type: ignore[method-assign]
        lanes = await warmed(store)
        for number in range(40):
            wanted = reservation(f"new-{number}")
            (found,) = await ask(lanes, wanted)
            assert found.record.owner == wanted.owner, "a new key is the lane's, and gets its row there"
        assert 1 <= len(here) < 20, "it went on asking for what is not there"
        here.clear()
        for _ in range(12 * express.SAMPLE):
            (found,) = await ask(lanes, reservation("known"))
            assert found.record.owner == known.owner
        assert len(here) > 2 * express.SAMPLE, "it did not come back for replays"
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_who_was_left_to_the_lanes_is_not_left_to_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race is lost for one piece, then the loop ends during the next: what the lane has answered stays answered, also
    when the store is down by then."""
    monkeypatch.setattr(batches, "MAX_BATCH", 1)

    class Raced(Quick):
        async def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
            if batch[0].key == "a":
                raise LostRace
            self.store.arrived.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        store = FastStore()
        store.in_loop = lambda: Raced(store)  # type: ignore[method-assign]
        lanes = await warmed(store)
        gate = store.hold("reserve")
        loop = asyncio.get_running_loop()
        wanted = reservation("a")
        first, second = (AsyncTicket(work, loop, PATIENCE) for work in (wanted, reservation("b")))
        store.arrived.clear()
        lanes.submit(first)
        lanes.submit(second)
        await store.arrived.wait()  # with the second piece; the first is with the lane
        (now,) = lanes._expresses.values()
        assert now._task is not None
        store.break_("reserve", lambda: StoreError("down"), about=lambda batch: store.row(batch[0].key) is not None)
        now._task.cancel()
        await asyncio.to_thread(gate.wait)
        gate.open()
        found = await first.wait()
        assert found.record.owner == wanted.owner
        await second.wait()
        await asyncio.to_thread(lanes.close, PATIENCE)
        assert store.keys("reserve").count(["a"]) == 1
        assert store.row("a") is not None, "it is in use, and was given back"

    run(main)


def test_a_bad_row_is_no_trouble() -> None:
    """It is about one key: the lanes tell whose, and nobody else takes the long way for it."""

    async def main() -> None:
        store = FastStore()
        lanes = await warmed(store)
        store.fails_after = StoreError("the stored headers of a row are damaged")
        await ask(lanes, reservation("a"))
        store.fails_after = None
        await ask(lanes, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        await asyncio.to_thread(lanes.close, PATIENCE)

    run(main)


def test_a_loop_that_was_closed_by_hand_harms_no_other() -> None:
    """Its callers are gone: what they had asked for is undone, and the next loop's first request is served."""
    store = FastStore()
    kept: list[Lanes] = []
    loop = asyncio.new_event_loop()

    async def first() -> None:
        kept.append(await warmed(store))
        store.held = asyncio.Event()
        store.arrived.clear()
        aboard = reservation("aboard")
        kept[0].submit(AsyncTicket(aboard, loop, PATIENCE))
        await store.arrived.wait()
        store.put(aboard)  # it was sent, and happened
        kept[0].submit(AsyncTicket(reservation("waiting"), loop, PATIENCE))

    loop.run_until_complete(first())
    tasks = asyncio.all_tasks(loop)
    loop.close()

    async def second() -> None:
        store.held = None
        (found,) = await ask(kept[0], reservation("b"))
        assert found.record.key == "b"

    asyncio.run(second())
    assert store.opened[0].abandoned == 1
    assert kept[0].close(PATIENCE)
    assert store.row("aboard") is None
    assert store.row("waiting") is None
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop is gone, as the test wants it
