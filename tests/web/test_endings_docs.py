"""The app of docs/endings.md, run as it stands there, with providers that fail in three ways."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest

PAGE = (Path(__file__).parents[2] / "docs/endings.md").read_text("utf-8")


class Unanswering(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        raise httpx.ReadTimeout("no answer", request=request)


def provider(status: int) -> httpx.AsyncBaseTransport:
    app = fastapi.FastAPI()

    @app.post("/charges", status_code=status)
    async def charge() -> dict[str, int]:
        return {"status": status}

    return httpx.ASGITransport(app)


@pytest.mark.parametrize(
    ("transport", "first", "retry"),
    [
        (provider(200), (201, None), (201, None)),
        (provider(500), (500, None), (409, "urn:oncekey:problem:outcome-unknown")),
        (Unanswering(), (504, None), (409, "urn:oncekey:problem:outcome-unknown")),
        (None, (503, None), (503, None)),  # the page's own provider: the port takes no connection, so each retry runs
    ],
)
async def test_the_app_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any, first: tuple[int, None], retry: tuple[int, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/endings.md", "exec"), names)
    if transport is not None:
        names["provider"] = httpx.AsyncClient(transport=transport, base_url="http://provider")
    app = httpx.ASGITransport(names["app"], raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=app, base_url="http://page") as client:
        for expected in (first, retry):
            answer = await client.post("/payments", headers={"Idempotency-Key": "k-1"}, json={"cents": 5})
            is_problem = answer.headers["content-type"] == "application/problem+json"
            assert (answer.status_code, answer.json()["type"] if is_problem else None) == expected
    await names["provider"].aclose()
    await names["once"].aclose()
