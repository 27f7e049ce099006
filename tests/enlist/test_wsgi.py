"""Enlisting under WSGI: the thread that called the app also ends its transaction."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, g
from sqlalchemy.orm import Session

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web import flask as flask_web
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.enlist.shop import TRANSACTIONAL, Psycopg, Shop, SqlAlchemy, Sqlite3

INSERT = sa.text("INSERT INTO payments (key, cents) VALUES (:key, 5)")


class OwnThread(Sqlite3):
    """As sqlite3 comes: for one thread."""

    def make(self) -> Any:
        return sqlite3.connect(self.shop.path)


class Site:
    def __init__(self, app: Any, shop: Shop, policy: Policy = TRANSACTIONAL) -> None:
        self.once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=policy)
        self.app = IdempotencyMiddleware(app, self.once)

    def post(self, key: str = "k-1") -> tuple[int, bytes]:
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/payments",
            "CONTENT_LENGTH": "0",
            "wsgi.input": io.BytesIO(),
            "HTTP_IDEMPOTENCY_KEY": key,
        }
        started: list[str] = []

        def start_response(status: str, headers: Any) -> Any:
            started.append(status)

        iterable = self.app(environ, start_response)
        body = b"".join(iterable)
        if hasattr(iterable, "close"):
            iterable.close()
        return int(started[0][:3]), body


@pytest.mark.parametrize("kind", [Psycopg, SqlAlchemy, OwnThread])
@pytest.mark.parametrize("parts", [1, 3], ids=["whole", "streamed"])
async def test_wsgi_write_response_and_key_share_one_commit(
    request: pytest.FixtureRequest, kind: Any, parts: int
) -> None:
    shop: Shop = request.getfixturevalue("sqlite_shop" if kind is OwnThread else "postgres_shop")
    payer = kind(shop)

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        thing = payer.open_now()
        current().blocking.enlist(thing)
        payer.pay(thing, current().key)
        start_response("201 Created", [])
        return iter([b"x" * 100] * parts)

    site = Site(app, shop, Policy(effects="transactional", max_response_bytes=150))
    assert site.post() == (201, b"x" * 100 * parts)
    assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
    assert site.post()[0] == 201
    assert shop.payments() == 1
    await payer.close()
    site.once.close()


async def test_exception_rolls_the_transaction_back(shop: Shop) -> None:
    payer = SqlAlchemy(shop)

    def app(environ: Any, start_response: Any) -> Any:
        thing = payer.open_now()
        current().enlist(thing)
        payer.pay(thing, "k-1")
        raise RuntimeError("no")

    site = Site(app, shop)
    with pytest.raises(RuntimeError, match="no"):
        site.post()
    assert (shop.payments(), shop.state()) == (0, State.FAILED_RETRYABLE)
    await payer.close()
    site.once.close()


async def test_wsgi_owner_that_lost_its_lease_writes_nothing(shop: Shop) -> None:
    payer = SqlAlchemy(shop)

    def app(environ: Any, start_response: Any) -> Any:
        shop.ask("UPDATE idempotency_keys SET owner = 'another'")
        current().enlist(payer.open_now())
        raise AssertionError("not reached")

    site = Site(app, shop)
    assert site.post()[0] == 409
    assert shop.payments() == 0
    await payer.close()
    site.once.close()


@pytest.mark.parametrize("commits", [True, False])
async def test_flask_that_commits_at_teardown(shop: Shop, commits: bool) -> None:
    """commit='caller': the response waits for the teardown, which is the app's own."""
    engine = sa.create_engine(SqlAlchemy(shop).url())
    app = Flask("shop")
    once = OnceKey(shop.url, scope=SINGLE_TENANT, policy=TRANSACTIONAL)

    @app.post("/payments")
    def pay() -> Any:
        g.session = Session(engine)
        current().blocking.enlist(g.session, commit="caller")
        g.session.execute(INSERT, {"key": current().key})
        return {"paid": True}, 201

    @app.teardown_appcontext
    def end(error: BaseException | None) -> None:
        if commits and error is None:
            g.session.commit()
        g.session.close()

    flask_web.protect(app, once)
    answer = app.test_client().post("/payments", headers={"Idempotency-Key": "k-1"}, json={})
    if commits:
        assert (answer.status_code, shop.payments(), shop.state()) == (201, 1, State.COMPLETED)
    else:
        assert (answer.status_code, shop.payments(), shop.state()) == (503, 0, State.FAILED_RETRYABLE)
    once.close()
    engine.dispose()


async def test_flask_behind_the_bare_middleware_is_refused(shop: Shop) -> None:
    """The bare middleware gets the response after the teardown has closed the session: refused, and nothing written."""
    engine = sa.create_engine(SqlAlchemy(shop).url())
    app = Flask("shop")

    @app.post("/payments")
    def pay() -> Any:
        g.session = Session(engine)
        current().enlist(g.session)
        g.session.execute(INSERT, {"key": current().key})
        return {"paid": True}, 201

    @app.teardown_appcontext
    def end(error: BaseException | None) -> None:
        g.session.close()

    site = Site(app.wsgi_app, shop)
    app.wsgi_app = site.app  # type: ignore[method-assign]
    answer = app.test_client().post("/payments", headers={"Idempotency-Key": "k-1"}, json={})
    assert (answer.status_code, shop.payments(), shop.state()) == (503, 0, State.FAILED_RETRYABLE)
    site.once.close()
    engine.dispose()
