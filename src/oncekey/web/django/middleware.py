"""The middleware: which requests of a Django project are protected.

A middleware of Django, and not a shell around the WSGI or ASGI app, because the caller is known only inside of Django:
``SCOPE`` gets Django's request, after session, authentication and what else stands above in ``MIDDLEWARE``. The three
rules hold here too:

* **Store before send.** The middleware returns a response only after the store has it, and Django sends it after that.
  Of a streamed response, the last piece waits for the store.
* **A disconnect changes nothing.** In WSGI the thread does not see it. In ASGI Django cancels the request; the app runs
  in a task of its own, which goes on (``async_calls.py``).
* **Never a bypass.** A request that cannot be protected is refused, and the view is not called.

It is sync under WSGI and async under ASGI, so a request needs no change of threads on its account, except where
``SCOPE`` or ``AUTHORIZE`` is a plain function under ASGI: that may use the database, and runs in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import ResolverMatch, get_resolver

from oncekey.core.declarations import SAFE_METHODS
from oncekey.core.evidence import SPEAKING_ERRORS
from oncekey.core.routes import Route
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import _current
from oncekey.errors import ApplicationError, ConfigurationError
from oncekey.upkeep.in_app import LazyUpkeep, UpkeepChoice
from oncekey.web.app_routes import Layer, Place, Spot
from oncekey.web.declared import Only, check_declarations, checked_only
from oncekey.web.django import conf, endpoints, reports
from oncekey.web.django.async_calls import AsyncCall
from oncekey.web.django.calls import Call, GetResponse, SyncCall
from oncekey.web.django.messages import MARK, passed_us, route_by_path
from oncekey.web.exchange import RUNNING
from oncekey.web.responses import checked

_log = logging.getLogger("oncekey")

begins_in_view: list[Callable[[Any], bool]] = []
"""Functions that tell whether a view authenticates its caller itself, and begins its request after that
(``oncekey.web.drf``)."""


class OnceKeyMiddleware:
    """``MIDDLEWARE = [..., "oncekey.web.django.OnceKeyMiddleware"]``, after Django's AuthenticationMiddleware.

    ``once``: another OnceKey than that of the setting ``ONCEKEY``, for a subclass. ``only`` and ``upkeep``: as
    :class:`oncekey.web.wsgi.IdempotencyMiddleware` has them; by default what ``ONLY`` and ``UPKEEP`` say.
    """

    sync_capable = True
    async_capable = True

    def __init__(
        self,
        get_response: GetResponse,
        *,
        once: OnceKey | None = None,
        only: Only | None = None,
        upkeep: UpkeepChoice = "auto",
    ) -> None:
        self.get_response = get_response
        self._given = once
        self._only, self._upkeep_choice = only, upkeep
        self._ready: Protection | None = None
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)
        reports.install()

    def __call__(self, request: HttpRequest) -> Any:
        if passed_us(request):  # the middleware is there twice: the outer one protects, and its operation stays current
            return self.get_response(request)
        if self.is_async:
            return self._call_async(request)
        with _told():
            found = self._found(request)
            if found is None:
                with _without_operation():
                    return self.get_response(request)
            call = SyncCall(*found[:-1])
            if found[-1]:
                return call.run_until_view(self.get_response)
            return call.run(self.get_response)

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        with _told():
            found = self._found(request)
            if found is None:
                with _without_operation():
                    response: HttpResponseBase = await self.get_response(request)
                    return response
            call = AsyncCall(*found[:-1])
            call.in_view = found[-1]
            return await call.run(self.get_response)

    def _found(self, request: HttpRequest) -> tuple[OnceKey, Route, HttpRequest, str, bool] | None:
        """What protects this request, and whether its view begins it; None: it passes untouched."""
        protection = self._ready or self.protection(getattr(request, "urlconf", None))
        method = (request.method or "").upper()
        if method in SAFE_METHODS and not protection.safe_methods:
            return None
        route, match = protection.route(request, method)
        if route is None or (not route.policy.required and "HTTP_IDEMPOTENCY_KEY" not in request.META):
            return None
        protection.upkeep.start()
        in_view = match is not None and any(begins(match.func) for begins in begins_in_view)
        return protection.once, route, request, method, in_view

    def protection(self, urlconf: Any = None) -> Protection:
        """What this middleware protects. Made before the first request and not when Django loads, so that a test runner
        can rename its databases first."""
        if self._ready is None:
            only, upkeep = self._only, self._upkeep_choice
            if self._given is None:
                said = conf.read()
                only, upkeep = said.get("ONLY", only), said.get("UPKEEP", upkeep)
            once = checked(conf.once.get() if self._given is None else self._given)
            ready = Protection(once, checked_only(only), upkeep, urlconf)
            get_resolver(urlconf).url_patterns  # noqa: B018 - imports the views, which declare their policies
            check_declarations(ready, once, ready.only)
            self._ready = ready
        return self._ready

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """An exception that tells oncekey the outcome is answered by oncekey, and is no error for Django's log. Any
        other of ours says what to change in the view. It goes to oncekey's log: Django's own, as it is set up without
        ``DEBUG``, prints nothing."""
        call: Call | None = getattr(request, MARK, None)
        if isinstance(error, ApplicationError) and not isinstance(error, SPEAKING_ERRORS):
            operation = f"{request.method} {request.path!r}" if call is None else call.exchange.route.operation
            _log.error("%s: the view raised an error of oncekey: %s", operation, error)
        if call is None or call.exchange.stage is not RUNNING:
            return None
        evidence = call.exchange.operation.evidence
        if not evidence.speaks(error):
            return None
        evidence.heard(error)
        return HttpResponse(status=500)  # ``Exchange.answered`` puts oncekey's answer in its place


class Protection:
    """A OnceKey, and what of the project it protects."""

    def __init__(self, once: OnceKey, only: Only | None, upkeep: UpkeepChoice, urlconf: Any) -> None:
        self.once = once
        self.only = only
        self.urlconf = urlconf
        """The URLconf of the first request; None: ROOT_URLCONF."""
        self.routes = once.routes if only is None else once.routes.only_listed()
        self.upkeep = LazyUpkeep(once, upkeep)
        self.has_admin = apps.is_installed("django.contrib.admin")
        listed = {operation.partition(" ")[0] for operation in once.routes.listed}
        self.safe_methods = bool(SAFE_METHODS & (once.default_policy.methods | listed))

    def route(self, request: HttpRequest, method: str) -> tuple[Route | None, ResolverMatch | None]:
        """The policy of this request, and the view to which it goes, if that was looked up."""
        declarations, match = self.once.declarations, None
        if begins_in_view or declarations.exist or self.has_admin:
            match = endpoints.match_of(request)
        if match is not None and declarations.exist and method not in SAFE_METHODS:
            declaration = endpoints.declaration_of(declarations, match.func, method)
            if declaration is not None:
                return declaration.route(method, endpoints.path_of(match)), match
        routes = self.routes
        if self.has_admin and match is not None and endpoints.is_admin(match):
            routes = routes.only_listed()
        return route_by_path(request, method, routes), match

    def spots(self, place: Place) -> Iterator[Spot]:
        """Every route of the project (``app_routes.walk``)."""
        behind = place.behind([Layer(self.once, self.only is not None, "its own")])
        for method, path, view in endpoints.views(self.urlconf):
            endpoint = endpoints.declared_object(self.once.declarations, view, method)
            yield Spot(behind, path, [method], endpoint=endpoint)


@contextmanager
def _told() -> Iterator[None]:
    """Log an error of the settings or of a declaration, for the reason that ``process_exception`` has."""
    try:
        yield
    except (ConfigurationError, ImproperlyConfigured) as error:
        said = str(error) if isinstance(error, conf.Wrong) else error  # the text of any other exception is masked
        _log.error("oncekey cannot protect this request, so it got a 500: %s", said)
        raise


@contextmanager
def _without_operation() -> Iterator[None]:
    """If a view calls its own app, hide the view's operation."""
    before = _current.get()
    if before is None:
        yield
        return
    _current.set(None)
    try:
        yield
    finally:
        _current.set(before)
