"""A key of a default route becomes unknown: the developer is told once per route, the client nothing of settings."""

from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web.fastapi import protect


@pytest.mark.parametrize(("effects", "told"), [("external", 1), ("repeatable", 0)])
async def test_unknown_key_of_a_route_is_explained_once(
    effects: str, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    policy = Policy(effects=effects)  # type: ignore[arg-type]
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=policy) as once:
        protect(app, once)

        @app.post("/payments")
        async def pay() -> None:
            raise RuntimeError("the provider hung up")

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        with caplog.at_level(logging.WARNING, logger="oncekey"):
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                sent = [
                    await client.post("/payments", headers={"Idempotency-Key": key})
                    for key in ("told-1", "told-2", "told-2")
                ]
    lines = [each.getMessage() for each in caplog.records if "left a key whose outcome is unknown" in each.getMessage()]
    assert len(lines) == told
    if told:
        assert sent[-1].status_code == 409
        assert "effects" not in sent[-1].json()["detail"]
        for words in ("POST /payments", "oncekey keys resolve", "raise NotExecuted", "'transactional'"):
            assert words in lines[0]
