"""The app of a case, by the name of its framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.web.verdicts import asgi_apps, wsgi_apps
from tests.web.verdicts.case_runner import CaseRunner

_APPS: dict[str, Callable[[CaseRunner], Any]] = {
    "fastapi": asgi_apps.fastapi,
    "fastapi-sync": lambda runner: asgi_apps.fastapi(runner, asynchronous=False),
    "starlette": asgi_apps.starlette,
    "starlette-sync": lambda runner: asgi_apps.starlette(runner, asynchronous=False),
    "litestar": asgi_apps.litestar,
    "litestar-sync": lambda runner: asgi_apps.litestar(runner, asynchronous=False),
    "asgi": asgi_apps.asgi,
    "mounted": asgi_apps.mounted,
    "flask": wsgi_apps.flask,
    "wsgi": wsgi_apps.wsgi,
}


def app_of(framework: str, runner: CaseRunner) -> Any:
    return _APPS[framework](runner)


def is_async(framework: str) -> bool:
    return framework not in ("flask", "wsgi")
