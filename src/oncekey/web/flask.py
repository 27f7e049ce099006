"""Flask: finish inside the framework, where its teardown has not run yet.

``protect(app, once)`` puts the WSGI middleware around the app and hooks into it:

* the response is stored when Flask starts to send it: after every ``after_request`` function, the session and the
  listeners have made their changes, with the headers as they are sent, and before ``teardown``, which closes sessions;
* every view is wrapped at the one place where Flask calls it, ``dispatch_request``: entered, returned, raised are
  reported (``core/evidence.py``), also of views that are registered later;
* a request that Flask turns away before any view ran (no such route, wrong method) does not use up its key;
* Flask-CORS adds its headers to our own answers too: a browser could not read them otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from oncekey.core.problems import Answer
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, current
from oncekey.errors import ConfigurationError
from oncekey.web.app_routes import FLASK_PARAMETER, Place, walk
from oncekey.web.coverage import audit_spots
from oncekey.web.declared import Handler, Only
from oncekey.web.environs import Environ
from oncekey.web.wsgi import Exchange, IdempotencyMiddleware, exchange_of

__all__ = ["current_operation", "protect"]


def current_operation() -> Operation:
    """The Operation of the running request; the same as :func:`oncekey.current`."""
    return current()


def protect(app: Flask, once: OnceKey, *, only: Only | None = None) -> Flask:
    """Protect the app's state-changing routes, as ``once`` says.

    ``only="declared"``: protect what ``routes`` or ``@once.policy`` declares; other routes pass untouched, and those
    that change something are named in the log before the first request.
    """
    if isinstance(app.wsgi_app, IdempotencyMiddleware):
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    _mark_mounted(app.wsgi_app)
    middleware = IdempotencyMiddleware(
        app.wsgi_app, once, covered=True, dress=partial(_with_cors, app), only=only, handler=partial(_handler, app)
    )
    app.wsgi_app = middleware  # type: ignore[method-assign]
    if once.declarations:
        audit_spots(list(walk(app, Place())))  # what is wrong with the routes that are there already is said now
    # Flask runs these last to first: the first one sees the response that all others agreed on.
    app.after_request_funcs.setdefault(None, []).insert(0, _remember)
    _wrap_dispatch(app)
    _wrap_errors(app)
    return app


def _handler(app: Flask, environ: Environ) -> Handler | None:
    """The view that Flask will call for this request: its own router is asked, so it is the one of all that fit."""
    try:
        adapter = app.create_url_adapter(app.request_class(environ, populate_request=False))
        if adapter is None:
            return None
        rule, _ = adapter.match(return_rule=True)
    except HTTPException:  # no such route, another method, a redirect: no view is called
        return None
    view = app.view_functions.get(rule.endpoint)
    return None if view is None else Handler(view, FLASK_PARAMETER.sub(r"{\1}", rule.rule))


def _wrap_dispatch(app: Flask) -> None:
    """Flask calls views in one place only."""
    dispatch = app.dispatch_request

    def dispatch_request() -> Any:
        exchange = _exchange()
        if exchange is None or request.routing_exception is not None:  # the latter is raised, and enters no view
            return dispatch()
        evidence = exchange.operation.evidence
        evidence.entered()
        try:
            result = dispatch()
        except BaseException as error:
            evidence.raised_with(error, _status_of(error))
            raise
        status = 200
        try:
            response = app.make_response(result)
            status = response.status_code
        finally:  # what Flask cannot make a response of was returned all the same
            evidence.returned_with(status)
        return response

    app.dispatch_request = dispatch_request  # type: ignore[method-assign]


def _status_of(error: BaseException) -> int | None:
    """Of ``abort(402)``, and of ``abort(redirect(…))``, which carries its whole response."""
    if not isinstance(error, HTTPException):
        return None
    return error.code if error.response is None else getattr(error.response, "status_code", None)


def _wrap_errors(app: Flask) -> None:
    """An exception of ours may be raised around the view too, and in tests Flask lets exceptions pass."""
    by_handlers, by_nobody = app.handle_user_exception, app.handle_exception

    def handle_user_exception(error: Exception) -> Any:
        if (exchange := _exchange()) is not None:
            exchange.operation.evidence.heard(error)
        return by_handlers(error)

    def handle_exception(error: Exception) -> Any:
        exchange = _exchange()
        if exchange is None:
            return by_nobody(error)
        exchange.operation.evidence.heard(error)
        try:
            return by_nobody(error)
        except BaseException:
            answer = exchange.failed(error)
            if answer is None:
                raise
            return app.finalize_request(_response(exchange.instead or answer), from_error_handler=True)

    app.handle_user_exception = handle_user_exception  # type: ignore[method-assign, assignment]
    app.handle_exception = handle_exception  # type: ignore[method-assign, assignment]


def _mark_mounted(app: Any) -> None:
    """Apps that a dispatcher mounts beside this one have endpoints of their own, which are not wrapped."""
    if isinstance(app, DispatcherMiddleware):
        app.mounts = {path: _foreign(mounted) for path, mounted in app.mounts.items()}


def _foreign(app: Any) -> Any:
    def foreign(environ: Environ, start_response: Any) -> Any:
        exchange = exchange_of(environ)
        if exchange is not None:
            exchange.operation.evidence.covered = False
        return app(environ, start_response)

    return foreign


def _with_cors(app: Flask, environ: Environ, answer: Answer) -> Answer:
    """Flask-CORS adds its headers in ``after_request`` functions, which do not run for an answer of ours.

    Only its own: an ``after_request`` function of the app may rely on what the view or a ``before_request`` left.
    """
    functions = [
        function
        for registered in app.after_request_funcs.values()
        for function in registered
        if (getattr(function, "__module__", None) or "").startswith("flask_cors.")
    ]
    if not functions:
        return answer
    with app.request_context(environ):
        response: Any = _response(answer)
        for function in functions:
            response = app.ensure_sync(function)(response)
        headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers)
    return Answer(answer.status, headers, answer.body)


def _exchange() -> Exchange | None:
    return exchange_of(request.environ)


def _remember(response: Response) -> Response:
    """The last ``after_request``: let the middleware have the body when Flask starts to send this response."""
    exchange = _exchange()
    # An error page, and what ``abort(response)`` carries, counts as streamed in Werkzeug, and is short. What else is
    # streamed, the middleware passes through.
    if exchange is not None and (
        response.status_code >= 400 or exchange.operation.evidence.raised or not response.is_streamed
    ):
        response.make_sequence()

        def whole_body(status: str) -> bytes | None:
            # Another status: a session or a listener failed after this, and Flask sends its error page instead.
            return response.get_data() if status == response.status else None

        exchange.whole_body = whole_body
    return response


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, [(n.decode("latin-1"), v.decode("latin-1")) for n, v in answer.headers])
