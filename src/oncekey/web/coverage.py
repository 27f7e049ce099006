"""Which routes of an app run once: every endpoint of a Starlette, FastAPI, Litestar or Flask app, and what protects it.

Nothing is asked of the app and nothing of it is run: its routes and its middleware are looked at where they are kept,
through mounted apps, included routers, hosts, blueprints and other people's middleware. What protects an endpoint is
decided by the very code that decides at run time, ``once.routes.match``, with the path as each middleware would see it.

No framework is imported here: what an app is made of has been imported by it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any

from oncekey.core.policy import Policy
from oncekey.core.routes import Routes
from oncekey.core.values import value
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.web import asgi, wsgi
from oncekey.web.status import StatusApp, StatusWsgi

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""RFC 9110: they change nothing. All others, unknown ones included, may."""

_ANY = ("POST", "PUT", "PATCH", "DELETE")
"""What stands for all methods, where an endpoint takes any."""

_INNER = ("app", "application", "wsgi_app", "asgi_app", "_app", "_application")
"""Where middleware keeps the app that it stands in front of."""

_MAX_DEPTH = 100
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_SPANNING = re.compile(r"\{(\w+):path\}")
_FLASK_PARAMETER = re.compile(r"<(?:\w+(?:\([^)]*\))?:)?(\w+)>")


class Coverage(StrEnum):
    """What a retry of this endpoint meets."""

    PROTECTED = "protected"
    EXEMPT = "exempt"
    UNPROTECTED = "unprotected"


@value
class Endpoint:
    """One method of one route."""

    method: str
    path: str
    """As the app writes it, with the path of what it is mounted in; parameters in braces."""
    host: str
    """Where it answers for one host only."""
    coverage: Coverage
    policy: Policy | None
    """Where it is protected: how."""
    listed: str | None
    """The entry of ``OnceKey(routes=…)`` that decided, if one did."""
    why: str
    """Where it is unprotected: how that comes, and what to do."""


@value
class Audit:
    """All state-changing endpoints of an app, and the listed routes that no endpoint has."""

    endpoints: tuple[Endpoint, ...]
    unused: tuple[str, ...]

    def count(self, coverage: Coverage) -> int:
        return sum(endpoint.coverage is coverage for endpoint in self.endpoints)


def audit(app: object) -> Audit:
    """Look through an app. ConfigurationError: it has no list of routes, being a plain ASGI or WSGI callable."""
    found = list(_walk(app, _Place()))
    if all(spot.opaque and not spot.place.prefix and not spot.place.host for spot in found) and found:
        raise ConfigurationError(
            f"this {type(app).__name__} has no list of routes: which paths a plain ASGI or WSGI callable answers, "
            "only it knows. Name the Starlette, FastAPI, Litestar or Flask app inside of it; if it makes one, say "
            "--factory"
        )
    endpoints = [
        _assess(method, spot) for spot in found for method in sorted(spot.methods) if method not in SAFE_METHODS
    ]
    return Audit(tuple(endpoints), tuple(_unused(found)))


# -- where an endpoint stands ------------------------------------------------------------------------------------------


@value
class _Layer:
    """One of our middlewares. ``base``: how much of the path has been taken off where it stands (ASGI), ``mount``: how
    much it can tell from the rest (WSGI)."""

    once: OnceKey
    base: str
    mount: str = ""

    def sees(self, method: str, path: str) -> str:
        whole = path.removeprefix(self.base) or "/"
        return self.once.routes.of_mounted(method, whole, whole.removeprefix(self.mount) or "/")


@value
class _Place:
    """A point in the app: how a request gets there, and past which of our middlewares, the outermost first."""

    prefix: str = ""
    host: str = ""
    layers: tuple[_Layer, ...] = ()
    depth: int = 0

    def under(self, path: str) -> _Place:
        return replace(self, prefix=self.prefix + path.rstrip("/"))

    def behind(self, onces: Iterable[OnceKey], *, wsgi: bool = False) -> _Place:
        at = ("", self.prefix) if wsgi else (self.prefix, "")
        return replace(self, layers=(*self.layers, *(_Layer(once, *at) for once in onces)))


@value
class _Spot:
    """A path with its methods. ``opaque``: an app that cannot be looked into, so any path below."""

    place: _Place
    path: str
    methods: Collection[str]
    opaque: bool = False

    @property
    def full(self) -> str:
        return self.place.prefix + self.path


