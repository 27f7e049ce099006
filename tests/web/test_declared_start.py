"""At the start of an app: declarations that contradict each other or have no effect, and routes without one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from flask import Flask
from flask import request as flask_request
from litestar import Litestar, asgi, post
from litestar.testing import AsyncTestClient
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute

from oncekey import OnceKey, Policy
from oncekey.core.responses import Response as Answer
from oncekey.core.verdicts import StillUnknown
from oncekey.errors import ConfigurationError
from oncekey.web import flask as on_flask
from oncekey.web import wsgi
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import protect as protect_fastapi
from oncekey.web.litestar import OnceKeyPlugin
from oncekey.web.starlette import protect
from tests.web.declaring_apps import FRAMEWORKS, ask, new_once, shop


async def handle(request: Any) -> Response:
    return PlainTextResponse("handled")


def new_handler(declare: Callable[[Any], Any] = lambda handler: handler) -> Any:
    async def pay(request: Any) -> Response:
        return await handle(request)

    return declare(pay)


async def start(app: Any, sent: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The app's lifespan, as a server begins it, and what it sends."""
    sent = [] if sent is None else sent
    received = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    return sent


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The warnings in oncekey's log. (Litestar sets up logging anew at its start, and takes pytest's handler away.)"""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logging.getLogger("oncekey").addHandler(handler)
    yield messages
    logging.getLogger("oncekey").removeHandler(handler)


async def refusal_at_start(app: Any) -> str:
    """What a server prints when it does not start the app; of Flask, which has no start, its first request."""
    if isinstance(app, Flask):
        with pytest.raises(ConfigurationError) as refused:
            await ask(app, "GET /nowhere")
        return str(refused.value)
    sent: list[dict[str, Any]] = []
    with pytest.raises((ConfigurationError, ExceptionGroup)):
        await start(app, sent)
    first = sent[0]
    assert first["type"] == "lifespan.startup.failed"
    if isinstance(app, Litestar):
        return str(first["message"])
    with pytest.raises(ConfigurationError):  # and where there is no lifespan, no request is served
        await ask(app, "GET /nowhere")
    message: str = first["message"]
    return message


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_route_declared_at_handler_and_in_routes_is_refused_with_both_places(framework: str) -> None:
    once = new_once(routes={"POST /orders/{order}": Policy(effects="repeatable")})
    message = await refusal_at_start(shop(framework, once))
    assert "POST /orders/{id" in message
    assert "tests.web.declaring_apps:" in message
    assert 'routes={"POST /orders/{order}": …}' in message


async def test_exemption_in_routes_of_a_declared_handler_is_refused_too() -> None:
    assert "two declarations" in await refusal_at_start(shop("fastapi", new_once(routes={"POST /pay": None})))


async def test_listed_route_beside_the_pattern_of_a_declared_handler_is_no_contradiction() -> None:
    once = new_once(routes={"POST /a/special": None})
    declared = new_handler(once.policy(effects="repeatable"))
    routes = [Route("/a/special", handle, methods=["POST"]), Route("/a/{name}", declared, methods=["POST"])]
    app = Starlette(routes=routes)
    protect(app, once)
    assert (await start(app))[0]["type"] == "lifespan.startup.complete"


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_handler_declared_for_another_oncekey_is_refused(framework: str) -> None:
    other, once = new_once(), new_once()
    app = serving(framework, once, other.policy(effects="repeatable"))
    message = await refusal_at_start(app)
    assert "POST /pay is served by" in message
    assert "belongs to another OnceKey" in message


async def test_handler_declared_for_both_oncekeys_has_the_policy_of_each() -> None:
    """Also where the outer app protects what the inner one declares: the outer one's word is the one that counts."""
    one, two = new_once(), new_once()
    handler = one.policy(effects="repeatable")(new_handler(two.policy(effects="transactional")))
    for once, effects in ((one, "repeatable"), (two, "transactional")):
        app = Starlette(routes=[Route("/pay", handler, methods=["POST"])])
        protect(app, once)
        await start(app)
        await ask(app, "POST /pay", "k")
        record = once.store.read([("single-tenant", "k")])[0]
        assert record is not None
        assert str(record.effects) == effects


