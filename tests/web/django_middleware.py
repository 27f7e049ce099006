"""Middleware of Django as projects have it, for tests: it calls the view itself, or in a thread, or twice."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from django.http import HttpResponse

pool = ThreadPoolExecutor(2, "of-middleware")
begin: list[Callable[[], object]] = []
"""What a thread of ``TimesOut`` waits for."""
late: list[Future[Any]] = []
"""The calls that ``TimesOut`` did not wait for."""


class Passes:
    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)


class CallsView(Passes):
    def process_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        return view(request, *args, **kwargs)


class CallsMatch(Passes):
    def process_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        return request.resolver_match.func(request, *args, **kwargs)


class CallsInnermost(Passes):
    """As some tools do that look for the name of a view."""

    def process_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        while hasattr(view, "__wrapped__"):
            view = view.__wrapped__
        return view(request, *args, **kwargs)


class Refuses(Passes):
    """Knows views by themselves, and answers without calling them."""

    refused: ClassVar[set[Any]] = set()

    def process_view(self, request: Any, view: Any, args: Any, kwargs: Any) -> Any:
        return HttpResponse(status=403) if view in self.refused else None


class InThread(Passes):
    def __call__(self, request: Any) -> Any:
        return pool.submit(self.get_response, request).result()


class InThreadWithContext(Passes):
    def __call__(self, request: Any) -> Any:
        return pool.submit(contextvars.copy_context().run, self.get_response, request).result()


class TimesOut(Passes):
    """Answers before its thread begins."""

    def __call__(self, request: Any) -> Any:
        late.append(pool.submit(lambda: (begin.pop()(), self.get_response(request))))
        return HttpResponse(status=429)


class SendsTwice(Passes):
    """As middleware that retries after a deadlock."""

    def __call__(self, request: Any) -> Any:
        self.get_response(request)
        return self.get_response(request)
