"""The loop lane: the loop asks by itself while all goes well, for what it can carry, and until it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import End, Swap, swap
from oncekey.engine.batching import batch, loop_lane
from oncekey.engine.batching.router import Router
from oncekey.errors import StoreOverloaded, StoreUnavailable
from tests.engine.doubles import PATIENCE, RESPONSE, reservation
from tests.engine.in_loop import FastStore, Quick, ask, run, warmed

# ---------------------------------------------------------------- batches


def test_loop_lane_takes_all_but_the_first_reservation() -> None:
    """A thread lane prepares and checks the tables; after it neither a reservation nor the first swap takes a thread.
    Where every handler enlists its transaction, no swap ever comes."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        (found,) = await ask(router, reservation("a"))
        (moved,) = await ask(router, swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE))
        assert moved.state is State.COMPLETED
        assert [verb for verb, _ in store.asked_here] == ["reserve", "swap"]
        assert store.batches == []
        await asyncio.to_thread(router.close, PATIENCE)
        assert [quick.abandoned for quick in store.opened] == [1]

    run(main)


def test_completions_and_reservations_share_a_commit() -> None:
    """One question for both. Completions come first, so that a retry of the same key gets its response."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        (found,) = await ask(router, reservation("a"))
        end = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        moved, again, new = await ask(router, end, reservation("a"), reservation("b"))
        assert [(verb, [work.key for work in batch]) for verb, batch in store.asked_here[1:]] == [
            ("both", ["a", "a", "b"])
        ]
        assert moved.state is State.COMPLETED
        assert again.record.response == RESPONSE
        assert new.record.state is State.IN_PROGRESS
        store.fails_after = StoreUnavailable("cut")
        end = swap(new.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        moved, newer = await ask(router, end, reservation("c"))
        assert moved is None, "it was moved before the cut: the lane says so, and its owner reads the row"
        assert newer.record.state is State.IN_PROGRESS
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_work_that_arrives_during_a_batch_is_the_next_batch() -> None:
    """Group commit: one batch for all that waited, each key once, the same for callers of the same key."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.held = asyncio.Event()
        store.arrived.clear()
        first = asyncio.create_task(ask(router, reservation("a")))
        await store.arrived.wait()
        twins = [reservation("b"), reservation("b"), reservation("c")]
        rest = asyncio.create_task(ask(router, *twins))
        await asyncio.sleep(0)
        store.held.set()
        await first
        answers = await rest
        assert [[work.key for work in batch] for _, batch in store.asked_here] == [["a"], ["b", "c"]]
        assert [answer.record.owner for answer in answers] == [twins[0].owner, twins[0].owner, twins[2].owner]
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_two_ends_of_one_key_are_two_batches() -> None:
    """A late owner and the one that took over: a statement names each key once."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        (found,) = await ask(router, reservation("a"))
        mine = swap(found.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        late = replace(mine, owner="late")
        moved, not_moved = await ask(router, mine, late)
        assert (moved.state, not_moved) == (State.COMPLETED, None)
        assert [[work.owner for work in batch] for verb, batch in store.asked_here if verb == "swap"] == [
            [mine.owner],
            ["late"],
        ]
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_large_bodies_are_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement has a bounded size; no end is lost, and none is answered twice."""
    monkeypatch.setattr(batch, "MAX_BATCH_BYTES", 25)

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        found = await ask(router, *(reservation(f"k-{number}") for number in range(5)))
        ends = [
            swap(each.record, Event.COMPLETE, Actor.OWNER, response=StoredResponse(201, (), b"x" * 10))
            for each in found
        ]
        moved = await ask(router, *ends)
        assert [record.state for record in moved] == [State.COMPLETED] * 5
        assert [len(batch) for verb, batch in store.asked_here if verb == "swap"] == [3, 2]
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_end_is_a_swap_where_a_thread_lane_does_it() -> None:
    """The flat way's end, in the loop and by a thread: the same row."""

    class Owner:
        def __init__(self, record: Record) -> None:
            self.record = record

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        rows = []
        for key, trouble in (("a", None), ("b", StoreUnavailable("cut"))):
            (found,) = await ask(router, reservation(key))
            store.fails_before = trouble
            end = End(found.record.scope, key, found.record.owner, RESPONSE, Owner(found.record))
            (moved,) = await ask(router, end)
            store.fails_before = None
            rows.append(store.row(key))
            assert moved.state is State.COMPLETED
        assert [row and (row.state, row.response, row.attempt) for row in rows] == [(State.COMPLETED, RESPONSE, 1)] * 2
        assert store.asked("swap"), "a thread lane did the second"
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


# ---------------------------------------------------------------- what takes the lanes


def test_other_work_goes_to_the_thread_lanes() -> None:
    """Whatever is not a reservation or the end of an attempt, and ends of rows that were not seen."""
    wanted = reservation("a")
    record = wanted.record(1_000.0)
    step = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True)
    end = swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
    expired = replace(record, state=State.EXPIRED)
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
    assert all(loop_lane.fits(work) for work in rides.values())
    assert not any(loop_lane.fits(work) for work in walks.values())


def test_a_store_that_leaves_most_keys_to_the_lanes_is_hardly_asked() -> None:
    """It steps aside but for a sample. Replays bring it back."""

    async def main() -> None:
        store = FastStore()
        known = reservation("known")
        store.put(known)
        here: list[str] = []

        class Reads(Quick):
            async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
                here.extend(work.key for work in batch)
                return [*self.store.inner.read([(work.scope, work.key) for work in batch])]

        store.in_loop = lambda: Reads(store)  # type: ignore[method-assign]
        router = await warmed(store)
        for number in range(40):
            wanted = reservation(f"new-{number}")
            (found,) = await ask(router, wanted)
            assert found.record.owner == wanted.owner, "a new key is the lane's, and gets its row there"
        assert 1 <= len(here) < 20, "it went on asking for what is not there"
        here.clear()
        for _ in range(12 * loop_lane.SAMPLE):
            (found,) = await ask(router, reservation("known"))
            assert found.record.owner == known.owner
        assert len(here) > 2 * loop_lane.SAMPLE, "it did not come back for replays"
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_full_loop_lane_refuses_reservations() -> None:
    """The bound of the queue holds here as well."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store, max_queued=2)
        store.held = asyncio.Event()
        store.arrived.clear()
        tasks = [asyncio.create_task(ask(router, reservation("a")))]
        await store.arrived.wait()
        lane_gate = store.hold("reserve")
        tasks += [asyncio.create_task(ask(router, reservation(f"b{n}"))) for n in range(7)]
        await asyncio.sleep(0)
        refused = 0
        for number in range(5):
            try:
                router.ask(reservation(f"c{number}"), asyncio.get_running_loop(), PATIENCE)
            except StoreOverloaded:
                refused += 1
        assert refused == 5
        store.held.set()
        lane_gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


# ---------------------------------------------------------------- loops, and the end


def test_closing_waits_for_the_running_batch() -> None:
    """A completion that the loop has sent is not cut off by the close."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.held = asyncio.Event()
        store.arrived.clear()
        asking = asyncio.create_task(ask(router, reservation("a")))
        await store.arrived.wait()
        closing = asyncio.create_task(asyncio.to_thread(router.close, PATIENCE))
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
    kept: list[Router] = []

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
