"""An app with planted secrets on every way of a request: bodies, headers, keys, results, payloads and exceptions."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
from fastapi import Depends, FastAPI, Request, Response

from oncekey import (
    Confirmed,
    NotAuthenticated,
    NotAuthorized,
    NotExecuted,
    OnceKey,
    OutcomeUnknown,
    Policy,
    Refused,
    StillUnknown,
)
from oncekey import Request as KeyRequest
from oncekey.core.verdicts import Inquiry
from oncekey.engine.resumption import Resumption
from oncekey.errors import Dead
from oncekey.limits import Limits
from oncekey.outbox import Context, Worker
from oncekey.web.fastapi import CurrentOperation, protect
from oncekey.web.status import status_app
from tests.security.planted import WORD, Witness, secret, sentence, shown

TENANT = "acme"
_SOON = timedelta(milliseconds=1)
_TABLE = "CREATE TABLE IF NOT EXISTS cards (number text PRIMARY KEY)"


def connect(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), check_same_thread=False)
    return psycopg.connect(url)


def tenant_of(request: KeyRequest) -> str:
    if request.headers.get("x-broken"):
        raise RuntimeError(sentence("scope"))
    if request.headers.get("x-nobody"):
        raise NotAuthenticated
    return TENANT if request.headers.get("authorization") == f"Bearer {secret('authorization')}" else "stranger"


def authorize(request: KeyRequest, operation: str) -> None:
    if operation == "POST /forbidden":
        raise NotAuthorized


def _raise(name: str) -> Any:
    raise RuntimeError(sentence(name))


def make_once(url: str, witness: Witness, **more: Any) -> OnceKey:
    external = Policy(quarantine=_SOON)
    return OnceKey(
        url,
        scope=tenant_of,
        authorize=authorize,
        limits=Limits(lookups="3/hour"),
        policy=external,
        routes={
            "POST /sql": Policy(effects="transactional"),
            "POST /phased": Policy(effects="phased", keep_request=True, quarantine=_SOON),
            "POST /later": Policy(effects="transactional"),
            "POST /repeatable": Policy(effects="repeatable"),
            "POST /personal": Policy(pii="warn"),
            "POST /refuses": Policy(pii="refuse"),
            "POST /signed": Policy(verify=lambda request, body: _raise("verify")),
            "POST /large": Policy(max_response_bytes=10),
            "POST /small": Policy(max_request_bytes=10),
            "POST /aged": Policy(max_age=timedelta(minutes=1)),
            "POST /limited": Policy(limit="1/hour"),
            "POST /bound": Policy(bind=lambda request: request.headers["x-user"]),
        },
        on_event=_Hook(witness),
        telemetry=witness.telemetry,
        bind_secret=secret("bind-secret-of-32-bytes"),
        migrate=True,
        **more,
    )


class _Hook:
    """Hears every event, and then raises: the log has one line about that."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def __call__(self, event: Any) -> None:
        self._witness.on_event(event)
        raise RuntimeError(sentence("hook"))


def make_app(once: OnceKey, url: str) -> FastAPI:
    app = FastAPI()
    protect(app, once, upkeep=False)
    with closing(connect(url)) as db:
        db.execute(_TABLE)
        db.commit()

    def connection() -> Iterator[Any]:
        with closing(connect(url)) as db:
            yield db

    database = Depends(connection)

    @app.post("/ok", status_code=201)
    def ok(response: Response) -> dict[str, str]:
        response.headers["Set-Cookie"] = f"session={secret('set-cookie')}"
        response.headers["Location"] = f"/cards/{secret('location')}"
        return {"card": secret("answer")}

    @app.post("/large")
    def large() -> dict[str, str]:
        return {"card": secret("large")}

    @app.post("/raises/{kind}")
    def raises(kind: str) -> None:
        errors = {"plain": RuntimeError, "not": NotExecuted, "unknown": OutcomeUnknown, "refused": Refused}
        try:
            _raise("cause")
        except RuntimeError as error:
            raise errors[kind](sentence(f"handler-{kind}")) from error

    @app.post("/repeatable")
    def repeatable() -> None:
        _raise("repeatable")

    @app.post("/sql")
    def sql(operation: CurrentOperation, db: Any = database) -> None:
        operation.blocking.enlist(db)
        place = "?" if isinstance(db, sqlite3.Connection) else "%s"
        for _ in range(2):  # the second is a duplicate: the database quotes it in its error
            db.execute(f"INSERT INTO cards VALUES ({place})", (secret("sql"),))

    @app.post("/phased", status_code=201)
    async def phased(request: Request, operation: CurrentOperation) -> dict[str, str]:
        body = await request.json()
        charge = {"card": secret("step"), "id": shown("provider-id")}
        made = await operation.effect("charge", lambda: charge, repeatable=False, provider_id=lambda got: got["id"])
        if body["then"] == "half":
            raise RuntimeError(sentence("half"))
        await operation.effect("ship", _raise, "effect", repeatable=False)
        return made

    @app.post("/later", status_code=202)
    def later(operation: CurrentOperation, db: Any = database) -> dict[str, str]:
        operation.blocking.enlist(db)
        operation.blocking.enqueue("mail", {"to": secret("payload")})
        operation.blocking.defer("settle", {"card": secret("payload")})
        return {"card": secret("accepted")}

    @app.post("/slow")
    async def slow() -> None:
        await asyncio.sleep(0.5)

    for path in ("personal", "refuses", "signed", "small", "aged", "limited", "bound", "forbidden"):
        app.post(f"/{path}")(lambda: {"card": secret("answer")})
    app.mount("/idempotency", status_app(once))
    return app


def resolve_with(once: OnceKey) -> None:
    """Resolvers and a function that resumes: each fails with a secret in its exception."""
    once.resolver("POST /raises/plain")(lambda inquiry: _raise("resolver"))

    @once.resolver("POST /raises/unknown")
    def undecided(inquiry: Inquiry) -> StillUnknown | Confirmed:
        return StillUnknown(shown("resolver-reason"))

    @once.resume("POST /phased")
    def go_on(op: Resumption) -> Any:
        _raise("resume")


def make_worker(once: OnceKey) -> Worker:
    worker = Worker(once, concurrency=1)

    @worker.task(max_attempts=2, backoff=0.01, max_backoff=0.01)
    def mail(context: Context, payload: Any) -> None:
        if context.attempt == 1:
            raise KeyError(WORD)
        _raise("task")

    @worker.task()
    def settle(context: Context, payload: Any) -> None:
        raise Dead(sentence("dead"))

    return worker
