"""A Django project with one view, behind a OnceKey in memory. Nothing here asserts."""

from __future__ import annotations

from typing import Any

import httpx

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.states import State
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.stack import Loop, as_a_server
from tests.web.django_apps import configure, make_handler, urls

configure()

from django.urls import path  # noqa: E402 - Django is configured first


class Site:
    """One view at POST /pay, and its client."""

    def __init__(self, view: Any, *, asgi: bool, where: str = "pay", policy: Policy | None = None, **more: Any) -> None:
        options = {name: more.pop(name) for name in ("scope", "authorize", "routes") if name in more}
        self.once = OnceKey("memory://", policy=policy or Policy(), **{"scope": SINGLE_TENANT, **options})
        self.app = make_handler(urls(path(where, view)), self.once, asgi=asgi, **more)
        self.loop = Loop() if asgi else None

    def post(self, key: str | None = "k-1", url: str = "/pay", **asked: Any) -> httpx.Response:
        asked["headers"] = {**({"Idempotency-Key": key} if key else {}), **asked.get("headers", {})}
        if self.loop is not None:
            answer: httpx.Response = self.loop.start(self._post(url, asked)).result(20.0)
            return answer
        transport = httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://site") as client:
            return client.post(url, **asked)

    async def _post(self, url: str, asked: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return await client.post(url, **asked)

    def state(self, key: str = "k-1") -> State | None:
        record = self.once.store.read([(ONE, key)])[0]
        return None if record is None else record.state

    def close(self) -> None:
        if self.loop is None:
            self.once.close()
        else:
            self.loop.start(self.once.aclose(grace=2.0)).result(10.0)
            self.loop.close()
