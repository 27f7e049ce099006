"""What became of a key, as a view of Django: the twin of ``oncekey.web.status``, which says what it answers.

::

    urlpatterns = [
        path("idempotency/", status_view()),             # the key in the header Idempotency-Key
        path("idempotency/<path:key>", status_view()),
    ]

``SCOPE`` and ``AUTHORIZE`` get Django's request, as for the requests themselves. The view works under WSGI and ASGI; it
is a plain one, so under ASGI Django runs it in a thread.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed

from oncekey.engine.once import OnceKey
from oncekey.web.django import conf
from oncekey.web.django.app_functions import logged
from oncekey.web.django.messages import answer_of_app, set_headers
from oncekey.web.status import StatusWsgi

__all__ = ["StatusView", "status_view"]


def status_view(once: OnceKey | None = None, *, operation: str | None = None) -> StatusView:
    """A view for ``path("idempotency/<path:key>", status_view())``.

    ``once``: another OnceKey than that of the setting ``ONCEKEY``. ``operation``: the route of the keys, if it has
    ``key_per="endpoint"``.
    """
    return StatusView(once, operation)


class StatusView(StatusWsgi):
    """The view."""

    def __init__(self, once: OnceKey | None, operation: str | None) -> None:
        self._given = once
        self.operation = operation

    @property
    def once(self) -> OnceKey:  # type: ignore[override]
        return conf.once.get() if self._given is None else self._given

    def __call__(self, request: HttpRequest, key: str = "") -> HttpResponse:  # type: ignore[override]
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD"])  # a POST with a key leaves it unused
        root = request.path.removesuffix(key).rstrip("/")
        query = request.META.get("QUERY_STRING", "").encode("latin-1", "replace")
        with logged(self.once, "the status endpoint", "scope or authorize"):
            status, headers, body = self.ask(request, f"/{key}", request.get_full_path(), root, query)
        response = HttpResponse(body, status=status)
        set_headers(response, headers)
        return response

    def _said(self, asked: Any, answer: Any, which: str) -> Any:
        return answer_of_app(asked.request, answer, which)
