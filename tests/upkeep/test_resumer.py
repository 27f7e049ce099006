"""The resumer: upkeep goes on with half-done requests, as the owner of an attempt of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from oncekey import NotExecuted, OnceKey, OutcomeUnknown, Policy, current
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import LONGEST_RESUME_SECONDS, RESUME_SECONDS, swap
from oncekey.engine.flows import Finished, Flow
from oncekey.engine.resumption import Answer, Resumption
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.outbox import Response
from oncekey.stores.api import Duty
from oncekey.upkeep import Reaper, Resumer, Sweeper, Upkeep
from oncekey.upkeep.resumer import LEFT_SECONDS, NO_FUNCTION_SECONDS
from tests.upkeep.key_store import OPERATION, RETENTION, KeyStore

Function = Callable[[Resumption], Any]
CHARGED = Step("charge", StepKind.EFFECT, StepState.DONE, False, b'{"id":"ch_1"}', "down-1", "ch_1")


def half_done(rows: KeyStore, *, released: bool = True, **how: Any) -> Record:
    """A key whose first attempt charged, and then fell."""
    (record,) = rows.reserved(effects=Effects.PHASED, **how)
    (record,) = rows.moved([record], Event.ADVANCE, Actor.OWNER, recovery_point="charge", step=CHARGED)
    return rows.moved([record], Event.RELEASE, Actor.OWNER, last_error="it fell")[0] if released else record


def resume(once: OnceKey, function: Function | None = None, **how: Any) -> dict[str, int]:
    """One run with this function: what it did."""
    if function is not None:
        once.resume(OPERATION, function)
    resumer = Resumer(once, **how)
    try:
        return {name: number for name, number in resumer.run().as_json().items() if number}
    finally:
        resumer.close()
        once.store.disconnect()  # of this thread


def counts(calls: list[Any]) -> Function:
    """Must not be called, or notes whose it is."""

    def go_on(op: Resumption) -> Answer:
        calls.append(op.scope)
        return 201, None

    return go_on


def phased(rows: KeyStore, **policy: Any) -> OnceKey:
    return rows.once(effects="phased", **policy)


def finishes(op: Resumption) -> Answer:
    return 201, {"charge": op.result("charge")["id"], "attempt": op.attempt}


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


# -- what the function is given, and what it returns -------------------------------------------------------------------


def test_function_is_given_the_operation(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    seen: list[Any] = []

    async def go_on(op: Resumption) -> Answer:
        remembered = await op.effect("charge", lambda: {"id": "a second charge"}, repeatable=False)
        new = await op.effect("mail", lambda: {"sent": True}, repeatable=True)
        seen.extend([current() is op, op.scope, op.key, op.name, op.request, op.result("charge"), op.result("nothing")])
        seen.append(op.downstream_key("charge"))
        return 201, [remembered, new]

    assert resume(phased(rows), go_on) == {"due": 1, "completed": 1}
    assert seen[:-1] == [True, "single-tenant", record.key, OPERATION, None, {"id": "ch_1"}, None]
    response = rows.get(record).response
    assert response is not None
    assert response.body == b'[{"id":"ch_1"},{"sent":true}]'


def test_plain_function_has_the_blocking_verbs(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    def go_on(op: Resumption) -> Answer:
        assert current() is op
        return Response(201, op.blocking.effect("charge", lambda: "a second charge", repeatable=False))

    assert resume(phased(rows), go_on) == {"due": 1, "completed": 1}
    response = rows.get(record).response
    assert response is not None
    assert response.body == b'{"id":"ch_1"}'


def test_step_that_was_neither_taken_nor_read_comes_first(rows: KeyStore) -> None:
    """As in a handler: a new step in front of one that is done means that the order has changed. Reading counts."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    def go_on(op: Resumption) -> Answer:
        if op.attempt == 3:
            op.result("charge")
        return 201, op.blocking.effect("mail", lambda: "sent", repeatable=True)

    once = phased(rows)
    assert resume(once, go_on) == {"due": 1, "retryable": 1}
    assert "comes before" in (rows.get(record).last_error or "")
    rows.age(LONGEST_RESUME_SECONDS)
    assert resume(once) == {"due": 1, "completed": 1}


def test_scope_is_the_tenant_where_keys_are_per_endpoint(rows: KeyStore) -> None:
    half_done(rows, scope=f"acme\x1f{OPERATION}")
    rows.age(RESUME_SECONDS + 1)
    seen: list[str] = []
    resume(phased(rows, key_per="endpoint"), counts(seen))
    assert seen == ["acme"]