# -- walking through an app --------------------------------------------------------------------------------------------


def _walk(app: Any, place: _Place) -> Iterator[_Spot]:
    """Everything that answers requests in ``app``."""
    owner = app.__self__ if inspect.ismethod(app) else None
    if place.depth > _MAX_DEPTH:  # something that is inside of itself
        yield _Spot(place, "/{path:path}", _ANY, opaque=True)
        return
    place = replace(place, depth=place.depth + 1)
    if isinstance(app, asgi.IdempotencyMiddleware):
        yield from _walk(app.app, place.behind([app.once]))
    elif isinstance(app, wsgi.IdempotencyMiddleware):
        yield from _walk(app.app, place.behind([app.once], wsgi=True))
    elif _is(app, "starlette.applications", "Starlette"):
        yield from _walk(app.router, place.behind(_onces(app.user_middleware)))
    elif _is(app, "starlette.routing", "Router"):
        yield from _walk(getattr(app, "middleware_stack", app.app), place)
    elif _is(owner, "starlette.routing", "Router"):
        yield from _starlette(owner, place)
    elif isinstance(app, StatusApp | StatusWsgi) or _is(app, "starlette.staticfiles", "StaticFiles"):
        return  # it refuses all but GET and HEAD
    elif _is(app, "litestar", "Litestar"):
        yield from _litestar(app, place)
    elif _is(app, "flask", "Flask"):
        yield from _walk(app.wsgi_app, place)
    elif _is(owner, "flask", "Flask"):
        yield from _flask(owner, place)
    elif _is(app, "werkzeug.middleware.dispatcher", "DispatcherMiddleware"):
        for prefix, mounted in app.mounts.items():
            yield from _walk(mounted, place.under(prefix))
        yield from _walk(app.app, place)
    elif (inner := _inner(app)) is not None:
        yield from _walk(inner, place)
    else:
        yield _Spot(place, "/{path:path}", _ANY, opaque=True)


def _starlette(router: Any, place: _Place) -> Iterator[_Spot]:
    """The routes of a router, those of FastAPI's included routers among them."""
    contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", iter)
    for route in contexts(router.routes):
        kind = getattr(route, "original_route", route)
        if _is(kind, "starlette.routing", "WebSocketRoute"):
            continue
        path: str = getattr(route, "path", None) or ""
        if _is(kind, "starlette.routing", "Host"):
            yield from _walk(route.app, replace(place, host=route.host))
        elif _is(kind, "starlette.routing", "Mount"):
            yield from _walk(route.app, place.under(path))
        elif _is(kind, "starlette.routing", "Route"):
            methods = route.methods or _of_class(route.endpoint)
            yield _Spot(place.behind(_onces_before(getattr(kind, "app", None))), path, methods)
        else:  # somebody's own kind of route
            yield _Spot(place, path or "/{path:path}", getattr(route, "methods", None) or _ANY)
    if router.default != router.not_found:
        yield from _walk(router.default, place)


def _litestar(app: Any, place: _Place) -> Iterator[_Spot]:
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if hasattr(handler, "http_methods"):
                onces = _onces(reversed(handler.resolve_middleware()))
                yield _Spot(place.behind(onces), route.path, {str(method) for method in handler.http_methods})
        if _is(route, "litestar.routes", "ASGIRoute"):
            handler = route.route_handler
            onces = _onces(reversed(handler.resolve_middleware()))
            if handler.is_mount:  # litestar takes its path off before any middleware runs
                inside = place.under(route.path)
                yield from _walk(handler.fn, inside.behind(onces))
            else:
                yield _Spot(place.behind(onces), route.path, _ANY)


def _flask(app: Any, place: _Place) -> Iterator[_Spot]:
    for rule in app.url_map.iter_rules():
        converters = getattr(rule, "_converters", {})

        def braces(found: re.Match[str], converters: Any = converters) -> str:
            one_segment = getattr(converters.get(found[1]), "part_isolating", True)
            return f"{{{found[1]}}}" if one_segment else f"{{{found[1]}:path}}"

        host = rule.host or rule.subdomain or ""
        where = replace(place, host=host) if host else place
        yield _Spot(where, _FLASK_PARAMETER.sub(braces, rule.rule), rule.methods or _ANY)


