"""An app in the campaign's own process, for faults of the store: no process is killed.

One route for each kind of effects, a ledger that counts what really happened, clients that retry by the rules of
docs/client.md, and the check of what they saw against ledger, business table and idempotency table. Each run of a
handler answers something else, so that two runs cannot pass for one.

``/external``       charges, and honours no key: asked twice, it charges twice
``/repeatable``     charges under the downstream key, which the ledger honours
``/transactional``  a row of the business table, enlisted
``/phased``         a row, a charge that may not be repeated, a row
``/deferred``       a row and a job, which charges and settles the key
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import orjson
import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import swap
from oncekey.engine import breaker
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.errors import Refused, StoreUnavailable
from oncekey.outbox import Context, Response, Worker
from oncekey.stores.api import Store
from oncekey.upkeep import Upkeep
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.status import status_app
from tests.faults.asgi_request import quiet
from tests.stores.mysql import connect_async

_T = TypeVar("_T")

LEASE = 1.0
PATIENCE_SECONDS = 30.0
"""How long after the fault a client may go on asking before its key counts as stuck (I4)."""
AGAIN_SECONDS = 0.05
"""A client waits so long before it asks again: what Retry-After says is a second, and there is much to do."""
KINDS = ("external", "repeatable", "transactional", "phased", "deferred")
WITHOUT_TABLES = ("external", "repeatable", "phased")
"""What a store can serve that enlists no transaction."""
_EXPECTED = frozenset({200, 201, 202, 409, 422, 500, 503})


@dataclass
class Story:
    """One key: what its client sent, and every answer."""

    key: str
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Requests that were told that nothing was done for want of the store."""
    asked: int = 0
    end: str = ""
    """``answered`` (final, and twice), ``unknown``, or nothing: stuck."""

    def told(self) -> str:
        """For the report of a violation."""
        return f"{self.key} /{self.kind} {self.body}\n    " + "\n    ".join(self.lines)


