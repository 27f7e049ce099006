"""An app that answers every exception: Starlette calls such a handler outside of all middleware, and so of ours."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.web.fastapi import protect

KEY = "every-1"


def app_of(
    once: OnceKey, kind: Any, status: int, *, plain: bool = False, where: str = "endpoint"
) -> tuple[Any, list[int]]:
    app, runs = FastAPI(), []

    async def envelope(_request: Any, _error: Exception) -> JSONResponse:
        return JSONResponse({"ok": False}, status)

    def plain_envelope(_request: Any, _error: Exception) -> JSONResponse:
        return JSONResponse({"ok": False}, status)

    app.add_exception_handler(kind, plain_envelope if plain else envelope)
    protect(app, once)

    async def check() -> None:
        if where == "dependency":
            raise ValueError("the user table is gone")

    @app.post("/payments", dependencies=[Depends(check)])
    async def pay() -> None:
        runs.append(1)
        raise ValueError("after the charge")

    return app, runs


async def send(app: Any, times: int) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return [await client.post("/payments", headers={"Idempotency-Key": KEY}) for _ in range(times)]


def state(once: OnceKey) -> State | None:
    (record,) = once.store.read([("single-tenant", KEY)])
    return None if record is None else record.state


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", [Exception, 500])
@pytest.mark.parametrize(
    ("effects", "status", "answers", "runs", "ends"),
    [
        ("external", 200, [409, 409, 409], 1, State.UNKNOWN),
        ("repeatable", 200, [500, 500, 500], 3, State.FAILED_RETRYABLE),
        ("external", 400, [400, 400, 400], 1, State.FAILED),
        ("external", 503, [503, 409, 409], 1, State.UNKNOWN),
        ("repeatable", 503, [503, 503, 503], 3, State.FAILED_RETRYABLE),
    ],
)
async def test_answer_to_every_exception_is_judged_as_any_other(
    kind: Any, plain: bool, effects: Any, status: int, answers: list[int], runs: int, ends: State
) -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(effects=effects)) as once:
        app, ran = app_of(once, kind, status, plain=plain)
        sent = await send(app, 3)
        assert ([each.status_code for each in sent], len(ran), state(once)) == (answers, runs, ends)
    assert all(each.headers["idempotency-key"] == KEY for each in sent)


async def test_success_made_of_a_dependencys_exception_is_not_stored() -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        app, ran = app_of(once, Exception, 200, where="dependency")
        assert [each.status_code for each in await send(app, 2)] == [409, 409]
        assert (ran, state(once)) == ([], State.UNKNOWN)


async def test_exception_still_reaches_the_server() -> None:
    """Servers log what was raised, also when the app has answered for it."""
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        app, _ = app_of(once, Exception, 503)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            with pytest.raises(ValueError, match="after the charge"):
                await client.post("/payments", headers={"Idempotency-Key": KEY})
