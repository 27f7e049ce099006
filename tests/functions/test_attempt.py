"""One attempt at one key without HTTP: blocking and async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from oncekey import (
    SINGLE_TENANT,
    InProgress,
    KeyReused,
    NotExecuted,
    OnceKey,
    OutcomeUnknown,
    Policy,
    Refused,
    current,
)
from oncekey.core.record import Record
from oncekey.core.routes import Route
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import LeaseLost, NoOperation, PersonalKey, StepError, StoreUnavailable
from oncekey.functions.attempt import Attempt
from oncekey.functions.refusals import NotStored
from oncekey.stores.api import Store

EXTERNAL = Policy()
REPEATABLE = Policy(effects="repeatable")


def attempt(once: OnceKey, policy: Policy = EXTERNAL, *, key: str = "key-1", body: bytes = b"{}") -> Attempt:
    return Attempt(once, Route("charge", policy), tenant="single-tenant", key=key, body=body)


def record_of(once: OnceKey, key: str = "key-1") -> Record | None:
    return once.store.read([("single-tenant", key)])[0]


def state_of(once: OnceKey, key: str = "key-1") -> State | None:
    record = record_of(once, key)
    return None if record is None else record.state


def test_first_attempt_runs_and_second_gets_its_answer(once: OnceKey) -> None:
    with attempt(once) as first:
        assert first.runs
        assert current() is first.operation
        first.keep(b'{"id":7}')
    with attempt(once) as second:
        assert not second.runs
    assert first.answer == second.answer
    assert second.answer is not None
    assert second.answer.body == b'{"id":7}'
    with pytest.raises(NoOperation):
        current()


async def test_async_first_attempt_runs_and_second_gets_its_answer(once: OnceKey) -> None:
    async with attempt(once) as first:
        assert first.runs
        assert current() is first.operation
        await asyncio.sleep(0)
        first.keep(b'{"id":7}')
    async with attempt(once) as second:
        assert not second.runs
    assert first.answer == second.answer
    assert second.answer is not None
    with pytest.raises(NoOperation):
        current()


def test_attempt_in_flight_raises_with_retry_after(once: OnceKey) -> None:
    with attempt(once), pytest.raises(InProgress, match="another attempt") as raised, attempt(once):
        pass
    assert raised.value.retry_after == 1.0


def test_attempt_that_waits_gets_the_first_answer(once: OnceKey) -> None:
    waits = Policy(in_flight="wait", wait=timedelta(seconds=20))
    first, answers = attempt(once), []

    def second() -> None:
        with attempt(once, waits) as other:
            answers.append((other.runs, other.answer))

    with first:
        thread = threading.Thread(target=second)
        thread.start()
        first.keep(b"1")
    thread.join(20)
    assert answers == [(False, first.answer)]


def test_other_body_raises_key_reused_also_in_flight(once: OnceKey) -> None:
    with attempt(once), pytest.raises(KeyReused, match="other arguments"), attempt(once, body=b'{"a":1}'):
        pass
    with pytest.raises(KeyReused), attempt(once, body=b'{"a":1}'):
        pass


def test_exception_leaves_an_external_key_unknown(once: OnceKey) -> None:
    with pytest.raises(ZeroDivisionError), attempt(once):
        raise ZeroDivisionError
    assert state_of(once) is State.UNKNOWN
    with pytest.raises(OutcomeUnknown, match="may have happened"), attempt(once):
        pass


def test_exception_lets_a_repeatable_key_run_again(once: OnceKey) -> None:
    with pytest.raises(ZeroDivisionError), attempt(once, REPEATABLE):
        raise ZeroDivisionError
    assert state_of(once) is State.FAILED_RETRYABLE
    with attempt(once, REPEATABLE) as again:
        assert again.runs
        assert again.operation.attempt == 2


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (lambda: NotExecuted("no"), State.FAILED_RETRYABLE),
        (lambda: OutcomeUnknown("perhaps"), State.UNKNOWN),
        (lambda: Refused("wrong"), None),
    ],
)
def test_word_of_an_exception_decides(once: OnceKey, error: Callable[[], Exception], state: State | None) -> None:
    policy = REPEATABLE if state is State.UNKNOWN else EXTERNAL
    raised = error()
    with pytest.raises(type(raised)), attempt(once, policy):
        raise raised
    assert state_of(once) is state


async def test_cancelled_attempt_is_judged_and_stored(once: OnceKey) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with attempt(once):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state_of(once) is State.UNKNOWN


async def test_caller_cancelled_while_storing_still_completes_the_key(once: OnceKey) -> None:
    storing, release = asyncio.Event(), asyncio.Event()

    class Slow(Attempt):
        async def _store(self, move):
            storing.set()
            await release.wait()
            return await super()._store(move)

    async def work() -> None:
        async with Slow(once, Route("charge", EXTERNAL), tenant="single-tenant", key="key-1", body=b"{}"):
            pass

    task = asyncio.create_task(work())
    await storing.wait()
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert state_of(once) is State.COMPLETED


async def test_max_run_ends_the_body_and_not_its_caller(once: OnceKey) -> None:
    policy = Policy(effects="repeatable", max_run=timedelta(seconds=0.05), lease=timedelta(seconds=3))
    with pytest.raises(TimeoutError, match="max_run"):
        async with attempt(once, policy):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert state_of(once) is State.FAILED_RETRYABLE


async def test_verb_that_is_not_awaited_makes_no_result(once: OnceKey) -> None:
    with pytest.raises(StepError, match=r"op\.enqueue was not awaited"):
        async with attempt(once, REPEATABLE):
            current().enqueue("send", {})  # type: ignore[unused-coroutine]
    assert state_of(once) is State.FAILED_RETRYABLE


async def test_exit_when_the_store_is_down_raises_and_the_keeper_stores_later(once: OnceKey) -> None:
    policy = Policy(begin_timeout=timedelta(seconds=0.5))
    store = SwapsFail(once.store)
    with OnceKey(cast("Store", store), scope=SINGLE_TENANT) as failing:
        with pytest.raises(StoreUnavailable, match="Call it again with the same key"):
            async with attempt(failing, policy) as first:
                first.keep(b"5")
        store.down = False
    async with attempt(once, policy) as second:
        assert not second.runs
        assert second.answer is not None
        assert second.answer.body == b"5"


def test_result_that_is_too_large_is_a_tombstone(once: OnceKey) -> None:
    small = Policy(max_response_bytes=3)
    with attempt(once, small) as first:
        first.keep(b"12345")
    with attempt(once, small) as second:
        assert second.answer is not None
        assert second.answer.body is None


def test_attempt_whose_key_went_to_another_takes_its_answer(once: OnceKey) -> None:
    """The first owner was paused for longer than its lease: what another attempt has stored counts."""
    short = Policy(effects="repeatable", lease=timedelta(seconds=1))
    once.store.check()
    first = attempt(once, short)
    with first:
        once.engine.keeper.unwatch(first.operation)  # as if this process were paused
        threading.Event().wait(1.1)
        with attempt(once, short) as second:
            assert second.runs
            second.keep(b"2")
        first.keep(b"1")
    assert first.answer is not None
    assert first.answer.body == b"2"


class SwapsFail:
    """A store that takes reservations and refuses every move while it is ``down``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.down = True

    def swap(self, batch):
        if self.down:
            raise StoreUnavailable("down")
        return self._store.swap(batch)

    def __getattr__(self, name):
        if name != "capabilities" and not hasattr(Store, name):
            raise AttributeError(name)  # neither an outbox nor a connection in the event loop: all goes by swap()
        return getattr(self._store, name)


