"""An app that books rides in three steps, as a process of its own that a test stops in the middle of its effect.

``python -m tests.upkeep.stopped_rides URL LEDGER sync|async`` sends one request to itself. It prints ``called`` when
the effect has charged, waits for a line, and prints the status that the client got.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.engine.resumption import Answer, Resumption
from oncekey.web.fastapi import protect

KEY = "ride-0001"
OPERATION = "POST /rides"
LEASE = timedelta(milliseconds=500)
_TABLE = "CREATE TABLE IF NOT EXISTS rides (id text PRIMARY KEY, charge text)"


def connect(url: str) -> Any:
    if url.startswith("sqlite:"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
    return psycopg.connect(url)


class Rides:
    """The app; ``waits``: its effect stops where the test wants it."""

    def __init__(self, url: str, ledger: Path, *, waits: bool = False) -> None:
        self.url, self.ledger, self.waits = url, ledger, waits
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
        if self.waits:
            print("called", flush=True)
            sys.stdin.readline()
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

    def __init__(self, rides: Rides, kind: str) -> None:
        command = [sys.executable, "-m", "tests.upkeep.stopped_rides", rides.url, str(rides.ledger), kind]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "called\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def wake_up(self) -> str:
        """Let it go on to its end: what its client was told."""
        os.kill(self._process.pid, signal.SIGCONT)
        told, _ = self._process.communicate("\n", timeout=30)
        return told.strip()


def main(url: str, ledger: str, kind: str) -> None:
    rides = Rides(url, Path(ledger), waits=True)
    print(asyncio.run(rides.send(kind)).status_code, flush=True)
    rides.once.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
