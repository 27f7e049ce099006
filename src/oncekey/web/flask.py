"""Flask: stores the response inside of the framework, before Flask's teardown.

``protect(app, once)`` puts the WSGI middleware around the app and hooks into it:

* the response is stored when Flask starts to send it. Then all ``after_request`` functions, the session and the
  listeners have made their changes, and ``teardown``, which closes sessions, has not run;
* every view is wrapped at ``dispatch_request``, the one place where Flask calls it: it reports that it was entered,
  returned or raised (``core/evidence.py``), also if it is registered later;
* a request that Flask refuses before any view (no such route, wrong method) does not use up its key;
* Flask-CORS adds its headers to oncekey's own answers too, so that a browser can read them.
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
from oncekey.upkeep.in_app import UpkeepChoice
from oncekey.web.app_routes import FLASK_PARAMETER, Place, walk
from oncekey.web.declared import Handler, Only
from oncekey.web.route_audit import audit_spots
from oncekey.web.wsgi import IdempotencyMiddleware
from oncekey.web.wsgi_environ import Environ
from oncekey.web.wsgi_shell import WsgiShell, shell_of

__all__ = ["current_operation", "protect"]


def current_operation() -> Operation:
    """The Operation of the running request; the same as :func:`oncekey.current`."""
    return current()


def protect(app: Flask, once: OnceKey, *, upkeep: UpkeepChoice = "auto", only: Only | None = None) -> Flask:
    """Protect the app's state-changing routes, as ``once`` says.

    ``upkeep``: as :class:`oncekey.web.wsgi.IdempotencyMiddleware` has it.
    ``only="declared"``: protect what ``routes`` or ``@once.policy`` declares; other routes pass untouched, and those
    that change something are named in the log before the first request.
    """
    if isinstance(app.wsgi_app, IdempotencyMiddleware):
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    _mark_mounted(app.wsgi_app)
    middleware = IdempotencyMiddleware(
        app.wsgi_app,
        once,
        upkeep=upkeep,
        dress=partial(_with_cors, app),
        only=only,
        endpoints=_Endpoints(app),
    )
    app.wsgi_app = middleware  # type: ignore[method-assign]
    if once.declarations.exist:
        audit_spots(list(walk(app, Place())))  # raise now for wrong declarations of the present routes
    # Flask runs these from last to first: the first one sees the response after all others have changed it.
    app.after_request_funcs.setdefault(None, []).insert(0, _remember)
    _wrap_dispatch(app)
    _wrap_errors(app)
    return app


class _Endpoints:
    """The views of a Flask app. ``_wrap_dispatch`` wraps the one place where Flask calls them, so all are wrapped."""

    def __init__(self, app: Flask) -> None:
        self.app = app

    def cover(self) -> bool:
        return True

    def handler(self, environ: Environ) -> Handler | None:
        """The view that Flask will call for this request, found by Flask's own router."""
        app = self.app
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
        shell = _shell()
        if shell is None or request.routing_exception is not None:  # Flask raises that one without a view
            return dispatch()
        evidence = shell.exchange.operation.evidence
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
        finally:  # the view has returned, also if Flask cannot make a response of its value
            evidence.returned_with(status)
        return response

    app.dispatch_request = dispatch_request  # type: ignore[method-assign]


def _status_of(error: BaseException) -> int | None:
    """The status of ``abort(402)``, and of ``abort(redirect(…))``, which has a whole response."""
    if not isinstance(error, HTTPException):
        return None
    return error.code if error.response is None else getattr(error.response, "status_code", None)


def _wrap_errors(app: Flask) -> None:
    """oncekey's exceptions may also be raised around the view, and in tests Flask does not catch exceptions."""
    by_handlers, unhandled = app.handle_user_exception, app.handle_exception

    def handle_user_exception(error: Exception) -> Any:
        if (shell := _shell()) is not None:
            shell.exchange.operation.evidence.heard(error)
        return by_handlers(error)

    def handle_exception(error: Exception) -> Any:
        shell = _shell()
        if shell is None:
            return unhandled(error)
        shell.exchange.operation.evidence.heard(error)
        try:
            return unhandled(error)
        except BaseException:
            answer = shell.failed(error)
            if answer is None:
                raise
            return app.finalize_request(_response(shell.exchange.instead or answer), from_error_handler=True)

    app.handle_user_exception = handle_user_exception  # type: ignore[method-assign, assignment]
    app.handle_exception = handle_exception  # type: ignore[method-assign, assignment]


def _mark_mounted(app: Any) -> None:
    """Mark apps that a dispatcher mounts beside this one: their endpoints are not wrapped."""
    if isinstance(app, DispatcherMiddleware):
        app.mounts = {path: _foreign(mounted) for path, mounted in app.mounts.items()}


def _foreign(app: Any) -> Any:
    def foreign(environ: Environ, start_response: Any) -> Any:
        shell = shell_of(environ)
        if shell is not None:
            shell.exchange.operation.evidence.covered = False
        return app(environ, start_response)

    return foreign


def _with_cors(app: Flask, environ: Environ, answer: Answer) -> Answer:
    """Flask-CORS adds its headers in ``after_request`` functions, which do not run for oncekey's own answers.

    Run only those of Flask-CORS: other ``after_request`` functions may need what the view or a ``before_request`` set.
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


def _shell() -> WsgiShell | None:
    return shell_of(request.environ)


def _remember(response: Response) -> Response:
    """The last ``after_request`` function: gives the middleware the body when Flask starts to send this response."""
    shell = _shell()
    # Werkzeug marks an error page and the response of ``abort(response)`` as streamed, but they are short. The
    # middleware passes every other streamed response through.
    if shell is not None and (
        response.status_code >= 400 or shell.exchange.operation.evidence.raised or not response.is_streamed
    ):
        response.make_sequence()

        def whole_body(status: str) -> bytes | None:
            # With another status, a session or a listener failed after this, and Flask sends its error page instead.
            return response.get_data() if status == response.status else None

        shell.whole_body = whole_body
    return response


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, [(n.decode("latin-1"), v.decode("latin-1")) for n, v in answer.headers])
