"""Flask: finish inside the framework, where its teardown has not run yet.

``protect(app, once)`` puts the WSGI middleware around the app and hooks into it:

* the response is stored when Flask starts to send it: after every ``after_request`` function, the session and the
  listeners have made their changes, with the headers as they are sent, and before ``teardown``, which closes sessions;
* whatever is raised is noticed before Flask makes a response of it, so that *raised* and *returned* can be told apart
  (they mean different things, see ``effects``);
* a request that Flask turns away before any view ran (no such route, wrong method) does not use up its key.
"""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request

from oncekey.core.problems import Answer
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, current
from oncekey.errors import ConfigurationError, NotExecuted, OutcomeUnknown, Refused, StoreError
from oncekey.web.wsgi import ENVIRON_KEY, Exchange, IdempotencyMiddleware

__all__ = ["current_operation", "protect"]


def current_operation() -> Operation:
    """The Operation of the running request; the same as :func:`oncekey.current`."""
    return current()


def protect(app: Flask, once: OnceKey) -> Flask:
    """Protect the app's state-changing routes, as ``once`` says."""
    if isinstance(app.wsgi_app, IdempotencyMiddleware):
        raise ConfigurationError("protect(app, once): this app is protected already; call it once")
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, once)  # type: ignore[method-assign]
    # Flask runs these last to first: the first one sees the response that all others agreed on.
    app.after_request_funcs.setdefault(None, []).insert(0, _remember)
    by_handlers, by_nobody = app.handle_user_exception, app.handle_exception

    def noticed(error: Exception) -> Any:
        """A view or a hook raised; the app's error handlers may answer."""
        exchange = _exchange()
        if exchange is not None:
            exchange.operation.raised = True
            if request.routing_exception is error:
                exchange.operation.refused = True
                exchange.operation.refused_as = (getattr(error, "code", None) or 404,)
            if isinstance(error, NotExecuted | OutcomeUnknown | Refused | StoreError):
                return _own_answer(exchange, error)
        return by_handlers(error)

    def unhandled(error: Exception) -> Any:
        """Nobody had an answer to it: Flask's own 500, or, in tests, the error itself."""
        exchange = _exchange()
        if exchange is None:
            return by_nobody(error)
        exchange.operation.raised = True
        if isinstance(error, NotExecuted | OutcomeUnknown | Refused | StoreError) and not exchange.concluded:
            # An error handler of the app translated what was raised into one of ours.
            return app.finalize_request(_own_answer(exchange, error), from_error_handler=True)
        try:
            return by_nobody(error)
        except BaseException:
            exchange.failed(error)
            raise

    app.handle_user_exception = noticed  # type: ignore[method-assign, assignment]
    app.handle_exception = unhandled  # type: ignore[method-assign, assignment]
    return app


def _exchange() -> Exchange | None:
    exchange: Exchange | None = request.environ.get(ENVIRON_KEY)
    return exchange


def _own_answer(exchange: Exchange, error: Exception) -> Response:
    """The handler raised one of our own exceptions: end the attempt as it says, and answer for it."""
    answer = exchange.failed(error)
    return _response(exchange.instead or answer) if answer is not None else Response(status=500)


def _remember(response: Response) -> Response:
    """The last ``after_request``: let the middleware have the body when Flask starts to send this response."""
    exchange = _exchange()
    if exchange is not None:
        exchange.operation.said = response.status_code
    # An error page counts as streamed in Werkzeug, and is short; what else is streamed, the middleware passes through.
    if exchange is not None and (response.status_code >= 400 or not response.is_streamed):
        response.make_sequence()

        def whole_body(status: str) -> bytes | None:
            # Another status: a session or a listener failed after this, and Flask sends its error page instead.
            return response.get_data() if status == response.status else None

        exchange.whole_body = whole_body
    return response


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, [(n.decode("latin-1"), v.decode("latin-1")) for n, v in answer.headers])
