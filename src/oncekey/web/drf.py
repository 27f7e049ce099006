"""Django REST framework: the key is looked up after authentication, permissions and throttling, before the handler.

``oncekey.web.django`` installs this where ``rest_framework`` is in ``INSTALLED_APPS``; there is nothing to add to the
views. A view of REST framework authenticates its caller itself, in ``APIView.initial``. So the middleware only reads
the request, and the view's handler (``post``, or the action of a viewset) begins it: then ``SCOPE`` knows
``request.user``, a caller that may not ask gets neither a replay nor a word about a key, and what was refused before
the handler leaves its key unused.

A refused serializer leaves its key unused, too: no parser could read the body, or the **first** validation of the
request failed, and the answer is a 4xx. A refusal after a validation that passed is the handler's answer, like any
other 4xx: by then the handler may have done something.

``schema_hook`` describes header and answers in drf-spectacular's document.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from django.http import HttpResponse
from rest_framework.exceptions import APIException, ParseError, UnsupportedMediaType, ValidationError
from rest_framework.serializers import BaseSerializer, ListSerializer
from rest_framework.views import APIView

from oncekey.core.evidence import Evidence, is_of
from oncekey.engine.operation import Operation
from oncekey.engine.transactions.adapters.django_entry import note_handler
from oncekey.web import openapi
from oncekey.web.django import conf, endpoints, middleware, reports
from oncekey.web.django.calls import Call
from oncekey.web.django.messages import MARK

_UNREADABLE = (ParseError, UnsupportedMediaType)


class _Validations:
    """What the serializers of one request said."""

    passed = False
    refused = False


_validations: ContextVar[_Validations | None] = ContextVar("oncekey_validations", default=None)


def install() -> None:
    """Let views of REST framework begin their requests. Safe to call more than once."""
    if is_api_view in middleware.begins_in_view:
        return
    middleware.begins_in_view.append(is_api_view)
    _wrap_views()
    for kind in (BaseSerializer, ListSerializer):
        if "is_valid" in vars(kind):
            _wrap_validation(kind)


def is_api_view(view: Any) -> bool:
    """Whether this is a view of REST framework: ``APIView.as_view()``, ``@api_view``, or that of a viewset."""
    kind = getattr(view, "cls", None)
    return isinstance(kind, type) and issubclass(kind, APIView)


def _wrap_views() -> None:
    initialize = APIView.initialize_request

    def initialize_request(self: APIView, request: Any, *args: Any, **kwargs: Any) -> Any:
        call: Call | None = getattr(request, MARK, None)
        name = (request.method or "").lower()
        handler = getattr(self, name, None)
        if call is not None and handler is not None and name in self.http_method_names:
            # ``dispatch`` takes the handler from the view after ``initial``, which authenticates and throttles.
            setattr(self, name, _begun(handler, call))
        return initialize(self, request, *args, **kwargs)

    APIView.initialize_request = initialize_request  # type: ignore[method-assign]
    handle = APIView.handle_exception

    def handle_exception(self: APIView, error: Exception) -> Any:
        """REST framework raises what it does not know, and Django would log it as an error of the view."""
        call: Call | None = getattr(self.request, MARK, None)
        if call is None or call.waiting or not call.exchange.operation.evidence.speaks(error):
            return handle(self, error)
        return HttpResponse(status=500)  # ``Exchange.answered`` puts oncekey's answer in its place

    APIView.handle_exception = handle_exception  # type: ignore[method-assign, assignment]


def _begun(handler: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The view's handler, which first asks for the key and then reports how it ended."""

    def begun(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not call.begin_in_view():
            return HttpResponse()  # the middleware sends ``call.answer``
        note_handler()
        said = _Validations()
        token = _validations.set(said)
        operation = call.exchange.operation
        evidence = operation.evidence
        evidence.entered()
        try:
            response = handler(request, *args, **kwargs)
        except BaseException as error:
            _raised(operation, evidence, said, error)
            raise
        finally:
            _validations.reset(token)
        status = getattr(response, "status_code", 200)
        if 400 <= status < 500 and said.refused:
            _refuse(operation, said)
        evidence.returned_with(status)
        return response

    return begun


def _raised(operation: Operation, evidence: Evidence, said: _Validations, error: BaseException) -> None:
    status = error.status_code if isinstance(error, APIException) else reports.raised_status(error)
    refused = isinstance(error, _UNREADABLE) or (isinstance(error, ValidationError) and said.refused)
    if refused and is_of(error, operation.owner):
        _refuse(operation, said)
    evidence.raised_with(error, status)


def _refuse(operation: Operation, said: _Validations) -> None:
    if not said.passed and not operation.begun:
        operation.refuse()


def _wrap_validation(kind: Any) -> None:
    validate = vars(kind)["is_valid"]

    def is_valid(self: Any, *args: Any, **kwargs: Any) -> Any:
        said = _validations.get()
        if said is None:
            return validate(self, *args, **kwargs)
        valid = False
        try:
            valid = validate(self, *args, **kwargs)
        finally:
            if valid:
                said.passed = True
            else:
                said.refused = True
        return valid

    kind.is_valid = is_valid


# -- drf-spectacular ---------------------------------------------------------------------------------------------------


def schema_hook(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """For drf-spectacular: ``SPECTACULAR_SETTINGS = {"POSTPROCESSING_HOOKS": [..., "oncekey.web.drf.schema_hook"]}``.

    Adds the header, oncekey's answers and ``x-idempotency`` to every protected operation.
    """
    del request, public
    once = conf.once.get()
    only = conf.read().get("ONLY")
    views = {(method, _unnamed(path)): view for path, _, method, view in _endpoints(generator)}
    routes = once.routes if only is None else once.routes.only_listed()

    def match(method: str, path: str) -> Any:
        view = views.get((method, _unnamed(path)))
        declaration = None
        if view is not None:
            declaration = endpoints.declaration_of(once.declarations, view, method)
        return routes.match(method, path) if declaration is None else declaration.route(method, path)

    return openapi.declare(
        result,
        match,
        profile=once.profile,
        docs_url=once.docs_url,
        authenticates=once.single_tenant is None,
        authorizes=once.authorize is not None,
    )


def _unnamed(path: str) -> str:
    """A path whose parameters have no names: drf-spectacular writes ``{id}`` for a ``{pk}``."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def _endpoints(generator: Any) -> list[Any]:
    generator._initialise_endpoints()
    found: list[Any] = generator.endpoints or []
    return found
