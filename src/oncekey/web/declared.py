"""Checks at the start of an app what its handlers declare, and logs routes without a declaration.

It runs only if a handler has ``@once.policy``, if there is a resolver or a resume function, or with
``only="declared"``, where an undeclared route is unprotected.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from oncekey.core.declarations import SAFE_METHODS, Declaration, Declarations
from oncekey.core.routes import Route, plain
from oncekey.core.values import value
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError

Only = Literal["declared"]
Match = Callable[[str, str], Route | None]

_log = logging.getLogger("oncekey")


@value
class Handler:
    """The handler that a framework's router finds for a request, and the pattern of its route."""

    endpoint: Any
    path: str


def checked_only(only: Only | None) -> Only | None:
    if only not in (None, "declared"):
        raise ConfigurationError(f"only={only!r}: it takes 'declared', or None, which protects all routes")
    return only


def endpoints_of(app: Any) -> Iterator[tuple[str, str, Any]]:
    """Method, path and handler of every route."""
    from oncekey.web.app_routes import Place, walk

    for spot in walk(app, Place()):
        for method in spot.methods:
            yield method, spot.full, spot.endpoint


def matcher(endpoints: Iterable[tuple[str, str, Any]], once: OnceKey, only: Only | None) -> Match:
    """A function that takes a method and the pattern of a path, and returns the route; None: it is not protected."""
    routes = once.routes if only is None else once.routes.only_listed()
    if not once.declarations.exist:
        return routes.match
    declared: dict[tuple[str, str], Declaration | None] = {}
    for method, path, endpoint in endpoints:
        if method not in SAFE_METHODS:  # the first route of a path gets its requests
            declared.setdefault((method, plain(path)), once.declarations.of(endpoint, method))

    def match(method: str, path: str) -> Route | None:
        declaration = declared.get((method, plain(path)))
        return routes.match(method, path) if declaration is None else declaration.route(method, path)

    return match


def _reader(app: Any, once: OnceKey) -> Callable[[], list[str]]:
    """Reads the operations later. It does not keep the app: a OnceKey may outlive the apps of a test suite."""
    try:
        known = weakref.ref(app)
    except TypeError:  # an app of a class with slots
        return lambda: _operations(app, once)
    return lambda: [] if (found := known()) is None else _operations(found, once)


def _operations(app: Any, once: OnceKey) -> list[str]:
    """The operations of all routes, as this OnceKey's middleware names them; empty: the routes cannot be seen."""
    from oncekey.web.app_routes import Place, walk

    spots = list(walk(app, Place()))
    if any(spot.opaque and not spot.place.prefix for spot in spots):
        return []
    return [
        f"{method} {layer.sees(method, spot.full)}"
        for spot in spots
        for layer in spot.place.layers
        if layer.once is once
        for method in spot.methods
    ]


def check_declarations(app: Any, once: OnceKey, only: Only | None) -> None:
    """ConfigurationError if a declaration has no effect, or a route has two. Logs a WARNING if it may be intended."""
    signed = {
        listed for listed, policy in once.routes.listed.items() if policy is not None and policy.verify is not None
    }
    once.engine.know_routes(_reader(app, once))
    if not (Declarations.in_process or only is not None or once.resolvers or once.resumes or signed):
        return
    from oncekey.web import route_audit
    from oncekey.web.app_routes import Place, walk

    spots = list(walk(app, Place()))
    cannot_see = bool(spots) and all(spot.opaque and not spot.place.prefix for spot in spots)
    if only is not None and not once.routes.listed and cannot_see:
        raise ConfigurationError(
            "only='declared' protects nothing here: the routes of this app cannot be seen, so what is declared at "
            "its handlers is not found, and OnceKey(routes=…) lists none. List the routes, or use your framework's "
            "protect()"
        )
    found = route_audit.audit_spots(spots)
    if unused := [declaration.place for declaration in once.declarations.unused()]:
        _log.warning(
            "@once.policy has no effect on %s: no route of this app leads there. If another decorator "
            "stands between the two, put @once.policy directly below the route's own decorator. If it is a websocket, "
            "or its router is not part of this app, nothing is wrong",
            ", ".join(unused),
        )
    if (unchecked := signed.intersection(found.unused)) and not cannot_see:
        _log.error(
            "no signature is checked by the policy of %s: no route of this app has that path, so whatever does get the "
            "webhooks takes unsigned ones. Compare the path with `oncekey routes`: a prefix may be missing",
            ", ".join(sorted(unchecked)),
        )
    if found.unused_functions:
        _log.warning(
            "no route of this app has the operation of the %s, so it is never called. Compare the path with "
            "`oncekey routes`; if the route belongs to another app, nothing is wrong",
            " and the ".join(found.unused_functions),
        )
    undeclared = [
        f"{endpoint.method} {endpoint.host}{endpoint.path}"
        for endpoint in found.endpoints
        if endpoint.coverage is route_audit.Coverage.UNPROTECTED and endpoint.method in once.default_policy.methods
    ]
    if only is not None and undeclared and not cannot_see:
        _log.warning(
            "only='declared': a retry of these routes runs again, since they have no declaration: %s. Give each "
            "@once.policy(…) or an entry in routes=, or exempt it with None; `oncekey routes` lists them all",
            ", ".join(undeclared),
        )
