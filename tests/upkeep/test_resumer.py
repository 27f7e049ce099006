"""The resumer: upkeep goes on with half-done requests, as the owner of an attempt of its own."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import LONGEST_RESUME_SECONDS, RESUME_SECONDS, swap
from oncekey.engine.resumption import Answer, Resumption
from oncekey.stores.api import Duty
from oncekey.upkeep import Reaper, Resumer, Sweeper, Upkeep
from tests.upkeep.half_done import counts, finishes, half_done, phased, raises, resume
from tests.upkeep.key_store import OPERATION, RETENTION, KeyStore

# -- when it is a key's turn -------------------------------------------------------------------------------------------


def test_half_done_request_is_ended_by_upkeep(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    assert resume(once, finishes) == {"due": 1, "completed": 1}
    found = rows.get(record)
    assert (found.state, found.attempt, found.owner != record.owner) == (State.COMPLETED, 2, True)
    assert found.response is not None
    assert (found.response.status, found.response.body) == (201, b'{"charge":"ch_1","attempt":2}')
    assert rows.names() == ["Resumed", "Completed"]
    assert resume(once) == {}


def test_client_has_the_first_try_after_a_release(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS - 5)
    assert resume(phased(rows), finishes) == {}
    assert rows.get(record).state is State.FAILED_RETRYABLE


def test_request_whose_process_died_is_resumed_after_the_sweeper(rows: KeyStore) -> None:
    record = half_done(rows, released=False)
    once = phased(rows)
    rows.age(61)
    assert Sweeper(rows.store).run().released == 1
    assert resume(once, finishes) == {}
    rows.age(RESUME_SECONDS + 1)
    assert resume(once) == {"due": 1, "completed": 1}
    assert rows.get(record).state is State.COMPLETED


def test_key_that_was_refuted_is_resumed_at_once(rows: KeyStore) -> None:
    """A verdict needs no pause: the client was told to ask later, and may never."""
    record = half_done(rows, released=False)
    (record,) = rows.moved([record], Event.DOUBT, Actor.OWNER)
    rows.age(400)
    rows.moved([record], Event.REFUTE, Actor.RECONCILER, quarantine_seconds=300.0)
    assert resume(phased(rows), finishes) == {"due": 1, "completed": 1}


def test_verdict_on_a_key_past_its_expiry_stands(rows: KeyStore) -> None:
    """Half-done keys past their expiry become unknown. One that a verdict has freed has its whole retention."""
    record = half_done(rows, released=False)
    (record,) = rows.moved([record], Event.DOUBT, Actor.OWNER)
    rows.age(RETENTION + 400)
    rows.moved([rows.get(record)], Event.REFUTE, Actor.RECONCILER)
    assert Reaper(rows.store).run().doubted == 0
    found = rows.get(record)
    assert (found.state, round(found.expires_at - found.now)) == (State.FAILED_RETRYABLE, RETENTION)
    assert resume(phased(rows), finishes) == {"due": 1, "completed": 1}


def test_key_without_steps_is_left_to_its_client(rows: KeyStore) -> None:
    (record,) = rows.reserved(effects=Effects.PHASED)
    rows.moved([record], Event.RELEASE, Actor.OWNER)
    rows.age(RETENTION / 2)
    assert resume(phased(rows), finishes) == {}
    assert rows.store.due(Duty.RESUMABLE, 10) == []


def test_client_that_was_faster_keeps_the_key(rows: KeyStore) -> None:
    """It came back between the look and the claim."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    calls: list[str] = []
    once.resume(OPERATION, counts(calls))
    resumer = Resumer(once)
    due = rows.store.due

    def look(duty: Duty, limit: int) -> list[Record]:
        seen = due(duty, limit)
        (wanted,) = rows.reservations(1)
        rows.moved([record], Event.RETRY, Actor.REQUEST, reservation=wanted)
        return seen

    once.store.due = look  # type: ignore[method-assign]
    try:
        assert resumer.run().as_json()["completed"] == 0
    finally:
        once.store.due = due  # type: ignore[method-assign]
        resumer.close()
    assert (calls, rows.get(record).state) == ([], State.IN_PROGRESS)


