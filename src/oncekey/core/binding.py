"""Keys that are bound to a user, a client or a device: ``Policy(bind=…)``.

A row keeps a keyed hash of the binding in the text of its recipe, ``{"bind":"…","headers":[…]}``. So the look-up stays
(scope, key), no store needs a column for it, and a version of oncekey that does not know bindings answers 503 for such
a row, as for every recipe that it does not know. The hash covers scope and key, so two rows of one user share nothing
that a reader of the database could see.

The hash needs a secret: the names of users can be guessed. While the secret is replaced there are several. The first
one makes the hash of new rows, and a row is compared under each.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from oncekey.core.recipe import DEFAULT_HEADERS
from oncekey.errors import ConfigurationError

MIN_SECRET_BYTES = 16
_HASH_BYTES = 16
_MAKE_ONE = "Make one with python -c 'import secrets; print(secrets.token_hex(32))', and give the same to all processes"

BindSecrets = str | bytes | Iterable[str | bytes]


def secrets_of(given: BindSecrets | None) -> tuple[bytes, ...]:
    """The secrets of ``OnceKey(bind_secret=…)``."""
    if given is None:
        return ()
    several: Any = given  # the app's settings have no types
    texts = list(several) if isinstance(several, Iterable) and not isinstance(several, str | bytes) else [several]
    if not all(isinstance(text, str | bytes) for text in texts):
        raise ConfigurationError("OnceKey(bind_secret=…): it takes a text or bytes, or the new and the old one")
    found = tuple(text.encode() if isinstance(text, str) else text for text in texts)
    if not found or min(map(len, found)) < MIN_SECRET_BYTES:
        raise ConfigurationError(f"OnceKey(bind_secret=…): it needs {MIN_SECRET_BYTES} bytes or more. {_MAKE_ONE}")
    return found


def need_secret() -> ConfigurationError:
    return ConfigurationError(
        f"Policy(bind=…) keeps a keyed hash, and needs OnceKey(bind_secret=…) for it. {_MAKE_ONE} of the app"
    )


def hashes(secrets: Sequence[bytes], scope: str, key: str, binding: object) -> tuple[str, ...]:
    """The hash of a binding under each secret, the one for new rows first."""
    if not isinstance(binding, str) or not binding:
        raise ConfigurationError(
            f"the bind function returned {type(binding).__name__}: it must return a text that names the user, the "
            "client or the device, or raise NotAuthenticated"
        )
    parts = [part.encode("utf-8", "surrogatepass") for part in (scope, key, binding)]
    message = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return tuple(hmac.digest(secret, message, "sha256")[:_HASH_BYTES].hex() for secret in secrets)


def bound_recipe(text: str | None, hashed: str) -> str:
    """The recipe of a row, with its binding. ``text``: the recipe without it."""
    document: dict[str, Any] = {"headers": sorted(DEFAULT_HEADERS)} if text is None else json.loads(text)
    return json.dumps({"bind": hashed, **document}, separators=(",", ":"))


def binding_of(text: str | None) -> str | None:
    """The hash in the recipe of a row; None: the row is not bound."""
    if text is None or '"bind"' not in text:
        return None
    try:
        document: Any = orjson.loads(text)
    except ValueError:
        return None
    found = document.get("bind") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def is_bound_to(text: str | None, bindings: Sequence[str]) -> bool:
    """Whether a request with these hashes may use a row with this recipe."""
    bound = binding_of(text)
    return bound is None or any(hmac.compare_digest(bound.encode(), each.encode()) for each in bindings)
