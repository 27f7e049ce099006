"""An app with one route for each kind of effects, upkeep inside, and a resolver that asks the provider's ledger.

The provider does not honour keys: two calls are two charges. A request says at which point it stops for good
on its first attempt, so that the process can be killed with a request at every point.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, OutcomeUnknown, Policy, current
from oncekey.core.policy import EffectsName
from oncekey.demo.book import Connection
from oncekey.demo.provider import Provider
from oncekey.outbox import Context, Worker
from oncekey.outbox import Response as Settled
from oncekey.telemetry import events
from oncekey.upkeep import Confirmed, Happened, Inquiry, Refuted, Upkeep
from oncekey.web.asgi import IdempotencyMiddleware

SWEEP_SECONDS = 1.0
SWEEPS = "sweeps"
LEASE = timedelta(seconds=1)
QUARANTINE = timedelta(seconds=1)
EFFECTS: tuple[EffectsName, ...] = ("external", "transactional", "phased", "repeatable")
POINTS: dict[str, tuple[str, ...]] = {
    "external": ("begun", "charged"),
    "phased": ("begun", "opened", "asked", "charged", "remembered", "closed"),
    "repeatable": ("begun", "written"),
    "transactional": ("begun", "written"),  # the last: where one writer has the file, it has it for good
}


def connect(url: str) -> Connection:
    if url.startswith("sqlite:"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
    import psycopg

    return psycopg.connect(url)


def write(url: str, db: Connection, key: str, what: str, *, again: bool = False) -> None:
    """A row of the app's own. ``again``: writing it twice is writing it once."""
    mark = "?" if url.startswith("sqlite:") else "%s"
    unless = f" WHERE NOT EXISTS (SELECT 1 FROM entries WHERE key = {mark} AND what = {mark})" if again else ""
    db.execute(f"INSERT INTO entries (key, what) SELECT {mark}, {mark}{unless}", [key, what] * (1 + again))


def charge(provider: Provider, downstream_key: str) -> str:
    made: str = provider.charge(downstream_key, "cus-1", 100, "EUR")["id"]
    return made


def make_worker(url: str, provider: Provider) -> Worker:
    worker = Worker(url, lease=1.0, poll=0.05)

    @worker.task("charge", max_attempts=1)
    def charge_later(ctx: Context, job: dict[str, str]) -> Settled:
        return Settled(201, {"charge": charge(provider, ctx.downstream_key), "key": job["key"]})

    return worker


def make_app() -> Any:
    """Told by the environment: the store, the provider, whether upkeep runs, and where requests say that they stand."""
    url, stands = os.environ["ONCEKEY_TEST_STORE"], Path(os.environ["ONCEKEY_TEST_STANDS"])
    provider = Provider(os.environ["ONCEKEY_TEST_PROVIDER"], honours=False)
    routes = {f"POST /{each}": Policy(effects=each, lease=LEASE, quarantine=QUARANTINE) for each in EFFECTS}
    routes["POST /deferred"] = Policy(effects="transactional", lease=LEASE, quarantine=QUARANTINE)
    once = OnceKey(url, scope=SINGLE_TENANT, routes=routes, migrate=True, on_event=Sweeps(stands.parent / SWEEPS))

    def ledger(inquiry: Inquiry) -> Confirmed | Refuted | Happened:
        made = [each for each in provider.charges() if each["downstreamKey"] == inquiry.downstream_key("charge")]
        if not made:
            return Refuted("the ledger has no such charge")
        if inquiry.in_doubt:
            return Happened(made[0]["id"], reason="found in the ledger")
        return Confirmed(201, {"charge": made[0]["id"], "key": inquiry.key}, reason="found in the ledger")

    for each in EFFECTS:
        once.resolve_with(f"POST /{each}", ledger)
    handlers = _Handlers(url, provider, stands)
    kinds: dict[str, Callable[[Request], Response]] = {
        "external": handlers.external,
        "transactional": handlers.transactional,
        "phased": handlers.phased,
        "repeatable": handlers.repeatable,
        "deferred": handlers.deferred,
    }
    app = Starlette(routes=[Route(f"/{name}", kind, methods=["POST"]) for name, kind in kinds.items()])
    keep = Upkeep(once, sweep_every=SWEEP_SECONDS, reconcile_every=0.2)
    app.add_middleware(IdempotencyMiddleware, once=once, upkeep=os.environ["ONCEKEY_TEST_UPKEEP"] == "yes" and keep)
    return app


class Sweeps:
    """Writes a line for each sweep: when it began, and how many keys it found with a lease that was over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = 0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.ZombieFound):
            self._found += 1
        elif isinstance(event, events.DutyDone) and event.duty == "sweep":
            with self._path.open("a") as lines:
                lines.write(f"{time.time() - event.seconds} {self._found}\n")
            self._found = 0


class _Handlers:
    def __init__(self, url: str, provider: Provider, stands: Path) -> None:
        self.url = url
        self.provider = provider
        self.stands = stands

    def external(self, request: Request) -> Response:
        self._stand(request, "begun")
        operation = current()
        how = request.query_params.get("how") if operation.attempt == 1 else None
        if how == "error":
            operation.not_executed()
            return JSONResponse({"error": "nothing happened"}, 500)
        if how == "declined":
            return JSONResponse({"error": "declined"}, 402)
        if how == "lost before":
            raise OutcomeUnknown("no answer")
        made = charge(self.provider, operation.downstream_key("charge"))
        self._stand(request, "charged")
        if how == "lost after":
            raise OutcomeUnknown("no answer")
        return self._answer(made)

    def repeatable(self, request: Request) -> Response:
        self._stand(request, "begun")
        with closing(connect(self.url)) as db:
            write(self.url, db, current().key, "written", again=True)
            db.commit()
        self._stand(request, "written")
        return self._answer("none")

    def transactional(self, request: Request) -> Response:
        self._stand(request, "begun")
        db = connect(self.url)  # not closed here: it is committed when the handler has returned
        current().blocking.enlist(db)
        write(self.url, db, current().key, "written")
        self._stand(request, "written")
        return self._answer("none")

    def phased(self, request: Request) -> Response:
        self._stand(request, "begun")
        operation, steps = current(), current().blocking

        def ask() -> str:
            self._stand(request, "asked")
            made = charge(self.provider, operation.downstream_key("charge"))
            self._stand(request, "charged")
            return made

        with closing(connect(self.url)) as db:
            steps.phase("opened", write, self.url, db, operation.key, "opened", on=db)
            self._stand(request, "opened")
            made: str = steps.effect("charge", ask, repeatable=False)
            self._stand(request, "remembered")
            steps.phase("closed", write, self.url, db, operation.key, "closed", on=db)
            self._stand(request, "closed")
        return self._answer(made)

    def deferred(self, request: Request) -> Response:
        del request
        db = connect(self.url)
        current().blocking.enlist(db)
        write(self.url, db, current().key, "written")
        current().blocking.defer("charge", {"key": current().key})
        return JSONResponse({"key": current().key}, 202)

    def _stand(self, request: Request, point: str) -> None:
        """Say that this point is reached, and stay here for good."""
        if request.query_params.get("at") == point and current().attempt == 1:
            (self.stands / current().key).touch()
            threading.Event().wait()

    def _answer(self, made: str) -> Response:
        return JSONResponse({"charge": made, "key": current().key, "attempt": current().attempt}, 201)
