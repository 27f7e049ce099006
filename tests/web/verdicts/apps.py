"""The app of a case, by the name of its framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.web.verdicts import asgi_apps, wsgi_apps
from tests.web.verdicts.bench import Bench

_APPS: dict[str, Callable[[Bench], Any]] = {
    "fastapi": asgi_apps.fastapi,
    "fastapi-sync": lambda bench: asgi_apps.fastapi(bench, asynchronous=False),
    "starlette": asgi_apps.starlette,
    "starlette-sync": lambda bench: asgi_apps.starlette(bench, asynchronous=False),
    "litestar": asgi_apps.litestar,
    "litestar-sync": lambda bench: asgi_apps.litestar(bench, asynchronous=False),
    "asgi": asgi_apps.asgi,
    "mounted": asgi_apps.mounted,
    "flask": wsgi_apps.flask,
    "wsgi": wsgi_apps.wsgi,
}


def app_of(framework: str, bench: Bench) -> Any:
    return _APPS[framework](bench)


def is_async(framework: str) -> bool:
    return framework not in ("flask", "wsgi")
