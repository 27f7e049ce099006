"""Schemathesis against the demo: whatever its OpenAPI document allows, and what it does not.

No 5xx from us. And a request that was rejected has not used up its key: the same key with a good body then runs as the
first request that it is, and charges once. Handlers that the demo lets fail on purpose are left to fail.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import requests
from fastapi import FastAPI
from hypothesis import strategies as st

from oncekey.demo.app import make_app
from oncekey.demo.book import Book
from oncekey.demo.provider import Ledger, Provider, make_server
from oncekey.web.asgi import IdempotencyMiddleware
from tests.faults.campaign import Fault, Run
from tests.faults.fuzz import search

REJECTED = (400, 413, 415, 422)
"""Before the operation began: of a key that was never used, a 422 is no mismatch."""
KILLS_OR_SLEEPS = ("crash", "slow", "large")
GOOD = {"customerId": "cus-1", "amountCents": 1200, "currency": "EUR"}
TENANT = {"Authorization": "Bearer tenant-a"}
BASE = "http://demo"


@contextmanager
def provider_in(folder: Any) -> Iterator[tuple[Provider, Ledger]]:
    """The demo's provider, in a thread. In the demo it is a process of its own, but no process is killed here."""
    ledger = Ledger(folder / "ledger")
    listener = socket.create_server(("127.0.0.1", 0))
    server: ThreadingHTTPServer = make_server(listener, ledger, honours=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Provider(f"http://127.0.0.1:{listener.getsockname()[1]}", honours=True), ledger
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        ledger.close()


class Caller:
    """Sends what schemathesis made up."""

    def __init__(self, run: Run, app: FastAPI, ledger: Ledger) -> None:
        self.run = run
        self.ledger = ledger
        self.numbers = 0
        self.rejected = 0
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE)

    async def one(self, case: Any, own_key: bool) -> None:
        self.numbers += 1
        key = f"case-{self.numbers:06d}"
        query = case.query or {}
        if query.get("simulate") in KILLS_OR_SLEEPS:
            query["simulate"] = "decline"
        kwargs = case.as_transport_kwargs(base_url=BASE)
        sent = requests.Request(**{name: value for name, value in kwargs.items() if name in _KNOWN}).prepare()
        headers = {name: value for name, value in sent.headers.items() if name.lower() not in _OURS}
        if own_key:
            headers |= TENANT | {"Idempotency-Key": key}
        content = sent.body.encode() if isinstance(sent.body, str) else sent.body
        self.run.asked()
        answer = await self.client.request(sent.method or "GET", sent.url or BASE, content=content, headers=headers)
        on_purpose = query.get("simulate") == "error" and b"out of order" in answer.content
        assert answer.status_code < 500 or on_purpose, (answer.status_code, answer.text)
        if own_key and sent.method == "POST" and answer.status_code in REJECTED:
            self.rejected += 1
            await self.then_a_good_one(key)

    async def then_a_good_one(self, key: str) -> None:
        before = len(self.ledger.charges())
        self.run.asked(2)
        first, again = [
            await self.client.post("/payments", json=GOOD, headers=TENANT | {"Idempotency-Key": key}) for _ in range(2)
        ]
        assert first.status_code == 201, (first.status_code, first.text)
        assert "idempotency-replayed" not in first.headers, "the rejected request has used up its key"
        assert (again.status_code, again.content) == (201, first.content)
        assert len(self.ledger.charges()) == before + 1


_KNOWN = ("method", "url", "headers", "params", "data", "json", "files", "cookies")
_OURS = ("content-length", "host", "transfer-encoding")


def rejected_requests(run: Run) -> None:
    import schemathesis  # takes a second, and every short form imports this module

    with provider_in(run.folder) as (provider, ledger), asyncio.Runner() as runner:
        store = run.url()
        Book(store).create_tables()
        app = make_app(store, provider)
        caller = Caller(run, app, ledger)
        document = schemathesis.openapi.from_dict(app.openapi())
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        operations: list[Any] = [found.ok() for found in document.get_all_operations()]  # type: ignore[union-attr]
        cases = st.one_of([each.as_strategy(generation_mode=mode) for each in operations for mode in modes])

        def test(case: Any, own_key: int) -> None:
            runner.run(caller.one(case, own_key > 0))

        try:
            search(run, test, {"case": cases, "own_key": st.integers(0, 4)}, "I4", run.count)
        finally:
            runner.run(caller.client.aclose())
            runner.run(_once_of(app).aclose())
    assert caller.rejected, "nothing was rejected"
    run.notes.append(f"{caller.rejected:,} were rejected, and their keys then ran")


def _once_of(app: FastAPI) -> Any:
    classes: list[Any] = list(app.user_middleware)
    return next(each.kwargs["once"] for each in classes if each.cls is IdempotencyMiddleware)


FAULTS = (
    Fault("schemathesis: the demo", rejected_requests, {"sqlite": 1_000}, 0, ("I1", "I4", "I7"), "examples", 90.0),
)
