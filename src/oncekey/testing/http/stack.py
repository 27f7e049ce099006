"""One client that drives the payments API alike in every framework.

``Stack`` is the protected app in this process, over a ``FlakyStore``. ``ServedStack`` (``served.py``) is the same for a
test, with the app in the process of a real server.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from oncekey import OnceKey
from oncekey.core.record import Record
from oncekey.telemetry.events import Event
from oncekey.testing.http.flaky import ONE, FlakyStore
from oncekey.testing.http.payments import Payments
from oncekey.testing.http.protected import Framework, Protected

SECONDS = 10.0
"""How long a test waits for what must happen before it says that it did not."""
PAYMENT = {"amount": 1000, "currency": "EUR"}


def until(holds: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll until ``holds()`` is true, and return what it said."""
    deadline = time.monotonic() + seconds
    while not (result := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)
    return result


def as_a_server(app: Any) -> Any:
    """What an app raises becomes a bare 500, as every WSGI server does; ASGITransport does it by itself."""

    def outer(environ: Any, start_response: Any) -> Any:
        try:
            return app(environ, start_response)
        except Exception:  # noqa: BLE001 - as a server
            start_response("500 Internal Server Error", [("content-type", "text/plain")], sys.exc_info())
            return [b"Internal Server Error"]

    return outer


class Loop:
    """An event loop in a thread of its own, so that tests are the same for sync and async apps."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()

    def start(self, awaitable: Awaitable[Any]) -> Future[Any]:
        async def run() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def close(self) -> None:
        self.start(self._loop.shutdown_default_executor()).result(SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


class Stack:
    """The protected app of one framework in this process. ``options`` are those of :class:`Protected`."""

    inside: Protected

    def __init__(self, framework: Framework, **options: Any) -> None:
        self.framework = framework
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="test-client")
        self._open(options)

    def _open(self, options: dict[str, Any]) -> None:
        store = options.pop("store", None) or FlakyStore()
        self.inside = Protected(self.framework, store, **options)
        self._loop = Loop() if self.framework.is_async else None

    # ---------------------------------------------------------------- what a client does

    def post(self, key: str | Sequence[str] | None = "k-1", m: str = "ok", **more: Any) -> httpx.Response:
        """One request; ``m`` is how the handler ends. Several keys are several headers."""
        return self.together([request(key, m, **more)])[0]

    def start(self, key: str | None = "k-1", m: str = "ok", **more: Any) -> Future[httpx.Response]:
        """As ``post``, without waiting for the response."""
        return self._threads.submit(self.post, key, m, **more)

    def together(self, requests: list[dict[str, Any]]) -> list[httpx.Response]:
        """One request after the other in the same task or thread, as a server with one worker handles them."""
        if self._loop is not None:
            answers: list[httpx.Response] = self._loop.start(self._ask_async(requests)).result(30.0)
            return answers
        with httpx.Client(
            transport=httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False), base_url="http://api.test"
        ) as client:
            return [client.request(**_joined(asked)) for asked in requests]

    async def _ask_async(self, requests: list[dict[str, Any]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            return [await client.request(**asked) for asked in requests]

    # ---------------------------------------------------------------- what became of it

    @property
    def payments(self) -> Payments:
        return self.inside.payments

    @property
    def runs(self) -> int:
        return len(self.payments.runs)

    @property
    def app(self) -> Any:
        return self.inside.app

    @property
    def once(self) -> OnceKey:
        return self.inside.once

    @property
    def store(self) -> Any:
        """The store of the app. Its verbs fail while they are named in ``down``; ``steal`` gives a key away."""
        return self.inside.store

    def record(self, key: str = "k-1", scope: str = ONE) -> Record | None:
        record: Record | None = self.store.read([(scope, key)])[0]
        return record

    def rows(self) -> list[Record]:
        """All keys, without their responses."""
        rows: list[Record] = self.store.listing()
        return rows

    @property
    def events(self) -> list[Event]:
        return self.inside.events

    def saw(self, kind: type[Event]) -> list[Any]:
        """The events of one kind so far."""
        return [event for event in list(self.events) if type(event) is kind]

    def close(self) -> None:
        self.payments.go.set()
        self._threads.shutdown()
        if self._loop is None:
            self.inside.close_blocking()
        else:
            self._loop.start(self.inside.close_in_loop()).result(SECONDS)
            self._loop.close()


def request(
    key: str | Sequence[str] | None = "k-1",
    m: str = "ok",
    *,
    method: str = "POST",
    path: str = "/payments",
    body: Any = PAYMENT,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    sent: list[tuple[str, str]] = list((headers or {}).items())
    sent += [("Idempotency-Key", value) for value in ([key] if isinstance(key, str) else key or [])]
    if "content" not in more and method != "GET":
        more["json"] = body
    return {"method": method, "url": path, "params": {"m": m} if m != "ok" else None, "headers": sent, **more}


def _joined(asked: dict[str, Any]) -> dict[str, Any]:
    """Repeated headers as one, as WSGI servers hand them over; httpx would keep the last one only."""
    headers: dict[str, str] = {}
    for name, value in asked["headers"]:
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return asked | {"headers": headers}
