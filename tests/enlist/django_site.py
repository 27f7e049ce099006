"""A Django project with one view, whose database keeps the keys, too. Nothing here asserts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from tests.enlist.mysql_shop import quoted
from tests.enlist.shop import Shop
from tests.web.django_apps import configure, make_handler, urls

configure()

from django.db import connections, transaction  # noqa: E402 - Django is configured first
from django.test import override_settings  # noqa: E402
from django.urls import path  # noqa: E402

from oncekey.testing.http.stack import Loop, as_a_server  # noqa: E402
from oncekey.web.django import conf  # noqa: E402

_numbers = count(1)


_MYSQL = [pytest.param(f"mysql-{driver}", marks=pytest.mark.stores) for driver in ("mysqlclient", "pymysql")]
mysql_shops = pytest.mark.parametrize("shop", _MYSQL, indirect=True)
every_shop = pytest.mark.parametrize("shop", ["sqlite", "postgresql", *_MYSQL], indirect=True)
"""For tests of Django: every database, and every driver of it."""

_ENGINES = {
    "": "django.db.backends.postgresql",
    "mysqlclient": "django.db.backends.mysql",
    "pymysql": "tests.enlist.django_pymysql",
}


class Site:
    """The project: ``view(site, request)`` answers POST /payments."""

    def __init__(
        self,
        shop: Shop,
        view: Callable[[Site, Any], Any],
        *,
        asgi: bool,
        asynchronous: bool = False,
        non_atomic: bool = False,
        atomic_requests: bool = False,
        effects: str = "transactional",
        lease: timedelta = timedelta(seconds=60),
        wrap: Callable[[Any], Any] = lambda view: view,
        inside: Sequence[str] = (),
        **database: Any,
    ) -> None:
        self.alias = add_database(shop.url, getattr(shop, "driver", ""), atomic_requests=atomic_requests, **database)
        self.atomic_requests = atomic_requests
        policy = {"effects": effects, "lease": lease}
        said = {"STORE": self.alias, "SCOPE": "SINGLE_TENANT", "POLICY": policy, "MIGRATE": True}
        with override_settings(ONCEKEY=said):
            self.once = conf.make()

        def plain(request: Any) -> Any:
            return view(self, request)

        async def awaited(request: Any) -> Any:
            return await view(self, request)

        wrapped = wrap(awaited if asynchronous else plain)
        if non_atomic:
            transaction.non_atomic_requests(using=self.alias)(wrapped)
        self.is_wsgi = not asgi
        self.urls = urls(path("payments", wrapped))
        self.app = make_handler(self.urls, self.once, asgi=asgi, upkeep=False, inside=inside)
        self._loop = Loop() if asgi else None

    @property
    def connection(self) -> Any:
        return connections[self.alias]

    def ask(self, sql: str) -> Any:
        """In the view: the first value of the answer."""
        with self.connection.cursor() as cursor:
            cursor.execute(quoted(sql) if self.connection.vendor == "mysql" else sql)
            return cursor.fetchone()[0] if cursor.description else None

    def pay(self, key: str | None = None) -> None:
        from oncekey import current

        self.ask(f"INSERT INTO payments (key, cents) VALUES ('{key or current().key}', 5)")

    def post(self, key: str = "k-1") -> httpx.Response:
        asked: dict[str, Any] = {"url": "/payments", "headers": {"Idempotency-Key": key}, "json": {}}
        if self._loop is not None:
            answer: httpx.Response = self._loop.start(self._post(asked)).result(30.0)
            return answer
        transport = httpx.WSGITransport(as_a_server(self.app), raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://shop") as client:
            return client.post(**asked)

    async def _post(self, asked: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(**asked)

    def close(self) -> None:
        connections[self.alias].close()
        del connections.settings[self.alias]
        if self._loop is None:
            self.once.close()
        else:
            self._loop.start(self.once.aclose(grace=2.0)).result(10.0)
            self._loop.close()


def make_site(shop: Shop, view: Callable[[Site, Any], Any], **options: Any) -> Site:
    return Site(shop, view, **options)


def add_database(url: str, driver: str = "", *, atomic_requests: bool, **options: Any) -> str:
    """A new alias in DATABASES for this URL. ``driver``: of MySQL. ``options``: of DATABASES' OPTIONS."""
    alias = f"shop_{next(_numbers)}"
    said: dict[str, Any] = {**connections.settings["default"], "ATOMIC_REQUESTS": atomic_requests}
    if url.startswith("sqlite"):
        said |= {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///"), "OPTIONS": options}
    else:
        parts = urlsplit(url)
        said |= {
            "ENGINE": _ENGINES[driver],
            "NAME": parts.path.removeprefix("/"),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": unquote(parts.hostname or ""),
            "PORT": parts.port or "",
            "OPTIONS": dict(options),
        }
        for pair in filter(None, parts.query.split("&")):
            name, _, value = pair.partition("=")
            known = {"host": "HOST", "port": "PORT", "user": "USER"}.get(name)
            (said if known else said["OPTIONS"])[known or name] = unquote(value)
    connections.settings[alias] = said
    return alias
