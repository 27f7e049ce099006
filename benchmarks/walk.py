"""How far a reader walks: ``python -m benchmarks.walk``, five seconds.

Follows one first POST, one replay, one POST that defers a job, and that job, through the source of oncekey. It counts
the calls into our modules, the modules, and the switches: calls from one of our modules into another. A coroutine that
is resumed is one call, a comprehension is none. All threads are followed. Each kind runs once before it is counted, so
imports, connections and caches are not in it.

    python -m benchmarks.walk              the table
    python -m benchmarks.walk --switches   and every switch, from and into, with its count
    PYTHONPATH=../other/src python -m benchmarks.walk     another version of oncekey, the same walk
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import oncekey
from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.outbox import Response as Settled
from oncekey.outbox import Worker
from oncekey.web.starlette import protect

SOURCE = str(Path(oncekey.__file__).parent) + "/"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
BODY = {"amount": 1000, "currency": "EUR"}


Switch = tuple[str | None, str]
"""The module of a caller, if that is ours, and the module that it called."""


class Walk:
    """The calls into our modules while it is followed."""

    def __init__(self) -> None:
        self.following = False
        self.frames: dict[FrameType, Switch] = {}

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        if self.following and event == "call" and frame not in self.frames:
            module = _module(frame)
            if module is not None and frame.f_code.co_name not in COMPREHENSIONS:
                self.frames[frame] = (_module(frame.f_back), module)

    async def follow(self, work: Callable[[], Awaitable[Any]]) -> Counter[Switch]:
        self.frames.clear()
        self.following = True
        await work()
        self.following = False
        return Counter(self.frames.values())


def _module(frame: FrameType | None) -> str | None:
    """The module of this frame, if it is ours."""
    path = frame.f_code.co_filename if frame else ""
    return path[len(SOURCE) : -len(".py")] if path.startswith(SOURCE) else None


def switches(walk: Counter[Switch]) -> Counter[Switch]:
    return Counter({pair: times for pair, times in walk.items() if pair[0] not in (None, pair[1])})


async def walks(folder: Path, url: str) -> dict[str, Counter[Switch]]:
    """Every kind of walk that this store has, by name."""

    async def pay(request: Request) -> Response:
        return JSONResponse({"id": "pay_1"}, 201)

    async def defer(request: Request) -> Response:
        operation = current()
        await operation.enlist(db)
        await operation.defer("settle", {"amount": 1000})
        return JSONResponse({"status": "pending"}, 202)

    db = sqlite3.connect(folder / "walk.db", isolation_level=None)
    worker = Worker(url)

    @worker.task("settle")
    async def settle(ctx: Any, payload: Any) -> Settled:
        return Settled(201, {"id": "pay_1"})

    routes = {"POST /later": Policy(effects="transactional")}
    once = OnceKey(url, scope=SINGLE_TENANT, routes=routes, migrate=True)
    app = Starlette(routes=[Route("/pay", pay, methods=["POST"]), Route("/later", defer, methods=["POST"])])
    protect(app, once, upkeep=False)
    kinds: dict[str, Callable[[], Awaitable[Any]]] = {
        "first POST": lambda: _post(app, "/pay", next(keys), 201),
        "replay": lambda: _post(app, "/pay", "warm-key-0", 201),
        "POST that defers": lambda: _post(app, "/later", next(keys), 202),
        "its job": lambda: worker.serve(until="drained"),
    }
    if url == "memory://":  # has no outbox
        del kinds["POST that defers"], kinds["its job"]
    keys = (f"warm-key-{number}" for number in count())
    walk = Walk()
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    for work in kinds.values():
        await work()
    found = {kind: await walk.follow(work) for kind, work in kinds.items()}
    sys.setprofile(None)
    threading.setprofile(None)
    db.close()
    await once.aclose()
    return found


async def _post(app: Starlette, path: str, key: str, status: int) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://walk") as client:
        answer = await client.post(path, json=BODY, headers={"Idempotency-Key": key})
    if answer.status_code != status:
        raise RuntimeError(f"not the response that was asked for: {answer.status_code} {answer.text}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--switches", action="store_true", help="and every switch, from and into, with its count")
    asked = parser.parse_args()
    print("| one … | store | calls | modules | switches |\n|---|---|---|---|---|")
    for store in ("memory", "sqlite"):
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{folder}/walk.db" if store == "sqlite" else "memory://"
            found = asyncio.run(walks(Path(folder), url))
        for kind, walk in found.items():
            modules = len({module for _, module in walk})
            print(f"| {kind} | {store} | {walk.total()} | {modules} | {switches(walk).total()} |")
            for (caller, module), times in switches(walk).most_common() if asked.switches else ():
                print(f"{times:4}  {caller} → {module}")


if __name__ == "__main__":
    main()
