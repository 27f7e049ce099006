"""What a policy asks of a request beside its key: where the key is, its signature, its age, and what binds it.

Owns the types and the checks of these options. Such a route leaves the flat way (``web/asgi.py``) at its head, and
``web/admission.py`` asks what the policy says. Pure.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from oncekey.core.header import MAX_LENGTH
from oncekey.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

KeySource = Callable[[Any, bytes], str | None]
"""A function of the request and its body that returns the key. None or an empty text: the request has none."""
Verify = Callable[[Any, bytes], object]
"""A function of the request and its body. True: the signature holds. Everything else refuses the request."""

Bind = Callable[[Any], str | Awaitable[str]]
"""A function of the request, sync or async, that names the user, the client or the device that the key is bound to."""

SENDER_MARK: Final = "sender:"
_MAX_SENDER_LENGTH = 100
_SUCH_AS = {"key_from": "header('webhook-id')", "verify": "hmac_sha256('X-Signature', secret)"}


def check_guards(policy: Policy) -> None:
    """Raise ConfigurationError for options that cannot work, alone or together."""
    for name in ("key_from", "verify"):
        function = getattr(policy, name)
        if function is None:
            continue
        if not callable(function) or isinstance(function, type):  # a class: header, and not header("webhook-id")
            raise ConfigurationError(
                f"Policy({name}=…): it takes a function of the request and its body, such as {_SUCH_AS[name]}"
            )
        if _is_async(function):
            raise ConfigurationError(
                f"Policy({name}=…): it takes a plain function; this one is async, and is not awaited before the look-up"
            )
        if not policy.required:
            raise ConfigurationError(
                f"Policy({name}=…, required=False): a request without a key would pass unchecked; leave out required"
            )
    if policy.key_from is not None and (policy.key_syntax, policy.key_format) != ("any", None):
        raise ConfigurationError(
            "Policy(key_from=…): key_syntax and key_format are about the Idempotency-Key header, which it replaces"
        )
    if policy.bind is not None and not callable(policy.bind):
        raise ConfigurationError(
            "Policy(bind=…): it takes a function of the request, such as one that returns its user"
        )
    _check_window(policy)
    sender: Any = policy.sender
    if sender is None:
        return
    if not isinstance(sender, str) or not (sender.isprintable() and 1 <= len(sender) <= _MAX_SENDER_LENGTH):
        raise ConfigurationError(f"Policy(sender=…): it takes a name of 1 to {_MAX_SENDER_LENGTH} printable characters")
    if policy.verify is None:
        raise ConfigurationError(
            f"Policy(sender={sender!r}): without the scope function, only a signature tells who sends: pass verify too"
        )


def _check_window(policy: Policy) -> None:
    name: Any = policy.timestamp_header
    if not isinstance(name, str) or not _HEADER_NAME(name):
        raise ConfigurationError(f"Policy(timestamp_header={name!r}): it takes the name of a header")
    if policy.max_age is None:
        return
    if policy.max_age + policy.skew > policy.ttl:
        raise ConfigurationError(
            f"Policy(max_age={policy.max_age}, skew={policy.skew}, ttl={policy.ttl}): a request may come as late as "
            "max_age and skew together, and its key must not be forgotten by then: make ttl longer"
        )
    if name.lower() in policy.fingerprint_headers:
        raise ConfigurationError(f"Policy(fingerprint_headers=…): {name} is the time of the request, and no part of it")


def moment(text: str) -> float | None:
    """The time in a header: RFC 3339 (``2026-11-17T19:30:00Z``), or seconds since the epoch; None: neither."""
    text = text.strip()
    if _EPOCH(text):
        return float(text)
    if not _RFC_3339(text):
        return None
    try:
        # Python knows no leap second: 23:59:60 is read as 23:59:59.
        return datetime.fromisoformat(text.upper().replace(":60", ":59")).timestamp()
    except (ValueError, OverflowError):
        return None


def why_not_now(text: str | None, policy: Policy, now: float) -> str | None:
    """Why a new request with this time is refused; None: it is within the window."""
    name = policy.timestamp_header
    if text is None:
        return f"This operation takes new requests only with the header {name}, the time at which the request was made."
    made = moment(text)
    if made is None:
        return f"The header {name} is not a time: send RFC 3339, or the seconds since 1970."
    if made > now + policy.skew.total_seconds():
        return f"The header {name} is a time in the future: compare the clock, and send seconds, not milliseconds."
    if made < now - (policy.max_age or timedelta(0)).total_seconds():
        return "This request was made too long ago, and it is not known here."
    return None


def unusable(key: str) -> bool:
    """Whether a key that the request carries elsewhere than in Idempotency-Key cannot be one on any route."""
    return not (key.isascii() and key.isprintable() and not key.isspace() and len(key) <= MAX_LENGTH)


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_EPOCH = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?").fullmatch
_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})", re.ASCII
).fullmatch
