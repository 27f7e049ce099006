"""Django apps for tests: many in one process, each with its own URLs and its own OnceKey. Nothing here asserts.

Django has one settings object for each process. ``configure`` sets it up once; a test's app gets its URLs by
``request.urlconf``, and its OnceKey by a middleware that is made for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import django
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse, HttpResponseNotAllowed, StreamingHttpResponse
from django.test import override_settings
from django.urls import path
from django.views.decorators.http import require_POST

from oncekey import OnceKey
from oncekey.testing.framework_suite import Abort, Payments, Reply, async_pieces_of, pieces_of, unprotected


def configure() -> None:
    """Django's settings for this process of tests."""
    if not settings.configured:
        settings.configure(
            ALLOWED_HOSTS=["*"],
            SECRET_KEY="of tests",
            USE_TZ=True,
            ROOT_URLCONF="tests.web.django_apps",
            INSTALLED_APPS=[
                "django.contrib.contenttypes",
                "django.contrib.auth",
                "django.contrib.sessions",
                "django.contrib.messages",
                "django.contrib.admin",
                "rest_framework",
                "oncekey.web.django",
            ],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            LOGGING_CONFIG=None,
            TEMPLATES=[
                {
                    "BACKEND": "django.template.backends.django.DjangoTemplates",
                    "APP_DIRS": True,
                    "OPTIONS": {
                        "context_processors": [
                            "django.template.context_processors.request",
                            "django.contrib.auth.context_processors.auth",
                            "django.contrib.messages.context_processors.messages",
                        ]
                    },
                }
            ],
            ONCEKEY={"STORE": "memory://", "SCOPE": "SINGLE_TENANT"},
            REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
        )
        django.setup()


urlpatterns: list[Any] = []
_numbers = iter(range(10**9))
_making: list[Any] = []
"""The OnceKey and the URLs of the app that is being made."""


def urls(*patterns: Any) -> ModuleType:
    """A URLconf of its own; ``urlpatterns`` may be added to."""
    module = ModuleType(f"urls_{next(_numbers)}")
    module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    return module


def set_urls(get_response: Any) -> Any:
    """Outermost: gives each request the URLs of its app."""
    from asgiref.sync import iscoroutinefunction, markcoroutinefunction

    urlconf = _making[0]

    def in_thread(request: Any) -> Any:
        request.urlconf = urlconf
        return get_response(request)

    async def in_loop(request: Any) -> Any:
        request.urlconf = urlconf
        return await get_response(request)

    if iscoroutinefunction(get_response):
        return markcoroutinefunction(in_loop)
    return in_thread


set_urls.async_capable = True  # type: ignore[attr-defined]


def protect(get_response: Any) -> Any:
    from oncekey.web.django import OnceKeyMiddleware

    return OnceKeyMiddleware(get_response, once=_making[1], **_making[2])


protect.async_capable = True  # type: ignore[attr-defined]


def make_handler(
    urlconf: ModuleType, once: OnceKey | None, *, asgi: bool, outside: Any = (), inside: Any = (), **options: Any
) -> Any:
    """A WSGI or ASGI app of Django. ``outside``, ``inside``: further middleware, by its import path."""
    here = "tests.web.django_apps"
    from oncekey.web.django.project import middleware_of

    ours = [f"{here}.protect"] if once is not None else ["oncekey.web.django.OnceKeyMiddleware"]
    _making[:] = [urlconf, once, options]
    with override_settings(MIDDLEWARE=[f"{here}.set_urls", *outside, *ours, *inside]):
        handler = ASGIHandler() if asgi else WSGIHandler()
    middleware_of(handler).protection(urlconf)
    return handler


# ---------------------------------------------------------------- the payments API of the suite


def respond(reply: Reply, pieces: Any = pieces_of) -> Any:
    if reply.streamed is not None:
        made: Any = StreamingHttpResponse(pieces(reply), status=reply.status, content_type=reply.content_type)
    else:
        made = HttpResponse(reply.body, status=reply.status, content_type=reply.content_type)
    if reply.content_type is None:
        del made["content-type"]
    for name, value in reply.headers:
        made[name] = value
    return made


def aborted(abort: Abort) -> Any:
    """Django has an exception for a few statuses; for others, views return the response."""
    if abort.status == 403:
        raise PermissionDenied from abort
    return HttpResponse(status=abort.status)


def django_views(payments: Payments, asynchronous: bool) -> tuple[Any, Any]:
    """The payment, and the unprotected view."""

    def pay(request: Any, **_: Any) -> Any:
        try:
            return respond(payments.handle(request.GET.get("m", "ok")))
        except Abort as abort:
            return aborted(abort)

    async def pay_async(request: Any, **_: Any) -> Any:
        try:
            return respond(await payments.handle_async(request.GET.get("m", "ok")), async_pieces_of)
        except Abort as abort:
            return aborted(abort)

    def other(request: Any) -> Any:
        return respond(unprotected())

    async def other_async(request: Any) -> Any:
        return respond(unprotected())

    return (pay_async, other_async) if asynchronous else (pay, other)


def django_app(payments: Payments, once: OnceKey, kind: str, declaring: bool) -> Any:
    """``kind``: async or sync views under ASGI, "drf-asgi", or "drf"; otherwise WSGI."""
    configure()
    pay, other = django_views(payments, kind == "async")
    from tests.web.drf_views import api_views  # REST framework wants the settings first

    drf = kind.startswith("drf")
    if drf:
        pay, other = api_views(payments)
    asgi = kind in ("async", "sync", "drf-asgi")
    if declaring:
        made = urls(
            path("declared/<id>", once.policy(effects="repeatable")(pay)),
            path("exempt", once.exempt(other)),
        )
        app = make_handler(made, once, asgi=asgi)
        late, _ = api_views(payments) if drf else django_views(payments, kind == "async")
        made.urlpatterns.append(path("late", late))
        return app
    if kind == "async":
        return make_handler(_payment_urls(_only_post(pay), other), once, asgi=True)
    return make_handler(_payment_urls(pay if drf else require_POST(pay), other), once, asgi=asgi)


def _only_post(view: Any) -> Any:
    """As ``require_POST``, which takes no async view before Django 5.0."""

    async def only_post(request: Any, **parameters: Any) -> Any:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        return await view(request, **parameters)

    return only_post


def _payment_urls(pay: Any, other: Any) -> ModuleType:
    return urls(
        path("payments", pay),
        path("payments/<id>/refunds", pay),
        path("login", other),
        path("status", other),
    )
