"""A framework added as CONTRIBUTING.md says ("Add a framework"): a toy framework, its adapter, and the public suite."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
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
    async_pieces_of,
    unprotected,
)
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.declared import Handler, check_declarations
from oncekey.web.endpoints import wrapped

# ---------------------------------------------------------------- a toy framework


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    pieces: AsyncIterator[bytes] | None = None
    body: bytes = b""


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Rule:
    method: str
    path: str
    handler: Callable[[Any], Awaitable[Answer]]

    def matches(self, path: str) -> bool:
        return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", self.path), path) is not None


class Toy:
    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.app: Any = self.serve  # middleware goes around it

    def find(self, method: str, path: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.method == method and rule.matches(path)), None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        rule = self.find(scope["method"], scope["path"])
        if rule is None:
            known = any(each.matches(scope["path"]) for each in self.rules)
            answer = Answer(405 if known else 404)
        else:
            try:
                answer = await rule.handler(scope)
            except HttpError as error:
                answer = Answer(error.status, body=b"error")
        length = [("content-length", str(len(answer.body)))] if answer.pieces is None else []
        headers = [(name.encode(), value.encode()) for name, value in answer.headers + length]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.pieces is not None:
            async for piece in answer.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": answer.body})


# ---------------------------------------------------------------- its adapter


class ToyEndpoints:
    """The endpoints of a Toy app: wrapped before each request, since rules may be added at any time."""

    def __init__(self, app: Toy) -> None:
        self.app = app

    def cover(self) -> bool:
        for rule in self.app.rules:
            rule.handler = wrapped(rule.handler, lambda answer, _: answer.status, _status_of_error)
        return True

    def each(self) -> Iterator[tuple[str, str, Any]]:
        return ((rule.method, rule.path, rule.handler) for rule in self.app.rules)

    def handler(self, scope: Any) -> Handler | None:
        rule = self.app.find(scope["method"], scope["path"])
        return None if rule is None else Handler(rule.handler, rule.path)

    def knows_route(self, scope: Any) -> bool:
        return True

    def check(self, scope: Any, once: OnceKey, only: Any) -> None:
        check_declarations(self.app, once, only)

    async def answer_to_error(self, scope: Any, error: Exception) -> None:
        return None


def _status_of_error(error: BaseException) -> int | None:
    return error.status if isinstance(error, HttpError) else None


def protect(app: Toy, once: OnceKey) -> None:
    app.app = IdempotencyMiddleware(app.app, once, endpoints=ToyEndpoints(app))


# ---------------------------------------------------------------- the suite


def make_app(payments: Payments, once: OnceKey) -> Toy:
    def answer(reply: Reply) -> Answer:
        pieces = None if reply.streamed is None else async_pieces_of(reply)
        return Answer(reply.status, reply.header_list, pieces, reply.body)

    async def pay(scope: Any) -> Answer:
        try:
            return answer(await payments.handle_async(parse_qs(scope["query_string"].decode()).get("m", ["ok"])[0]))
        except Abort as abort:
            raise HttpError(abort.status) from abort

    async def other(scope: Any) -> Answer:
        return answer(unprotected())

    app = Toy()
    app.rules += [Rule("POST", "/payments", pay), Rule("POST", "/payments/{id}/refunds", pay)]
    app.rules += [Rule("POST", "/login", other), Rule("GET", "/status", other)]
    protect(app, once)
    return app


def make_declaring_app(payments: Payments, once: OnceKey) -> Toy:
    rules = {rule.path: rule for rule in make_app(payments, once).rules}
    pay, other = rules["/payments"].handler, rules["/login"].handler

    async def late(scope: Any) -> Answer:
        return await pay(scope)

    app = Toy()
    app.rules.append(Rule("POST", "/declared/{id}", once.policy(effects="repeatable")(pay)))
    app.rules.append(Rule("POST", "/exempt", once.exempt(other)))
    protect(app, once)
    app.rules.append(Rule("POST", "/late", late))
    return app


class TestToy(FrameworkSuite):
    framework = Framework(make_app, make_declaring_app=make_declaring_app)


@pytest.mark.frameworks
class TestToyServed(ServedSuite):
    framework = Framework(make_app, make_declaring_app=make_declaring_app)
    server = "uvicorn"

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'keys.db'}"
