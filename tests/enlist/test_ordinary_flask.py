"""Ordinary Flask-SQLAlchemy code in an enlisted view, three sends of one key each, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, abort, redirect
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.exc import IntegrityError

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.flask import protect

KEY = "ordinary-1"


class Bookings:
    """A Flask app with one table, whose one view is given."""

    def __init__(self, url: str) -> None:
        self.app = Flask("bookings")
        self.is_sqlite = url.startswith("sqlite")
        driver = url.replace("postgresql://", "postgresql+psycopg://")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = driver
        self.db = db = SQLAlchemy()
        db.init_app(self.app)
        self.table = db.Table("bookings", db.Column("seat", db.Integer, primary_key=True))
        with self.app.app_context():
            db.create_all()
        policy = Policy(effects="transactional")
        self.once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, migrate=True)
        protect(self.app, self.once)

    def serve(self, work: Callable[[Bookings], Any]) -> list[int]:
        @self.app.post("/bookings")
        def book() -> Any:
            current().blocking.enlist(self.db.session)
            return work(self)

        client = self.app.test_client()
        return [client.post("/bookings", headers={"Idempotency-Key": KEY}).status_code for _ in range(3)]

    def insert(self, seat: int | None = None) -> None:
        values = {} if seat is None else {"seat": seat}
        self.db.session.execute(self.table.insert().values(**values))

    @property
    def rows(self) -> int:
        with self.app.app_context(), self.db.engine.connect() as connection:
            return len(connection.execute(self.table.select()).all())

    @property
    def state(self) -> State:
        (record,) = self.once.store.read([("single-tenant", KEY)])
        assert record is not None
        return record.state


@pytest.fixture(params=["sqlite", "postgres"])
def bookings(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path}/bookings.db" if sqlite else request.getfixturevalue("postgres_url")
    made = Bookings(url)
    with made.once:
        yield made
    with made.app.app_context():
        made.db.engine.dispose()


def test_session_removed_and_used_again_makes_the_key_unknown(bookings: Bookings) -> None:
    """``remove()`` ends the enlisted transaction, and the next use is a session that nothing guards."""

    def work(bookings: Bookings) -> Any:
        bookings.insert()
        bookings.db.session.remove()
        bookings.insert()
        bookings.db.session.commit()
        return {"ok": 1}

    assert bookings.serve(work) == [409, 409, 409]
    assert (bookings.rows, bookings.state) == (1, State.UNKNOWN)


@pytest.mark.parametrize("rolls_back", [True, False])
def test_integrity_error_answered_with_409_is_stored_and_replayed(bookings: Bookings, rolls_back: bool) -> None:
    def work(bookings: Bookings) -> Any:
        bookings.insert(7)
        try:
            bookings.insert(7)
        except IntegrityError:
            if rolls_back:
                bookings.db.session.rollback()
            return {"error": "taken"}, 409
        return {"ok": 1}

    assert bookings.serve(work) == [409, 409, 409]
    # SQLite undoes the failed statement alone; PostgreSQL fails the whole transaction.
    kept = 1 if bookings.is_sqlite and not rolls_back else 0
    assert (bookings.rows, bookings.state) == (kept, State.FAILED)


def test_raised_redirect_commits_its_rows(bookings: Bookings) -> None:
    def work(bookings: Bookings) -> Any:
        bookings.insert()
        abort(redirect("/bookings/1"))

    assert bookings.serve(work) == [302, 302, 302]
    assert (bookings.rows, bookings.state) == (1, State.COMPLETED)