def test_attempt_that_finds_its_key_lost_in_the_body_takes_the_other_answer(once: OnceKey) -> None:
    """``enlist`` raises LeaseLost. The caller gets the answer of the attempt that took the key over."""
    lost = attempt(once, REPEATABLE)
    with lost:
        raise_lost(once, lost)
    assert lost.answer is not None
    assert lost.answer.body == b"2"


def release(once: OnceKey, lost: Attempt) -> None:
    """As upkeep does after the end of a lease."""
    move = swap(lost.operation.record, Event.RELEASE, Actor.OWNER, last_error="as after the end of its lease")
    assert once.store.swap([move])[0] is not None


def raise_lost(once: OnceKey, lost: Attempt) -> None:
    """Another attempt takes the key over and ends; this one hears of it."""
    once.engine.keeper.unwatch(lost.operation)
    release(once, lost)
    with attempt(once, REPEATABLE) as second:
        second.keep(b"2")
    raise LeaseLost("the key went to another attempt")


def test_attempt_whose_key_was_released_says_that_its_result_is_not_stored(once: OnceKey) -> None:
    """Upkeep released it, because its lease was over: the next call runs again, so this result does not count."""
    first = attempt(once, REPEATABLE)
    with pytest.raises(NotStored, match="lost its key"), first:
        release(once, first)
    with attempt(once, REPEATABLE) as again:
        assert again.runs


