"""Traces of an app whose deploy switches encryption on: they do not call a replay unreadable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.encryption import Keyring
from oncekey.web.starlette import protect
from tests.encryption.rings import ring
from tests.telemetry.sdk import Sdk


async def pay(request: Request) -> JSONResponse:
    return JSONResponse({"paid": (await request.json())["amount"]}, 201)


async def answers(url: str, sdk: Sdk, keyring: Keyring | None, *amounts: int) -> list[tuple[int, Any]]:
    """Each status of one process, and the decision in the span of the question to the store."""
    once = OnceKey(url, scope=SINGLE_TENANT, telemetry=sdk.exporter(), encryption=keyring)
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    protect(app, once, upkeep=False)
    found: list[tuple[int, Any]] = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        for amount in amounts:
            before = len(sdk.spans("idempotency.begin"))
            answer = await client.post("/pay", json={"amount": amount}, headers={"Idempotency-Key": "k-1"})
            (span,) = sdk.spans("idempotency.begin")[before:]
            found.append((answer.status_code, (span.attributes or {}).get("idempotency.decision")))
    await once.aclose()
    return found


@pytest.mark.parametrize("before", [None, ring(1)], ids=str)
async def test_row_that_must_be_compared_again_has_no_decision_in_its_first_span(
    tmp_path: Path, before: Keyring | None
) -> None:
    sdk, url = Sdk(), f"sqlite:///{tmp_path / 'keys.db'}"
    assert await answers(url, sdk, before, 5, 5, 6) == [(201, "execute"), (201, "replay"), (422, "mismatch")]
    assert await answers(url, sdk, ring(2, 1), 5, 6) == [(201, None), (422, None)]
