"""Phases and effects through the real middleware, on both SQL stores: what is remembered, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from oncekey import NotExecuted, Policy
from oncekey.core.states import State
from oncekey.core.steps import MAX_RESULT_BYTES, StepKind, StepState
from oncekey.engine.operation import Operation
from oncekey.engine.steps import MAX_NAME_LENGTH
from oncekey.errors import EnlistError, StepError
from tests.engine.desk import Desk, now
from tests.enlist.shop import ALL, POSTGRES, SQLITE, Till


async def book(desk: Desk, op: Operation, connection: Any) -> Response:
    """A row, a charge, a receipt; the first attempt stumbles behind the charge."""
    row = await op.phase("row", desk.pay, connection, on=connection)
    charge = await op.effect("charge", desk.call, "charge", repeatable=False, provider_id=lambda _: "ch_1")
    if op.attempt == 1:
        raise ConnectionError("stumbled")
    receipt = await op.phase("receipt", desk.pay, connection, name="receipt", on=connection)
    return JSONResponse([row, charge, receipt], 201)


async def test_what_is_done_is_remembered(desk: Desk) -> None:
    """The second attempt gets the results of the first, and goes on from there."""
    assert (await desk.post(book)).status_code == 500
    assert (desk.state, desk.record.recovery_point) == (State.FAILED_RETRYABLE, "charge")
    answer = await desk.post(book)
    assert (answer.status_code, answer.json()) == (201, [{"paid": 1}, {"call": 1}, {"paid": 1}])
    assert desk.calls == {"pay": 1, "charge": 1, "receipt": 1}
    assert (desk.shop.payments(), desk.state, desk.record.recovery_point) == (2, State.COMPLETED, "receipt")
    steps = desk.steps()
    assert list(steps) == ["row", "charge", "receipt"]
    assert [step.kind for step in steps.values()] == [StepKind.PHASE, StepKind.EFFECT, StepKind.PHASE]
    assert all(step.state is StepState.DONE for step in steps.values())
    assert steps["charge"].provider_id == "ch_1"
    assert steps["charge"].downstream_key
    assert (await desk.post(book)).content == answer.content


async def test_the_first_attempt_gets_what_later_ones_get(desk: Desk) -> None:
    """A tuple comes back as a list at once, and not only when it is remembered."""
    seen = []

    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        seen.append(await op.effect("pair", desk.call, "pair", (1, 2), repeatable=True))
        seen.append(await op.phase("none", desk.calls.clear, on=connection))

    assert (await desk.post(serve)).status_code == 201
    assert seen == [[1, 2], None]


@pytest.mark.parametrize("name", ["", "started", "x" * (MAX_NAME_LENGTH + 1), "a\nb"])
@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_names(desk: Desk, name: str, kind: str) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        if kind == "phase":
            await op.phase(name, desk.pay, connection, on=connection)
        else:
            await op.effect(name, desk.call, "effect", repeatable=True)

    assert (await desk.post(serve)).status_code == 500
    assert isinstance(desk.errors[0], StepError)
    assert (desk.calls, desk.state) == ({}, State.FAILED_RETRYABLE)


async def test_a_name_is_used_once(desk: Desk) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        await op.phase("row", desk.pay, connection, on=connection)
        await op.effect("row", desk.call, "effect", repeatable=True)

    assert (await desk.post(serve)).status_code == 500
    assert "used already" in str(desk.errors[0])
    assert desk.calls == {"pay": 1}


@pytest.mark.parametrize(("result", "says"), [(object(), "not JSON"), ("x" * MAX_RESULT_BYTES, "bytes, more than")])
async def test_results_that_cannot_be_remembered(desk: Desk, result: Any, says: str) -> None:
    """A phase is undone. An effect has happened: repeatable or not says what that means."""

    async def phase(desk: Desk, op: Operation, connection: Any) -> None:
        async def work() -> Any:
            await desk.pay(connection)
            return result

        await op.phase("row", work, on=connection)

    async def effect(desk: Desk, op: Operation, connection: Any) -> None:
        await op.effect("charge", desk.call, "charge", result, repeatable=op.key == "repeatable")

    assert (await desk.post(phase)).status_code == 500
    assert (desk.shop.payments(), desk.state, desk.record.recovery_point) == (0, State.FAILED_RETRYABLE, None)
    for key, state in (("repeatable", State.FAILED_RETRYABLE), ("not", State.UNKNOWN)):
        assert (await desk.post(effect, key)).status_code == 500
        assert desk.shop.state(key) is state
    for error in desk.errors:
        assert isinstance(error, StepError)
        assert says in str(error)
    assert desk.is_free()


@pytest.mark.parametrize("provider_id", [7, "", "a\nb"])
async def test_a_providers_id_is_text(desk: Desk, provider_id: Any) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        await op.effect("charge", desk.call, "charge", repeatable=True, provider_id=lambda _: provider_id)

    assert (await desk.post(serve)).status_code == 500
    assert "provider_id" in str(desk.errors[0])


# ---------------------------------------------------------------- after a deploy


async def after_a_deploy(desk: Desk, *steps: tuple[str, str]) -> int:
    """An attempt with the steps a, b (phases) and c (an effect), and one with these. The status of the second."""

    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        first = [("phase", "a"), ("phase", "b"), ("effect", "c")]
        for kind, name in first if op.attempt == 1 else steps:
            if kind == "phase":
                await op.phase(name, desk.pay, connection, name=name, on=connection)
            else:
                await op.effect(name, desk.call, name, repeatable=False)
        if op.attempt == 1:
            raise NotExecuted("the deploy comes")

    api = desk.api(serve)
    assert (await api.post()).status_code == 503
    return (await api.post()).status_code


async def test_new_steps_at_the_end(desk: Desk) -> None:
    steps = [("phase", "a"), ("phase", "b"), ("effect", "c"), ("phase", "d")]
    assert await after_a_deploy(desk, *steps) == 201
    assert desk.calls == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize(
    "steps", [[("phase", "new"), ("phase", "a")], [("phase", "a"), ("effect", "new")], [("phase", "b"), ("phase", "d")]]
)
async def test_the_order_has_changed(desk: Desk, steps: list[tuple[str, str]]) -> None:
    assert await after_a_deploy(desk, *steps) == 500
    assert "the order of steps has changed" in str(desk.errors[-1])
    assert desk.calls == {"a": 1, "b": 1, "c": 1}
    assert desk.state is State.FAILED_RETRYABLE


async def test_the_kind_has_changed(desk: Desk) -> None:
    assert await after_a_deploy(desk, ("effect", "a")) == 500
    assert "was a phase" in str(desk.errors[-1])


async def test_the_kind_of_what_was_only_intended_has_changed(desk: Desk) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        if op.attempt == 1:
            await op.effect("a", desk.fail, "a", ConnectionError("cut"), repeatable=True)
        await op.phase("a", desk.pay, connection, on=connection)

    api = desk.api(serve)
    assert [(await api.post()).status_code for _ in range(2)] == [500, 500]
    assert "was a effect" in str(desk.errors[-1])
    assert desk.calls == {"a": 1}


# ---------------------------------------------------------------- where no step may begin


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
async def test_only_phased_routes_have_steps(desk: Desk, effects: Any) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        await op.effect("charge", desk.call, "charge", repeatable=True)

    assert (await desk.post(serve, policy=Policy(effects=effects))).status_code == 500
    assert "Policy(effects='phased') only" in str(desk.errors[0])
    assert not desk.calls


@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_not_while_a_transaction_is_open(desk: Desk, kind: str) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        await op.enlist(connection)
        await desk.pay(connection)
        if kind == "phase":
            await op.phase("row", desk.pay, connection, on=connection)
        else:
            await op.effect("charge", desk.call, "charge", repeatable=True)

    assert (await desk.post(serve)).status_code == 500
    assert "while a transaction is open" in str(desk.errors[0])
    assert (desk.calls, desk.shop.payments(), desk.state) == ({"pay": 1}, 0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("inner", ["phase", "effect", "enlist"])
@pytest.mark.parametrize("outer", ["phase", "effect"])
async def test_not_inside_of_another(desk: Desk, outer: str, inner: str) -> None:
    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        async def begin() -> None:
            if inner == "phase":
                await op.phase("inner", desk.pay, connection, on=connection)
            elif inner == "effect":
                await op.effect("inner", desk.call, "inner", repeatable=True)
            else:
                await op.enlist(connection)

        if outer == "phase":
            await op.phase("outer", begin, on=connection)
        else:
            await op.effect("outer", begin, repeatable=True)

    assert (await desk.post(serve)).status_code == 500
    assert isinstance(desk.errors[0], StepError | EnlistError)
    assert (desk.calls, desk.state) == ({}, State.FAILED_RETRYABLE)
    assert desk.is_free()


async def test_one_after_another(desk: Desk) -> None:
    """Two at once have no order, and the end of one would take back the doubt about the other."""

    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        begun = asyncio.Event()

        async def slow() -> None:
            begun.set()
            await asyncio.sleep(0)

        first = asyncio.create_task(op.effect("first", slow, repeatable=True))
        await begun.wait()
        with pytest.raises(StepError, match="while 'first' is under way"):
            await op.effect("second", desk.call, "second", repeatable=True)
        await first
        await op.effect("third", desk.call, "third", repeatable=True)

    assert (await desk.post(serve)).status_code == 201
    assert desk.calls == {"third": 1}


# ---------------------------------------------------------------- functions of every kind, and every driver


@pytest.mark.parametrize("till", ALL, indirect=True)
async def test_every_driver(till: Till) -> None:
    """A phase commits with it, rolls back with it, and a second phase follows on the same connection."""
    desk = Desk(till.shop)
    desk.connect = till.open

    async def serve(desk: Desk, op: Operation, session: Any) -> Response:
        async def pay(fails: bool = False) -> str:
            await now(till.pay(session, op.key))
            if fails:
                raise ValueError("after the write")
            return "paid"

        first = await op.phase("first", pay, on=session)
        with pytest.raises(ValueError, match="after the write"):
            await op.phase("second", pay, True, on=session)
        return JSONResponse([first, await op.phase("third", pay, on=session)], 201)

    answer = await desk.post(serve)
    await till.close()
    assert (answer.status_code, answer.json()) == (201, ["paid", "paid"])
    assert (desk.shop.payments(), desk.state) == (2, State.COMPLETED)


@pytest.fixture
def till(request: pytest.FixtureRequest) -> Till:
    kind, name = request.param
    desk: Desk = request.getfixturevalue("sqlite_desk" if kind == "sqlite" else "postgres_desk")
    return (SQLITE if kind == "sqlite" else POSTGRES)[name](desk.shop)


async def test_functions_of_every_kind(desk: Desk) -> None:
    """A plain effect runs in a thread, where it may block; what only returns an awaitable is awaited."""
    threads = []

    class Callable:
        async def __call__(self) -> str:
            threads.append(threading.get_ident())
            return "object"

    async def later() -> str:
        threads.append(threading.get_ident())
        return "lambda"

    def plain() -> str:
        threads.append(threading.get_ident())
        return "plain"

    async def serve(desk: Desk, op: Operation, connection: Any) -> Response:
        done = [
            await op.effect("object", Callable(), repeatable=False),
            await op.effect("lambda", lambda: later(), repeatable=False),  # noqa: PLW0108 - as people write it
            await op.effect("plain", plain, repeatable=False),
            await op.phase("plain phase", plain, on=connection),
        ]
        return JSONResponse(done, 201)

    answer = await desk.post(serve)
    assert (answer.status_code, answer.json()) == (201, ["object", "lambda", "plain", "plain"])
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, True, False, True]


async def test_a_downstream_key_is_one_requests(desk: Desk) -> None:
    """The same in every attempt; another one when the key is used again, after its expiry, for something else."""
    seen = []

    async def serve(desk: Desk, op: Operation, connection: Any) -> None:
        seen.append(op.downstream_key("charge"))
        await op.effect("charge", desk.call, "charge", repeatable=True)
        if op.attempt == 1 and len(seen) == 1:
            raise NotExecuted("once more")

    assert (await desk.post(serve)).status_code == 503
    assert (await desk.post(serve)).status_code == 201
    assert desk.steps()["charge"].downstream_key == seen[0] == seen[1]
    desk.let_it_expire()
    assert (await desk.post(serve, cents=7)).status_code == 201
    assert seen[2] != seen[0]
    assert desk.calls == {"charge": 2}  # what the old request remembers is not the new one's
