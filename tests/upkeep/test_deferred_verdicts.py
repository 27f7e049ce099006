"""A deferred request (202) is done: whatever is said of its job, its handler does not run a second time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, Confirmed, Happened, NotHappened, OnceKey, Policy, Refuted, current
from oncekey.admin import changes
from oncekey.core.audit import Audit
from oncekey.core.jobs import JobState
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.verdicts import Verdict
from oncekey.errors import MoveRefused
from oncekey.outbox import Context, Worker
from oncekey.outbox import Response as TaskResponse
from oncekey.stores.api import Outbox
from oncekey.upkeep import Inquiry, Outcome, Reconciler
from oncekey.web.asgi import IdempotencyMiddleware

KEY = "order-1-of-today"
AUDIT = Audit("ann", "the provider has no charge")


def outbox_of(once: OnceKey) -> Outbox:
    assert isinstance(once.store, Outbox)
    return once.store


class Shop:
    """An app that answers 202, and its worker, which calls a provider that is down until ``up``."""

    def __init__(self, url: str) -> None:
        self.url, self.up = url, False
        policy = Policy(effects="transactional", quarantine=timedelta(microseconds=1))
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, migrate=True)
        self.app = Starlette(routes=[Route("/orders", self.order, methods=["POST"])])
        self.app.add_middleware(IdempotencyMiddleware, once=self.once, upkeep=False)
        self.worker = Worker(self.once.store)
        self.worker.task("charge", max_attempts=1)(self.charge)
        with closing(self.connect()) as db:
            db.execute("CREATE TABLE orders (id integer)")
            db.commit()

    def connect(self) -> Any:
        if self.url.startswith("sqlite:"):
            return sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10, check_same_thread=False)
        return psycopg.connect(self.url)

    async def order(self, request: Request) -> Response:
        op, db = current(), request.app.state.db
        await op.enlist(db)
        db.execute("INSERT INTO orders (id) VALUES (7)")
        await op.defer("charge", {"order": 7})
        return JSONResponse({"status": "pending"}, 202)

    async def charge(self, ctx: Context, payload: Any) -> TaskResponse:
        if not self.up:
            raise ConnectionError("the provider is down")
        return TaskResponse(201, {"charge": "ch_1"})

    def send(self) -> httpx.Response:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post("/orders", headers={"Idempotency-Key": KEY}, json={"order": 7})

        with closing(self.connect()) as self.app.state.db:
            return asyncio.run(post())

    def work(self) -> None:
        asyncio.run(self.worker.serve(until="drained"))

    def left_unknown(self) -> Record:
        """Its job ended as a dead letter."""
        assert self.send().status_code == 202
        self.work()
        record = self.key()
        assert record.state is State.UNKNOWN
        return record

    def key(self) -> Record:
        (record,) = self.once.store.listing()
        (found,) = self.once.store.read([(record.scope, record.key)])
        assert found is not None
        return found

    def rows(self) -> int:
        with closing(self.connect()) as db:
            (count,) = db.execute("SELECT count(*) FROM orders").fetchone()
        return int(count)


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    file = f"sqlite:///{tmp_path / 'shop.db'}"
    shop = Shop(file if request.param == "sqlite" else request.getfixturevalue("postgres_url"))
    yield shop
    shop.once.close()


def _by_webhook(shop: Shop, verdict: Verdict) -> None:
    settled = shop.once.ingest_blocking(verdict, key=KEY)
    (job,) = outbox_of(shop.once).jobs(JobState.DEAD, 10)
    assert (settled.outcome, settled.over) == (Outcome.REFUSED, False)
    assert f"`oncekey dead-letters retry {job.id} --why TEXT`" in (settled.reason or "")


def _by_resolver(shop: Shop, verdict: Verdict) -> None:
    def ask(inquiry: Inquiry) -> Verdict:
        return verdict

    shop.once.resolve_with("POST /orders", ask)
    reconciler = Reconciler(shop.once)
    assert reconciler.run().postponed == 1
    reconciler.close()
    assert "the request itself is done" in (shop.key().last_error or "")


def _by_operator(shop: Shop, verdict: Verdict) -> None:
    record, store = shop.key(), shop.once.store
    change = partial(changes.refute, store, record, AUDIT, 0.0)
    if isinstance(verdict, Happened):
        change = partial(changes.happened, store, record, verdict, AUDIT)
    elif isinstance(verdict, NotHappened):
        change = partial(changes.not_happened, store, record, None, AUDIT, 0.0)
    with pytest.raises(MoveRefused, match=r"the request itself is done.*dead-letters retry"):
        change()


@pytest.mark.parametrize("by", [_by_webhook, _by_resolver, _by_operator])
@pytest.mark.parametrize("verdict", [Refuted("no charge"), NotHappened("no charge"), Happened(1)])
def test_deferred_request_is_not_run_again_by_a_verdict(shop: Shop, by: Any, verdict: Verdict) -> None:
    shop.left_unknown()
    by(shop, verdict)
    assert shop.send().status_code == 409
    assert (shop.key().state, shop.rows()) == (State.UNKNOWN, 1)


def test_retried_job_settles_the_deferred_request(shop: Shop) -> None:
    shop.left_unknown()
    (job,) = outbox_of(shop.once).jobs(JobState.DEAD, 10)
    changes.retry_job(shop.once.store, job.id, AUDIT)
    shop.up = True
    shop.work()
    again = shop.send()
    assert (again.status_code, again.json(), shop.rows()) == (201, {"charge": "ch_1"}, 1)


def test_discarded_job_still_proves_that_the_request_is_done(shop: Shop) -> None:
    """The reaper deletes cancelled jobs, but not this one while its key is unknown."""
    record = shop.left_unknown()
    store = shop.once.store
    assert isinstance(store, Outbox)
    (job,) = store.jobs(JobState.DEAD, 10)
    changes.discard_job(store, job.id, AUDIT)
    assert store.purge_jobs(10, -60.0) == 0
    settled = shop.once.ingest_blocking(Refuted("no charge"), key=KEY)
    assert (settled.outcome, "dead-letters retry" in (settled.reason or "")) == (Outcome.REFUSED, False)
    assert (shop.send().status_code, shop.rows()) == (409, 1)
    assert shop.once.ingest_blocking(Confirmed(402, {"error": "no money"}), key=KEY).outcome is Outcome.SETTLED
    assert (store.purge_jobs(10, -60.0), record.owner == shop.key().owner) == (1, True)
    assert (shop.send().status_code, shop.rows()) == (402, 1)
