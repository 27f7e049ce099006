"""One client that drives the payments API alike in every framework.

``Framework`` says how to make the app. ``Stack`` is that app, protected, in this process; ``FlakyStore`` has its keys.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Found, Record, Reservation
from oncekey.core.swaps import Swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.telemetry import events
from oncekey.testing.http.payments import MAX_RESPONSE, Payments

ONE = "single-tenant"
"""The scope of all keys of an app with SINGLE_TENANT and ``key_per="tenant"``."""
NOW = 1_800_000_000.0
"""The time in every Stack's store, which stands still: so Idempotency-Expires is the same everywhere."""
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


class FlakyStore(MemoryStore):
    """A store whose verbs fail while they are named in ``down``."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.down: set[str] = set()

    def _ask(self, verb: str) -> None:
        if verb in self.down:
            raise StoreUnavailable("the test has switched it off")

    def reserve(self, batch: Sequence[Reservation]) -> list[Found]:
        self._ask("reserve")
        return super().reserve(batch)

    def swap(self, batch: Sequence[Swap]) -> list[Record | None]:
        self._ask("swap")
        return super().swap(batch)

    def read(self, keys: Sequence[tuple[str, str]]) -> list[Record | None]:
        self._ask("read")
        return super().read(keys)

    def steal(self, key: str = "k-1") -> None:
        """Give the key to another owner, as if its next attempt ran in another process."""
        with self._lock:
            row = self._rows[ONE, key]
            self._rows[ONE, key] = replace(row, owner="another owner", attempt=row.attempt + 1)


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


@dataclass(frozen=True)
class Framework:
    """How to make the payments API in one framework, protected."""

    make_app: Callable[[Payments, OnceKey], Any]
    is_async: bool = True
    """Whether it makes an ASGI app; otherwise a WSGI app."""
    async_handlers: bool = True
    """Whether its handlers run in the event loop; otherwise in threads. A WSGI app has none that do."""
    reports_endpoints: bool = True
    """Whether oncekey sees its endpoints being entered and what they raise. Without it a 4xx is the app's own word."""
    name: str = ""
    make_declaring_app: Callable[[Payments, OnceKey], Any] | None = None
    """Makes an app whose handlers declare what protects them, and which adds one after ``protect()``."""

    def __post_init__(self) -> None:
        if not self.is_async:
            object.__setattr__(self, "async_handlers", False)


class Stack:
    """The protected app of one framework in this process."""

    def __init__(
        self,
        framework: Framework,
        *,
        store: FlakyStore | None = None,
        make_app: Callable[[Payments, OnceKey], Any] | None = None,
        policy: Policy | None = None,
        effects: Any = "external",
        **options: Any,
    ) -> None:
        self.framework = framework
        self.payments = Payments()
        self.events: list[events.Event] = []
        self.store = store or FlakyStore()
        options.setdefault("scope", SINGLE_TENANT)
        self.once = OnceKey(
            self.store,
            policy=policy or Policy(effects=effects, max_response_bytes=MAX_RESPONSE),
            on_event=self.events.append,
            **options,
        )
        self.app = (make_app or framework.make_app)(self.payments, self.once)
        self._loop = Loop() if framework.is_async else None
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="test-client")

    @property
    def runs(self) -> int:
        return len(self.payments.runs)

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

    def record(self, key: str = "k-1", scope: str = ONE) -> Record | None:
        return self.store.read([(scope, key)])[0]

    def saw(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind so far."""
        return [event for event in list(self.events) if type(event) is kind]

    def close(self) -> None:
        self.payments.go.set()
        self._threads.shutdown()
        if self._loop is None:
            self.once.close()
        else:
            self._loop.start(self.once.aclose(grace=2.0)).result(SECONDS)
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
