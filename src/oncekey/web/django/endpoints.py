"""Finds the views of a Django project: by the path of a request, and all of them, with what they declare."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest
from django.urls import Resolver404, ResolverMatch, URLPattern, URLResolver, get_resolver

from oncekey.core.declarations import Declaration, Declarations
from oncekey.web.django.status import StatusView

_CONVERTED = re.compile(r"<(?:(\w+):)?(\w+)>")
_OF_REGEX = re.compile(r"[\^$(\\]").search
_NAME = re.compile(r"\(\?P<(\w+)>").match
_REQUIRED = "request_method_list"
_METHODS = ("POST", "PUT", "PATCH", "DELETE")


def match_of(request: HttpRequest) -> ResolverMatch | None:
    """What Django's router will find for this request."""
    try:
        return get_resolver(getattr(request, "urlconf", None)).resolve(request.path_info)
    except Resolver404:
        return None


def path_of(match: ResolverMatch) -> str:
    return "/" + pattern_of(match.route)


def is_admin(match: ResolverMatch) -> bool:
    """Whether this is a page of Django's admin. Its forms come from browsers, which send no key, so they pass unless
    ``ROUTES`` lists them."""
    return "admin" in match.app_names


def declaration_of(declarations: Declarations, view: Any, method: str) -> Declaration | None:
    """What is declared at a view: at the function, at the method of a class-based view, or at its class."""
    return next(filter(None, (declarations.of(each, method) for each in _handlers(view, method))), None)


def declared_object(declarations: Declarations, view: Any, method: str) -> Any:
    """What carries a declaration of this view, of any OnceKey; without one, the view."""
    found = (
        each
        for each in _handlers(view, method)
        if declarations.of(each, method) is not None or declarations.of_others(each, method) is not None
    )
    return next(found, view)


def _handlers(view: Any, method: str) -> Iterator[Any]:
    actions = getattr(view, "actions", None)
    if isinstance(actions, dict) and isinstance(kind := getattr(view, "cls", None), type):  # DRF's viewsets
        yield getattr(kind, actions.get(method.lower()) or "", None)
        yield kind
    yield view


def pattern_of(route: str) -> str:
    """Django's pattern with its parameters in braces: ``pay/<int:id>`` and ``^pay/(?P<id>[0-9]+)$`` give
    ``pay/{id}``. ``<path:…>`` spans slashes."""
    plain = _without_groups(route) if _OF_REGEX(route) else route
    return _CONVERTED.sub(lambda found: f"{{{found[2]}{':path' if found[1] == 'path' else ''}}}", plain)


def _without_groups(regex: str) -> str:
    """A regular expression with ``<name>`` for each outermost group, and without its other special characters."""
    text, depth, groups, at = "", 0, 0, 0
    while at < len(regex):
        char = regex[at]
        if char == "\\":
            at += 1
            text += regex[at] if not depth and regex[at] not in "bBAZ" else ""
        elif char == "(":
            if not depth and not regex.startswith("(?:", at):
                groups += 1
                named = _NAME(regex[at:])
                text += f"<{named[1] if named else f'group{groups}'}>"
            depth += 1
        elif char == ")":
            depth -= 1
        elif not depth and char not in "^$?*+":
            text += char
        at += 1
    return text


def views(urlconf: Any = None) -> Iterator[tuple[str, str, Any]]:
    """Method, path and view of every route of a URLconf but Django's admin. A view that does not say its methods takes
    any."""
    for path, view in _patterns(get_resolver(urlconf), ""):
        for method in _methods(view):
            yield method, "/" + pattern_of(path), view


def _patterns(resolver: URLResolver, prefix: str) -> Iterator[tuple[str, Any]]:
    for each in resolver.url_patterns:
        path = prefix + str(each.pattern)
        if isinstance(each, URLResolver) and each.app_name != "admin":
            yield from _patterns(each, path)
        elif isinstance(each, URLPattern):
            yield path, each.callback


def _methods(view: Any) -> list[str]:
    if isinstance(view, StatusView):
        return ["GET"]
    actions = getattr(view, "actions", None)
    if isinstance(actions, dict):
        return [method.upper() for method in actions]
    kind = getattr(view, "view_class", None) or getattr(view, "cls", None)
    if kind is None:
        return _required_methods(view) or list(_METHODS)
    names = getattr(kind, "http_method_names", [])
    return [name.upper() for name in names if hasattr(kind, name) and name != "options"]


def _required_methods(view: Any) -> list[str]:
    """The methods that ``require_POST`` or ``require_http_methods`` lets through; []: the view has neither. Django
    keeps them in the closure of the decorator only."""
    while callable(view):
        code, cells = getattr(view, "__code__", None), getattr(view, "__closure__", None)
        if code is not None and cells and _REQUIRED in code.co_freevars:
            return [str(method) for method in cells[code.co_freevars.index(_REQUIRED)].cell_contents]
        view = getattr(view, "__wrapped__", None)
    return []