class LocalApp:
    def __init__(
        self,
        store: Store | str,
        *,
        url: str | None = None,
        lease: float = LEASE,
        begin_timeout: float = 0.5,
        works: bool = False,
        upkeep: bool = False,
        transactions: bool = True,
        upkeep_every: float = 0.2,
    ) -> None:
        """``url``: what handlers open for their own transactions; None: there is no such database.
        ``transactions``: the store takes transactional routes."""
        self.url = url
        self.charges: Counter[str] = Counter()
        self.runs: dict[str, str] = {}
        """Request -> key, for every call of a handler."""
        self.stories: list[Story] = []
        self.statuses: Counter[int] = Counter()
        self.outage: Callable[[], object] = lambda: None
        """Tells one outage, in which nothing can be reserved, from another; None: the store may answer."""
        self.failed_open: list[str] = []
        """Requests that came in an outage and were let through in it."""
        self.began = time.monotonic()
        self.gate = asyncio.Event()
        self.pad = 0
        """How much longer than necessary each answer is."""
        self.waiting = 0
        """Handlers that have come to the gate."""
        self._asked_in: dict[str, object] = {}
        self._honoured: set[str] = set()
        self._opened: defaultdict[str, list[Any]] = defaultdict(list)
        self._numbers = count(1)
        policy = {"lease": timedelta(seconds=lease), "begin_timeout": timedelta(seconds=begin_timeout)}
        policy |= {"quarantine": timedelta(milliseconds=1)}
        effects = {kind: "transactional" if kind == "deferred" else kind for kind in KINDS}
        self.kinds = WITHOUT_TABLES if url is None else KINDS if works else KINDS[:-1]
        routes = {
            f"POST /{kind}": Policy(effects=effects[kind], **policy)  # type: ignore[arg-type]
            for kind in (KINDS if transactions else WITHOUT_TABLES)
        }
        self.once = OnceKey(store, scope=SINGLE_TENANT, routes=routes)
        app = Starlette(routes=[Route(f"/{kind}", self._counted(kind), methods=["POST"]) for kind in KINDS])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        self._app = app
        self._status = status_app(self.once)
        self._worker = Worker(self.once, lease=lease, poll=0.02) if works else None
        if self._worker is not None:
            limits: Any = {"max_attempts": 1_000, "backoff": 0.01, "max_backoff": 0.05}
            self._worker.task("charge", **limits)(self._charge_later)
        every = upkeep_every
        self._upkeep = Upkeep(self.once, sweep_every=every, reap_every=every, reconcile_every=every) if upkeep else None

    def go_on_from(self, other: LocalApp) -> None:
        """Another app with the same clients and the same ledger."""
        self.stories, self.charges, self.runs = other.stories, other.charges, other.runs
        self._honoured, self._numbers = other._honoured, other._numbers

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LocalApp]:
        """With its worker and its upkeep, where it has them."""
        with quiet():
            async with self._running():
                yield self

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        breaker.OPEN_SECONDS = 0.1  # as leases are short here: thousands of outages have to fit into minutes
        working = asyncio.create_task(self._worker.serve()) if self._worker else None
        if self._upkeep:
            self._upkeep.start()
        try:
            yield
        finally:
            if self._upkeep:
                await asyncio.to_thread(self._upkeep.stop)
            if self._worker and working:
                self._worker.stop()
                await working
            await self.once.aclose(grace=5.0)
            breaker.OPEN_SECONDS = 1.0

    # -- handlers --------------------------------------------------------------------------------------------------

    def _counted(self, kind: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        handler = getattr(self, f"_{kind}")

        async def endpoint(request: Request) -> JSONResponse:
            name = request.headers["x-request"]
            self.runs[name] = current().key
            if (outage := self.outage()) is not None and outage == self._asked_in.get(name):
                self.failed_open.append(name)
            answer: JSONResponse = await handler(request)
            return answer

        return endpoint

    async def _begin(self, request: Request) -> dict[str, Any]:
        """What the body says about the first run."""
        body: dict[str, Any] = await request.json()
        if seconds := body.get("seconds"):
            await asyncio.sleep(seconds)
        if body.get("waits"):
            self.waiting += 1
            await self.gate.wait()
        if current().attempt == 1:
            match body.get("first"):
                case "refused":
                    if body["key"] not in self._honoured:
                        self._honoured.add(body["key"])
                        raise Refused("not like this")
                case "not executed":
                    raise NotExecuted("not yet")
                case "failed":
                    return {"status": 422}
                case "broken":
                    return {"status": 500}
                case "raised":
                    raise RuntimeError("it broke")
        return {"status": 201}

    def _answer(self, request: Request, status: int = 201, **more: Any) -> JSONResponse:
        content = {"paid": current().key, "run": request.headers["x-request"], "pad": "." * self.pad, **more}
        return JSONResponse(content, status)

    async def _external(self, request: Request) -> JSONResponse:
        ends = await self._begin(request)
        if ends["status"] == 201:
            self.charges[current().key] += 1
        return self._answer(request, **ends)

    async def _repeatable(self, request: Request) -> JSONResponse:
        ends = await self._begin(request)
        if ends["status"] == 201:
            self._charge(current().key, current().downstream_key("charge"))
        return self._answer(request, **ends)

    async def _transactional(self, request: Request) -> JSONResponse:
        connection = await self._connect(request)
        await current().enlist(connection)
        await self._insert(connection, current().key, "paid")
        return self._answer(request, **await self._begin(request))

    async def _phased(self, request: Request) -> JSONResponse:
        op = current()
        connection = await self._connect(request) if self.url is not None else None
        if connection is not None:
            await op.phase("opened", self._insert, connection, op.key, "opened", on=connection)
        ends = await self._begin(request)
        if ends["status"] != 201:
            return self._answer(request, **ends)
        await op.effect("charge", self._charge_once, op.key, repeatable=False)
        if op.attempt == 1 and (await request.json()).get("first") == "stumbled":
            raise NotExecuted("between two steps")
        if connection is not None:
            await op.phase("closed", self._insert, connection, op.key, "closed", on=connection)
        return self._answer(request)

    async def _deferred(self, request: Request) -> JSONResponse:
        connection = await self._connect(request)
        await current().enlist(connection)
        await self._insert(connection, current().key, "taken")
        works = (await request.json()).get("works", 0.0)
        await current().defer("charge", {"run": request.headers["x-request"], "seconds": works})
        return JSONResponse({"taken": current().key}, 202)

    async def _charge_later(self, ctx: Context, payload: Any) -> Response:
        self._charge(ctx.key, ctx.downstream_key)
        await ctx.record(f"ch-{ctx.key}")
        await asyncio.sleep(payload["seconds"])
        return Response(201, {"paid": ctx.key, "run": payload["run"]})

    async def _charge_once(self, key: str) -> dict[str, str]:
        self.charges[key] += 1
        return {"charge": key}

    def _charge(self, key: str, downstream_key: str) -> None:
        if downstream_key not in self._honoured:
            self._honoured.add(downstream_key)
            self.charges[key] += 1

    # -- the app's own database ------------------------------------------------------------------------------------

    @property
    def path(self) -> str | None:
        """Of the SQLite file."""
        return self.url.removeprefix("sqlite:///") if self.url and self.url.startswith("sqlite") else None

    async def _connect(self, request: Request) -> Any:
        assert self.url is not None
        if self.path is not None:
            # Not created where it is gone: an empty file in its place would be another fault.
            connection: Any = sqlite3.connect(f"file:{self.path}?mode=rw", uri=True, timeout=0.1)
        elif self.url.startswith("mysql"):
            connection = await connect_async(self.url, connect_timeout=2)
        else:
            connection = await psycopg.AsyncConnection.connect(self.url, connect_timeout=2)
        self._opened[request.headers["x-request"]].append(connection)
        return connection

    async def _insert(self, connection: Any, key: str, what: str) -> dict[str, str]:
        text = f"INSERT INTO app_rows VALUES ('{key}', '{what}')"
        if self.url is not None and self.url.startswith("mysql"):
            async with connection.cursor() as cursor:
                await cursor.execute(text)
        else:
            await _done(connection.execute(text))
        return {"row": what}

    # -- clients ---------------------------------------------------------------------------------------------------

    def story(self, kind: str | None = None, **body: Any) -> Story:
        """A new key."""
        number = next(self._numbers)
        kind = kind or self.kinds[number % len(self.kinds)]
        told = Story(f"key-{number:06d}", kind, {"key": f"key-{number:06d}", **body})
        self.stories.append(told)
        return told

    async def ask(self, story: Story) -> tuple[int, bytes]:
        """One request, as a server hands it to the app."""
        story.asked += 1
        name = f"{story.key}.{story.asked}"
        self._asked_in[name] = self.outage()
        status, content = await self._send(self._app, _scope(story, name), story)
        for connection in self._opened.pop(name, ()):
            with contextlib.suppress(Exception):
                await _done(connection.close())
        if b":store-unavailable" in content:
            story.refused.append(name)
        return status, content

    async def look(self, story: Story) -> tuple[int, bytes]:
        """Ask what became of a key, without sending the request."""
        path = f"/{story.key}"
        scope = _scope(story, "look") | {"method": "GET", "path": path, "raw_path": path.encode()}
        return await self._send(self._status, scope, story)

    async def _send(self, app: Any, scope: dict[str, Any], story: Story) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        body = [{"type": "http.request", "body": orjson.dumps(story.body), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return body.pop() if body else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        asked = self._now()
        with contextlib.suppress(Exception):  # it was answered with 500 before
            await app(scope, receive, send)
        status = next((m["status"] for m in sent if m["type"] == "http.response.start"), 0)
        content = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
        self.statuses[status] += 1
        what = f"{scope['method']} {status} {content[:150].decode()}"
        story.lines.append(f"{asked:8.3f} to {self._now():8.3f}  {what}")
        return status, content

    @property
    def served(self) -> int:
        """Requests that were not refused."""
        return sum(self.statuses.values()) - self.statuses[503]

    def leave_behind(self, stories: Sequence[Story], *, expired: bool = False) -> None:
        """Rows of owners that have died: their leases are over. ``expired``: they had ended, and so has retention."""
        wanted = [
            self.once.reservation(
                route,
                tenant=SINGLE_SCOPE,
                key=story.key,
                owner=f"dead-{story.key}",
                parts=("POST", f"/{story.kind}", b"", "application/json", orjson.dumps(story.body), lambda names: []),
                lines=(),
            )
            for story in stories
            if (route := self.once.routes.match("POST", f"/{story.kind}")) is not None
        ]
        keep = 0.001 if expired else 3600.0
        short = [replace(each, lease_seconds=0.001, retention_seconds=keep) for each in wanted]
        store = self.once.store
        found = patiently(lambda: store.reserve(short))
        if expired:
            ended = StoredResponse(201, (), b"")
            moves = [swap(f.record, Event.COMPLETE, Actor.OWNER, response=ended) for f in found if f.record]
            patiently(lambda: store.swap(moves))
        store.disconnect()

    def _now(self) -> float:
        return time.monotonic() - self.began

    async def pay(self, story: Story, patience: Callable[[], float] = lambda: PATIENCE_SECONDS) -> Story:
        """Retry by the rules, until the answer is final and came twice, or only the reconciler can know.

        ``patience`` says how long to go on from now; it is asked again and again, since it begins when a fault ends.
        """
        deadline = time.monotonic() + patience()
        doubts = 0
        while time.monotonic() < (deadline := max(deadline, time.monotonic() + patience() - PATIENCE_SECONDS)):
            status, content = await self.ask(story)
            if status not in _EXPECTED:
                story.end = f"was answered with {status}"
                return story
            if status == 422 and b":refused" in content:
                continue  # its key is unused
            if status in (200, 201, 422):
                story.answers.append((status, content))
                if len(story.answers) == 2:
                    story.end = "answered"
                    return story
                continue
            if status == 409 and b":outcome-unknown" in content:
                doubts += 1
                if doubts >= 10:  # an owner that was only late has had its half second
                    story.end = "unknown"
                    return story
            await asyncio.sleep(AGAIN_SECONDS)
        return story


def _scope(story: Story, name: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"host", b"local_app"), (b"x-request", name.encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": f"/{story.kind}",
        "raw_path": f"/{story.kind}".encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers, (b"idempotency-key", story.key.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("local_app", 80),
        "state": {},
    }


async def _done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def gather(work: Sequence[Awaitable[Any]]) -> None:
    """All of them to their end; then the first error, if there was one."""
    for done in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


def patiently(ask: Callable[[], _T]) -> _T:
    """What the campaign itself asks: its store has little time for an answer, and the machine may be busy."""
    for _ in range(50):
        with contextlib.suppress(StoreUnavailable):
            return ask()
    return ask()