def test_response_is_kept_whole(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    resume(phased(rows), lambda op: Response(201, {"id": 1}, headers={"X-Ride": "7"}))
    response = rows.get(record).response
    assert response == StoredResponse(201, (("x-ride", "7"), ("content-type", "application/json")), b'{"id":1}')


def raises(error: BaseException) -> Function:
    def go_on(op: Resumption) -> Answer:
        raise error

    return go_on


def raises_in_effect(repeatable: bool) -> Function:
    def go_on(op: Resumption) -> Answer:
        assert op.result("charge") == {"id": "ch_1"}
        op.blocking.effect("mail", raises(ConnectionError("cut")), op, repeatable=repeatable)
        return 201, None

    return go_on


async def forgets_to_await(op: Resumption) -> Answer:
    op.effect("mail", lambda: None, repeatable=True)  # type: ignore[unused-coroutine]
    return 201, None


@pytest.mark.parametrize(
    ("function", "state", "ended"),
    [
        (lambda op: (402, {"error": "declined"}), State.FAILED, "failed"),
        (lambda op: (503, None), State.FAILED_RETRYABLE, "retryable"),
        (lambda op: (429, None), State.FAILED_RETRYABLE, "retryable"),
        (raises(ValueError("no")), State.FAILED_RETRYABLE, "retryable"),
        (raises(NotExecuted("closed")), State.FAILED_RETRYABLE, "retryable"),
        (raises(OutcomeUnknown("cut")), State.UNKNOWN, "unknown"),
        (raises_in_effect(True), State.FAILED_RETRYABLE, "retryable"),
        (raises_in_effect(False), State.UNKNOWN, "unknown"),
        (lambda op: {"id": 1}, State.FAILED_RETRYABLE, "retryable"),
        (forgets_to_await, State.FAILED_RETRYABLE, "retryable"),
    ],
)
def test_end_is_judged_as_a_handlers(rows: KeyStore, function: Function, state: State, ended: str) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    assert resume(phased(rows), function) == {"due": 1, ended: 1}
    found = rows.get(record)
    assert (found.state, found.attempt, found.has_steps) == (state, 2, True)
    if state is not State.FAILED:
        assert "ResumeFailed" in rows.names()


def test_raise_is_logged_with_its_traceback(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    resume(phased(rows), raises(ValueError("the bug")))
    (line,) = [line for line in caplog.records if "ResumeFailed" in line.message]
    assert line.levelno == logging.WARNING
    assert line.exc_info is not None
    assert isinstance(line.exc_info[1], ValueError)


def test_async_function_that_takes_too_long_is_cancelled(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    async def hangs(op: Resumption) -> Answer:
        await asyncio.Event().wait()
        return 201, None

    assert resume(phased(rows), hangs, timeout=0.05) == {"due": 1, "retryable": 1}
    assert "took longer than 0.05 s" in (rows.get(record).last_error or "")


def test_function_that_runs_past_max_run_is_left_to_its_lease(rows: KeyStore) -> None:
    """As a handler: its lease is no longer renewed, and it is cancelled."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    cancelled: list[bool] = []

    async def hangs(op: Resumption) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return 201, None

    once = phased(rows, max_run=timedelta(seconds=0.1))
    assert resume(once, hangs) == {"due": 1}
    assert (rows.get(record).state, cancelled) == (State.IN_PROGRESS, [True])
    assert "RanTooLong" in rows.names()
    assert once.engine.keeper._live == {}


@pytest.mark.parametrize("status", [201, 503])
def test_end_that_the_store_cannot_take_is_kept_by_the_keeper(
    rows: KeyStore, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work is done, and the store is away for a moment: nothing is done again."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = phased(rows)
    move, away = once.engine.move, threading.Event()

    def try_to_move(*how: Any) -> Flow[Finished]:
        if away.is_set():
            raise StoreUnavailable("the store is away")
        return (yield from move(*how))

    def go_on(op: Resumption) -> Answer:
        away.set()
        return status, None

    monkeypatch.setattr(once.engine, "move", try_to_move)
    assert resume(once, go_on) == {"due": 1}
    assert rows.get(record).state is State.IN_PROGRESS
    away.clear()
    once.engine.keeper.look()
    assert rows.get(record).state is (State.COMPLETED if status == 201 else State.FAILED_RETRYABLE)


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


# -- no function, no phases --------------------------------------------------------------------------------------------


def test_process_without_the_function_leaves_the_key_to_one_that_has_it(rows: KeyStore) -> None:
    """Two apps on one store: what is due stays due, and costs no try."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    other = phased(rows)
    other.resume("POST /other", finishes)
    assert resume(other) == {"due": 1, "left": 1}
    assert resume(phased(rows), finishes) == {"due": 1, "completed": 1}
    assert rows.get(record).state is State.COMPLETED


def test_operation_without_a_function_is_put_off(rows: KeyStore) -> None:
    """Its keys must not stand in front of the others, and a deploy may bring a function."""
    record = half_done(rows, operation="POST /other")
    rows.age(RESUME_SECONDS + LEFT_SECONDS + 1)
    once = phased(rows)
    assert resume(once, finishes) == {"due": 1, "left": 1}
    assert resume(once) == {}
    found = rows.get(record)
    assert (found.state, found.attempt, found.reconcile_tries) == (State.FAILED_RETRYABLE, 1, 0)
    assert (found.owner, found.last_error) == (record.owner, "it fell")
    rows.age(NO_FUNCTION_SECONDS)
    once.resume("POST /{name}", finishes)
    assert resume(once) == {"due": 1, "completed": 1}


def test_without_any_function_nothing_is_looked_for(rows: KeyStore) -> None:
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    assert resume(phased(rows)) == {}
    assert rows.get(record).reconcile_at == record.reconcile_at or rows.kind == "postgresql"


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
def test_route_that_is_not_phased_any_more_is_not_resumed(
    rows: KeyStore, effects: Any, caplog: pytest.LogCaptureFixture
) -> None:
    records = [half_done(rows) for _ in range(2)]
    rows.age(RESUME_SECONDS + 1)
    calls: list[str] = []
    assert resume(rows.once(effects=effects), counts(calls)) == {"due": 2, "left": 2}
    assert (calls, rows.states(records)) == ([], [State.FAILED_RETRYABLE] * 2)
    (line,) = [line for line in caplog.records if "not declared so here" in line.message]
    assert line.levelno == logging.WARNING
    assert OPERATION in line.message


def test_exempt_route_is_not_resumed(rows: KeyStore, caplog: pytest.LogCaptureFixture) -> None:
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = OnceKey(rows.store, scope=lambda _: "", policy=Policy(effects="phased"), routes={OPERATION: None})
    try:
        assert resume(once, finishes) == {"due": 1, "left": 1}
    finally:
        once.engine.keeper.close(1.0)
        once.engine.router.close(1.0)
    assert "not declared so here" in caplog.text


def test_policy_that_only_the_app_knows_is_given_with_the_function(rows: KeyStore) -> None:
    """@once.policy declares it at the handler, and this process does not start the app."""
    record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = rows.once()  # external
    seen: list[float] = []

    @once.resume(OPERATION, policy=Policy(effects="phased", lease=timedelta(seconds=45)))
    def go_on(op: Resumption) -> Answer:
        seen.append(op.policy.lease_seconds)
        return 201, None

    assert resume(once) == {"due": 1, "completed": 1}
    assert (seen, rows.get(record).state) == ([45.0], State.COMPLETED)
    with pytest.raises(ConfigurationError, match="only a phased route can be resumed"):
        once.resume("POST /other", go_on, policy=Policy())


def test_policy_of_the_app_counts_before_the_one_given_with_the_function(rows: KeyStore) -> None:
    """A deploy declares the route otherwise: what was given for another process is not more than that."""
    half_done(rows)
    rows.age(RESUME_SECONDS + 1)
    once = rows.once()
    once.declarations.policies[OPERATION] = Policy(effects="repeatable")
    once.resume(OPERATION, finishes, policy=Policy(effects="phased"))
    assert resume(once) == {"due": 1, "left": 1}


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


# -- registering -------------------------------------------------------------------------------------------------------


def test_invalid_resume_function_is_refused() -> None:
    once = OnceKey("memory://", scope=lambda _: "t")

    @once.resume("POST /rides")
    async def go_on(op: Resumption) -> Answer:
        return 201, None

    registered: Callable[[Resumption], Awaitable[Answer]] = once.resume("post /rides/{id}", go_on)
    assert registered is go_on
    assert list(once.resumes) == ["POST /rides", "POST /rides/{id}"]
    with pytest.raises(ConfigurationError, match="has a resume function already"):
        once.resume("POST /rides", go_on)
    with pytest.raises(ConfigurationError, match="not of the form 'POST /path'"):
        once.resume("rides", go_on)
    with pytest.raises(ConfigurationError, match="takes a function"):
        once.resume("POST /x", 7)  # type: ignore[call-overload]
    for wrong in ({"concurrency": 0}, {"timeout": 0}, {"max_tries": 0}):
        with pytest.raises(ConfigurationError, match="more than 0"):
            Resumer(once, **wrong)
    with pytest.raises(ConfigurationError, match="resume_every"):
        Upkeep(once, resume_every=0)
