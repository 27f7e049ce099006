"""Handlers of every kind behind one app, in this process, and the ledgers that say what they did.

For faults that come at a line or a message, not at a process: each key's request is sent by hand (``asgi_request.py``).
Afterwards its client retries by the rules until it knows how it stands. ``blemishes`` says what is wrong then.

The app is as a framework has it: endpoints are wrapped and return a ``Reply``, which is sent when they have returned;
what an endpoint has opened is closed after that, as a dependency with ``yield`` is. The ``raw`` ones are not wrapped.
"""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.engine.operation import Operation
from oncekey.errors import Refused
from oncekey.outbox import Context, Response, Worker
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.endpoints import wrapped
from tests.faults.asgi_request import AsgiRequest
from tests.faults.breakable_stores import TABLES, BreakableMemory, BreakableSqlite
from tests.faults.linearizable import Saw

LEASE = 0.6
BEGIN = 0.2
"""How long a request waits for the store. Callers whose ticket a fault has lost wait so long."""
PATIENCE = 10.0
"""How long after its fault a key may take to be final, retryable or unknown, under the load of all the others."""
HANGS = 5 * LEASE
"""Who has heard nothing for so long hears nothing any more: every wait for the store is bounded by its lease."""
BODY = b'{"cents":100}'
OTHER_BODY = b'{"cents":999}'


class Reply(NamedTuple):
    """What an endpoint returns."""

    status: int = 201
    pieces: tuple[bytes, ...] = ()
    content_type: bytes = b"application/json"


class Wrapped:
    """All endpoints of the app are."""

    def cover(self) -> bool:
        return True

    def knows_route(self, scope: Any) -> bool:
        return True

    def handler(self, scope: Any) -> None:
        return None

    def check(self, *_: Any) -> None: ...

    async def answer_to_error(self, scope: Any, error: Exception) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Kind:
    """A route: its policy, and what a finished request of it has left behind."""

    policy: Policy
    charges: int = 1
    rows: int = 0
    """In each of so many business tables, one."""
    tombstone: bool = False
    settles_later: bool = False

    @property
    def needs_tables(self) -> bool:
        return self.rows > 0


def _kind(effects: str, *, charges: int = 1, rows: int = 0, tombstone: bool = False, later: bool = False, **more: Any):
    policy = Policy(
        effects=effects,  # type: ignore[arg-type]
        lease=timedelta(seconds=LEASE),
        begin_timeout=timedelta(seconds=BEGIN),
        wait=timedelta(seconds=2 * LEASE),
        **more,
    )
    return Kind(policy, charges, rows, tombstone, later)


KINDS = {
    "plain": _kind("external"),
    "unmeasured": _kind("external"),
    "raw": _kind("external"),
    "raw-raises": _kind("external"),
    "slow": _kind("external"),
    "held": _kind("external"),
    "waited": _kind("external", in_flight="wait"),
    "pieces": _kind("external"),
    "large": _kind("external", tombstone=True, max_response_bytes=10),
    "events": _kind("external", tombstone=True),
    "raises": _kind("external"),
    "not-executed": _kind("external"),
    "client-error": _kind("external"),
    "refused": _kind("external"),
    "repeatable": _kind("repeatable"),
    "stumbles": _kind("repeatable"),
    "server-error": _kind("repeatable"),
    "enlisted": _kind("transactional", charges=0, rows=1),
    "enlisted-raises": _kind("transactional", charges=0, rows=1),
    "enlisted-thread": _kind("transactional", charges=0, rows=1),
    "enlisted-caller": _kind("transactional", charges=0, rows=1),
    "phased": _kind("phased", rows=2),
    "deferred": _kind("transactional", rows=1, later=True),
}