def _is(found: object, module: str, name: str) -> bool:
    """Whether it is an instance of this class; if nobody has imported that, it is not."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(found, kind)


def _inner(app: Any) -> Any:
    """What stands behind somebody's middleware."""
    for name in _INNER:
        inner = getattr(app, name, None)
        if inner is not None and callable(inner):
            return inner
    return None


def _onces(middleware: Iterable[Any]) -> list[OnceKey]:
    """Of a framework's list of middleware that it will make: which of them will be ours, and of which OnceKey."""
    found = []
    for item in middleware:
        kind = getattr(item, "cls", None) or getattr(item, "middleware", None)  # Starlette's name, and Litestar's
        if isinstance(kind, type) and issubclass(kind, asgi.IdempotencyMiddleware):
            given = [*getattr(item, "args", ()), *getattr(item, "kwargs", {}).values()]
            found += [once for once in given if isinstance(once, OnceKey)]
    return found


def _onces_before(app: Any) -> list[OnceKey]:
    """Of middleware around one endpoint."""
    found = []
    for _ in range(_MAX_DEPTH):
        if isinstance(app, asgi.IdempotencyMiddleware):
            found.append(app.once)
        app = getattr(app, "app", None)
    return found


def _of_class(endpoint: Any) -> Collection[str]:
    """The methods of a class-based endpoint; of any other ASGI app, all."""
    module = sys.modules.get("starlette.endpoints")
    if isinstance(endpoint, type) and module is not None and issubclass(endpoint, module.HTTPEndpoint):
        return [method for method in (*_ANY, *SAFE_METHODS) if hasattr(endpoint, method.lower())]
    return _ANY


# -- what protects it --------------------------------------------------------------------------------------------------


def _assess(method: str, spot: _Spot) -> Endpoint:
    """The worst of what the requests to an endpoint meet."""
    verdicts = [_verdict(method, path, spot.place.layers) for path in _examples(spot.full)]
    order = (Coverage.UNPROTECTED, Coverage.EXEMPT, Coverage.PROTECTED)
    coverage, policy, listed, why = min(verdicts, key=lambda verdict: order.index(verdict[0]))
    return Endpoint(method, spot.full or "/", spot.place.host, coverage, policy, listed, why)


def _examples(path: str) -> set[str]:
    """Paths that the pattern stands for: a parameter is a segment, one that spans slashes is one and two segments."""
    deeper = _SPANNING.sub(r"{\1}/{\1}", path)
    return {_PARAMETER.sub(r"{\1}", path), _PARAMETER.sub(r"{\1}", deeper)}


def _verdict(method: str, path: str, layers: tuple[_Layer, ...]) -> tuple[Coverage, Policy | None, str | None, str]:
    exempted = None
    for layer in layers:  # the outermost that wants it has it
        routes, seen = layer.once.routes, layer.sees(method, path)
        listed = routes.listed_as(method, seen)
        if (route := routes.match(method, seen)) is not None:
            return Coverage.PROTECTED, route.policy, listed, ""
        exempted = exempted or listed
    if exempted is not None:
        return Coverage.EXEMPT, None, exempted, ""
    if not layers:
        return Coverage.UNPROTECTED, None, None, "no IdempotencyMiddleware stands in front of it"
    methods = ", ".join(sorted(layers[0].once.policy.methods))
    return Coverage.UNPROTECTED, None, None, f"the policy protects {methods}, and this route is not listed"


def _unused(spots: list[_Spot]) -> Iterator[str]:
    """Listed routes that no endpoint has: a typing error in a path protects nothing, or exempts nothing."""
    at = [(spot, layer) for spot in spots for layer in spot.place.layers]
    for once in dict.fromkeys(layer.once for _, layer in at):
        for listed in once.routes.listed:
            if not any(layer.once is once and _falls_under(spot, layer, listed) for spot, layer in at):
                yield listed


def _falls_under(spot: _Spot, layer: _Layer, listed: str) -> bool:
    """Whether requests to ``spot`` may fall under ``listed``: the one pattern fits the other, either way."""
    method, _, path = listed.partition(" ")
    if method not in spot.methods:
        return False
    template = layer.sees(method, spot.full)
    if any(layer.once.routes.listed_as(method, example) == listed for example in _examples(template)):
        return True
    try:
        return Routes(layer.once.policy, {f"{method} {template}": None}).listed_as(method, path) is not None
    except ConfigurationError:
        return False  # a template of a kind that we cannot read
