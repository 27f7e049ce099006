"""Makes every view of Django report to its operation that it was entered, what it returned and what it raised.

Django looks a view up in one place, ``BaseHandler.resolve_request``, and gives it to the ``process_view`` of all
middleware. So that is where the view of a protected request gets its wrapper: middleware that calls the view itself
calls the wrapper, whatever the URLconf is and whenever it was made. No URL pattern is changed, and the wrapper equals
its view. It has no ``__wrapped__``, by which middleware could go around it.

Django itself calls what ``BaseHandler.make_view_atomic`` returns. There the wrapper goes around the block of
``ATOMIC_REQUESTS``: a view has returned when its transaction has ended, and a commit that fails counts as raised.

The operation is found by the request, so a view also reports if middleware calls it in another thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.base import BaseHandler
from django.http import Http404, HttpRequest, HttpResponseNotAllowed
from django.http.multipartparser import MultiPartParserError
from django.urls import ResolverMatch

from oncekey.core.states import Effects
from oncekey.engine.operation import Operation, _current
from oncekey.engine.transactions.adapters.django_checks import seen_in_thread
from oncekey.engine.transactions.adapters.django_entry import Entered, note_atomic_requests, noted, seen_now
from oncekey.web.django.calls import Call
from oncekey.web.django.messages import MARK

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (Http404, 404),
    (PermissionDenied, 403),
    (MultiPartParserError, 400),
    (BadRequest, 400),
    (SuspiciousOperation, 400),
)
"""Exceptions to which Django itself gives a status (``django.core.handlers.exception``)."""
_INSTALLED = "oncekey_reports"
_ASYNC_IN_BLOCK = (
    "%s: Django did not call the view, because it is async and ATOMIC_REQUESTS is on. The client got a 500, and its "
    "key stays unused. Decorate the view with @transaction.non_atomic_requests, or make it a plain function "
    "(docs/django.md). This is said once per {unit}"
)


def install() -> None:
    """Make all views of this process report. Safe to call more than once."""
    if hasattr(BaseHandler.make_view_atomic, _INSTALLED):  # not ``__wrapped__``: other tools wrap it, too
        return
    resolve, make_atomic, check = BaseHandler.resolve_request, BaseHandler.make_view_atomic, BaseHandler.check_response

    @functools.wraps(resolve)
    def resolve_request(self: BaseHandler, request: HttpRequest) -> ResolverMatch:
        match = resolve(self, request)
        if hasattr(request, MARK) or _current.get() is not None:
            match.func = reported(match.func)
        return match

    @functools.wraps(make_atomic)
    def make_view_atomic(self: BaseHandler, view: Any) -> Any:
        if not isinstance(view, ReportedView) and _current.get() is None:
            return make_atomic(self, view)
        try:
            return reported(make_atomic(self, _in_block(getattr(view, "oncekey_view", view))))
        except RuntimeError as error:
            _not_called(error)
            raise

    @functools.wraps(check)
    def check_response(self: BaseHandler, response: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        """Django's error names the view."""
        return check(self, response, getattr(callback, "oncekey_view", callback), *args, **kwargs)

    setattr(make_view_atomic, _INSTALLED, True)
    BaseHandler.resolve_request = resolve_request  # type: ignore[method-assign]
    BaseHandler.make_view_atomic = make_view_atomic  # type: ignore[method-assign]
    BaseHandler.check_response = check_response  # type: ignore[method-assign]


def _not_called(error: RuntimeError) -> None:
    """Django refuses to call an async view under ``ATOMIC_REQUESTS``, before it enters it: the key stays unused."""
    operation = _current.get()
    if operation is None or operation.engine is None:
        return
    operation.evidence.refused_by_validation()
    operation.engine.tell_once(operation.name, _ASYNC_IN_BLOCK, error=error)


