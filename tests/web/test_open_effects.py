"""A handler swallows the failure of an effect that may not be repeated, and answers with a success."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.fastapi import protect

KEY = "left-open-1"


class Api:
    """A phased route whose charge times out; the handler answers with ``status`` all the same."""

    def __init__(self, url: str, status: int) -> None:
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects="phased"), migrate=True)
        self.calls = 0
        self.app = FastAPI()
        protect(self.app, self.once)

        async def charge() -> dict[str, Any]:
            self.calls += 1
            raise TimeoutError

        @self.app.post("/rides")
        async def ride() -> JSONResponse:
            with contextlib.suppress(TimeoutError):
                await current().effect("charge", charge, repeatable=False)
            return JSONResponse({"ride": 1}, status)

    async def send(self) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rides") as client:
            return await client.post("/rides", headers={"Idempotency-Key": KEY})

    @property
    def state(self) -> State:
        (record,) = self.once.store.read([("single-tenant", KEY)])
        assert record is not None
        return record.state


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/rides.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def test_success_over_an_open_effect_is_stored_warned_about_and_audited(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    api = Api(url, 200)
    with api.once, caplog.at_level(logging.WARNING, logger="oncekey"):
        first, second = await api.send(), await api.send()
        assert (first.status_code, second.status_code, api.calls, api.state) == (200, 200, 1, State.COMPLETED)
        (line,) = api.once.store.audit("single-tenant", KEY, 10)
    assert "is not known" in line.why
    told = [record.getMessage().split()[0] for record in caplog.records if hasattr(record, "event")]
    assert told == ["EffectLeftOpen"]


@pytest.mark.parametrize("status", [402, 429, 500])
async def test_error_over_an_open_effect_makes_the_key_unknown(url: str, status: int) -> None:
    api = Api(url, status)
    with api.once:
        first, second = await api.send(), await api.send()
        assert (first.status_code, second.status_code, api.calls, api.state) == (status, 409, 1, State.UNKNOWN)