async def test_late_cancellation_of_max_run_does_not_hit_the_caller(once: OnceKey) -> None:
    async with attempt(once, REPEATABLE) as first:
        body = cast("asyncio.Task[None]", first.operation.task)
    body.cancel("max_run is over")
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_loop_that_closes_while_storing_leaves_the_end_to_the_keeper(once: OnceKey) -> None:
    """``asyncio.run`` cancels every task that is left, also the one that stores."""

    async def work() -> None:
        async with attempt(once) as cut:
            cut.keep(b"1")
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, lambda: [each.cancel() for each in asyncio.all_tasks(loop)])

    with pytest.raises(asyncio.CancelledError):
        await asyncio.to_thread(asyncio.run, work())
    once.engine.keeper.look()
    assert state_of(once) is State.COMPLETED
    assert not once.engine.keeper._live


def test_unexpected_error_at_the_end_leaves_the_key_to_its_lease(
    once: OnceKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a bug")

    first = attempt(once)
    with pytest.raises(RuntimeError, match="a bug"), first:
        monkeypatch.setattr(once.engine, "finish", broken)
    assert not once.engine.keeper._live


@pytest.mark.parametrize("is_async", [False, True])
async def test_function_with_a_personal_key_does_not_run(once: OnceKey, is_async: bool) -> None:
    def charge(email: str) -> None:
        pytest.fail("it ran")

    async def charge_async(email: str) -> None:
        charge(email)

    protected = once.function("charge", key="email", pii="refuse")(cast("Any", charge_async if is_async else charge))
    with pytest.raises(PersonalKey, match="an e-mail address") as caught:
        await protected("ann@example.com") if is_async else protected("ann@example.com")
    assert (caught.value.kind, "ann@" in str(caught.value)) == ("email", False)
    assert once.store.listing() == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_repeated_call_with_a_personal_key_from_before_gets_its_result(once: OnceKey, is_async: bool) -> None:
    key = "ann@example.com"
    with attempt(once, key=key) as first:
        first.keep(b'"paid"')
    refusing = attempt(once, Policy(pii="refuse"), key=key)
    if is_async:
        async with refusing:
            assert not refusing.runs
    else:
        with refusing:
            assert not refusing.runs
    assert refusing.answer == first.answer


def test_function_with_a_personal_key_is_warned_of(once: OnceKey, caplog: pytest.LogCaptureFixture) -> None:
    @once.function("charge", key="email", pii="warn")
    def charge(email: str) -> str:
        return "paid"

    assert (charge("ann@example.com"), charge("bob@example.com")) == ("paid", "paid")
    assert caplog.text.count("charge got a key that looks like an e-mail address") == 1
    assert "ann" not in caplog.text