def test_two_at_once_resume_a_key_once(rows: KeyStore) -> None:
    records = [half_done(rows) for _ in range(20)]
    rows.age(RESUME_SECONDS + 1)
    calls: list[str] = []
    onces = [phased(rows, store=rows.another()) if rows.kind != "memory" else phased(rows) for _ in range(2)]

    async def go_on(op: Resumption) -> Answer:
        calls.append(op.key)
        await asyncio.sleep(0)
        return 201, None

    threads = [threading.Thread(target=resume, args=(once, go_on)) for once in onces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == sorted(record.key for record in records)
    assert rows.states(records) == [State.COMPLETED] * 20


def test_key_in_hand_is_in_progress_for_everybody_else(rows: KeyStore) -> None:
    """Its lease is the route's, and (state, owner) fences the owner that had it before."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    seen: list[Record] = []
    late: list[Record | None] = []

    def go_on(op: Resumption) -> Answer:
        seen.append(rows.get(record))
        late.extend(rows.store.swap([swap(record, Event.POSTPONE, Actor.OPERATOR, reconcile_in=0.0)]))
        rows.store.disconnect()
        return 201, None

    assert resume(phased(rows, lease=timedelta(seconds=90)), go_on) == {"due": 1, "completed": 1}
    assert (seen[0].state, seen[0].attempt, late) == (State.IN_PROGRESS, 2, [None])
    assert 60 < seen[0].lease_until - seen[0].now <= 90


# -- tries -------------------------------------------------------------------------------------------------------------


def test_function_that_always_raises_ends_in_the_dead_letters(rows: KeyStore) -> None:
    record = half_done(rows)
    once = phased(rows)
    once.resume(OPERATION, raises(ValueError("no")))
    pauses = []
    for tries in (1, 2):
        rows.age(LONGEST_RESUME_SECONDS)
        assert resume(once, max_tries=3) == {"due": 1, "retryable": 1}
        found = rows.get(record)
        assert found.reconcile_at is not None
        assert (found.reconcile_tries, found.attempt, found.dead) == (tries, tries + 1, False)
        pauses.append(round(found.reconcile_at - found.now))
    assert pauses == [60, 120]
    rows.age(121)
    assert resume(once, max_tries=3) == {"due": 1, "dead": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_at, found.reconcile_tries) == (State.FAILED_RETRYABLE, None, 3)
    assert found.dead
    assert "ValueError" in (found.last_error or "")
    assert rows.names()[-1] == "ResumeGaveUp"
    (line,) = rows.store.audit(record.scope, record.key, 10)
    assert (line.who, line.event) == ("resumer", "postpone")
    assert "tried 3 times, and no more" in line.why
    rows.age(LONGEST_RESUME_SECONDS)
    assert resume(once, max_tries=3) == {}


def test_try_that_kills_the_process_counts(rows: KeyStore) -> None:
    """Its lease runs out, and the sweeper releases it: after the last such try it is not called again."""
    record = half_done(rows)
    once = phased(rows)
    for _ in range(2):
        rows.age(LONGEST_RESUME_SECONDS)
        (wanted,) = rows.reservations(1, effects=Effects.PHASED)
        rows.moved([rows.get(record)], Event.RETRY, Actor.RESUMER, reservation=wanted)
        rows.age(61)
        Sweeper(rows.store).run()
    rows.age(LONGEST_RESUME_SECONDS)
    calls: list[str] = []
    assert resume(once, counts(calls), max_tries=2) == {"due": 1, "dead": 1}
    assert (calls, rows.get(record).dead) == ([], True)


def test_clients_retry_starts_the_tries_over(rows: KeyStore) -> None:
    """A dead letter is retried by its client as ever, and is on the list again if that fails."""
    record = half_done(rows)
    once = phased(rows)
    rows.age(RESUME_SECONDS + 1)
    assert resume(once, raises(ValueError("no")), max_tries=1) == {"due": 1, "dead": 1}
    (wanted,) = rows.reservations(1, effects=Effects.PHASED)
    (claimed,) = rows.moved([rows.get(record)], Event.RETRY, Actor.REQUEST, reservation=wanted)
    rows.moved([claimed], Event.RELEASE, Actor.OWNER)
    found = rows.get(record)
    assert (found.reconcile_tries, found.reconcile_at is not None) == (0, True)


# -- beside others -----------------------------------------------------------------------------------------------------


def test_tenant_with_many_keys_does_not_keep_another_waiting(rows: KeyStore) -> None:
    for _ in range(30):
        half_done(rows, scope="crowd")
    rows.age(5)
    single = half_done(rows, scope="single")
    rows.age(RESUME_SECONDS + 1)
    order: list[str] = []
    resume(phased(rows), counts(order), concurrency=1, batch=10)
    assert len(order) == 31
    assert order.index("single") < 10
    assert rows.get(single).state is State.COMPLETED


def test_stop_lets_the_function_end_and_takes_no_other(rows: KeyStore) -> None:
    records = [half_done(rows) for _ in range(2)]
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    running, stopping = threading.Event(), threading.Event()

    def go_on(op: Resumption) -> Answer:
        running.set()
        stopping.wait(10)
        return 201, None

    once.resume(OPERATION, go_on)
    upkeep = Upkeep(once, resume_every=0.1, resumer=Resumer(once, concurrency=1))
    upkeep.start()
    assert running.wait(10)
    upkeep._stop.set()
    stopping.set()
    assert upkeep.stop(10)
    assert sorted(str(state) for state in rows.states(records)) == ["completed", "failed_retryable"]


async def test_stop_cuts_a_function_off_that_does_not_end(rows: KeyStore) -> None:
    """Its key is left to its lease, as a crash leaves it."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    running = asyncio.Event()

    async def hangs(op: Resumption) -> Answer:
        running.set()
        await asyncio.Event().wait()
        return 201, None

    once.resume(OPERATION, hangs)
    upkeep = Upkeep(once, resume_every=0.1)
    upkeep.start()
    await asyncio.wait_for(running.wait(), 10)
    assert await upkeep.astop(0.2)
    found = rows.get(record)
    assert (found.state, found.attempt) == (State.IN_PROGRESS, 2)
    assert once.engine.keeper._live == {}


def test_verdict_and_resumption_in_one_round(rows: KeyStore) -> None:
    """`oncekey upkeep --once`: what the reconciler settles, the resumer ends in the same run."""
    from oncekey import Refuted

    record = half_done(rows, released=False)
    rows.moved([record], Event.DOUBT, Actor.OWNER)
    rows.age(400)
    once = phased(rows)
    once.resolve_with(OPERATION, lambda inquiry: Refuted("no such charge"))
    once.resume(OPERATION, finishes)
    turns = {turn.duty: turn.result.as_json() for turn in Upkeep(once).run_once() if turn.result}
    assert (turns["reconcile"]["refuted"], turns["resume"]["completed"]) == (1, 1)
    assert rows.get(record).state is State.COMPLETED


def test_dry_run_counts_and_changes_nothing(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    once.resume(OPERATION, finishes)
    assert Resumer(once).run(dry_run=True).as_json()["due"] == 1
    assert rows.get(record).state is State.FAILED_RETRYABLE
