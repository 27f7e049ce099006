"""Enlisting in FastAPI and Flask, as their users write it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI, HTTPException
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.core.states import State
from oncekey.telemetry.route_warnings import MORE_FOLLOW, NAMED
from oncekey.web import fastapi as web
from oncekey.web import flask as flask_web
from oncekey.web.fastapi import CurrentOperation, enlisted_session
from tests.enlist.shop import TRANSACTIONAL, Shop

INSERT = sa.text("INSERT INTO payments (key, cents) VALUES (:key, :cents)")


class Payment(BaseModel):
    cents: int


def sync_url(shop: Shop) -> str:
    return shop.url.replace("postgresql:", "postgresql+psycopg:")


def async_url(shop: Shop) -> str:
    return sync_url(shop).replace("sqlite:", "sqlite+aiosqlite:")


class Site:
    """A FastAPI app with one payment route, and its client."""

    def __init__(self, shop: Shop, make: Any, how: str) -> None:
        self.app = app = FastAPI()
        self.once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)
        web.protect(app, self.once)
        given = Depends(enlisted_session(make))
        if how == "async":

            @app.post("/payments", status_code=201)
            async def pay(payment: Payment, op: CurrentOperation, session: AsyncSession = given) -> Any:
                await session.execute(INSERT, {"key": op.key, "cents": payment.cents})
                if payment.cents in (303, 409):
                    raise HTTPException(payment.cents, "not now")
                return {"paid": payment.cents}
        else:

            @app.post("/payments", status_code=201)
            def pay_now(payment: Payment, op: CurrentOperation, session: Session = given) -> Any:
                session.execute(INSERT, {"key": op.key, "cents": payment.cents})
                if payment.cents in (303, 409):
                    raise HTTPException(payment.cents, "not now")
                return {"paid": payment.cents}

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def post(self, body: Any, key: str = "k-1") -> httpx.Response:
        return await self.http.post("/payments", headers={"Idempotency-Key": key}, json=body)


@pytest.fixture(params=["async", "sync"])
async def site(request: pytest.FixtureRequest, shop: Shop) -> Any:
    if request.param == "async":
        engine: Any = create_async_engine(async_url(shop), poolclass=NullPool)
        site = Site(shop, async_sessionmaker(engine, expire_on_commit=False), "async")
        yield site
        await engine.dispose()
    else:
        engine = sa.create_engine(sync_url(shop))
        site = Site(shop, sessionmaker(engine), "sync")
        yield site
        engine.dispose()
    await site.http.aclose()
    await site.once.aclose()


async def test_fastapi_session_that_is_enlisted_already(site: Site, shop: Shop) -> None:
    first = await site.post({"cents": 5})
    assert first.status_code == 201, first.text
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert (await site.post({"cents": 5})).content == first.content
    assert shop.payments() == 1


async def test_fastapi_http_exception_rolls_back_and_is_stored(site: Site, shop: Shop) -> None:
    assert (await site.post({"cents": 409})).status_code == 409
    assert (shop.payments(), shop.state()) == (0, State.FAILED)


async def test_log_says_to_return_a_redirect_that_fastapi_raised(
    site: Site, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The dependency sees the exception, and closes the session before oncekey can commit."""
    assert (await site.post({"cents": 303})).status_code == 503
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert "the response is a redirect. If the handler raised it, let it return the redirect" in caplog.text
    assert "Take the commit() or rollback() out" not in caplog.text


async def test_a_body_that_fastapi_refuses_leaves_the_key_unused(site: Site, shop: Shop) -> None:
    """The dependency has enlisted before the body is validated: rolled back, and discarded all the same."""
    assert (await site.post({"cents": "many"})).status_code == 422
    assert shop.state() is None
    assert (await site.post({"cents": 5})).status_code == 201


def test_older_fastapi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "fastapi_version", "0.117.1")
    with pytest.raises(Exception, match=r"fastapi>=0\.118"):
        enlisted_session(lambda: None)


# ---------------------------------------------------------------- Flask-SQLAlchemy


class FlaskSite:
    def __init__(self, shop: Shop) -> None:
        self.app = app = Flask("shop")
        app.config["SQLALCHEMY_DATABASE_URI"] = sync_url(shop)
        self.db = db = SQLAlchemy(app)
        self.once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)

        @app.post("/payments")
        def pay() -> Any:
            from flask import abort, request

            cents = request.get_json()["cents"]
            current().blocking.enlist(db.session)
            db.session.execute(INSERT, {"key": current().key, "cents": cents})
            if cents == 409:
                abort(409)
            if cents == 500:
                raise RuntimeError("no")
            if cents == 1:
                db.session.commit()
            return {"paid": cents}, 201

        flask_web.protect(app, self.once)
        self.http = app.test_client()

    def post(self, cents: int, key: str = "k-1") -> Any:
        return self.http.post("/payments", headers={"Idempotency-Key": key}, json={"cents": cents})


@pytest.fixture
def flask_site(shop: Shop) -> Iterator[FlaskSite]:
    site = FlaskSite(shop)
    yield site
    with site.app.app_context():
        site.db.engine.dispose()
    site.once.close()


async def test_flask_sqlalchemy_session_commits_before_the_teardown(flask_site: FlaskSite, shop: Shop) -> None:
    """The session is removed at teardown, which is after the commit."""
    first = flask_site.post(5)
    assert first.status_code == 201
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert flask_site.post(5).data == first.data
    assert shop.payments() == 1


async def test_flask_abort_rolls_back_and_is_stored(flask_site: FlaskSite, shop: Shop) -> None:
    assert flask_site.post(409).status_code == 409
    assert (shop.payments(), shop.state()) == (0, State.FAILED)


async def test_flask_error_rolls_back(flask_site: FlaskSite, shop: Shop) -> None:
    assert flask_site.post(500).status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)


async def test_flask_handler_that_commits_is_refused(flask_site: FlaskSite, shop: Shop) -> None:
    assert flask_site.post(1).status_code == 500
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    assert flask_site.post(5, "k-2").status_code == 201, "the pooled connection is as good as new"
    assert shop.payments() == 0


async def test_transactional_route_that_enlists_nothing_is_warned_about_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async def pay(request: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({}, 201)

    api = shop.api(pay)
    with caplog.at_level(logging.WARNING, "oncekey"):
        await api.post("k-1")
        await api.post("k-2")
    told = [line for line in caplog.messages if "enlisted no transaction" in line]
    assert len(told) == 1
    assert "POST /payments" in told[0]


async def test_transactional_handler_that_raises_before_it_enlists_is_warned_about_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is rolled back then, and each retry runs: that must not be silent."""

    async def pay(request: Any) -> Any:
        raise RuntimeError("after a commit of its own")

    api = shop.api(pay)
    with caplog.at_level(logging.WARNING, "oncekey"):
        for _ in range(2):
            with suppress(RuntimeError):
                await api.post("k-1")
    told = [line for line in caplog.messages if "without having enlisted a transaction" in line]
    assert len(told) == 1
    assert "POST /payments" in told[0]


def test_warnings_per_path_that_clients_invent_have_a_limit(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Where the routes cannot be read, each path that a client sends is one."""
    with OnceKey(shop.url, scope=SINGLE_TENANT) as once, caplog.at_level(logging.WARNING, "oncekey"):
        for number in range(3 * NAMED):
            once.engine.tell_once(f"POST /{number}", "a warning about %s")
    assert len(caplog.messages) == NAMED + 1
    assert caplog.messages[-1] == f"a warning about another operation{MORE_FOLLOW}"