async def test_mounted_app_with_its_own_oncekey_under_one_that_takes_all_is_refused() -> None:
    inner_once, outer_once = new_once(), new_once()
    handler = new_handler(inner_once.policy(effects="repeatable"))
    inner = Starlette(routes=[Route("/pay", handler, methods=["POST"])])
    protect(inner, inner_once)
    outer = Starlette(routes=[Mount("/sub", app=inner)])
    protect(outer, outer_once)
    assert "POST /sub/pay is served by" in await refusal_at_start(outer)


async def test_mounted_app_with_its_own_oncekey_under_only_declared_starts() -> None:
    inner_once, outer_once = new_once(), new_once()
    handler = new_handler(inner_once.policy(effects="repeatable"))
    inner = Starlette(routes=[Route("/pay", handler, methods=["POST"])])
    protect(inner, inner_once)
    outer = Starlette(routes=[Mount("/sub", app=inner)])
    protect(outer, outer_once, only="declared")
    assert (await start(outer))[0]["type"] == "lifespan.startup.complete"
    await ask(outer, "POST /sub/pay", "k")
    assert inner_once.store.read([("single-tenant", "k")])[0] is not None


def forgetful(function: Any) -> Any:
    """A decorator without functools.wraps."""

    async def around(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return around


def forgetful_and_blocking(function: Any) -> Any:
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def careful(function: Any) -> Any:
    @functools.wraps(function)
    async def around(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return around


def serving(framework: str, once: OnceKey, decorate: Callable[[Any], Any]) -> Any:
    """``POST /pay``, by a function that was decorated first."""
    if framework == "starlette":
        app = Starlette(routes=[Route("/pay", decorate(new_handler()), methods=["POST"])])
        protect(app, once)
        return app
    if framework == "flask":

        def view() -> str:
            return "handled"

        flask_app = Flask(__name__)
        on_flask.protect(flask_app, once)
        flask_app.post("/pay", endpoint="pay")(decorate(view))
        return flask_app

    async def pay() -> str:
        return "handled"

    if framework == "litestar":
        made = decorate(pay)
        made.__annotations__ = {"return": str}
        return Litestar([post("/pay", signature_namespace={})(made)], plugins=[OnceKeyPlugin(once)])
    api = FastAPI()
    protect_fastapi(api, once)
    api.post("/pay")(decorate(pay))
    return api


@pytest.mark.parametrize("framework", ["starlette", "fastapi", "flask"])
async def test_declaration_behind_a_decorator_without_wraps_is_refused(framework: str) -> None:
    once = new_once()
    hide = forgetful_and_blocking if framework == "flask" else forgetful
    message = await refusal_at_start(serving(framework, once, lambda f: hide(once.policy(effects="repeatable")(f))))
    assert "POST /pay is served by a decorator's function around tests.web.test_declared_start:" in message
    assert "put @once.policy directly below the route's own decorator" in message


async def test_closure_of_a_handler_is_looked_at_and_nothing_in_it_is_called() -> None:
    """A proxy, such as Flask's request, raises outside of a request, whatever it is asked."""
    once, unused = new_once(), lambda: None
    once.policy()(unused)
    proxy = flask_request

    def view() -> str:
        return proxy.method

    app = Flask(__name__)
    on_flask.protect(app, once)
    app.post("/pay")(view)
    assert (await ask(app, "POST /pay", "k")).text == "POST"


async def test_declaration_behind_a_method_decorator_without_wraps_is_refused() -> None:
    once = new_once()

    class Things(HTTPEndpoint):
        @forgetful
        @once.policy(effects="repeatable")
        async def post(self, request: Any) -> Response:
            return await handle(request)

    app = Starlette(routes=[Route("/things", Things)])
    protect(app, once)
    assert "POST /things is served by a decorator's function around" in await refusal_at_start(app)


async def test_declaration_behind_functools_wraps_counts() -> None:
    once = new_once()
    app = serving("fastapi", once, lambda function: careful(once.policy(effects="repeatable")(function)))
    await ask(app, "POST /pay", "k")
    record = once.store.read([("single-tenant", "k")])[0]
    assert record is not None
    assert str(record.effects) == "repeatable"


async def test_declared_handler_that_answers_safe_methods_only_is_refused() -> None:
    once = new_once()
    app = Starlette(routes=[Route("/report", new_handler(once.policy(effects="repeatable")), methods=["GET"])])
    protect(app, once)
    assert "change nothing" in await refusal_at_start(app)


async def test_only_declared_where_no_route_can_be_seen_and_none_is_listed_is_refused() -> None:
    async def raw(scope: Any, receive: Any, send: Any) -> None: ...

    def raw_wsgi(environ: Any, start_response: Any) -> list[bytes]:
        return []

    assert "protects nothing here" in await refusal_at_start(IdempotencyMiddleware(raw, new_once(), only="declared"))
    middleware = wsgi.IdempotencyMiddleware(raw_wsgi, new_once(), only="declared")
    with pytest.raises(ConfigurationError, match="protects nothing here"):
        middleware({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, lambda *_: lambda _: None)


@pytest.mark.parametrize(
    "protected",
    [
        lambda once: protect(Starlette(), once, only="all"),  # type: ignore[arg-type]
        lambda once: on_flask.protect(Flask(__name__), once, only="all"),  # type: ignore[arg-type]
        lambda once: OnceKeyPlugin(once, only="all"),  # type: ignore[arg-type]
        lambda once: IdempotencyMiddleware(handle, once, only="all"),  # type: ignore[arg-type]
    ],
)
def test_other_word_than_declared_is_refused(protected: Any) -> None:
    with pytest.raises(ConfigurationError, match="it takes 'declared'"):
        protected(new_once())


def test_flask_protect_refuses_two_declarations_of_a_route() -> None:
    once = new_once(routes={"POST /pay": None})
    app = Flask(__name__)
    app.post("/pay")(once.policy(effects="repeatable")(lambda: "handled"))
    with pytest.raises(ConfigurationError, match="two declarations"):
        on_flask.protect(app, once)


# ---------------------------------------------------------------- said


async def begin(app: Any) -> None:
    if isinstance(app, Flask):
        await ask(app, "GET /nowhere")
        await ask(app, "GET /nowhere")
    elif isinstance(app, Litestar):
        async with AsyncTestClient(app) as client:
            await client.post("/other")
    else:
        assert (await start(app))[0]["type"] == "lifespan.startup.complete"
        await ask(app, "GET /nowhere")


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_undeclared_routes_are_named_once_in_one_warning(framework: str, said: list[str]) -> None:
    """Of the policy's methods: a DELETE is idempotent by HTTP's rules, and left to ``oncekey routes``."""
    await begin(shop(framework, new_once(), "declared"))
    (warning,) = said
    assert "have no declaration: POST /other. Give each" in warning


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_default_mode_and_full_declaration_are_silent(framework: str, said: list[str]) -> None:
    await begin(shop(framework, new_once()))
    await begin(shop(framework, new_once(routes={"POST /other": None}), "declared"))
    assert said == []


async def test_declared_handler_without_a_route_is_named_and_the_app_starts(said: list[str]) -> None:
    """An imported router that is no part of the app is no mistake; a websocket has no keys."""
    once = new_once()
    elsewhere = APIRouter()

    @elsewhere.post("/pay")
    @once.policy(effects="repeatable")
    async def not_mounted() -> str:
        return "handled"

    @once.policy(effects="repeatable")
    async def socket(websocket: Any) -> None: ...

    app = Starlette(routes=[WebSocketRoute("/ws", socket)])
    protect(app, once)
    await begin(app)
    (warning,) = said
    assert "test_declared_start:test_declared_handler_without_a_route_is_named_and_the_app_starts" in warning
    assert ".not_mounted, " in warning
    assert ".socket: no route of this app leads there" in warning
    assert "directly below the route's own decorator" in warning


async def test_handlers_of_another_app_of_the_same_oncekey_are_not_named(said: list[str]) -> None:
    once = new_once()
    apps = [
        Starlette(routes=[Route("/pay", new_handler(once.policy(effects="repeatable")), methods=["POST"])])
        for _ in range(2)
    ]
    protect(apps[0], once)
    await begin(apps[0])
    said.clear()
    protect(apps[1], once)
    await begin(apps[1])
    assert said == []


async def test_handler_that_is_gone_is_forgotten(said: list[str]) -> None:
    once = new_once()
    new_handler(once.policy(effects="repeatable"))
    app = Starlette()
    protect(app, once)
    await begin(app)
    assert said == []


async def test_handlers_behind_middleware_that_cannot_see_them_are_named(said: list[str]) -> None:
    once = new_once(routes={"POST /other": Policy()})
    handler = new_handler(once.policy(effects="repeatable"))

    async def raw(scope: Any, receive: Any, send: Any) -> None:
        await handler(None)

    app = IdempotencyMiddleware(raw, once, only="declared")
    await start(app)
    (warning,) = said
    assert "@once.policy has no effect on tests.web.test_declared_start:new_handler" in warning


async def test_declared_handler_of_a_mounted_app_of_another_framework_is_named(said: list[str]) -> None:
    """Litestar's router does not know the handlers of an app that is mounted in it."""
    once = new_once()

    # Litestar hands the rest of the path on with a slash at its end.
    inner = Starlette(
        routes=[Route("/pay/", new_handler(once.policy(effects="repeatable")), methods=["POST"])],
    )
    mounted = asgi("/sub", is_mount=True, copy_scope=True)(inner)
    app = Litestar([mounted], plugins=[OnceKeyPlugin(once, only="declared")])
    await start(app)
    assert (await ask(app, "POST /sub/pay", "k")).status_code == 200
    assert once.store.read([("single-tenant", "k")]) == [None]
    assert ".pay: no route of this app leads there" in said[0]
    assert "no declaration: POST /sub/pay/. Give" in said[1]


@pytest.mark.parametrize(
    ("operation", "is_there"),
    [
        ("POST /pay", True),
        ("POST /orders/{order}", True),  # another name for the parameter
        ("POST /orders/7", True),  # one of its paths
        ("POST /{anything:path}", True),
        ("POST /payy", False),
        ("PATCH /pay", False),
        ("POST /orders/{id}/refund", False),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_function_of_an_operation_that_no_route_has_is_named_at_start(
    framework: str, operation: str, is_there: bool, said: list[str]
) -> None:
    once = new_once()
    once.resolver(operation)(lambda inquiry: StillUnknown())
    once.resume(operation, lambda op: Answer(200))
    await begin(shop(framework, once))
    never_called = [line for line in said if "so it is never called" in line]
    assert never_called == ([] if is_there else never_called[:1])
    if not is_there:
        assert f"resolver of {operation} and the resume function of {operation}" in never_called[0]


@pytest.mark.parametrize("name", ["charge", "shop.Payments/Charge", "message payments"])
async def test_resolver_of_a_function_or_a_queue_is_not_named_at_start(name: str, said: list[str]) -> None:
    """No route has the operation of a protected function, of a gRPC method or of a queue, and nothing is wrong."""
    once = new_once()
    once.resolver(name)(lambda inquiry: StillUnknown())
    once.resume(name, lambda op: Answer(200))
    await begin(shop("starlette", once))
    assert said == []
