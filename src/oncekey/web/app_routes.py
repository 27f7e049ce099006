"""Every endpoint of an app: its path, and the oncekey middleware in front of it.

This module does not run the app. It reads the app's routes and middleware, through mounted apps, included routers,
hosts, blueprints and other middleware. ``route_audit.py`` says what protects an endpoint.

It imports no framework: the app has imported the frameworks that it uses.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from oncekey.core.declarations import SAFE_METHODS, Declaration
from oncekey.core.routes import Routes, plain
from oncekey.core.values import value
from oncekey.engine.once import OnceKey
from oncekey.web import asgi, wsgi
from oncekey.web.status import StatusApp, StatusWsgi

_ANY = ("POST", "PUT", "PATCH", "DELETE")
"""The methods of an endpoint that takes any method."""

_INNER = ("app", "application", "wsgi_app", "asgi_app", "_app", "_application")
"""The attributes in which middleware keeps the next app."""

_GET_ONLY = (
    ("starlette.staticfiles", "StaticFiles"),
    ("oncekey.telemetry.prometheus", "MetricsApp"),
    ("oncekey.telemetry.prometheus", "MetricsWsgi"),
)
"""Apps that refuse all methods but GET and HEAD."""

READABLE = "Starlette, FastAPI, Litestar, Flask or Django"
"""The frameworks whose routes this module reads, for messages."""

_MAX_DEPTH = 100
FLASK_PARAMETER = re.compile(r"<(?:\w+(?:\([^)]*\))?:)?(\w+)>")


# -- the place of an endpoint ------------------------------------------------------------------------------------------


@value
class Layer:
    """One oncekey middleware, and its place.

    ``only_declared``: a route without a declaration is not protected. ``handlers``: the framework whose router the
    middleware asks for the handler; "": none, so it does not see what handlers declare.
    """

    once: OnceKey
    only_declared: bool
    handlers: str
    base: str = ""
    """The prefix of the path that is removed before the middleware (ASGI)."""
    mount: str = ""
    """The prefix of the path that the middleware sees separately (WSGI)."""

    @property
    def routes(self) -> Routes:
        return self.once.routes.only_listed() if self.only_declared else self.once.routes

    def sees(self, method: str, path: str) -> str:
        whole = path.removeprefix(self.base) or "/"
        return self.once.routes.of_mounted(method, whole, whole.removeprefix(self.mount) or "/")

    def operation_path(self, path: str) -> str:
        """The pattern of a route in its own app: it names the operation of a declared handler."""
        return plain(path.removeprefix(self.base).removeprefix(self.mount) or "/")

    def declared(self, method: str, endpoint: Any) -> Declaration | None:
        return self.once.declarations.of(endpoint, method) if self.handlers else None


@value
class Place:
    """A point in the app: its prefix and host, and the oncekey middleware in front of it, the outermost first."""

    prefix: str = ""
    host: str = ""
    layers: tuple[Layer, ...] = ()
    depth: int = 0

    def under(self, path: str) -> Place:
        return replace(self, prefix=self.prefix + path.rstrip("/"))

    def behind(self, layers: Iterable[Layer], *, wsgi: bool = False) -> Place:
        base, mount = ("", self.prefix) if wsgi else (self.prefix, "")
        return replace(self, layers=(*self.layers, *(replace(layer, base=base, mount=mount) for layer in layers)))

    def inside(self, framework: str) -> Place:
        """Inside of an app of this framework: middleware of other frameworks does not see its handlers."""
        seeing = (layer if layer.handlers == framework else replace(layer, handlers="") for layer in self.layers)
        return replace(self, layers=tuple(seeing))


@value
class Spot:
    """A path with its methods. ``opaque``: an app whose routes cannot be read, so any path below."""

    place: Place
    path: str
    methods: Collection[str]
    opaque: bool = False
    endpoint: Any = None
    """The handler: a function, or a class with one method for each HTTP method."""

    @property
    def full(self) -> str:
        return self.place.prefix + self.path


# -- walking through an app --------------------------------------------------------------------------------------------


def walk(app: Any, place: Place) -> Iterator[Spot]:
    """All endpoints of ``app``."""
    owner = app.__self__ if inspect.ismethod(app) else None
    if place.depth > _MAX_DEPTH:  # an app that contains itself
        yield Spot(place, "/{path:path}", _ANY, opaque=True)
        return
    place = replace(place, depth=place.depth + 1)
    ours = isinstance(app, asgi.IdempotencyMiddleware | wsgi.IdempotencyMiddleware)
    if ours and (each := getattr(app.endpoints, "each", None)) is not None:
        layer = Layer(app.once, app.only is not None, "its own")  # of a framework that is not named here
        behind = place.behind([layer], wsgi=isinstance(app, wsgi.IdempotencyMiddleware))
        for method, path, endpoint in each():
            yield Spot(behind, path, [method], endpoint=endpoint)
    elif (spots := _own_spots(app)) is not None:
        yield from spots(place)
    elif isinstance(app, asgi.IdempotencyMiddleware):
        handlers = "starlette" if app.endpoints is not None or is_starlette(app.app) else ""
        yield from walk(app.app, place.behind([Layer(app.once, app.only is not None, handlers)]))
    elif isinstance(app, wsgi.IdempotencyMiddleware):
        layer = Layer(app.once, app.only is not None, "" if app.endpoints is None else "flask")
        yield from walk(app.app, place.behind([layer], wsgi=True))
    elif is_starlette(app):
        yield from walk(app.router, place.inside("starlette").behind(_layers(app.user_middleware, "starlette")))
    elif _is(app, "starlette.routing", "Router"):
        yield from walk(getattr(app, "middleware_stack", app.app), place)
    elif _is(owner, "starlette.routing", "Router"):
        yield from _starlette(owner, place.inside("starlette"))
    elif isinstance(app, StatusApp | StatusWsgi) or any(_is(app, *kind) for kind in _GET_ONLY):
        return  # it refuses all but GET and HEAD
    elif _is(app, "litestar", "Litestar"):
        yield from _litestar(app, place.inside("litestar"))
    elif _is(app, "flask", "Flask"):
        yield from walk(app.wsgi_app, place)
    elif _is(owner, "flask", "Flask"):
        yield from _flask(owner, place.inside("flask"))
    elif _is(app, "werkzeug.middleware.dispatcher", "DispatcherMiddleware"):
        for prefix, mounted in app.mounts.items():
            yield from walk(mounted, place.inside("").under(prefix))
        yield from walk(app.app, place)
    elif (inner := _inner(app)) is not None:
        # oncekey's middleware for Starlette follows only the attribute ``app``.
        yield from walk(inner, place if inner is getattr(app, "app", None) else place.inside("flask"))
    else:
        yield Spot(place, "/{path:path}", _ANY, opaque=True)


def _starlette(router: Any, place: Place) -> Iterator[Spot]:
    """The routes of a router, including those of FastAPI's included routers."""
    contexts = getattr(sys.modules.get("fastapi.routing"), "iter_route_contexts", iter)
    for route in contexts(router.routes):
        kind = getattr(route, "original_route", route)
        if _is(kind, "starlette.routing", "WebSocketRoute"):
            continue
        path: str = getattr(route, "path", None) or ""
        if _is(kind, "starlette.routing", "Host"):
            yield from walk(route.app, replace(place, host=route.host))
        elif _is(kind, "starlette.routing", "Mount"):
            yield from walk(route.app, place.under(path))
        elif _is(kind, "starlette.routing", "Route"):
            methods = route.methods or _of_class(route.endpoint)
            around = place.behind(_layers_before(getattr(kind, "app", None)))
            yield Spot(around, path, methods, endpoint=route.endpoint)
        else:  # a kind of route that the app defines
            yield Spot(place, path or "/{path:path}", getattr(route, "methods", None) or _ANY)
    if router.default != router.not_found:
        yield from walk(router.default, place)


