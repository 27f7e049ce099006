"""A loop lane in trouble: the thread lanes take over what it sent, and no caller that left keeps a reservation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from oncekey.core.record import Record, Reservation
from oncekey.engine.batching import batch, loop_lane
from oncekey.engine.batching.router import Router
from oncekey.errors import StoreError, StoreUnavailable
from oncekey.stores.api import LostRace
from tests.engine.doubles import PATIENCE, eventually, reservation
from tests.engine.in_loop import FastStore, Quick, ask, run, warmed

# ---------------------------------------------------------------- trouble, and what is none


@pytest.mark.parametrize("when", ["fails_before", "fails_after"])
def test_trouble_is_left_to_the_lanes(when: str) -> None:
    """Whether the lost batch had happened or not, the lane asks again, and the owner token tells; then it rests."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        setattr(store, when, StoreUnavailable("cut"))
        wanted = reservation("a")
        (found,) = await ask(router, wanted)
        assert found.record.owner == wanted.owner
        assert [verb for verb, _ in store.batches] == ["reserve"]
        await ask(router, reservation("b"))
        assert len(store.asked_here) == 1, "it did not rest after trouble"
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_after_its_rest_the_express_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble does not last, and is told, though the lanes got by."""
    monkeypatch.setattr(loop_lane, "PAUSE_SECONDS", 0.0)
    told: list[tuple[str, str, int]] = []

    async def main() -> None:
        store = FastStore()
        router = await warmed(store, on_error=lambda verb, error, failed: told.append((verb, str(error), failed)))
        store.fails_before = StoreUnavailable("cut")
        await ask(router, reservation("a"))
        store.fails_before = None
        await ask(router, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        assert len(store.batches) == 1
        assert told == [("reserve", "cut", 0)], "no request failed"
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_outage_in_the_loop_and_in_the_thread_is_reported_once() -> None:
    reports: list[tuple[str, int]] = []

    async def main() -> None:
        store = FastStore()
        router = await warmed(store, on_error=lambda verb, _, requests: reports.append((verb, requests)))
        store.fails_before = StoreUnavailable("cut")
        store.break_("reserve", lambda: StoreUnavailable("down"))
        store.break_("swap", lambda: StoreUnavailable("down"))
        [answer] = await ask(router, reservation("a"))
        assert str(answer) == "down"
        await asyncio.to_thread(router.close, PATIENCE)
        assert reports == [("reserve", 1)]

    run(main)


def test_a_lost_race_is_no_trouble() -> None:
    """A rival was faster with one key: the thread lanes read its row; the loop lane neither pauses nor reports it."""
    told: list[str] = []

    async def main() -> None:
        store = FastStore()
        router = await warmed(store, on_error=lambda verb, *_: told.append(verb))
        store.fails_before = LostRace()
        await ask(router, reservation("a"))
        store.fails_before = None
        await ask(router, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        assert told == []
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_a_bad_row_is_no_trouble() -> None:
    """It is about one key: the lanes tell which, and no other key takes the long way for it."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.fails_after = StoreError("the stored headers of a row are damaged")
        await ask(router, reservation("a"))
        store.fails_after = None
        await ask(router, reservation("b"))
        assert [batch[0].key for _, batch in store.asked_here] == ["a", "b"]
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_an_error_of_the_lanes_reaches_the_caller() -> None:
    """The store is down for the loop lane and for the thread lanes: the caller gets the error."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.fails_before = StoreUnavailable("cut")
        store.break_("reserve", lambda: StoreError("really"))
        (error,) = await ask(router, reservation("a"))
        assert isinstance(error, StoreError)
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_ticket_given_to_a_thread_lane_is_not_given_to_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race is lost for one piece, then the loop ends during the next: what the lane has answered stays answered, also
    when the store is down by then."""
    monkeypatch.setattr(batch, "MAX_BATCH", 1)

    class Raced(Quick):
        async def reserve(self, batch: Sequence[Reservation]) -> list[float | Record | None]:
            if batch[0].key == "a":
                raise LostRace
            self.store.arrived.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        store = FastStore()
        store.in_loop = lambda: Raced(store)  # type: ignore[method-assign]
        router = await warmed(store)
        gate = store.hold("reserve")
        loop = asyncio.get_running_loop()
        wanted = reservation("a")
        store.arrived.clear()
        first, second = (router.ask(work, loop, PATIENCE) for work in (wanted, reservation("b")))
        await store.arrived.wait()  # with the second piece; the first is with the lane
        (now,) = router._loop_lanes.values()
        assert now._task is not None
        store.break_("reserve", lambda: StoreError("down"), about=lambda batch: store.row(batch[0].key) is not None)
        now._task.cancel()
        await asyncio.to_thread(gate.wait)
        gate.open()
        found = await first
        assert found.record.owner == wanted.owner
        await second
        await asyncio.to_thread(router.close, PATIENCE)
        assert store.keys("reserve").count(["a"]) == 1
        assert store.row("a") is not None, "it is in use, and was given back"

    run(main)


