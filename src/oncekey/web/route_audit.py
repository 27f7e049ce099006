"""Which routes of an app run once: every endpoint of a Starlette, FastAPI, Litestar or Flask app, and what protects it.

``app_routes.py`` finds the endpoints without running the app. The code that decides at run time decides here too:
``once.declarations.of`` the handler, and then ``once.routes.match`` of the path that each middleware sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum

from oncekey.core.declarations import SAFE_METHODS, Declaration
from oncekey.core.policy import Policy
from oncekey.core.routes import compiled, plain
from oncekey.core.values import value
from oncekey.errors import ConfigurationError
from oncekey.web.app_routes import READABLE, Layer, Place, Spot, walk

_SPANNING = re.compile(r"\{(\w+):path\}")


class Coverage(StrEnum):
    """Whether a retry of this endpoint runs again."""

    PROTECTED = "protected"
    EXEMPT = "exempt"
    UNPROTECTED = "unprotected"


@value
class Endpoint:
    """One method of one route."""

    method: str
    path: str
    """As the app writes it, with the prefix of its mounts; parameters in braces."""
    host: str
    """The host, if the endpoint answers for one host only."""
    coverage: Coverage
    policy: Policy | None
    """The policy, if it is protected."""
    listed: str | None
    """The entry of ``OnceKey(routes=…)`` that decided, if one did."""
    handler: str | None
    """The handler whose ``@once.policy`` decided, if one did: ``module:function``."""
    why: str
    """The reason, if it is unprotected."""


@value
class Audit:
    """All state-changing endpoints of an app, and declarations that none of them uses."""

    endpoints: tuple[Endpoint, ...]
    unused: tuple[str, ...]
    """Entries of ``routes``."""
    unused_handlers: tuple[str, ...]
    """Handlers with ``@once.policy``."""
    unused_functions: tuple[str, ...]
    """Resolvers and resume functions: ``resolver of POST /ride``."""

    def count(self, coverage: Coverage) -> int:
        return sum(endpoint.coverage is coverage for endpoint in self.endpoints)


def audit(app: object) -> Audit:
    """Audit an app. ConfigurationError: the app is a plain ASGI or WSGI callable without a list of routes, or a
    declaration of a handler has no effect."""
    found = list(walk(app, Place()))
    if all(spot.opaque and not spot.place.prefix and not spot.place.host for spot in found) and found:
        raise ConfigurationError(
            f"this {type(app).__name__} has no list of routes: oncekey cannot see which paths a plain ASGI or WSGI "
            f"callable answers. Name the {READABLE} app inside of it; if it is a function that makes the app, give "
            "--factory"
        )
    return audit_spots(found)


def audit_spots(found: list[Spot]) -> Audit:
    """:func:`audit` for endpoints that were already found."""
    each = [(method, spot) for spot in found for method in sorted(spot.methods) if method not in SAFE_METHODS]
    onces = dict.fromkeys(layer.once for spot in found for layer in spot.place.layers)
    for method, spot in each:
        _use_declaration(method, spot)
    for method, spot in each:
        _refuse_lost_declaration(method, spot)
    for spot in found:
        _refuse_safe_declaration(spot)
    endpoints = tuple(_assess(method, spot) for method, spot in each)
    unused_handlers = tuple(declaration.place for once in onces for declaration in once.declarations.unused())
    return Audit(endpoints, tuple(_unused(found)), unused_handlers, tuple(_unused_functions(found)))


# -- what handlers declare ---------------------------------------------------------------------------------------------


def _use_declaration(method: str, spot: Spot) -> None:
    """Use the declaration of an endpoint for its route. ConfigurationError if the route is also listed."""
    for layer in spot.place.layers:
        declaration = layer.declared(method, spot.endpoint)
        if declaration is None:
            continue
        if (listed := _listed(method, spot, layer)) is not None:
            raise ConfigurationError(
                f"{method} {spot.full} has two declarations: @once.policy at {declaration.place}, and "
                f'routes={{"{listed}": …}} of the OnceKey. Take one of them away'
            )
        declaration.used = True
        declaration.route(method, layer.operation_path(spot.full))


def _listed(method: str, spot: Spot, layer: Layer) -> str | None:
    seen = (layer.sees(method, path) for path in _examples(spot.full))
    return next(filter(None, (layer.once.routes.listed_as(method, path) for path in seen)), None)


def _refuse_lost_declaration(method: str, spot: Spot) -> None:
    """Refuse a declaration that was made for this endpoint and has no effect on it."""
    for layer in spot.place.layers:
        if layer.declared(method, spot.endpoint) is not None or _listed(method, spot, layer) is not None:
            return  # the outermost middleware with a declaration decides
        declarations = layer.once.declarations
        takes_it = any(layer.routes.match(method, layer.sees(method, path)) for path in _examples(spot.full))
        inner = any(other.declared(method, spot.endpoint) for other in spot.place.layers)
        if layer.handlers and (takes_it or not inner):
            if (other := declarations.of_others(spot.endpoint, method)) is not None:
                raise ConfigurationError(
                    f"{method} {spot.full} is served by {other.place}, whose @once.policy belongs to another OnceKey "
                    "than the one that protects this app, and has no effect here. Use one OnceKey for both, or declare "
                    "the policy with this one too"
                )
            if (hidden := declarations.hidden_in(spot.endpoint, method)) is not None:
                raise ConfigurationError(
                    f"{method} {spot.full} is served by a decorator's function around {hidden.place}, which does not "
                    "carry its @once.policy: put @once.policy directly below the route's own decorator, or use "
                    "functools.wraps in the decorator"
                )


def _refuse_safe_declaration(spot: Spot) -> None:
    for layer in spot.place.layers:
        for method in spot.methods:
            declaration = layer.declared(method, spot.endpoint)
            if declaration is not None and declaration.policy is not None and not declaration.used:
                methods = ", ".join(sorted(spot.methods))
                raise ConfigurationError(
                    f"{declaration.place} has @once.policy, and answers {methods} {spot.full}, which change nothing: "
                    f'take it away, or list the route: routes={{"{method} {spot.full}": Policy(…)}}'
                )


# -- what protects it --------------------------------------------------------------------------------------------------


_Verdict = tuple[Coverage, Policy | None, str | None, str | None, str]


def _assess(method: str, spot: Spot) -> Endpoint:
    """The worst coverage of all paths that the endpoint's pattern matches."""
    verdicts = [_verdict(method, path, spot) for path in _examples(spot.full)]
    order = (Coverage.UNPROTECTED, Coverage.EXEMPT, Coverage.PROTECTED)
    worst = min(verdicts, key=lambda verdict: order.index(verdict[0]))
    return Endpoint(method, spot.full or "/", spot.place.host, *worst)


