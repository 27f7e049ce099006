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
from oncekey.engine.known_steps import MAX_NAME_LENGTH
from oncekey.engine.operation import Operation
from oncekey.errors import EnlistError, StepError
from tests.engine.phased_api import PhasedApi, now
from tests.enlist.shop import ALL, POSTGRES, SQLITE, Payer


async def book(phased: PhasedApi, op: Operation, connection: Any) -> Response:
    """A row, a charge, a receipt; the first attempt stumbles behind the charge."""
    row = await op.phase("row", phased.pay, connection, on=connection)
    charge = await op.effect("charge", phased.call, "charge", repeatable=False, provider_id=lambda _: "ch_1")
    if op.attempt == 1:
        raise ConnectionError("stumbled")
    receipt = await op.phase("receipt", phased.pay, connection, name="receipt", on=connection)
    return JSONResponse([row, charge, receipt], 201)


async def test_second_attempt_gets_the_results_of_done_steps(phased: PhasedApi) -> None:
    """The second attempt gets the results of the first, and goes on from there."""
    assert (await phased.post(book)).status_code == 500
    assert (phased.state, phased.record.recovery_point) == (State.FAILED_RETRYABLE, "charge")
    answer = await phased.post(book)
    assert (answer.status_code, answer.json()) == (201, [{"paid": 1}, {"call": 1}, {"paid": 1}])
    assert phased.calls == {"pay": 1, "charge": 1, "receipt": 1}
    assert (phased.shop.payments(), phased.state, phased.record.recovery_point) == (2, State.COMPLETED, "receipt")
    steps = phased.steps()
    assert list(steps) == ["row", "charge", "receipt"]
    assert [step.kind for step in steps.values()] == [StepKind.PHASE, StepKind.EFFECT, StepKind.PHASE]
    assert all(step.state is StepState.DONE for step in steps.values())
    assert steps["charge"].provider_id == "ch_1"
    assert steps["charge"].downstream_key
    assert (await phased.post(book)).content == answer.content


async def test_first_attempt_gets_the_same_result_as_later_ones(phased: PhasedApi) -> None:
    """A tuple comes back as a list at once, and not only when it is remembered."""
    seen = []

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        seen.append(await op.effect("pair", phased.call, "pair", (1, 2), repeatable=True))
        seen.append(await op.phase("none", phased.calls.clear, on=connection))

    assert (await phased.post(serve)).status_code == 201
    assert seen == [[1, 2], None]