class Scene:
    """One store, one OnceKey, and all handlers. ``beside``: another OnceKey on the same store, as another process."""

    def __init__(self, store: BreakableMemory | BreakableSqlite) -> None:
        self.store = store
        self.path = store.path if isinstance(store, BreakableSqlite) else None
        self.charged: Counter[str] = Counter()
        self._known: set[str] = set()
        self.attempts: Counter[str] = Counter()
        self.gate = asyncio.Event()
        """Handlers of ``held`` and ``waited`` wait for it."""
        self.gate.set()
        self.entered: Callable[[], None] = lambda: None
        """Called when a handler is entered."""
        self.once, self.app = self._open()
        self._beside: tuple[OnceKey, IdempotencyMiddleware] | None = None

    def _open(self) -> tuple[OnceKey, IdempotencyMiddleware]:
        routes = {f"POST /{name}": kind.policy for name, kind in KINDS.items()}
        once = OnceKey(self.store, scope=SINGLE_TENANT, routes=routes)
        self._endpoints = {name: self._endpoint(name) for name in KINDS}
        return once, IdempotencyMiddleware(self._handle, once=once, endpoints=Wrapped())

    def _endpoint(self, name: str) -> Callable[..., Any]:
        call = getattr(self, name.replace("-", "_"))
        return call if name.startswith("raw") else wrapped(call, lambda reply, _: int(reply.status), lambda _: None)

    @property
    def beside(self) -> IdempotencyMiddleware:
        self._beside = self._beside or self._open()
        return self._beside[1]

    async def close(self) -> None:
        if self._beside is not None:
            with suppress(Exception, asyncio.CancelledError):  # a fault that waits for a thread may strike here
                await self._beside[0].aclose(grace=0.2)
        await self.once.aclose(grace=0.2)

    # -- the handlers ------------------------------------------------------------------------------------------------

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered()
        op = current()
        self.attempts[op.key] += 1
        name = scope["path"][1:]
        op.evidence.covered = not name.startswith("raw")  # as a foreign app that is mounted reports it
        while (await receive()).get("more_body"):
            pass
        async with AsyncExitStack() as dependencies:
            reply = await self._endpoints[name](op, dependencies)
            headers = [(b"content-type", reply.content_type), (b"location", op.key.encode())]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            pieces = reply.pieces or (json.dumps({"run": op.owner}).encode(),)
            for number, piece in enumerate(pieces, 1):
                await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})

    def charge(self, op: Operation) -> dict[str, str]:
        """A provider that honours the downstream key of repeatable routes, and of no others."""
        if op.policy.effects == "repeatable":
            name = op.downstream_key("charge")
            if name in self._known:
                return {"charge": name}
            self._known.add(name)
        self.charged[op.key] += 1
        return {"charge": op.owner}

    async def plain(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply()

    repeatable = raw = unmeasured = plain

    async def slow(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        await asyncio.sleep(LEASE / 2)
        return Reply()

    async def held(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        await self.gate.wait()
        return Reply()

    waited = held

    async def pieces(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply(201, (b'{"run":"', op.owner.encode(), b'"}'))

    async def large(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply(201, (b"more than ten bytes,", b"of ", op.owner.encode()))

    async def events(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply(201, (b"data: 1\n\n", b"data: 2\n\n"), b"text/event-stream")

    async def raises(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        raise ValueError("it may have happened")

    raw_raises = raises

    async def not_executed(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        if self.attempts[op.key] == 1:
            raise NotExecuted("proven")
        return await self.plain(op, dependencies)

    async def client_error(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply(404)

    async def refused(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        if self.attempts[op.key] == 1:
            raise Refused("not like this")
        return await self.plain(op, dependencies)

    async def stumbles(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        if self.attempts[op.key] == 1:
            raise ValueError("harmless")
        return Reply()

    async def server_error(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        self.charge(op)
        return Reply(500 if self.attempts[op.key] == 1 else 201)

    # those that write into the store's own file

    def _connection(self, dependencies: AsyncExitStack) -> sqlite3.Connection:
        assert self.path is not None
        connection = sqlite3.connect(self.path, check_same_thread=False, timeout=1.0)
        return dependencies.enter_context(closing(connection))

    @staticmethod
    def _insert(connection: sqlite3.Connection, table: str, key: str) -> dict[str, str]:
        connection.execute(f"INSERT INTO {table} (key) VALUES (?)", [key])
        return {"row": table}

    async def enlisted(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        connection = self._connection(dependencies)
        await op.enlist(connection)
        self._insert(connection, "orders", op.key)
        return Reply()

    async def enlisted_raises(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        reply = await self.enlisted(op, dependencies)
        if self.attempts[op.key] == 1:
            raise ValueError("after all")
        return reply

    async def enlisted_thread(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        def work() -> None:
            op.blocking.enlist(connection)
            self._insert(connection, "orders", op.key)

        connection = self._connection(dependencies)
        await asyncio.to_thread(work)
        return Reply()

    async def enlisted_caller(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        connection = self._connection(dependencies)
        dependencies.push(lambda error, *_: None if error else connection.commit())
        await op.enlist(connection, commit="caller")
        self._insert(connection, "orders", op.key)
        return Reply()

    async def phased(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        connection = self._connection(dependencies)
        await op.phase("order", self._insert, connection, "orders", op.key, on=connection)
        if self.attempts[op.key] == 1 and op.key.startswith("resumed"):
            raise NotExecuted("between two steps")
        await op.effect("charge", self._charge_async, op, repeatable=False)
        await op.phase("receipt", self._insert, connection, "receipts", op.key, on=connection)
        return Reply()

    async def _charge_async(self, op: Operation) -> dict[str, str]:
        return self.charge(op)

    async def deferred(self, op: Operation, dependencies: AsyncExitStack) -> Reply:
        await self.enlisted(op, dependencies)
        await op.defer("later", {})
        return Reply(202)

    async def work(self) -> None:
        """Do the jobs of deferred requests."""
        worker = Worker(self.store, lease=LEASE, poll=0.01)
        worker.task("later")(self._later)
        async with asyncio.timeout(PATIENCE):
            await worker.serve(until="drained")

    def _later(self, ctx: Context, payload: Any) -> Response:
        """A job runs at least once (I8), so it charges under its downstream key, which the provider honours."""
        if ctx.downstream_key not in self._known:
            self._known.add(ctx.downstream_key)
            self.charged[ctx.key] += 1
        return Response(201, {"done": ctx.key})

    # -- what they left ----------------------------------------------------------------------------------------------

    def rows(self, key: str) -> list[int]:
        if self.path is None:
            return []
        with closing(sqlite3.connect(self.path, timeout=5.0)) as own:
            counts = (own.execute(f"SELECT count(*) FROM {table} WHERE key = ?", [key]) for table in TABLES)
            return [count.fetchone()[0] for count in counts]


@dataclass
class Story:
    """What the client of one key saw, from the request with the fault in it to its end."""

    key: str
    kind: str
    what: str
    """The fault."""
    seen: list[AsgiRequest] = field(default_factory=list)
    ended: bool = False
    """It has its answer, or was told that the outcome is unknown."""

    async def ask(self, app: Any, body: bytes = BODY, *, hangs: float = HANGS) -> AsgiRequest:
        asked = AsgiRequest(f"/{self.kind}", self.key, body)
        self.seen.append(asked)
        if not (await asyncio.wait([asked.start(app)], timeout=hangs))[0]:
            raise TimeoutError
        return asked

    async def until_ended(self, scene: Scene, app: Any) -> None:
        """Retry by the rules, up to the bound."""
        until, step = time.monotonic() + PATIENCE, 0.02
        while time.monotonic() < until:
            asked = await self.ask(app, hangs=PATIENCE)  # many ask at the same time
            if asked.status == 202:
                await scene.work()
            elif asked.saw in (Saw.EXECUTED, Saw.REPLAYED, Saw.UNKNOWN):
                if self.ended or asked.saw is Saw.UNKNOWN:
                    self.ended = True
                    return
                self.ended = True
            await asyncio.sleep(0 if self.ended else step)
            step = min(step * 1.5, LEASE / 3)

    @property
    def unknown(self) -> bool:
        return self.seen[-1].saw is Saw.UNKNOWN

    def told(self) -> str:
        lines = [f"    {asked.status} {asked.saw} {asked.body[:200]!r}" for asked in self.seen]
        return f"{self.key}, {self.what}\n" + "\n".join(lines)


def blemishes(scene: Scene, story: Story) -> list[tuple[str, str]]:
    """What is wrong with a key whose client is done: (promise, what)."""
    kind, key = KINDS[story.kind], story.key
    found: list[tuple[str, str]] = []
    if not story.ended:
        found.append(("I4", f"neither final nor unknown after {PATIENCE:g} s: {story.told()}"))
    charged, rows = scene.charged[key], scene.rows(key)
    if charged > 1 or any(row > 1 for row in rows):
        found.append(("I1", f"{charged} charges, rows {rows}: {story.told()}"))
    finals = [asked for asked in story.seen if asked.result is not None and asked.status != 202]
    if finals and (charged < kind.charges or sum(rows) < kind.rows) and not story.unknown:
        found.append(("I1", f"answered, and only {charged} charges and rows {rows}: {story.told()}"))
    if kind.tombstone:  # of the first only the status is kept
        finals = [asked for asked in finals if asked.replayed]
    if len({asked.result for asked in finals}) > 1:
        found.append(("I2", f"two answers: {story.told()}"))
    first = min((asked.ended_at for asked in finals), default=math.inf)
    later = {asked.saw for asked in story.seen if asked.began > first and asked.ended}
    if later - {Saw.REPLAYED, Saw.MISMATCH, Saw.LOST}:  # lost: a 503, which says nothing
        found.append(("I2", f"answered, and then something else: {story.told()}"))
    return found
