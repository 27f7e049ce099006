"""System checks (``manage.py check``): each names the setting or route that is wrong, and says what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections
from django.utils.module_loading import import_string

from oncekey.errors import ConfigurationError
from oncekey.upkeep.service import Upkeep
from oncekey.web.app_routes import Place, walk
from oncekey.web.django import conf, endpoints
from oncekey.web.django.app_functions import AUTHENTICATION
from oncekey.web.django.middleware import OnceKeyMiddleware, Protection
from oncekey.web.route_audit import Audit, audit_spots

_NAME = "oncekey.web.django.OnceKeyMiddleware"


@register("oncekey")
def check_settings(**_: Any) -> list[CheckMessage]:
    """What ``ONCEKEY`` says, and what was declared with ``once``."""
    try:
        conf.options()
        said = conf.read()
        _check_middleware_options(said)
        conf.once.get()
    except conf.Wrong as wrong:
        return [Error(f"{wrong.message}.", hint=f"{wrong.hint}.", id=f"oncekey.E{wrong.number:03}")]
    except ConfigurationError as error:  # of a declaration, which is made with the OnceKey
        return [Error(f"{error}.", hint="docs/functions.md and docs/policy.md list the options.", id="oncekey.E011")]
    return []


def _check_middleware_options(said: dict[str, Any]) -> None:
    if said.get("ONLY") not in (None, "declared"):
        raise conf.Wrong(8, f"ONCEKEY['ONLY'] is {said['ONLY']!r}", "Write 'declared', or leave it out")
    upkeep = said.get("UPKEEP", "auto")
    if not (upkeep in (True, False, "auto") or isinstance(upkeep, Upkeep)):
        raise conf.Wrong(8, f"ONCEKEY['UPKEEP'] is {upkeep!r}", "Write 'auto', True or False")


@register("oncekey")
def check_middleware(**_: Any) -> list[CheckMessage]:
    """Whether the middleware is there, and after the one that knows the caller."""
    names = list(settings.MIDDLEWARE)
    ours = [at for at, name in enumerate(names) if _is_ours(name)]
    return list(_wrong_places(names, ours))


def _wrong_places(names: list[str], ours: list[int]) -> Iterator[CheckMessage]:
    if not ours:
        yield Warning(
            "oncekey.web.django is in INSTALLED_APPS, and its middleware is not in MIDDLEWARE: nothing is protected.",
            hint=f"Add {_NAME!r} to MIDDLEWARE, after {AUTHENTICATION!r}.",
            id="oncekey.W001",
        )
    elif len(ours) > 1:
        yield Warning(
            "MIDDLEWARE names oncekey's middleware twice: the second one has no effect.",
            hint="Take one of them away.",
            id="oncekey.W002",
        )
    elif AUTHENTICATION in names and ours[0] < names.index(AUTHENTICATION):
        yield Error(
            f"MIDDLEWARE has oncekey's middleware before {AUTHENTICATION!r}: ONCEKEY['SCOPE'] would not know the user.",
            hint=f"Move {names[ours[0]]!r} below it.",
            id="oncekey.E009",
        )


@register("oncekey")
def check_routes(**_: Any) -> list[CheckMessage]:
    """Whether every entry of ``ROUTES`` has a route, and no route has two declarations."""
    if not getattr(settings, "ROOT_URLCONF", None) or not any(map(_is_ours, settings.MIDDLEWARE)) or check_settings():
        return []
    only = conf.read().get("ONLY")
    try:
        found = audit_spots(list(walk(Protection(conf.once.get(), only, False, None), Place())))
    except ConfigurationError as error:
        hint = "routes= is ONCEKEY['ROUTES']. docs/django.md says where a declaration may stand."
        return [Error(f"{error}.", hint=hint, id="oncekey.E010")]
    return [*_unused_routes(found), *_async_in_blocks()]


def _unused_routes(found: Audit) -> Iterator[CheckMessage]:
    there = sorted({f"{endpoint.method} {endpoint.path}" for endpoint in found.endpoints})
    for listed in found.unused:
        near = difflib.get_close_matches(listed, there, 1)
        meant = f"Did you mean {near[0]!r}? " if near else ""
        yield Warning(
            f"ONCEKEY['ROUTES'] has {listed!r}, and no route of ROOT_URLCONF is that: the entry has no effect.",
            hint=f"{meant}`manage.py oncekey routes` lists them all.",
            id="oncekey.W003",
        )


def _async_in_blocks() -> Iterator[CheckMessage]:
    """Async views that Django refuses to call. It says so at the first request, and not at the start."""
    atomic = {alias for alias, said in connections.settings.items() if said["ATOMIC_REQUESTS"]}
    refused = {
        path: view
        for _, path, view in endpoints.views()
        if iscoroutinefunction(view) and atomic - getattr(view, "_non_atomic_requests", set())
    }
    for path, view in refused.items():
        name = f"{view.__module__}.{view.__qualname__}"
        yield Warning(
            f"The view of {path!r}, {name}, is async, and ATOMIC_REQUESTS is on: Django answers 500 and does not call "
            "it.",
            hint="Decorate it with @transaction.non_atomic_requests, or make it a plain function.",
            id="oncekey.W004",
        )


def _is_ours(name: str) -> bool:
    if name == _NAME:
        return True
    try:
        found = import_string(name)
    except ImportError:
        return False  # Django itself says so
    return isinstance(found, type) and issubclass(found, OnceKeyMiddleware)
