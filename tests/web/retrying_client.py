"""What the tests share that ask which answer is the handler's: a client, the state of its key, and usual middleware.

Nothing here asserts.
"""

from __future__ import annotations

from typing import Any

import anyio
import httpx
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import OnceKey
from oncekey.core.states import State

PATIENCE = 0.15
KEY = {"Idempotency-Key": "k-1"}


async def replies(
    app: Any, times: int = 3, path: str = "/pay", method: str = "POST", **more: Any
) -> list[httpx.Response]:
    """The same request, so often, under the same key."""
    headers = {**KEY, **more.pop("headers", {})}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        return [await client.request(method, path, headers=headers, **more) for _ in range(times)]


async def answers(app: Any, times: int = 3, path: str = "/pay", method: str = "POST", **more: Any) -> list[int]:
    """The statuses of the replies."""
    return [reply.status_code for reply in await replies(app, times, path, method, **more)]


def state(once: OnceKey) -> State | None:
    record = once.store.read([("single-tenant", "k-1")])[0]
    return None if record is None else record.state


class Layer:
    """Middleware that does nothing, for others to inherit from."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class CopiesScope(Layer):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(dict(scope), receive, send)


class MovesOn(Layer):
    """A timeout: it cancels the handler and answers."""

    status = 504

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with anyio.move_on_after(PATIENCE) as patience:
            await self.app(scope, receive, send)
        if patience.cancelled_caught:
            await JSONResponse({}, self.status)(scope, receive, send)


class PassesOn(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        return answer
