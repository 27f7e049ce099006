"""Asks the status endpoint of a stack's OnceKey, by ASGI or by WSGI as its framework is."""

from __future__ import annotations

import httpx

from oncekey.testing.http.stack import Stack
from oncekey.web.status import status_app, status_wsgi


def status_of(stack: Stack, key: str, headers: dict[str, str]) -> httpx.Response:
    if not stack.framework.is_async:
        with httpx.Client(transport=httpx.WSGITransport(status_wsgi(stack.once)), base_url="http://s") as client:
            return client.get(f"/{key}", headers=headers)

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(status_app(stack.once))
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return await client.get(f"/{key}", headers=headers)

    assert stack._loop is not None
    answer: httpx.Response = stack._loop.start(get()).result(10)
    return answer
