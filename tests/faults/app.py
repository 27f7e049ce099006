"""The app that the campaign kills: every charge is a line in a file, written before the answer."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.web.asgi import IdempotencyMiddleware

LEASE = timedelta(seconds=1)


def make_app() -> Any:
    """Told by the environment: the store, the ledger of charges, and where effects live."""
    ledger = Path(os.environ["ONCEKEY_TEST_LEDGER"])

    async def pay(request: Request) -> JSONResponse:
        body = await request.json()
        await asyncio.sleep(0.005)
        charge(ledger, current().key)
        await asyncio.sleep(0.005)
        return JSONResponse({"key": current().key, "cents": body["cents"], "attempt": current().attempt}, 201)

    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
    policy = Policy(effects=os.environ["ONCEKEY_TEST_EFFECTS"], lease=LEASE)  # type: ignore[arg-type]
    once = OnceKey(os.environ["ONCEKEY_TEST_STORE"], scope=SINGLE_TENANT, policy=policy, migrate=True)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app


def charge(ledger: Path, key: str) -> None:
    """One line, appended in one write, on disk before we go on: the outside world does not forget."""
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{key}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)
