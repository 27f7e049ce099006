"""Rides that upkeep goes on with: a row, a charge, a receipt. For tests that kill upkeep in the middle of it.

The provider is a file with one line for each charge. With ``honours`` it charges a downstream key once; without, every
call is a charge, and the effect is declared so.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, Happened, NotHappened, OnceKey, Operation, Policy, current
from oncekey.encryption import Keyring
from oncekey.engine.resumption import Answer, Resumption
from oncekey.testing import faults
from oncekey.upkeep import Inquiry, Upkeep
from oncekey.web.asgi import IdempotencyMiddleware

OPERATION = "POST /rides"
TABLES = (
    "CREATE TABLE rides (id integer NOT NULL, cents integer NOT NULL, charge text)",
    "CREATE TABLE receipts (ride integer NOT NULL)",
)

KILLED_AT = (
    "upkeep.resume",
    "steps.read",
    "store.swap",  # the claim
    "phase",  # the first is remembered, so nothing of it is run
    "effect.intent",
    "effect.call",
    "effect.result",
    "phase.work",
    "enlist.commit",
    "phase.commit",
    "request.finish",
)
"""The points of ``oncekey.testing.faults`` at which upkeep is killed, before and after each."""


class Rides:
    """The app and its provider. ``stumbles``: the first attempt at each ride raises right after its row is written."""

    def __init__(
        self, url: str, ledger: str, honours: bool, *, stumbles: bool = False, encryption: Keyring | None = None
    ) -> None:
        self.url = url
        self.ledger = Path(ledger)
        self.honours = honours
        self.stumbles = stumbles
        policy = Policy(
            effects="phased", keep_request=True, lease=timedelta(seconds=30), quarantine=timedelta(milliseconds=1)
        )
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, encryption=encryption)
        self.once.resume(OPERATION, self.go_on)
        self.once.resolve_with(OPERATION, self.ask)
        app = Starlette(routes=[Route("/rides", self.handle, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        self.app = app

    def connect(self) -> Any:
        if self.url.startswith("sqlite:"):
            return sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
        return psycopg.connect(self.url)

    def charges(self, downstream_key: str | None = None) -> list[str]:
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [line for line in lines if downstream_key in (None, line)]

    def charge(self, downstream_key: str) -> dict[str, str]:
        if not (self.honours and self.charges(downstream_key)):
            with self.ledger.open("a") as file:
                file.write(f"{downstream_key}\n")
        return {"id": f"ch_{downstream_key[:8]}"}

    def handle(self, request: Request) -> Response:
        op = current()
        assert op.request is not None
        return JSONResponse(self.book(op, op.request.json()), 201)

    def go_on(self, op: Resumption) -> Answer:
        assert op.request is not None
        return 201, self.book(op, op.request.json())

    def book(self, op: Operation, asked: dict[str, int]) -> dict[str, Any]:
        steps, ride = op.blocking, asked["ride"]
        mark = "?" if self.url.startswith("sqlite:") else "%s"

        def open_ride() -> int:
            db.execute(f"INSERT INTO rides (id, cents) VALUES ({mark}, {mark})", [ride, asked["cents"]])
            return ride

        def finish(charge: str) -> None:
            db.execute(f"UPDATE rides SET charge = {mark} WHERE id = {mark}", [charge, ride])
            db.execute(f"INSERT INTO receipts (ride) VALUES ({mark})", [ride])

        with closing(self.connect()) as db:
            steps.phase("ride_created", open_ride, on=db)
            if self.stumbles:
                raise ConnectionError("the client never comes back")
            downstream_key = op.downstream_key("charge")
            paid = steps.effect("charge", self.charge, downstream_key, repeatable=self.honours)
            steps.phase("receipt", finish, paid["id"], on=db)
        return {"ride": ride, "charge": paid["id"]}

    def ask(self, inquiry: Inquiry) -> Happened | NotHappened:
        """The provider's ledger knows."""
        downstream_key = inquiry.downstream_key("charge")
        if self.charges(downstream_key):
            return Happened({"id": f"ch_{downstream_key[:8]}"}, "charge")
        return NotHappened("the ledger has no such charge", "charge")


def tidy(*, url: str, ledger: str, honours: bool, survived: str, fault: str = "") -> None:
    """A process of upkeep: one turn of each duty. It leaves the file ``survived``, unless it dies before."""
    if fault:
        faults.install_from_environment({faults.VARIABLE: fault})
    rides = Rides(url, ledger, honours)
    Upkeep(rides.once).run_once()
    rides.once.close()
    os.close(os.open(survived, os.O_CREAT | os.O_WRONLY))


class StumbledRides:
    """Rides whose first attempt stumbles, and their database."""

    def __init__(self, url: str, folder: Path, *, honours: bool) -> None:
        self.told: dict[str, Any] = {"url": url, "ledger": str(folder / "ledger"), "honours": honours}
        self.rides = Rides(stumbles=True, **self.told)
        self.rides.once.store.migrate()
        for table in TABLES:
            self.ask(table)

    def ask(self, sql: str) -> list[Any]:
        with closing(self.rides.connect()) as db:
            cursor = db.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            db.commit()
            return list(rows)

    def past(self, column: str, keys: str = "true") -> None:
        """As if the time were over for these keys (an SQL condition), and for no others."""
        past = "0" if self.told["url"].startswith("sqlite:") else "now() - interval '1 hour'"
        self.ask(f"UPDATE idempotency_keys SET {column} = {past} WHERE {keys} AND {column} IS NOT NULL")
