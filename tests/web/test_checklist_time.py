"""The checklists' lines about leases and expiry, over HTTP: every store, both frameworks (tests/web/conftest.py)."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, Refused, current
from oncekey.core.states import State
from tests.web.apps import PAYMENT, Gate, MakeApi, World, held, paid, raising, same, soon, until
from tests.web.checks import assert_state

# ---------------------------------------------------------------- leases


async def test_a_handler_longer_than_its_lease_runs_once(make_api: MakeApi, world: World) -> None:
    """The lease is renewed while the handler lives: no retry takes over, although a second run would be allowed."""
    gate = Gate()
    lease = 0.3
    api = make_api(held(gate), policy=Policy(lease=timedelta(seconds=lease), effects="repeatable"))
    first = api.start()
    await soon(gate.entered.wait())

    def renewed() -> bool:
        record = world.record("k-1")
        return record is not None and record.lease_until - record.created_at > 3 * lease

    await until(renewed, "the lease is renewed past its first end")
    assert (await api.post()).status_code == 409
    gate.go.set()
    answer = await first
    assert answer.status_code == 201
    assert same(answer, await api.post())
    assert api.runs == 1


async def test_a_handler_that_blocks_its_loop_keeps_its_lease(make_api: MakeApi, world: World) -> None:
    """Leases are renewed by a thread: a handler that never awaits does not lose its key by that."""
    lease = 0.6
    seen: list[float] = []

    def respond(request: Request, run: int) -> Response:
        if world.record("k-1") is None:
            return paid(request, run)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:  # on purpose: the loop stands still
            record = world.record("k-1")
            assert record is not None
            if record.lease_until - record.created_at > 2 * lease:
                seen.append(record.lease_until)
                break
            time.sleep(0.01)
        return paid(request, run)

    api = make_api(respond, policy=Policy(lease=timedelta(seconds=lease)))
    await api.post("warm")  # a begin has no longer than a lease, and the first one opens the store
    assert (await api.post()).status_code == 201
    assert seen, "the lease was not renewed while the loop stood still"


async def test_a_lapsed_lease_of_external_work_is_unknown(make_api: MakeApi, world: World) -> None:
    """Hazard 2: the end of a lease proves nothing, so a payment is not made a second time."""
    gate = Gate()
    dead, alive = make_api(held(gate)), make_api()
    first = dead.start()
    await soon(gate.entered.wait())
    world.age("k-1", 61)
    answer = await alive.post()
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:oncekey:problem:outcome-unknown"
    assert_state(world, State.UNKNOWN)
    assert alive.runs == 0
    gate.go.set()
    late = await first
    assert (late.status_code, late.content) == (201, b'{"id":"pay_1"}')  # it was only late, and it alone knows
    assert same(late, await alive.post())
    assert (dead.runs, alive.runs) == (1, 0)


@pytest.mark.parametrize("effects", ["transactional", "repeatable"])
async def test_a_lapsed_lease_of_harmless_work_is_taken_over(make_api: MakeApi, world: World, effects: Any) -> None:
    """Hazard 1: the new owner is attempt 2; the late one writes nothing, and its client gets what is recorded."""
    gate = Gate()

    def attempts(request: Request, run: int) -> Response:
        return JSONResponse({"attempt": current().attempt}, 201)

    late = make_api(held(gate, attempts), policy=Policy(effects=effects))
    rival = make_api(attempts, policy=Policy(effects=effects))
    first = late.start()
    await soon(gate.entered.wait())
    assert (await rival.post()).status_code == 409  # the lease is not over yet
    world.age("k-1", 61)
    second = await rival.post()
    assert second.json() == {"attempt": 2}
    gate.go.set()
    answer = await first
    assert same(answer, second)
    assert answer.headers["idempotency-replayed"] == "true"
    record = assert_state(world, State.COMPLETED)
    assert record.attempt == 2
    assert record.response is not None
    assert record.response.body == second.content
    assert same(second, await late.post())


async def test_a_late_owner_does_not_disturb_a_rival_that_still_runs(make_api: MakeApi, world: World) -> None:
    """Fencing before the rival is done: the late one gets a 409, and the rival's answer is stored."""
    early, later = Gate(), Gate()
    late = make_api(held(early), policy=Policy(effects="repeatable"))
    rival = make_api(
        held(later, lambda request, run: JSONResponse({"by": "rival"}, 201)), policy=Policy(effects="repeatable")
    )
    first = late.start()
    await soon(early.entered.wait())
    world.age("k-1", 61)
    second = rival.start()
    await soon(later.entered.wait())
    early.go.set()
    assert (await first).status_code == 409
    later.go.set()
    assert (await second).json() == {"by": "rival"}
    assert (await late.post()).json() == {"by": "rival"}


@pytest.mark.parametrize("ending", ["raises", "500", "refused"])
async def test_a_late_owner_that_fails_gives_nothing_back(make_api: MakeApi, world: World, ending: str) -> None:
    """Fencing of release and discard: an owner that lost its key cannot free it under the new owner."""
    gate = Gate()

    async def respond(request: Request, run: int) -> Response:
        await gate.wait()
        if ending == "raises":
            raise RuntimeError("late, and broken")
        if ending == "refused":
            raise Refused("late")
        return JSONResponse({}, 500)

    late, rival = make_api(respond, policy=Policy(effects="repeatable")), make_api(policy=Policy(effects="repeatable"))
    first = late.start()
    await soon(gate.entered.wait())
    world.age("k-1", 61)
    second = await rival.post()
    gate.go.set()
    await first
    assert_state(world, State.COMPLETED)
    assert same(second, await rival.post())
    assert rival.runs == 1


# ---------------------------------------------------------------- expiry


async def test_reused_after_expiry_is_new(make_api: MakeApi, world: World) -> None:
    """When its time is over a key is free, for another request too; a moment before it is not."""
    api = make_api()
    first = await api.post()
    world.age("k-1", 24 * 3600 - 30)
    assert same_but_for_time(first, await api.post())
    assert (await api.post(body=PAYMENT | {"amount": 5})).status_code == 422
    world.age("k-1", 31)
    second = await api.post(body=PAYMENT | {"amount": 5})
    assert (second.status_code, second.content) == (201, b'{"id":"pay_2"}')
    assert "idempotency-replayed" not in second.headers
    record = assert_state(world, State.COMPLETED)
    assert record.attempt == 1
    assert same(second, await api.post(body=PAYMENT | {"amount": 5}))
    assert (await api.post()).status_code == 422
    assert api.runs == 2


async def test_50_at_once_after_expiry_are_one_effect(make_api: MakeApi, world: World) -> None:
    """Starting over is a race like the first reservation, and has one winner."""
    api = make_api()
    await api.post()
    world.age("k-1", 24 * 3600 + 1)
    answers = await asyncio.gather(*(api.post() for _ in range(50)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert {answer.content for answer in answers if answer.status_code == 201} == {b'{"id":"pay_2"}'}
    assert api.runs == 2


async def test_unknown_does_not_expire(make_api: MakeApi, world: World) -> None:
    """What may have happened does not become what never happened by waiting."""
    api = make_api(raising(RuntimeError))
    await api.post()
    world.age("k-1", 10 * 24 * 3600)
    assert (await api.post()).status_code == 409
    assert api.runs == 1


def same_but_for_time(first: Any, second: Any) -> bool:
    """The test has moved the expiry, which the answer names."""
    return first.content == second.content and second.headers["idempotency-replayed"] == "true"