def _litestar(app: Any, place: Place) -> Iterator[Spot]:
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            if hasattr(handler, "http_methods"):
                layers = _layers(reversed(handler.resolve_middleware()), "litestar")
                methods = {str(method) for method in handler.http_methods}
                yield Spot(place.behind(layers), route.path, methods, endpoint=handler.fn)
        if _is(route, "litestar.routes", "ASGIRoute"):
            handler = route.route_handler
            layers = _layers(reversed(handler.resolve_middleware()), "litestar")
            if handler.is_mount:  # Litestar removes the prefix before any middleware runs
                inside = place.under(route.path)
                yield from walk(handler.fn, inside.behind(layers))
            else:
                yield Spot(place.behind(layers), route.path, _ANY)


def _flask(app: Any, place: Place) -> Iterator[Spot]:
    for rule in app.url_map.iter_rules():
        converters = getattr(rule, "_converters", {})

        def braces(found: re.Match[str], converters: Any = converters) -> str:
            one_segment = getattr(converters.get(found[1]), "part_isolating", True)
            return f"{{{found[1]}}}" if one_segment else f"{{{found[1]}:path}}"

        host = rule.host or rule.subdomain or ""
        where = replace(place, host=host) if host else place
        path = FLASK_PARAMETER.sub(braces, rule.rule)
        yield Spot(where, path, rule.methods or _ANY, endpoint=app.view_functions.get(rule.endpoint))


