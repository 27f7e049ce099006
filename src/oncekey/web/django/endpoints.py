"""The views of a Django project: reports that they were entered, returned or raised, and finds them by their path.

Django calls every view in one place, with what ``BaseHandler.make_view_atomic`` returns. ``report_views`` wraps that
method. So every view reports, also one of another URLconf or one that is added late, and no URL pattern is changed:
``reverse(view)`` and ``process_view`` see the view itself. The report stands outside of ``ATOMIC_REQUESTS``: a view has
returned when its transaction has ended, and a commit that fails counts as raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.base import BaseHandler
from django.http import Http404, HttpRequest, HttpResponseNotAllowed
from django.http.multipartparser import MultiPartParserError
from django.urls import Resolver404, ResolverMatch, URLPattern, URLResolver, get_resolver

from oncekey.core.declarations import Declaration, Declarations
from oncekey.engine.operation import _current
from oncekey.engine.transactions.adapters.django import changes_before
from oncekey.web.endpoints import wrapped

_CONVERTED = re.compile(r"<(?:(\w+):)?(\w+)>")
_OF_REGEX = re.compile(r"[\^$(\\]").search
_NAME = re.compile(r"\(\?P<(\w+)>").match
_METHODS = ("POST", "PUT", "PATCH", "DELETE")
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (MultiPartParserError, 400),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
)
"""Exceptions to which Django itself gives a status (``django.core.handlers.exception``)."""


def report_views() -> None:
    """Make all views of this process report. Safe to call more than once."""
    make_view_atomic = BaseHandler.make_view_atomic
    if hasattr(make_view_atomic, "__wrapped__"):
        return

    def reporting(self: BaseHandler, view: Any) -> Any:
        atomic = make_view_atomic(self, view)
        operation = _current.get()
        if operation is None:  # no protected request runs here
            return atomic
        engine = operation.engine
        if engine is not None and engine.own_connection is not None and not iscoroutinefunction(atomic):
            atomic = _noting_changes(atomic, engine.own_connection)
        return wrapped(atomic, _returned, raised_status, awaited=iscoroutinefunction(atomic))

    reporting.__wrapped__ = make_view_atomic  # type: ignore[attr-defined]
    BaseHandler.make_view_atomic = reporting  # type: ignore[method-assign]


def _noting_changes(view: Any, connection: Callable[[], Any]) -> Any:
    """Note, in the view's thread, what its connection to SQLite has written before: ``enlist()`` comes first."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        raw = connection().connection
        changes_before.set((raw, getattr(raw, "total_changes", 0)))
        return view(*args, **kwargs)

    return noting


def _returned(result: Any, _: dict[str, Any]) -> int:
    """A view that returns no response has returned too; Django raises after it.

    ``HttpResponseNotAllowed`` is how ``require_POST`` and class-based views refuse a method before they do anything, so
    the key stays unused, as after a router's 405.
    """
    operation = _current.get()
    if isinstance(result, HttpResponseNotAllowed) and operation is not None and not operation.begun:
        operation.refuse()
    status = getattr(result, "status_code", 200)
    return status if isinstance(status, int) else 200


def raised_status(error: BaseException) -> int | None:
    """The status that Django itself gives to this exception."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), None)


# -- the handler of a request ------------------------------------------------------------------------------------------


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
    actions = getattr(view, "actions", None)
    if isinstance(actions, dict):
        return [method.upper() for method in actions]
    kind = getattr(view, "view_class", None) or getattr(view, "cls", None)
    if kind is None:
        return list(_METHODS)
    names = getattr(kind, "http_method_names", [])
    return [name.upper() for name in names if hasattr(kind, name) and name != "options"]
