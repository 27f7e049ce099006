"""Steps that fail, or are lost: what happened is never done twice, what did not is not remembered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from oncekey import NotExecuted, OutcomeUnknown
from oncekey.core.states import Effects, State
from oncekey.core.steps import StepState
from oncekey.engine import steps
from oncekey.engine.operation import Operation
from oncekey.errors import LeaseLost, StoreUnavailable
from oncekey.testing import faults
from tests.engine.phased_api import CUT, PhasedApi, Serve, short


def charging(repeatable: bool, error: BaseException = CUT, times: int = 1) -> Serve:
    """One effect, which raises in its first calls."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        def charge() -> Any:
            return phased.fail("charge", error) if phased.calls["charge"] < times else phased.call("charge")

        await op.effect("charge", charge, repeatable=repeatable)

    return serve


# ---------------------------------------------------------------- doubt


async def test_a_repeatable_effect_that_raised_is_called_again(phased: PhasedApi) -> None:
    api = phased.api(charging(repeatable=True))
    assert (await api.post()).status_code == 500
    assert (phased.state, phased.record.effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
    assert phased.steps()["charge"].state is StepState.INTENDED
    assert (await api.post()).status_code == 201
    assert phased.calls == {"charge": 2}


async def test_one_that_may_not_be_repeated_leaves_the_key_unknown(phased: PhasedApi) -> None:
    api = phased.api(charging(repeatable=False))
    assert (await api.post()).status_code == 500
    assert (phased.state, phased.record.reconcile_at is not None) == (State.UNKNOWN, True)
    assert (await api.post()).status_code == 409
    assert phased.calls == {"charge": 1}


async def test_refuted_it_is_called_once_more(phased: PhasedApi) -> None:
    api = phased.api(charging(repeatable=False))
    await api.post()
    phased.refute()
    assert [(await api.post()).status_code for _ in range(2)] == [201, 201]
    assert (phased.calls, phased.state) == ({"charge": 2}, State.COMPLETED)


@pytest.mark.parametrize("repeatable", [True, False])
async def test_not_executed_makes_an_effect_retryable(phased: PhasedApi, repeatable: bool) -> None:
    api = phased.api(charging(repeatable, NotExecuted("the bank was closed")))
    assert (await api.post()).status_code == 503
    assert (phased.state, phased.record.effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
    assert (await api.post()).status_code == 201
    assert phased.calls == {"charge": 2}


async def test_outcome_unknown_of_a_repeatable_effect(phased: PhasedApi) -> None:
    assert (await phased.post(charging(True, OutcomeUnknown("no answer")))).status_code == 409
    assert phased.state is State.UNKNOWN


@pytest.mark.parametrize(
    ("status", "state"),
    [(500, "unknown"), (503, "unknown"), (429, "unknown"), (402, "unknown"), (201, "completed")],
)
async def test_answer_with_an_open_effect_is_stored_only_if_it_is_a_success(
    phased: PhasedApi, status: int, state: str
) -> None:
    """The handler caught the error of an effect that may not be repeated. An error of its own does not say that the
    effect did not happen."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> Response:
        with pytest.raises(ConnectionError):
            await op.effect("charge", phased.fail, "charge", CUT, repeatable=False)
        return JSONResponse({}, status)

    api = phased.api(serve)
    assert (await api.post()).status_code == status
    assert phased.state == state
    await api.post()
    assert phased.calls == {"charge": 1}


@pytest.mark.parametrize("repeatable", [True, False])
async def test_success_of_another_effect_leaves_the_first_in_doubt(phased: PhasedApi, repeatable: bool) -> None:
    """The first may have happened, whatever becomes of the second. Refuted, it is called again, in its old place."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        if op.attempt == 1:
            with pytest.raises(ConnectionError):
                await op.effect("first", phased.fail, "first", CUT, repeatable=False)
        else:
            await op.effect("first", phased.call, "first", repeatable=False)
        await op.effect("second", phased.call, "second", repeatable=repeatable)
        if op.attempt == 1:
            raise ConnectionError("stumbled")

    api = phased.api(serve)
    assert (await api.post()).status_code == 500
    assert phased.state is State.UNKNOWN
    phased.refute()
    assert (await api.post()).status_code == 201
    assert phased.calls == {"first": 2, "second": 1}


@pytest.mark.parametrize("repeatable", [True, False])
async def test_not_executed_of_another_effect_leaves_the_first_in_doubt(phased: PhasedApi, repeatable: bool) -> None:
    """It speaks of itself: the first may have happened, and is not called again (I1)."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        with pytest.raises(ConnectionError):
            await op.effect("charge", phased.fail, "charge", CUT, repeatable=False)
        await op.effect("fallback", phased.fail, "fallback", NotExecuted("closed"), repeatable=repeatable)

    api = phased.api(serve)
    assert [(await api.post()).status_code for _ in range(2)] == [409, 409]
    assert phased.state is State.UNKNOWN
    assert phased.calls == {"charge": 1, "fallback": 1}


async def test_a_handlers_own_not_executed_answers_for_all_of_its_effects(phased: PhasedApi) -> None:
    """It has asked the provider, say."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        with pytest.raises(ConnectionError):
            await op.effect("charge", phased.fail, "charge", CUT, repeatable=False)
        raise NotExecuted("the provider knows of no charge")

    assert (await phased.post(serve)).status_code == 503
    assert phased.state is State.FAILED_RETRYABLE


async def test_lost_transaction_leaves_the_effect_in_doubt(phased: PhasedApi) -> None:
    """It ends with an enlisted transaction that cannot be committed, which by itself would mean: try again."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        with pytest.raises(ConnectionError):
            await op.effect("charge", phased.fail, "charge", CUT, repeatable=False)
        await op.enlist(connection)
        await phased.pay(connection)

    with faults.install("enlist.commit", "before", faults.raising(CUT)):
        assert (await phased.post(serve)).status_code == 409
    assert (phased.state, phased.shop.payments()) == (State.UNKNOWN, 0)


async def test_a_crash_in_an_effect(phased: PhasedApi) -> None:
    """A request that finds the lease over sees by the record alone what that means."""
    found = []

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        def look() -> None:
            found.append((phased.record.effects, phased.record.recovery_point))

        await op.effect("first", look, repeatable=True)
        await op.effect("second", look, repeatable=False)
        look()

    assert (await phased.post(serve)).status_code == 201
    assert found == [(Effects.PHASED, "started"), (Effects.EXTERNAL, "first"), (Effects.PHASED, "second")]


# ---------------------------------------------------------------- a lease that is lost


async def test_effect_is_not_called_if_the_lease_is_lost_at_its_intent(phased: PhasedApi) -> None:
    """Not called."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        phased.steal()
        await op.effect("charge", phased.call, "charge", repeatable=True)

    assert (await phased.post(serve)).status_code == 409
    assert isinstance(phased.errors[0], LeaseLost)
    assert (phased.calls, phased.record.owner) == ({}, "a-thief")


async def test_nothing_is_written_if_the_lease_is_lost_at_the_result(phased: PhasedApi) -> None:
    """Called, and nothing more is written: the thief decides what becomes of the key."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        def charge() -> None:
            phased.call("charge")
            phased.steal()

        await op.effect("charge", charge, repeatable=True)

    assert (await phased.post(serve)).status_code == 409
    assert isinstance(phased.errors[0], LeaseLost)
    assert (phased.calls, phased.record.owner) == ({"charge": 1}, "a-thief")
    assert phased.steps()["charge"].state is StepState.INTENDED


async def test_lost_before_a_phase_writes(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        phased.steal()
        await op.phase("row", phased.pay, connection, on=connection)

    assert (await phased.post(serve)).status_code == 409
    assert isinstance(phased.errors[0], LeaseLost)
    assert (phased.calls, phased.shop.payments(), phased.is_free()) == ({}, 0, True)


async def test_an_intent_that_took_too_long(phased: PhasedApi) -> None:
    """Paused behind the intent for longer than half a lease: the key is looked at again before the call."""
    policy = short(0.6)

    def pause() -> None:
        phased.steal()
        time.sleep(policy.lease_seconds * 0.6)

    with faults.install("store.swap", "after", pause):
        answer = await phased.post(charging(repeatable=True, times=0), policy=policy)
    assert (answer.status_code, phased.calls) == (409, {})


# ---------------------------------------------------------------- a store that is down


@pytest.fixture
def again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that could not be written are tried again in quick succession."""
    monkeypatch.setattr(steps, "AGAIN_SECONDS", 0.02)


@contextmanager
def outage(from_swap: int, swaps: int) -> Iterator[None]:
    """That swap and the ones behind it fail, so many of them. (A lane tries twice: one alone would go unnoticed.)"""
    error = faults.raising(StoreUnavailable("down"))
    down = [faults.install("store.swap", "before", error, from_swap) for _ in range(swaps)]
    try:
        yield
    finally:
        while down:
            down.pop().remove()


@pytest.mark.usefixtures("again_soon")
async def test_a_result_is_written_when_the_store_is_back(phased: PhasedApi) -> None:
    """It has happened, and only we know how it ended."""
    with outage(2, swaps=5):
        assert (await phased.post(charging(repeatable=False, times=0))).status_code == 201
    assert (phased.calls, phased.state) == ({"charge": 1}, State.COMPLETED)


async def test_a_result_that_was_written_and_not_confirmed(phased: PhasedApi) -> None:
    """Writing it twice is writing it once."""
    with faults.install("store.swap", "after", faults.raising(StoreUnavailable("its answer was lost")), nth=2):
        assert (await phased.post(charging(repeatable=False, times=0))).status_code == 201
    assert (phased.calls, phased.state) == ({"charge": 1}, State.COMPLETED)


@pytest.mark.usefixtures("again_soon")
async def test_a_store_that_stays_down(phased: PhasedApi) -> None:
    """For longer than the lease: a call that may not be repeated is unknown, and is not made again."""
    serve = charging(repeatable=False, times=0)
    with outage(2, swaps=500):
        assert (await phased.post(serve, policy=short(0.3))).status_code in (409, 503)
    async with asyncio.timeout(10):
        while phased.state is State.IN_PROGRESS:  # until the last moment of its lease
            assert (await phased.post(serve)).status_code == 409  # by another process
            await asyncio.sleep(0.02)
    assert phased.state is State.UNKNOWN
    assert phased.calls == {"charge": 1}


async def test_an_intent_that_was_not_written(phased: PhasedApi) -> None:
    """Not called: there is nothing to doubt."""
    with outage(1, swaps=2):
        assert (await phased.post(charging(repeatable=False, times=0))).status_code == 503
    assert (phased.calls, phased.state) == ({}, State.FAILED_RETRYABLE)
