"""Phases whose commit fails or ends otherwise, and steps that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from oncekey import NotExecuted
from oncekey.core.doubts import in_doubt
from oncekey.core.states import State
from oncekey.engine.operation import Operation
from oncekey.testing import faults
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import PostgresServer
from tests.engine.phased_api import CUT, PhasedApi, now
from tests.enlist.shop import Shop


async def paying(phased: PhasedApi, op: Operation, connection: Any) -> Response:
    return JSONResponse(await op.phase("row", phased.pay, connection, on=connection), 201)


async def test_a_commit_that_was_not_heard_of(phased: PhasedApi) -> None:
    """It happened: the steps tell, and the request goes on."""
    with faults.install("enlist.commit", "after", faults.raising(CUT)) as fault:
        answer = await phased.post(paying)
    assert fault.fired
    assert (answer.status_code, answer.json()) == (201, {"paid": 1})
    assert (phased.shop.payments(), phased.state, phased.is_free()) == (1, State.COMPLETED, True)


async def test_a_commit_that_did_not_happen(phased: PhasedApi) -> None:
    api = phased.api(paying)
    with faults.install("enlist.commit", "before", faults.raising(CUT)) as fault:
        assert (await api.post()).status_code == 503
    assert fault.fired
    assert (phased.shop.payments(), phased.state, phased.is_free()) == (0, State.FAILED_RETRYABLE, True)
    assert (await api.post()).status_code == 201
    assert (phased.shop.payments(), phased.calls) == (1, {"pay": 2})


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", postgres_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_cut_on_the_wire(postgres_desk: PhasedApi, proxy: TcpProxy, when: Any) -> None:
    """Hazard 9, with the app's connection behind a proxy: the retry finds the truth in both cases."""
    phased = postgres_desk
    far = PhasedApi(Shop(proxy.rewrite(phased.shop.url)))
    phased.connect = far._connect
    api = phased.api(paying)
    cut = proxy.cut_on("to_server", b"COMMIT", when=when)
    answer = await api.post()
    assert cut.wait(5)
    assert (answer.status_code, phased.shop.payments()) == ((201, 1) if when == "after" else (503, 0))
    assert (await api.post()).status_code == 201
    assert (phased.shop.payments(), phased.calls["pay"]) == (1, 1 if when == "after" else 2)


async def test_phase_that_commits_by_itself_is_refused_and_commits_nothing(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def work() -> None:
            await phased.pay(connection)
            await now(connection.execute("COMMIT"))

        await op.phase("row", work, on=connection)

    api = phased.api(serve)
    assert (await api.post()).status_code in (409, 500)
    assert (phased.shop.payments(), phased.state) == (0, State.FAILED_RETRYABLE)
    assert phased.is_free()


async def test_an_error_of_the_database_is_the_handlers_to_answer(phased: PhasedApi) -> None:
    """Caught, and answered with a 4xx: that is final, and nothing of the phase is there."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> Response:
        async def work() -> None:
            await phased.pay(connection)
            await now(connection.execute("INSERT INTO payments (key) VALUES (NULL)"))

        with pytest.raises(Exception, match=r"(?i)null"):
            await op.phase("row", work, on=connection)
        return JSONResponse({"duplicate": True}, 422)

    api = phased.api(serve)
    assert [(await api.post()).status_code for _ in range(2)] == [422, 422]
    assert (phased.shop.payments(), phased.state, phased.calls) == (0, State.FAILED, {"pay": 1})


async def out_of_time(limit: asyncio.Timeout) -> None:
    """It hangs, and its caller's limit is reached: here, and not while the store is asked before."""
    limit.reschedule(asyncio.get_running_loop().time())
    await asyncio.Event().wait()


async def test_a_phase_that_ran_out_of_time(phased: PhasedApi) -> None:
    """The handler's own limit: the phase is undone at once, and the handler may go on."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def hang() -> None:
            await phased.pay(connection)
            await out_of_time(limit)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await op.phase("row", hang, on=connection)
        assert (op.enlisted, phased.is_free()) == (None, True)
        await op.phase("note", phased.pay, connection, on=connection)

    assert (await phased.post(serve)).status_code == 201
    assert (phased.shop.payments(), phased.state) == (1, State.COMPLETED)
    assert list(phased.steps()) == ["note"]


async def test_a_handler_that_is_cancelled_in_a_phase(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        async def work() -> None:
            await phased.pay(connection)
            raise asyncio.CancelledError

        await op.phase("row", work, on=connection)

    assert (await phased.post(serve)).status_code >= 500
    assert (phased.shop.payments(), phased.state, phased.is_free()) == (0, State.FAILED_RETRYABLE, True)


@pytest.mark.parametrize("repeatable", [True, False])
async def test_an_effect_that_ran_out_of_time(phased: PhasedApi, repeatable: bool) -> None:
    """It is not known how it ended: the same as if it had raised. The next step is not kept waiting."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await op.effect("charge", out_of_time, limit, repeatable=repeatable)
        await op.phase("note", phased.pay, connection, on=connection)
        raise ConnectionError("stumbled")

    assert (await phased.post(serve)).status_code == 500
    assert phased.state is (State.FAILED_RETRYABLE if repeatable else State.UNKNOWN)


async def test_cancelled_while_the_store_is_asked(phased: PhasedApi) -> None:
    """A step is over when its caller has gone, also while a traceback still holds on to it."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        task = asyncio.create_task(op.effect("first", phased.call, "first", repeatable=True))
        await asyncio.sleep(0)  # it has asked the store for its intent
        assert op.steps is not None
        assert op.steps.under_way == "first"
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await task
        assert op.steps.under_way is None
        await op.effect("second", phased.call, "second", repeatable=True)
        del cancelled

    assert (await phased.post(serve)).status_code == 201
    assert phased.calls == {"second": 1}


async def test_effect_that_was_not_executed_is_not_in_doubt_later(phased: PhasedApi) -> None:
    """The first effect proved that it did not happen. Only the second is in doubt, and a verdict need not name it."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        with contextlib.suppress(NotExecuted):
            await op.effect("first", phased.fail, "first", NotExecuted("closed"), repeatable=False)
        await op.effect("second", phased.fail, "second", TimeoutError(), repeatable=False)

    assert (await phased.post(serve)).status_code == 500
    assert (phased.state, [step.name for step in in_doubt(phased.record, phased.steps().values())]) == (
        State.UNKNOWN,
        ["second"],
    )
