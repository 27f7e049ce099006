"""A handler that never ends: ``Policy(max_run=…)`` ends it, and its key is as if the process had died."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.errors import ConfigurationError, LeaseLost, StoreUnavailable
from oncekey.web.fastapi import protect
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.web.apps import soon, until

SHORT = timedelta(milliseconds=500)
EffectsName = Literal["external", "transactional", "phased", "repeatable"]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    ready: str = request.getfixturevalue("ready_url")
    return ready


class Shop:
    """A FastAPI app with one protected endpoint; ``calls`` counts what it did outside."""

    def __init__(self, url: str, effects: EffectsName, **policy: Any) -> None:
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects=effects, max_run=SHORT, **policy))
        self.app = FastAPI()
        self.calls: list[str] = []
        protect(self.app, self.once)

    async def post(self) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await soon(client.post("/payments", headers={"Idempotency-Key": "k-1"}))

    def record(self) -> Record:
        (record,) = self.once.store.read([("single-tenant", "k-1")])
        self.once.store.disconnect()
        assert record is not None
        return record


@pytest.fixture
async def shop(url: str) -> AsyncIterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(effects: EffectsName, **policy: Any) -> Shop:
        made.append(Shop(url, effects, **policy))
        return made[-1]

    yield make
    for each in made:
        await each.once.aclose(0.5)


@pytest.mark.parametrize(
    ("effects", "state", "retry", "calls"),
    [
        ("external", State.UNKNOWN, 409, 1),
        ("transactional", State.FAILED_RETRYABLE, 201, 0),
        ("phased", State.FAILED_RETRYABLE, 201, 1),
        ("repeatable", State.FAILED_RETRYABLE, 201, 2),
    ],
)
async def test_handler_that_never_ends_is_cancelled_and_effects_decide(
    shop: Callable[..., Shop],
    effects: EffectsName,
    state: State,
    retry: int,
    calls: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    this = shop(effects)

    @this.app.post("/payments", status_code=201)
    async def pay() -> None:
        if effects == "phased":
            await current().effect("charge", lambda: this.calls.append("charge"), repeatable=False)
        elif effects != "transactional":
            this.calls.append("charge")
        if current().attempt == 1:
            await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING, "oncekey"):
        assert (await this.post()).status_code == 500
    assert this.record().state is state
    (line,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("RanTooLong")]
    assert "max_seconds=0.5 handler=cancelled" in line
    assert (await this.post()).status_code == retry
    assert len(this.calls) == calls


async def test_effect_that_hangs_and_may_not_be_repeated_makes_the_key_unknown(shop: Callable[..., Shop]) -> None:
    this = shop("phased")

    async def charge() -> None:
        this.calls.append("charge")
        await asyncio.Event().wait()

    @this.app.post("/payments", status_code=201)
    async def pay() -> None:
        await current().effect("charge", charge, repeatable=False)

    assert (await this.post()).status_code >= 409
    assert this.record().state is State.UNKNOWN
    assert (await this.post()).status_code == 409
    assert this.calls == ["charge"]


async def test_handler_that_ends_in_time_is_left_alone(shop: Callable[..., Shop]) -> None:
    this = shop("external")

    @this.app.post("/payments", status_code=201)
    async def pay() -> None:
        this.calls.append("charge")

    assert (await this.post()).status_code == 201
    assert this.once.engine.keeper._live == {}


async def test_thread_of_a_cancelled_handler_goes_on_without_its_key(shop: Callable[..., Shop]) -> None:
    """A plain function cannot be cancelled. The retry runs, and what the late thread still does is refused."""
    this = shop("phased")
    go_on, over = threading.Event(), threading.Event()
    late: list[BaseException] = []

    @this.app.post("/payments", status_code=201)
    def pay() -> None:
        op = current()
        if op.attempt == 1:
            go_on.wait(20)
        try:
            op.blocking.effect("charge", lambda: this.calls.append(f"attempt {op.attempt}"), repeatable=False)
        except LeaseLost as error:
            late.append(error)
            raise
        finally:
            if op.attempt == 1:
                over.set()

    assert (await this.post()).status_code == 500
    assert (await this.post()).status_code == 201
    go_on.set()
    await asyncio.to_thread(over.wait, 20)
    assert this.calls == ["attempt 2"]
    assert len(late) == 1


def test_wsgi_handler_goes_on_and_its_lease_is_no_longer_renewed(url: str) -> None:
    """Its key is left to the lease; the handler that ends after all is only late."""
    policy = Policy(effects="external", max_run=SHORT, lease=timedelta(seconds=1))
    told: list[Any] = []
    over = threading.Event()

    def hear(event: Any) -> None:
        told.append(event)
        if type(event).__name__ == "RanTooLong":
            over.set()

    once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, on_event=hear)

    def app(environ: Any, start_response: Any) -> list[bytes]:
        assert over.wait(20)
        assert once.engine.keeper._live == {}
        start_response("201 Created", [])
        return [b"paid"]

    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/payments",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_IDEMPOTENCY_KEY": "k-1",
        "wsgi.input": io.BytesIO(b""),
    }

    def start_response(status: str, headers: Any, *_: Any) -> Callable[[bytes], object]:
        told.append(status)
        return told.append

    assert b"".join(IdempotencyMiddleware(app, once=once)(environ, start_response)) == b"paid"
    assert "201 Created" in told
    (event,) = [each for each in told if type(each).__name__ == "RanTooLong"]
    assert event.handler == "goes on in its thread, without a lease"
    once.close()


async def test_outcome_that_waits_for_the_store_is_not_given_up(shop: Callable[..., Shop]) -> None:
    """The handler has ended: only the store has not taken it yet, and the lease is kept until it does."""
    this = shop("external")
    keeper = this.once.engine.keeper
    tried = threading.Event()

    def fails(flow: Any, timeout: float) -> Any:
        tried.set()
        flow.close()
        raise StoreUnavailable("down")

    run, run_blocking = this.once.engine.run, this.once.engine.run_blocking

    @this.app.post("/payments", status_code=201)
    async def pay() -> None:
        async def down(flow: Any, timeout: float) -> Any:
            return fails(flow, timeout)

        this.once.engine.run = down  # type: ignore[method-assign]
        this.once.engine.run_blocking = fails  # type: ignore[method-assign]

    assert (await this.post()).status_code == 503
    (operation,) = keeper._live.values()
    await until(lambda: operation.runs_until is not None and operation.runs_until < time.monotonic(), "over")
    keeper.look()
    assert operation.owner in keeper._live
    this.once.engine.run, this.once.engine.run_blocking = run, run_blocking  # type: ignore[method-assign]
    await until(lambda: this.record().state is State.COMPLETED, "it is stored", 5.0)


@pytest.mark.parametrize("given", [timedelta(0), 5, "1h"])
def test_max_run_that_is_no_length_of_time_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_run"):
        Policy(max_run=given)