def _own_spots(app: Any) -> Any:
    """The function of a framework's module that lists the routes of this app; None: there is none."""
    if _is(app, "django.core.handlers.base", "BaseHandler"):
        from oncekey.web.django import project

        return partial(project.spots, app)
    return app.spots if _is(app, "oncekey.web.django.middleware", "Protection") else None


def _is(found: object, module: str, name: str) -> bool:
    """Whether it is an instance of this class. If the module is not imported, it is not."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(found, kind)


def _inner(app: Any) -> Any:
    """The app behind a middleware that is not oncekey's."""
    for name in _INNER:
        inner = getattr(app, name, None)
        if inner is not None and callable(inner):
            return inner
    return None


def _layers(middleware: Iterable[Any], framework: str) -> list[Layer]:
    """The oncekey middleware in a framework's list of middleware, with its options."""
    found = []
    for item in middleware:
        kind = getattr(item, "cls", None) or getattr(item, "middleware", None)  # Starlette's name, and Litestar's
        if isinstance(kind, type) and issubclass(kind, asgi.IdempotencyMiddleware):
            options = getattr(item, "kwargs", {})
            given = [*getattr(item, "args", ()), *options.values()]
            # In Starlette the middleware finds its app itself; in Litestar the plugin passes the routes to it.
            handlers = framework if framework == "starlette" or options.get("endpoints") is not None else ""
            found += [
                Layer(once, options.get("only") is not None, handlers) for once in given if isinstance(once, OnceKey)
            ]
    return found


def _layers_before(app: Any) -> list[Layer]:
    """The oncekey middleware around one endpoint."""
    found = []
    for _ in range(_MAX_DEPTH):
        if isinstance(app, asgi.IdempotencyMiddleware):
            found.append(Layer(app.once, app.only is not None, ""))
        app = getattr(app, "app", None)
    return found


def is_starlette(app: Any) -> bool:
    return _is(app, "starlette.applications", "Starlette")


def _of_class(endpoint: Any) -> Collection[str]:
    """The methods of a class-based endpoint; of any other ASGI app, all."""
    module = sys.modules.get("starlette.endpoints")
    if isinstance(endpoint, type) and module is not None and issubclass(endpoint, module.HTTPEndpoint):
        return [method for method in (*_ANY, *SAFE_METHODS) if hasattr(endpoint, method.lower())]
    return _ANY
