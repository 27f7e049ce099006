"""One protected endpoint in Flask and in plain WSGI, which does what a case says. Nothing here asserts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, abort, jsonify, redirect

from oncekey.web.flask import protect
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.web.verdicts.asgi_apps import breaks_off, location, said_or_raised, split
from tests.web.verdicts.case_runner import CaseRunner, Declined, Forgiven
from tests.web.verdicts.middleware import Wsgi, named


def flask_ended(runner: CaseRunner) -> Any:
    """The end of a view, after its work."""
    verb, status = split(runner.does)
    match verb:
        case "return":
            return jsonify({"run": runner.runs}), status, location(status)
        case "raise" if 300 <= status < 400:
            abort(redirect("/elsewhere", status))
        case "raise" if status in (402, 425):  # Werkzeug has no exception of its own for them
            abort(Response("{}", status, content_type="application/json"))
        case "raise":
            abort(status)
        case "stream":
            return Response(breaks_off(), 201, content_type="application/json")
        case "unserializable":
            return {"cannot be JSON": object()}
    said_or_raised(runner)
    return jsonify({"run": runner.runs}), status


def flask(runner: CaseRunner) -> Any:
    """Its view is added after ``protect``, as the README does; its middleware stands inside of ours."""
    app = Flask("payments")
    verb, status, _ = named(runner.case.around)
    app.config["PROPAGATE_EXCEPTIONS"] = runner.case.propagates or verb == "retry once"
    by_error_handler = verb == "catch" and not runner.case.propagates
    if verb and "hook" not in verb and not by_error_handler:
        app.wsgi_app = Wsgi(app.wsgi_app, runner)  # type: ignore[method-assign]
    protect(app, runner.once)

    @app.before_request
    def gate() -> Any:
        if runner.gate == "crash":
            raise RuntimeError("a before_request function broke")
        if isinstance(runner.gate, int):
            if runner.gate < 400:
                return {"by": "before_request"}, runner.gate
            abort(runner.gate)
        return None

    @app.post("/payments")
    def pay() -> Any:
        with runner.working_blocking():
            return flask_ended(runner)

    app.register_error_handler(Declined, lambda error: ({"by": "error handler"}, 409))
    app.register_error_handler(Forgiven, lambda error: ({"by": "error handler"}, 200))
    if by_error_handler:
        app.register_error_handler(Exception, lambda error: ({"by": "error handler"}, status))
    if "hook" in verb:

        @app.after_request
        def hook(response: Response) -> Response:
            if verb == "crashing hook":
                raise RuntimeError("an after_request function broke")
            return Response("{}", status, content_type="application/json")

    return app


def wsgi(runner: CaseRunner) -> Any:
    def app(environ: Any, start_response: Any) -> Any:
        with runner.working_blocking():
            verb, status = split(runner.does)
            said_or_raised(runner)
            start_response(f"{status} Status", [("Content-Type", "application/json"), *location(status).items()])
            return breaks_off_later() if verb == "stream" else [b'{"run": %d}' % runner.runs]

    def breaks_off_later() -> Iterator[bytes]:
        yield from breaks_off()

    return IdempotencyMiddleware(Wsgi(app, runner) if runner.case.around else app, runner.once)
