"""Flask: finish inside the framework, where its teardown has not run yet.

``protect(app, once)`` puts the WSGI middleware around the app and three hooks into it:

* after every other ``after_request`` function, the response is stored: before ``teardown``, which closes sessions, and
  before the server sees a byte;
* whatever a view raises is noticed before Flask makes a response of it, so that *raised* and *returned* can be told
  apart (they mean different things, see ``effects``);
* a request that Flask turns away before any view ran (no such route, wrong method) does not use up its key.
"""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request

from oncekey.core.problems import Answer
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, current
from oncekey.errors import NotExecuted, OutcomeUnknown, Refused
from oncekey.web.wsgi import ENVIRON_KEY, Exchange, IdempotencyMiddleware

__all__ = ["current_operation", "protect"]


def current_operation() -> Operation:
    """The Operation of the running request; the same as :func:`oncekey.current`."""
    return current()


def protect(app: Flask, once: OnceKey) -> Flask:
    """Protect the app's state-changing routes, as ``once`` says."""
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, once)  # type: ignore[method-assign]
    # Flask runs these last to first: the first one sees what all others have made of the response.
    app.after_request_funcs.setdefault(None, []).insert(0, _store)
    handle = app.handle_user_exception

    def notice(error: Exception) -> Any:
        exchange = _exchange()
        if exchange is not None:
            exchange.operation.raised = True
            if request.routing_exception is error:
                exchange.operation.refused = True
            if isinstance(error, NotExecuted | OutcomeUnknown | Refused):
                return _own_answer(exchange, error)
        return handle(error)

    app.handle_user_exception = notice  # type: ignore[method-assign, assignment]
    return app


def _exchange() -> Exchange | None:
    exchange: Exchange | None = request.environ.get(ENVIRON_KEY)
    if exchange is not None:
        exchange.operation.tells_apart = True
    return exchange


def _own_answer(exchange: Exchange, error: Exception) -> Response:
    """The handler raised one of our own exceptions: end the attempt as it says, and answer for it."""
    answer = exchange.failed(error)
    if isinstance(exchange.finished, Answer):
        answer = exchange.finished
    return _response(answer) if answer is not None else Response(status=500)


def _store(response: Response) -> Response:
    """The last ``after_request``: what leaves here is what is stored and what the client gets."""
    exchange = _exchange()
    if exchange is None or exchange.concluded or response.is_streamed:
        return response  # a streamed one is consumed by the middleware, which stores it before its end
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
    exchange.conclude(response.status_code, headers, response.get_data())
    return _response(exchange.finished) if isinstance(exchange.finished, Answer) else response


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, list(answer.headers))