@pytest.mark.parametrize("name", ["", "started", "x" * (MAX_NAME_LENGTH + 1), "a\nb"])
@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_invalid_step_name_is_refused(phased: PhasedApi, name: str, kind: str) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        if kind == "phase":
            await op.phase(name, phased.pay, connection, on=connection)
        else:
            await op.effect(name, phased.call, "effect", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert isinstance(phased.errors[0], StepError)
    assert (phased.calls, phased.state) == ({}, State.FAILED_RETRYABLE)


async def test_a_name_is_used_once(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.phase("row", phased.pay, connection, on=connection)
        await op.effect("row", phased.call, "effect", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert "used already" in str(phased.errors[0])
    assert phased.calls == {"pay": 1}


@pytest.mark.parametrize(("result", "says"), [(object(), "not JSON"), ("x" * MAX_RESULT_BYTES, "bytes, more than")])
async def test_results_that_cannot_be_remembered(phased: PhasedApi, result: Any, says: str) -> None:
    """A phase is undone. An effect has happened: repeatable or not says what that means."""

    async def phase(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def work() -> Any:
            await phased.pay(connection)
            return result

        await op.phase("row", work, on=connection)

    async def effect(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect("charge", phased.call, "charge", result, repeatable=op.key == "repeatable")

    assert (await phased.post(phase)).status_code == 500
    assert (phased.shop.payments(), phased.state, phased.record.recovery_point) == (0, State.FAILED_RETRYABLE, None)
    for key, state in (("repeatable", State.FAILED_RETRYABLE), ("not", State.UNKNOWN)):
        assert (await phased.post(effect, key)).status_code == 500
        assert phased.shop.state(key) is state
    for error in phased.errors:
        assert isinstance(error, StepError)
        assert says in str(error)
    assert phased.is_free()


@pytest.mark.parametrize("provider_id", [7, "", "a\nb"])
async def test_a_providers_id_is_text(phased: PhasedApi, provider_id: Any) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect("charge", phased.call, "charge", repeatable=True, provider_id=lambda _: provider_id)

    assert (await phased.post(serve)).status_code == 500
    assert "provider_id" in str(phased.errors[0])


# ---------------------------------------------------------------- after a deploy


async def after_a_deploy(phased: PhasedApi, *steps: tuple[str, str]) -> int:
    """An attempt with the steps a, b (phases) and c (an effect), and one with these. The status of the second."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        first = [("phase", "a"), ("phase", "b"), ("effect", "c")]
        for kind, name in first if op.attempt == 1 else steps:
            if kind == "phase":
                await op.phase(name, phased.pay, connection, name=name, on=connection)
            else:
                await op.effect(name, phased.call, name, repeatable=False)
        if op.attempt == 1:
            raise NotExecuted("the deploy comes")

    api = phased.api(serve)
    assert (await api.post()).status_code == 503
    return (await api.post()).status_code


async def test_new_steps_at_the_end(phased: PhasedApi) -> None:
    steps = [("phase", "a"), ("phase", "b"), ("effect", "c"), ("phase", "d")]
    assert await after_a_deploy(phased, *steps) == 201
    assert phased.calls == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize(
    "steps", [[("phase", "new"), ("phase", "a")], [("phase", "a"), ("effect", "new")], [("phase", "b"), ("phase", "d")]]
)
async def test_changed_order_of_steps_is_refused(phased: PhasedApi, steps: list[tuple[str, str]]) -> None:
    assert await after_a_deploy(phased, *steps) == 500
    assert "the order of steps has changed" in str(phased.errors[-1])
    assert phased.calls == {"a": 1, "b": 1, "c": 1}
    assert phased.state is State.FAILED_RETRYABLE


async def test_changed_kind_of_a_step_is_refused(phased: PhasedApi) -> None:
    assert await after_a_deploy(phased, ("effect", "a")) == 500
    assert "was a phase" in str(phased.errors[-1])


async def test_step_that_changes_its_kind_after_the_intent_is_refused(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        if op.attempt == 1:
            await op.effect("a", phased.fail, "a", ConnectionError("cut"), repeatable=True)
        await op.phase("a", phased.pay, connection, on=connection)

    api = phased.api(serve)
    assert [(await api.post()).status_code for _ in range(2)] == [500, 500]
    assert "was a effect" in str(phased.errors[-1])
    assert phased.calls == {"a": 1}


# ---------------------------------------------------------------- where no step may begin


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
async def test_only_phased_routes_have_steps(phased: PhasedApi, effects: Any) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect("charge", phased.call, "charge", repeatable=True)

    assert (await phased.post(serve, policy=Policy(effects=effects))).status_code == 500
    assert "Policy(effects='phased') only" in str(phased.errors[0])
    assert not phased.calls


@pytest.mark.parametrize("kind", ["phase", "effect"])
async def test_not_while_a_transaction_is_open(phased: PhasedApi, kind: str) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.enlist(connection)
        await phased.pay(connection)
        if kind == "phase":
            await op.phase("row", phased.pay, connection, on=connection)
        else:
            await op.effect("charge", phased.call, "charge", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert "while a transaction is open" in str(phased.errors[0])
    assert (phased.calls, phased.shop.payments(), phased.state) == ({"pay": 1}, 0, State.FAILED_RETRYABLE)


@pytest.mark.parametrize("inner", ["phase", "effect", "enlist"])
@pytest.mark.parametrize("outer", ["phase", "effect"])
async def test_step_inside_of_another_is_refused(phased: PhasedApi, outer: str, inner: str) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def begin() -> None:
            if inner == "phase":
                await op.phase("inner", phased.pay, connection, on=connection)
            elif inner == "effect":
                await op.effect("inner", phased.call, "inner", repeatable=True)
            else:
                await op.enlist(connection)

        if outer == "phase":
            await op.phase("outer", begin, on=connection)
        else:
            await op.effect("outer", begin, repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert isinstance(phased.errors[0], StepError | EnlistError)
    assert (phased.calls, phased.state) == ({}, State.FAILED_RETRYABLE)
    assert phased.is_free()


async def test_two_steps_at_once_are_refused(phased: PhasedApi) -> None:
    """Two at once have no order, and the end of one would take back the doubt about the other."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        begun = asyncio.Event()

        async def slow() -> None:
            begun.set()
            await asyncio.sleep(0)

        first = asyncio.create_task(op.effect("first", slow, repeatable=True))
        await begun.wait()
        with pytest.raises(StepError, match="while 'first' is under way"):
            await op.effect("second", phased.call, "second", repeatable=True)
        await first
        await op.effect("third", phased.call, "third", repeatable=True)

    assert (await phased.post(serve)).status_code == 201
    assert phased.calls == {"third": 1}


# ---------------------------------------------------------------- functions of every kind, and every driver


@pytest.mark.parametrize("payer", ALL, indirect=True)
async def test_phase_commits_and_rolls_back_with_every_driver(payer: Payer) -> None:
    """A phase commits with it, rolls back with it, and a second phase follows on the same connection."""
    phased = PhasedApi(payer.shop)
    phased.connect = payer.open

    async def serve(phased: PhasedApi, op: Operation, session: Any) -> Response:
        async def pay(fails: bool = False) -> str:
            await now(payer.pay(session, op.key))
            if fails:
                raise ValueError("after the write")
            return "paid"

        first = await op.phase("first", pay, on=session)
        with pytest.raises(ValueError, match="after the write"):
            await op.phase("second", pay, True, on=session)
        return JSONResponse([first, await op.phase("third", pay, on=session)], 201)

    answer = await phased.post(serve)
    await payer.close()
    assert (answer.status_code, answer.json()) == (201, ["paid", "paid"])
    assert (phased.shop.payments(), phased.state) == (2, State.COMPLETED)


@pytest.fixture
def payer(request: pytest.FixtureRequest) -> Payer:
    kind, name = request.param
    phased: PhasedApi = request.getfixturevalue("sqlite_desk" if kind == "sqlite" else "postgres_desk")
    return (SQLITE if kind == "sqlite" else POSTGRES)[name](phased.shop)


async def test_effect_runs_plain_and_async_functions(phased: PhasedApi) -> None:
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

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> Response:
        done = [
            await op.effect("object", Callable(), repeatable=False),
            await op.effect("lambda", lambda: later(), repeatable=False),  # noqa: PLW0108 - as people write it
            await op.effect("plain", plain, repeatable=False),
            await op.phase("plain phase", plain, on=connection),
        ]
        return JSONResponse(done, 201)

    answer = await phased.post(serve)
    assert (answer.status_code, answer.json()) == (201, ["object", "lambda", "plain", "plain"])
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, True, False, True]


async def test_a_downstream_key_is_one_requests(phased: PhasedApi) -> None:
    """The same in every attempt; another one when the key is used again, after its expiry, for something else."""
    seen = []

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        seen.append(op.downstream_key("charge"))
        await op.effect("charge", phased.call, "charge", repeatable=True)
        if op.attempt == 1 and len(seen) == 1:
            raise NotExecuted("once more")

    assert (await phased.post(serve)).status_code == 503
    assert (await phased.post(serve)).status_code == 201
    assert phased.steps()["charge"].downstream_key == seen[0] == seen[1]
    phased.let_it_expire()
    assert (await phased.post(serve, cents=7)).status_code == 201
    assert seen[2] != seen[0]
    assert phased.calls == {"charge": 2}  # what the old request remembers is not the new one's
