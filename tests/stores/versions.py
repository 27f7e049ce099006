"""A protected app in a process of its own, run by whatever version of oncekey stands first on its path.

It takes one JSON line for each thing to do and answers each with one. Only what version 0.1.0 has, too, is used here.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ADDED = "ALTER TABLE idempotency_keys ADD COLUMN added_by_a_test TEXT;\n"
ADDITIVE = f"-- Works with: schema 0002 (oncekey 0.1.0) and later.\n{ADDED}"
"""A migration that the next version might have."""


class Version:
    """A process of one version. ``migration``: the SQL of one more migration that this version has."""

    def __init__(self, where: Path, url: str, migration: str | None = None) -> None:
        tests = Path(__file__).parents[2]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(where), str(tests)])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.versions", url, migration or ""],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it logs what is wanted here
            text=True,
        )
        assert self.ask("where").startswith(str(where)), "another version of oncekey was imported"

    def ask(self, what: str, **more: Any) -> Any:
        """Have something done; what it raised there is raised here, as a RuntimeError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '{"error": "the process has ended"}')
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["answer"]

    def post(self, key: str, **more: Any) -> tuple[int, str, bool]:
        """Status, body, and whether it is a replay."""
        status, body, replayed = self.ask("post", key=key, **more)
        return status, body, replayed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if self._process.wait(20) and kind is None:
            raise AssertionError("the process ended badly")
        self._process.stdout.close()


class _Child:
    def __init__(self, url: str) -> None:
        import httpx
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        from oncekey import SINGLE_TENANT, OnceKey, Policy
        from oncekey.web.asgi import IdempotencyMiddleware

        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects="repeatable"))
        self.running = asyncio.Event()
        self.go_on = asyncio.Event()
        self.held: asyncio.Task[Any] | None = None
        self.how = "plain"
        self.runs = 0

        async def pay(request: Request) -> Response:
            how, self.how = self.how, "plain"
            self.runs += 1
            if how == "hold":
                self.running.set()
                await self.go_on.wait()
            if how == "fail":
                raise RuntimeError("as it was told to")
            return JSONResponse({"run": self.runs, "by": os.getpid()}, 201)

        app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def do_where(self) -> str:
        import oncekey

        return str(oncekey.__file__)

    async def do_migrate(self) -> list[str]:
        return await asyncio.to_thread(self.once.store.migrate)

    async def do_start(self) -> None:
        await asyncio.to_thread(self.once.start)

    async def do_post(self, key: str, how: str = "plain") -> tuple[int, str, bool]:
        self.how = how
        response = await self.http.post("/payments", headers={"Idempotency-Key": key}, json={"cents": 5})
        return response.status_code, response.text, "idempotency-replayed" in response.headers

    async def do_hold(self, key: str) -> None:
        """Begin a request whose handler does not end before ``release``."""
        self.held = asyncio.create_task(self.do_post(key, "hold"))
        await self.running.wait()

    async def do_release(self) -> tuple[int, str, bool]:
        self.go_on.set()
        assert self.held is not None
        answer: tuple[int, str, bool] = await self.held
        return answer

    async def do_reconnect(self) -> None:
        """Let go of every connection: each new one looks at the tables again."""
        await self.once.aclose()
        await asyncio.to_thread(self.once.start)

    async def do_sweep(self) -> int:
        from oncekey.upkeep.sweeper import Sweeper

        return (await asyncio.to_thread(Sweeper(self.once.store).run)).released

    async def run(self) -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            try:
                said = {"answer": await getattr(self, f"do_{asked.pop('do')}")(**asked)}
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), flush=True)
        await self.http.aclose()
        await self.once.aclose()


def _with(migration: str) -> None:
    from oncekey.stores.sql import queries

    known = queries.migrations

    def more(package: str) -> list[queries.Migration]:
        newest = known(package)[-1].number
        return [*known(package), queries.Migration(newest + 1, "more", migration)]

    queries.migrations = more


if __name__ == "__main__":
    if sys.argv[2]:
        _with(sys.argv[2])

    async def main() -> None:
        await _Child(sys.argv[1]).run()

    asyncio.run(main())
