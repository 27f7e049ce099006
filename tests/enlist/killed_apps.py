"""Six toy apps that enlist, four as they should and two as people do, in processes that are killed at named points.

A child of a warm fork server serves one request to itself. ``fault`` says at which point it is killed
(``kill:written``) or stopped (``stop:begun``).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Session, sessionmaker

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.engine.transactions.adapters.sqlalchemy import SqlAlchemyLink
from oncekey.web import fastapi as web
from oncekey.web import flask as flask_web

POINTS = ("begun", "enlisted", "written", "completing", "completed", "committed", "answered")
GOOD = ("flask-sqlalchemy", "fastapi-yield", "django", "django-asgi")
BAD = ("with-session", "commits-itself")
POLICY = Policy(effects="transactional", lease=timedelta(seconds=30))
INSERT = sa.text("INSERT INTO payments (key, cents) VALUES (:key, 5)")

Answer = tuple[int, bytes]
Point = Callable[[str], None]


def make_point(fault: str) -> Point:
    what, _, where = fault.partition(":")

    def point(name: str) -> None:
        if name == where:
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            time.sleep(0.3)  # the signal may reach another thread first, and this one must not go on meanwhile

    return point


def watch_the_end(point: Point, link: Any = SqlAlchemyLink) -> None:
    """Points inside of the engine's own ending."""
    complete, commit = link.complete, link.commit

    def watched_complete(self: Any, statements: Any, parameters: Any) -> Any:
        point("completing")
        rows = complete(self, statements, parameters)
        point("completed")
        return rows

    def watched_commit(self: Any) -> None:
        commit(self)
        point("committed")

    link.complete, link.commit = watched_complete, watched_commit


def serve(toy: str, url: str, fault: str, answers: Any) -> None:
    """One request, in a process of its own."""
    point = make_point(fault)
    if toy.startswith("django"):
        answer = _django(toy, url, point)
    else:
        watch_the_end(point)
        answer = _flask(url, point) if toy == "flask-sqlalchemy" else asyncio.run(_asgi(toy, url, point))
    point("answered")
    answers.put(answer)


def _flask(url: str, point: Point) -> Answer:
    app = Flask("toy")
    app.config["SQLALCHEMY_DATABASE_URI"] = _url(url)
    db = SQLAlchemy(app)

    @app.post("/payments")
    def pay() -> Any:
        point("begun")
        current().blocking.enlist(db.session)
        point("enlisted")
        db.session.execute(INSERT, {"key": current().key})
        point("written")
        return {"paid": current().key}, 201

    once = OnceKey(url, scope=SINGLE_TENANT, policy=POLICY)
    flask_web.protect(app, once)
    answer = app.test_client().post("/payments", headers={"Idempotency-Key": "k-1"}, json={})
    once.close()
    return answer.status_code, answer.data


def _django(toy: str, url: str, point: Point) -> Answer:
    """``ATOMIC_REQUESTS`` under WSGI, a block of the view under ASGI. A toy on MySQL ends with its driver."""
    from tests.enlist.django_site import Site

    from django.db import transaction  # isort: skip
    from django.http import JsonResponse  # isort: skip
    from oncekey.engine.transactions.adapters.django import DjangoLink  # isort: skip

    def pay(site: Site, request: Any) -> Any:
        point("begun")
        with transaction.atomic(using=site.alias):
            current().blocking.enlist()
            point("enlisted")
            site.pay()
            point("written")
        return JsonResponse({"paid": current().key}, status=201)

    watch_the_end(point, DjangoLink)
    shop: Any = SimpleNamespace(url=url, driver=toy.partition(":")[2])
    asgi = toy.startswith("django-asgi")
    site = Site(shop, pay, asgi=asgi, atomic_requests=not asgi)
    answer = site.post()
    site.close()
    return answer.status_code, answer.content


async def _asgi(toy: str, url: str, point: Point) -> Answer:
    app = FastAPI()
    once = OnceKey(url, scope=SINGLE_TENANT, policy=POLICY)
    web.protect(app, once)
    maker = sessionmaker(sa.create_engine(_url(url)))

    def write(session: Session) -> None:
        current().blocking.enlist(session)
        point("enlisted")
        session.execute(INSERT, {"key": current().key})
        point("written")

    def session() -> Iterator[Session]:
        with maker() as session:
            yield session

    def with_yield(session: Session = Depends(session)) -> Any:  # noqa: B008
        point("begun")
        write(session)
        return {"paid": current().key}

    def with_session() -> Any:
        """Closed before the response is there: its transaction is gone."""
        point("begun")
        with maker() as session:
            write(session)
        return {"paid": current().key}

    def commits_itself() -> Any:
        point("begun")
        with maker() as session:
            write(session)
            session.commit()
        return {"paid": current().key}

    toys = {"fastapi-yield": with_yield, "with-session": with_session, "commits-itself": commits_itself}
    app.post("/payments", status_code=201)(toys[toy])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        answer = await http.post("/payments", headers={"Idempotency-Key": "k-1"}, json={})
    await once.aclose()
    return answer.status_code, answer.content


def _url(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


# ---------------------------------------------------------------- the test's side

_warm = multiprocessing.get_context("forkserver")
_warm.set_forkserver_preload(
    ["pytest", "tests.enlist.killed_apps", "tests.enlist.django_site"]
)  # pytest: a child looks into our main module


class Child:
    def __init__(self, toy: str, url: str, fault: str) -> None:
        self._answers = _warm.Queue()
        self.process = _warm.Process(target=serve, args=(toy, url, fault, self._answers), daemon=True)
        self.process.start()

    def answer(self) -> Answer | None:
        """What the request got; None: the process was killed."""
        self.process.join(30)
        if self.process.exitcode == -signal.SIGKILL:
            return None
        status, body = self._answers.get(timeout=10)
        return status, body


@contextmanager
def child(toy: str, url: str, fault: str = "") -> Iterator[Child]:
    started = Child(toy, url, fault)
    try:
        yield started
    finally:
        if started.process.is_alive():
            started.process.kill()
            started.process.join(10)
        started._answers.close()


def run(toy: str, url: str, fault: str = "") -> Answer | None:
    with child(toy, url, fault) as started:
        return started.answer()
