"""What a policy asks of a request beside its key: where the key is, and whether its signature holds.

Owns the types and the checks of these options. Such a route leaves the flat way (``web/asgi.py``) at its head, and
``web/admission.py`` asks what the policy says. Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from oncekey.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.core.policy import Policy

KeySource = Callable[[Any, bytes], "str | None"]
"""A function of the request and its body that returns the key. None or an empty text: the request has none."""
Verify = Callable[[Any, bytes], object]
"""A function of the request and its body. True: the signature holds. Everything else refuses the request."""

SENDER_MARK: Final = "sender:"
_MAX_SENDER_LENGTH = 100


def check_guards(policy: Policy) -> None:
    """Raise ConfigurationError for options that cannot work, alone or together."""
    for name in ("key_from", "verify"):
        function = getattr(policy, name)
        if function is None:
            continue
        if not callable(function):
            raise ConfigurationError(f"Policy({name}=…): it takes a function of the request and its body")
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
    sender: Any = policy.sender
    if sender is None:
        return
    if not isinstance(sender, str) or not (sender.isprintable() and 1 <= len(sender) <= _MAX_SENDER_LENGTH):
        raise ConfigurationError(f"Policy(sender=…): it takes a name of 1 to {_MAX_SENDER_LENGTH} printable characters")
    if policy.verify is None:
        raise ConfigurationError(
            f"Policy(sender={sender!r}): without the scope function, only a signature tells who sends: pass verify too"
        )


def unusable(key: str, policy: Policy) -> bool:
    """Whether a key that the request carries elsewhere than in Idempotency-Key cannot be one."""
    return not (
        key.isascii()
        and key.isprintable()
        and not key.isspace()
        and policy.key_min_length <= len(key) <= policy.key_max_length
    )


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
