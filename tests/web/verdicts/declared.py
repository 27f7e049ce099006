"""What the ways to declare an endpoint share: their register, and middleware that changes an app.

Nothing here asserts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.web.verdicts.case_runner import CaseRunner

DECLARATIONS: dict[str, Callable[[CaseRunner], Any]] = {}
"""Makes the protected app of each way."""
FOREIGN: dict[str, Callable[[CaseRunner], Any]] = {}
"""The same, where an endpoint may count as not wrapped: it answers by itself, in ASGI."""


def declared(make: Callable[[CaseRunner], Any]) -> Callable[[CaseRunner], Any]:
    DECLARATIONS[make.__name__] = make
    return make


def decorated(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """As an app's own decorators are."""

    @functools.wraps(endpoint)
    async def outer(*args: Any, **kwargs: Any) -> Any:
        return await endpoint(*args, **kwargs)

    return outer


def foreign(make: Callable[[CaseRunner], Any]) -> Callable[[CaseRunner], Any]:
    FOREIGN[make.__name__] = make
    return make


class HandsOn:
    """Middleware that does nothing."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


class AfterFirstRequest:
    """Lets the app see one request, and changes it then."""

    def __init__(self, app: Any, change: Callable[[], None]) -> None:
        self.app = app
        self.change: Callable[[], None] | None = change

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.change is not None:
            headers = [(b"idempotency-key", b"of another request")]
            other = {**scope, "path": "/nowhere", "raw_path": b"/nowhere", "headers": headers}
            await self.app(other, _empty_body, _discard)
            self.change()
            self.change = None
        await self.app(scope, receive, send)


async def _empty_body() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _discard(message: Any) -> None:
    del message
