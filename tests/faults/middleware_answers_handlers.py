"""What handlers do whose middleware answers in their place, and a provider that counts.

A handler stands still at a point and tells its middleware, whose patience is over at that moment: no clock decides.
What a handler and its middleware do is in the :class:`Case`; the apps (``middleware_answers_apps.py``) read it from the
:class:`Stage` they stand on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from oncekey import current
from oncekey.engine.operation import Operation

Framework = Literal["fastapi", "starlette", "litestar", "asgi", "flask", "wsgi"]
Layer = Literal["plain", "copied scope", "BaseHTTPMiddleware"]
Shape = Literal["timeout, cancelled", "timeout, detached", "catch-all", "replaced", "retry once"]
Effects = Literal["external", "external, retry", "transactional", "phased", "repeatable"]
Point = Literal["before", "after"]

FRAMEWORKS: tuple[Framework, ...] = ("fastapi", "starlette", "litestar", "asgi", "flask", "wsgi")
BLOCKING: tuple[Framework, ...] = ("flask", "wsgi")
NOT_WRAPPED: tuple[Framework, ...] = ("asgi", "wsgi")
EFFECTS: tuple[Effects, ...] = ("external", "external, retry", "transactional", "phased", "repeatable")
PATIENCE = 20.0
"""Seconds for what comes at once, unless something hangs."""


@dataclass(frozen=True)
class Case:
    framework: Framework
    layer: Layer
    shape: Shape
    status: int
    """What the middleware answers."""
    effects: Effects
    point: Point
    """Where the handler stands still, or raises: before its effect, or after it."""

    @property
    def path(self) -> str:
        return "/" + self.effects.replace(", ", "-")


class Stage:
    """One case at a time: what its handler did, and where it stands."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.charged: Counter[str] = Counter()
        self._known: set[str] = set()
        self.case: Case
        self.calls = 0
        self.inside = 0
        """Handlers that have not ended."""
        self._opened: list[Any] = []
        self._lock = threading.Lock()

    def begin(self, case: Case) -> None:
        self.case, self.calls = case, 0
        self.stands: Any = threading.Event() if case.framework in BLOCKING else asyncio.Event()
        """The handler stands still: the middleware's patience is over."""
        self.goes_on: Any = type(self.stands)()

    def charge(self, op: Operation, key: str | None = None) -> dict[str, str]:
        """What the provider counts. It honours a key that it is given."""
        if key is None or key not in self._known:
            self.charged[op.key] += 1
        if key is not None:
            self._known.add(key)
        return {"charge": op.owner}

    def rows(self, key: str) -> int:
        with self._connect() as connection:
            found: int = connection.execute(f"SELECT count(*) FROM payments WHERE key = '{key}'").fetchone()[0]
        connection.close()
        return found

    def _connect(self) -> Any:
        if self.url.startswith("sqlite:"):
            return sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=5.0, check_same_thread=False)
        return psycopg.connect(self.url)

    async def aclose_opened(self) -> None:
        for connection in self._opened:
            done = connection.close()
            if done is not None:
                await done
        self._opened.clear()

    # -- the handlers: each keeps to what its route declares -------------------------------------------------------

    async def handle(self) -> int:
        """As a coroutine; the status that it returns."""
        op, troubled = current(), self._enter()
        try:
            if troubled and self.case.point == "before":
                await self._stop()
            if self.case.effects == "transactional":
                await self._pay(op)
            elif self.case.effects == "phased":
                await op.effect("charge", self.charge, op, repeatable=False)
            else:
                self.charge(op, op.downstream_key("charge") if self.case.effects == "repeatable" else None)
            if troubled and self.case.point == "after":
                await self._stop()
            return 201
        finally:
            self.inside -= 1

    def handle_blocking(self) -> int:
        op, troubled = current(), self._enter()
        try:
            if troubled and self.case.point == "before":
                self._stop_blocking()
            if self.case.effects == "transactional":
                self._pay_blocking(op)
            elif self.case.effects == "phased":
                op.blocking.effect("charge", self.charge, op, repeatable=False)
            else:
                self.charge(op, op.downstream_key("charge") if self.case.effects == "repeatable" else None)
            if troubled and self.case.point == "after":
                self._stop_blocking()
            return 201
        finally:
            with self._lock:
                self.inside -= 1

    def _enter(self) -> bool:
        """Whether this call is the first, which gets into trouble."""
        with self._lock:
            self.calls += 1
            self.inside += 1
            return self.calls == 1 or (self.case.shape == "retry once" and self.calls == 2 and self.case.status == 500)

    async def _stop(self) -> None:
        if self.case.shape in ("catch-all", "retry once"):
            raise RuntimeError("the handler failed")
        if self.case.shape.startswith("timeout"):
            self.stands.set()
            await asyncio.wait_for(self.goes_on.wait(), PATIENCE)

    def _stop_blocking(self) -> None:
        if self.case.shape in ("catch-all", "retry once"):
            raise RuntimeError("the handler failed")
        if self.case.shape.startswith("timeout"):
            self.stands.set()
            assert self.goes_on.wait(PATIENCE)

    async def _pay(self, op: Operation) -> None:
        connection: Any
        if self.url.startswith("sqlite:"):
            connection = self._connect()
        else:
            connection = await psycopg.AsyncConnection.connect(self.url)
        self._opened.append(connection)
        await op.enlist(connection)
        done = connection.execute(f"INSERT INTO payments (key, cents) VALUES ('{op.key}', 5)")
        if isinstance(done, Awaitable):
            await done

    def _pay_blocking(self, op: Operation) -> None:
        connection = self._connect()
        self._opened.append(connection)
        op.blocking.enlist(connection)
        connection.execute(f"INSERT INTO payments (key, cents) VALUES ('{op.key}', 5)")
