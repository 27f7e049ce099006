"""The routes of a Django project and the OnceKeyMiddleware in front of them, for ``oncekey routes`` and the checks."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from oncekey.web.app_routes import Place, Spot
from oncekey.web.django import endpoints

_INNER = ("__wrapped__", "get_response", "func", "awaitable", "__self__")
"""Where middleware and the wrappers of Django and asgiref keep the next handler."""
_MOST = 500


def spots(handler: Any, place: Place) -> Iterator[Spot]:
    """Every route of a WSGI or ASGI app of Django."""
    found = middleware_of(handler)
    if found is not None:
        yield from found.protection().spots(place)
        return
    for method, path, view in endpoints.views():
        yield Spot(place, path, [method], endpoint=view)


def middleware_of(handler: Any) -> Any:
    """The OnceKeyMiddleware of a handler, found through the middleware before it; None: there is none."""
    from oncekey.web.django.middleware import OnceKeyMiddleware

    waiting, seen = [getattr(handler, "_middleware_chain", None)], set[int]()
    while waiting and len(seen) < _MOST:
        layer = waiting.pop()
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, OnceKeyMiddleware):
            return layer
        waiting += [getattr(layer, name, None) for name in _INNER]
        if type(layer) is FunctionType:  # middleware that is a function keeps the next one in its closure
            waiting += [cell.cell_contents for cell in layer.__closure__ or () if callable(_content(cell))]
    return None


def __getattr__(name: str) -> Any:
    """``application``: the WSGI app of the project, for ``oncekey routes oncekey.web.django.project:application``."""
    if name != "application":
        raise AttributeError(name)
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
