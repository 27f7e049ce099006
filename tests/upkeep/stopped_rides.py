"""An app that books rides in three steps, as a process of its own that a test stops in the middle of its effect.

The process (``ride_elsewhere``, a role of a ``ForkServer``) sends one request to its own app. Over a socket it says
``called`` when the effect has charged, waits for a line, and says which status the client got.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import httpx
import psycopg
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.engine.resumption import Answer, Resumption
from oncekey.web.fastapi import protect
from tests.faults.fork_server import ForkServer

KEY = "ride-0001"
OPERATION = "POST /rides"
LEASE = timedelta(milliseconds=500)
_PATIENCE_SECONDS = 30.0
_TABLE = "CREATE TABLE IF NOT EXISTS rides (id text PRIMARY KEY, charge text)"


def connect(url: str) -> Any:
    if url.startswith("sqlite:"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
    return psycopg.connect(url)


class Rides:
    """The app. With ``line``, its effect says so there and waits for the test."""

    def __init__(self, url: str, ledger: Path, *, line: IO[str] | None = None) -> None:
        self.url, self.ledger, self.line = url, ledger, line
        policy = Policy(effects="phased", lease=LEASE, quarantine=timedelta(milliseconds=1))
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, migrate=True)
        with closing(connect(url)) as db:
            db.execute(_TABLE)
            db.commit()
        self.app = FastAPI()
        protect(self.app, self.once)

        @self.app.post("/rides")
        async def ride() -> JSONResponse:
            op = current()
            with closing(connect(url)) as db:
                await op.phase("ride_created", self._create, db, on=db)
                charge = await op.effect("charge", self._charge, repeatable=False)
                await op.phase("ride_charged", self._enter, db, charge["id"], on=db)
            return JSONResponse(charge, 201)

        @self.app.post("/sync/rides")
        def ride_sync() -> JSONResponse:
            op = current().blocking
            with closing(connect(url)) as db:
                op.phase("ride_created", self._create, db, on=db)
                charge = op.effect("charge", self._charge, repeatable=False)
                op.phase("ride_charged", self._enter, db, charge["id"], on=db)
            return JSONResponse(charge, 201)

    def go_on(self, op: Resumption) -> Answer:
        """What upkeep calls: the steps that are done return what they returned."""
        steps = op.blocking
        with closing(connect(self.url)) as db:
            steps.phase("ride_created", self._create, db, on=db)
            charge = steps.effect("charge", self._charge, repeatable=False)
            steps.phase("ride_charged", self._enter, db, charge["id"], on=db)
        return 201, charge

    @staticmethod
    def _create(db: Any) -> None:
        db.execute(f"INSERT INTO rides (id) VALUES ('{KEY}')")

    @staticmethod
    def _enter(db: Any, charge: str) -> None:
        db.execute(f"UPDATE rides SET charge = '{charge}'")

    def _charge(self) -> dict[str, str]:
        with self.ledger.open("a") as ledger:
            ledger.write("charged\n")
        if self.line is not None:
            print("called", file=self.line, flush=True)
            self.line.readline()
        return {"id": "ch_of_the_handler"}

    async def send(self, kind: str = "async") -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://rides") as client:
            return await client.post("/sync/rides" if kind == "sync" else "/rides", headers={"Idempotency-Key": KEY})

    @property
    def charges(self) -> int:
        return len(self.ledger.read_text().splitlines())

    @property
    def rides(self) -> list[Any]:
        with closing(connect(self.url)) as db:
            return [row[0] for row in db.execute("SELECT charge FROM rides").fetchall()]


class Elsewhere:
    """The app in another process, which has charged and not yet come back from its effect."""

    def __init__(self, forks: ForkServer, rides: Rides, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PATIENCE_SECONDS)
            options = {"url": rides.url, "ledger": str(rides.ledger), "kind": kind}
            self._process = forks.spawn("ride", port=listener.getsockname()[1], **options)
            connection, _ = listener.accept()
        connection.settimeout(_PATIENCE_SECONDS)
        self._line = connection.makefile("rw")
        connection.close()  # the file keeps it open
        assert self._line.readline() == "called\n"

    def kill(self) -> None:
        self._process.kill()
        self._line.close()

    def pause(self) -> None:
        self._process.pause()

    def wake_up(self) -> str:
        """Let it go on to its end. Returns the status that its client got."""
        self._process.resume()
        with self._line as line:
            print(file=line, flush=True)
            return line.readline().strip()


def ride_elsewhere(url: str, ledger: str, kind: str, port: int) -> None:
    """The work of that process."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as line:
        rides = Rides(url, Path(ledger), line=line)
        print(asyncio.run(rides.send(kind)).status_code, file=line, flush=True)
        rides.once.close()