def _examples(path: str) -> set[str]:
    """Examples of paths that match a pattern: a parameter is one segment, a ``:path`` parameter is one or two."""
    deeper = _SPANNING.sub(r"{\1}/{\1}", path)
    return {plain(path), plain(deeper)}


def _verdict(method: str, path: str, spot: Spot) -> _Verdict:
    exempted: tuple[str | None, str | None] | None = None
    layers = spot.place.layers
    for layer in layers:  # the outermost middleware that protects it decides
        declaration: Declaration | None = layer.declared(method, spot.endpoint)
        if declaration is not None:
            if declaration.policy is not None:
                return Coverage.PROTECTED, declaration.policy, None, declaration.place, ""
            exempted = exempted or (None, declaration.place)
            continue
        seen = layer.sees(method, path)
        listed = layer.routes.listed_as(method, seen)
        if (route := layer.routes.match(method, seen)) is not None:
            return Coverage.PROTECTED, route.policy, listed, None, ""
        exempted = exempted or ((listed, None) if listed else None)
    if exempted is not None:
        return Coverage.EXEMPT, None, *exempted, ""
    return Coverage.UNPROTECTED, None, None, None, _why(method, layers)


def _why(method: str, layers: tuple[Layer, ...]) -> str:
    if not layers:
        return "no IdempotencyMiddleware stands in front of it"
    if any(layer.only_declared and method in layer.once.default_policy.methods for layer in layers):
        return "only='declared', and this route is not declared"
    methods = ", ".join(sorted(layers[0].once.default_policy.methods))
    return f"the policy protects {methods}, and this route is not declared"


def _unused(spots: list[Spot]) -> Iterator[str]:
    """Listed routes that match no endpoint: with a wrong path an entry protects nothing and exempts nothing."""
    at = [(spot, layer) for spot in spots for layer in spot.place.layers]
    for once in dict.fromkeys(layer.once for _, layer in at):
        for listed in once.routes.listed:
            if not any(layer.once is once and _falls_under(spot, layer, listed) for spot, layer in at):
                yield listed


def _unused_functions(spots: list[Spot]) -> Iterator[str]:
    """Resolvers and resume functions of operations that no endpoint has: a typo, and the function is never called.
    Those of protected functions and of messages belong to no endpoint."""
    at = [(spot, layer) for spot in spots for layer in spot.place.layers]
    for once in dict.fromkeys(layer.once for _, layer in at):
        for what, operations in (("resolver", once.resolvers), ("resume function", once.resumes)):
            for operation in operations:
                if " /" in operation and not any(
                    layer.once is once and _may_be(spot, layer, operation) for spot, layer in at
                ):
                    yield f"{what} of {operation}"


def _falls_under(spot: Spot, layer: Layer, listed: str) -> bool:
    """Whether requests to ``spot`` may match ``listed``: one of the two patterns matches the other."""
    method, _, path = listed.partition(" ")
    if method not in spot.methods:
        return False
    template = layer.sees(method, spot.full)
    if any(layer.once.routes.listed_as(method, example) == listed for example in _examples(template)):
        return True
    return _matches(template, [path])


def _may_be(spot: Spot, layer: Layer, operation: str) -> bool:
    """Whether a key that ``spot`` takes may have this operation, or one that its pattern matches."""
    method, _, path = operation.partition(" ")
    if method not in spot.methods:
        return False
    template = layer.sees(method, spot.full)
    return spot.opaque or _matches(path, _examples(template)) or _matches(template, [path])


def _matches(pattern: str, paths: Iterable[str]) -> bool:
    try:
        match = compiled(pattern).fullmatch
    except ConfigurationError:
        return False  # a pattern that oncekey cannot read
    return any(match(path) for path in paths)
