"""A WSGI framework added as CONTRIBUTING.md says ("Add a framework"): a toy with class-based views, and its adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from oncekey import OnceKey
from oncekey.testing.framework_suite import (
    Abort,
    Framework,
    FrameworkSuite,
    Payments,
    Reply,
    ServedSuite,
    pieces_of,
    unprotected,
)
from oncekey.web.declared import Handler
from oncekey.web.endpoints import wrapped
from oncekey.web.wsgi import IdempotencyMiddleware

# ---------------------------------------------------------------- a toy framework


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Views:
    """A path leads to an object, which has one method for each HTTP method: ``post(environ)``."""

    def __init__(self) -> None:
        self.views: dict[str, Any] = {}
        self.wsgi_app: Any = self.serve  # middleware goes around it

    def find(self, path: str) -> tuple[str, Any] | None:
        for pattern, view in self.views.items():
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path):
                return pattern, view
        return None

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = self.wsgi_app(environ, start_response)
        return answer

    def serve(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        found = self.find(environ["PATH_INFO"])
        method = None if found is None else getattr(found[1], environ["REQUEST_METHOD"].lower(), None)
        try:
            if found is None or method is None:
                raise HttpError(404 if found is None else 405)
            reply: Reply = method(environ)
        except HttpError as error:
            reply = Reply(error.status, b"error")
        length = [("content-length", str(len(reply.body)))] if reply.streamed is None else []
        start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", reply.header_list + length)
        return [reply.body] if reply.streamed is None else pieces_of(reply)


# ---------------------------------------------------------------- its adapter

METHODS = ("get", "post", "put", "patch", "delete")


class ViewEndpoints:
    """The methods of all views: wrapped before each request, since views may be added at any time."""

    def __init__(self, app: Views) -> None:
        self.app = app

    def cover(self) -> bool:
        for method, path, call in self.each():
            setattr(self.app.views[path], method.lower(), wrapped(call, lambda reply, _: reply.status, _status_of))
        return True

    def each(self) -> Iterator[tuple[str, str, Any]]:
        for path, view in self.app.views.items():
            for method in METHODS:
                if hasattr(view, method):
                    yield method.upper(), path, getattr(view, method)

    def handler(self, environ: Any) -> Handler | None:
        found = self.app.find(environ["PATH_INFO"])
        call = None if found is None else getattr(found[1], environ["REQUEST_METHOD"].lower(), None)
        return None if found is None or call is None else Handler(call, found[0])


def _status_of(error: BaseException) -> int | None:
    return error.status if isinstance(error, HttpError) else None


def protect(app: Views, once: OnceKey) -> None:
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, once, endpoints=ViewEndpoints(app))


# ---------------------------------------------------------------- the suite


class View:
    def __init__(self, **methods: Callable[[Any], Reply]) -> None:
        self.__dict__.update(methods)


def paying(payments: Payments) -> Callable[[Any], Reply]:
    def pay(environ: Any) -> Reply:
        try:
            return payments.handle(parse_qs(environ["QUERY_STRING"]).get("m", ["ok"])[0])
        except Abort as abort:
            raise HttpError(abort.status) from abort

    return pay


def other(environ: Any) -> Reply:
    return unprotected()


def make_app(payments: Payments, once: OnceKey) -> Views:
    app = Views()
    app.views["/payments"] = app.views["/payments/{id}/refunds"] = View(post=paying(payments))
    app.views["/login"], app.views["/status"] = View(post=other), View(get=other)
    protect(app, once)
    return app


def make_declaring_app(payments: Payments, once: OnceKey) -> Views:
    app = Views()
    app.views["/declared/{id}"] = View(post=once.policy(effects="repeatable")(paying(payments)))
    app.views["/exempt"] = View(post=once.exempt(lambda environ: unprotected()))
    protect(app, once)
    app.views["/late"] = View(post=paying(payments))
    return app


class TestViews(FrameworkSuite):
    framework = Framework(make_app, is_async=False, make_declaring_app=make_declaring_app)


@pytest.mark.frameworks
class TestViewsServed(ServedSuite):
    framework = Framework(make_app, is_async=False, make_declaring_app=make_declaring_app)
    server = "gunicorn"

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'keys.db'}"
