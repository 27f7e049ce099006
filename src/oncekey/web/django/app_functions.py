"""Logs what the app's own functions raise: ``SCOPE``, ``AUTHORIZE`` and the bind function of a policy.

Such an exception becomes Django's 500. Django's own log, as it is set up without ``DEBUG``, prints nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError, NotAuthenticated, NotAuthorized

_log = logging.getLogger("oncekey")

AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"
_NAMES = {
    "scope": "the function of ONCEKEY['SCOPE']",
    "authorize": "the function of ONCEKEY['AUTHORIZE']",
    "bind": "the function of Policy(bind=…)",
    "scope or authorize": "the function of ONCEKEY['SCOPE'] or ONCEKEY['AUTHORIZE']",
}
_RAISED = "%s: %s raised %s, so %s got a 500. %s. This is said at most once a minute per route and cause%s"
_NO_USER = (
    "The request has no user: in MIDDLEWARE, put {!r} above oncekey's middleware (`manage.py check` looks at the order)"
)
_INSTEAD = {
    "scope": "Let it return the tenant as a text, or raise oncekey.NotAuthenticated, which is answered with 401",
    "authorize": "Let it return nothing, or raise oncekey.NotAuthorized, which is answered with 403",
    "bind": "Let it return a text that names the user, or raise oncekey.NotAuthenticated, which is answered with 401",
    "scope or authorize": "See docs/authorization.md for what they may raise",
}


@contextmanager
def logged(once: OnceKey, operation: str, which: str) -> Iterator[None]:
    """Around a call of the function. ``which``: a name of ``_NAMES``."""
    try:
        yield
    except (NotAuthenticated, NotAuthorized, ConfigurationError, ImproperlyConfigured):
        raise  # the first two are answers, and the middleware logs the others
    except Exception as error:
        _log_once(once, operation, which, error)
        raise


def _log_once(once: OnceKey, operation: str, which: str, error: Exception) -> None:
    due = once.engine.emitter.warnings.paced(operation, which, *_cause(error))
    if due is None:
        return
    said = _NAMES[which], error, due.requests, _advice(which, error), due.end
    _log.error(_RAISED, due.operation, *said, exc_info=error)


def _cause(error: Exception) -> tuple[str, str]:
    """The class of the exception, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return type(error).__name__, where


def _advice(which: str, error: Exception) -> str:
    if isinstance(error, AttributeError) and error.name == "user" and isinstance(error.obj, HttpRequest):
        return _NO_USER.format(AUTHENTICATION)
    return _INSTEAD[which]