# ---------------------------------------------------------------- callers and loops that are gone


def test_caller_that_times_out_leaves_no_reservation() -> None:
    """One look for all: the overdue caller gets its 503 while the batch is under way, and its row is undone."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.held = asyncio.Event()
        late, waiting = reservation("late"), reservation("behind")
        store.arrived.clear()
        first = asyncio.create_task(ask(router, late, timeout=0.01))
        await store.arrived.wait()
        second = asyncio.create_task(ask(router, waiting, timeout=0.01))
        assert [type(end) for end in await first + await second] == [StoreUnavailable, StoreUnavailable]
        store.held.set()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))
        await asyncio.to_thread(router.close, PATIENCE)
        assert store.row("late") is None
        assert store.row("behind") is None
        assert len(store.asked_here) == 1, "no caller waited for it any more"

    run(main)


def test_reservation_of_a_gone_caller_is_undone_after_a_cut_batch() -> None:
    """It may have been reserved before the cut, and its caller will not come back for it."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        store.held = asyncio.Event()
        store.fails_after = StoreUnavailable("cut")
        (error,) = await ask(router, reservation("late"), timeout=0.01)
        assert isinstance(error, StoreUnavailable)
        store.held.set()
        await asyncio.to_thread(eventually, lambda: store.asked("swap"))
        await asyncio.to_thread(router.close, PATIENCE)
        assert store.row("late") is None

    run(main)


def test_reservation_of_a_gone_caller_is_undone_by_a_busy_lane() -> None:
    """The loop lane reserved and lost the answer; the thread lane drops the ticket, since its caller has left."""

    async def main() -> None:
        store = FastStore()
        router = await warmed(store)
        gate = store.hold("read")
        busy = router.ask(("tenant-1", "late"), asyncio.get_running_loop(), PATIENCE)  # to the lane of that key
        await asyncio.to_thread(gate.wait)
        store.fails_after = StoreUnavailable("cut")
        (error,) = await ask(router, reservation("late"), timeout=0.1)
        assert isinstance(error, StoreUnavailable)
        assert store.row("late") is not None
        gate.open()
        await asyncio.to_thread(eventually, lambda: store.row("late") is None)
        await busy
        await asyncio.to_thread(router.close, PATIENCE)

    run(main)


def test_a_cancelled_loop_leaves_its_tickets_to_the_lanes() -> None:
    """asyncio.run cancels every task at its end: what the loop lane had sent may have happened, and is undone."""
    store = FastStore()
    kept: list[Router] = []

    async def main() -> None:
        kept.append(await warmed(store))
        store.held = asyncio.Event()
        store.arrived.clear()
        asyncio.create_task(ask(kept[0], reservation("cut-off")))  # noqa: RUF006 - it is meant to be cancelled
        await store.arrived.wait()

    run(main)
    assert kept[0].close(PATIENCE)
    assert store.row("cut-off") is None


def test_a_loop_that_was_closed_by_hand_harms_no_other() -> None:
    """Its callers are gone: what they had asked for is undone, and the next loop's first request is served."""
    store = FastStore()
    kept: list[Router] = []
    loop = asyncio.new_event_loop()

    async def first() -> None:
        kept.append(await warmed(store))
        store.held = asyncio.Event()
        store.arrived.clear()
        aboard = reservation("aboard")
        kept[0].ask(aboard, loop, PATIENCE)
        await store.arrived.wait()
        store.put(aboard)  # it was sent, and happened
        kept[0].ask(reservation("waiting"), loop, PATIENCE)

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
