"""An enlist that must be refused: the handler that tries it, and what must be left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from oncekey.core.states import State
from oncekey.engine.operation import Operation
from oncekey.errors import EnlistError
from oncekey.stores.sqlite.gate import gate_of
from tests.enlist.shop import Shop, paid

INSERT = "INSERT INTO payments (key, cents) VALUES ('k-1', 5)"
_engines: list[sa.Engine] = []


def create_engine(url: str, **options: Any) -> sa.Engine:
    _engines.append(sa.create_engine(url, **options))
    return _engines[-1]


def dispose_of_engines() -> None:
    """Of all that ``create_engine`` has made so far."""
    while _engines:
        _engines.pop().dispose()


class Tried:
    """What came of an enlist inside a handler."""

    error: BaseException | None = None


@asynccontextmanager
async def refused(shop: Shop, attempt: Callable[[Operation], Any], match: str) -> AsyncIterator[None]:
    """Run ``attempt`` in a handler; its enlist must raise, the request ends without effect, and the file is free."""
    tried = Tried()

    async def pay(request: Request) -> Response:
        try:
            answer = attempt(current())
            if asyncio.iscoroutine(answer):
                await answer
        except BaseException as error:
            tried.error = error
            raise
        return paid("k-1")

    api = shop.api(pay)
    assert (await api.post()).status_code == 500
    assert isinstance(tried.error, EnlistError), tried.error
    assert match in str(tried.error)
    assert shop.payments() == 0
    assert shop.state() is State.FAILED_RETRYABLE
    if shop.kind == "sqlite":
        gate = gate_of(Path(shop.path))
        assert gate.acquire(0, lane=True), "the gate is still held"
        gate.release()
    yield