def _in_block(view: Any) -> Any:
    """The view, which first notes whether Django has opened a block of ``ATOMIC_REQUESTS`` for it. Django opens none
    for async views."""
    if iscoroutinefunction(view):
        return view

    @functools.wraps(view)
    def called_by_django(*args: Any, **kwargs: Any) -> Any:
        note_atomic_requests()
        return view(*args, **kwargs)

    return called_by_django


def reported(view: Any) -> ReportedView:
    if isinstance(view, ReportedView):
        return view
    return _AsyncView(view) if iscoroutinefunction(view) else ReportedView(view)


class ReportedView:
    """A view with reports. It has the view's attributes, such as ``csrf_exempt`` and ``view_class``, and equals it."""

    oncekey_view: Callable[..., Any]

    def __init__(self, view: Callable[..., Any]) -> None:
        functools.update_wrapper(self, view)
        self.__dict__.pop("__wrapped__", None)
        self.oncekey_view = view

    def __eq__(self, other: object) -> bool:
        return bool(self.oncekey_view == getattr(other, "oncekey_view", other))

    def __hash__(self) -> int:
        return hash(self.oncekey_view)

    def __call__(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        before, operation = _current.get(), _entered(request)
        if operation is None:  # no key yet: a view of REST framework asks for it (``oncekey.web.drf``)
            return _keyless(before, self.oncekey_view, request, *args, **kwargs)
        _current.set(operation)
        evidence = operation.evidence
        try:
            with noted(seen_now()):
                result = self.oncekey_view(request, *args, **kwargs)
            status = _returned(result, operation)
        except BaseException as error:
            evidence.raised_with(error, raised_status(error))
            raise
        finally:
            _current.set(before)
        evidence.returned_with(status)
        return result


class _AsyncView(ReportedView):
    def __init__(self, view: Callable[..., Any]) -> None:
        super().__init__(view)
        markcoroutinefunction(self)

    async def __call__(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        before, operation = _current.get(), _entered(request)
        if operation is None:
            return await self.oncekey_view(request, *args, **kwargs)
        _current.set(operation)
        evidence = operation.evidence
        try:
            with noted(await _seen_in_thread(operation)):
                result = await self.oncekey_view(request, *args, **kwargs)
            status = _returned(result, operation)
        except BaseException as error:
            evidence.raised_with(error, raised_status(error))
            raise
        finally:
            _current.set(before)
        evidence.returned_with(status)
        return result


def _entered(request: Any) -> Operation | None:
    """Report that the view of this request is entered, and return its operation; None: it has none yet."""
    call: Call | None = getattr(request, MARK, None)
    if call is not None:
        return call.enter_view()
    operation = _current.get()  # a request of the middleware's own making
    if operation is not None:
        operation.evidence.entered()
    return operation


def _keyless(before: Operation | None, view: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    call: Call | None = getattr(request, MARK, None)
    try:
        with noted(seen_now()):
            return view(request, *args, **kwargs)
    finally:
        if call is not None and call.is_elsewhere:
            _current.set(before)  # the thread goes back to its pool


async def _seen_in_thread(operation: Operation) -> Mapping[str, Entered] | None:
    """Only for ``transactional`` views: for all others, a write that was committed before ``enlist()`` does not change
    what a retry does."""
    if operation.engine is None or operation.policy.effects_kind is not Effects.TRANSACTIONAL:
        return None
    return await seen_in_thread(operation.engine)


def _returned(result: Any, operation: Operation) -> int:
    """A view that returns no response has returned too; Django raises after it.

    ``HttpResponseNotAllowed`` is how ``require_POST`` and class-based views refuse a method before they do anything, so
    the key stays unused, as after a router's 405.
    """
    if isinstance(result, HttpResponseNotAllowed) and not operation.begun:
        operation.refuse()
    status = getattr(result, "status_code", 200)
    return status if isinstance(status, int) else 200


def raised_status(error: BaseException) -> int | None:
    """The status that Django itself gives to this exception."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
