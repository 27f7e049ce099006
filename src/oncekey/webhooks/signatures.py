"""Checks of signatures, for ``Policy(verify=…)``: by the sender's own library if there is one, otherwise by HMAC.

Each takes several secrets, so that a secret can be replaced: pass the new and the old one until the sender has changed
to the new one. A signature holds if it holds under one of them.

Each is a :class:`Check`, which also says why a signature was refused. Only the log gets the reason, not the sender.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import importlib
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from oncekey.core.values import value
from oncekey.engine.request import Request
from oncekey.errors import ConfigurationError

Secrets = str | Iterable[str]
Verifier = Callable[[Request, bytes], bool]

TOLERANCE = timedelta(minutes=5)
"""How far the time in a signature may be from now: what Stripe and Standard Webhooks say."""


Reason = Literal["unusable", "mismatch", "clock"]


@value
class Why:
    """Why a signature was refused. ``detail`` is for the log."""

    reason: Reason
    detail: str


_MISMATCH = Why("mismatch", "")


class Check:
    """A verifier: ``holds`` decides, and ``explain`` says why not. ``signs_time``: whether the time of the request is
    part of what is signed. Otherwise an attacker can send a recorded request again with a new time."""

    def __init__(self, holds: Verifier, explain: Callable[[Request, bytes], Why], *, signs_time: bool) -> None:
        self._holds = holds
        self._explain = explain
        self.signs_time = signs_time

    def __call__(self, request: Request, body: bytes) -> bool:
        return self._holds(request, body)

    def why(self, request: Request, body: bytes) -> Why:
        """For a request that it refused."""
        try:
            return self._explain(request, body)
        except Exception:  # noqa: BLE001 - headers that no sender writes
            return _MISMATCH


def hmac_sha256(
    name: str, secret: Secrets, *, encoding: Literal["hex", "base64"] = "hex", prefix: str = ""
) -> Verifier:
    """The header ``name`` has the HMAC-SHA-256 of the body: after ``prefix``, in hexadecimal digits or base64. It
    covers the body alone, and no header: neither the time of the request nor an id that is in a header."""
    keys = [text.encode() for text in secrets_of(secret)]
    if encoding not in ("hex", "base64"):
        raise ConfigurationError(f"hmac_sha256(encoding={encoding!r}): it takes 'hex' or 'base64'")

    def verify(request: Request, body: bytes) -> bool:
        signature = _decoded(request.headers.get(name, "").strip(), prefix, encoding)
        if signature is None:
            return False
        return _any([hmac.compare_digest(hmac.digest(key, body, "sha256"), signature) for key in keys])

    def explain(request: Request, body: bytes) -> Why:  # noqa: ARG001
        sent = request.headers.get(name, "").strip()
        if not sent:
            return Why("unusable", f"it has no header {name}")
        if _decoded(sent, prefix, encoding) is None:
            return Why("unusable", f"its header {name} is not of the form {prefix}…, in {encoding}")
        return _MISMATCH

    return Check(verify, explain, signs_time=False)


def _decoded(sent: str, prefix: str, encoding: str) -> bytes | None:
    if not sent.startswith(prefix):
        return None
    text = sent.removeprefix(prefix)
    try:
        return bytes.fromhex(text) if encoding == "hex" else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None


def stripe_signature(secret: Secrets, tolerance: timedelta = TOLERANCE) -> Verifier:
    """``Stripe-Signature``, by Stripe's library."""
    signature = _library("stripe", "stripe").WebhookSignature
    keys, seconds = secrets_of(secret), tolerance.total_seconds()

    def verify(request: Request, body: bytes) -> bool:
        sent = request.headers.get("stripe-signature", "")
        holds = [_returns(signature.verify_header, body, sent, key, seconds) for key in keys]
        # The library refuses what is too old, but not what is from the future.
        return _any(holds) and _time_of(sent) <= time.time() + seconds

    def explain(request: Request, body: bytes) -> Why:
        sent = request.headers.get("stripe-signature", "")
        if not sent:
            return Why("unusable", "it has no header Stripe-Signature")
        if _any([_returns(signature.verify_header, body, sent, key, None) for key in keys]):  # at any time
            return _outside(_time_of(sent), seconds)
        return _MISMATCH

    return Check(verify, explain, signs_time=True)


def standard_signature(secret: Secrets) -> Verifier:
    """``webhook-signature`` of Standard Webhooks, by their library, which allows five minutes."""
    library, keys = _library("standardwebhooks", "webhooks"), secrets_of(secret)
    try:
        hooks = [library.Webhook(text) for text in keys]
    except Exception as error:
        raise ConfigurationError(
            "standard_webhooks(secret): it takes the secret as the sender shows it, in base64, with or without whsec_"
        ) from error

    def verify(request: Request, body: bytes) -> bool:
        headers = dict(request.headers)
        return _any([_returns(hook.verify, body, headers) for hook in hooks])

    def explain(request: Request, body: bytes) -> Why:
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        values = [request.headers.get(name, "") for name in names]
        if missing := [name for name, sent in zip(names, values, strict=True) if not sent]:
            return Why("unusable", f"it has no header {' and no header '.join(missing)}")
        event, seconds, sent = values[0], float(values[1]), values[2].split()
        signed = [hook.sign(event, datetime.fromtimestamp(seconds, UTC), body.decode()) for hook in hooks]
        if not _any([hmac.compare_digest(ours, theirs) for ours in signed for theirs in sent]):
            return _MISMATCH
        if abs(time.time() - seconds) < TOLERANCE.total_seconds():
            return Why("unusable", "its signature matches, but its body is not JSON")
        return _outside(seconds, TOLERANCE.total_seconds())

    return Check(verify, explain, signs_time=True)


def secrets_of(secret: Secrets) -> list[str]:
    """The secrets as a list. An empty one would let every sender sign."""
    given: Any = secret
    found: list[Any] = [given] if given is None or isinstance(given, str) else list(given)
    if not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise ConfigurationError(
            "the secret of a webhook is missing or empty: is the variable of the environment set? It takes a text, or "
            "a list of texts while a secret is replaced"
        )
    return found


def _any(holds: list[bool]) -> bool:
    """True if one holds. All were computed, so the time does not say which secret it was."""
    return any(holds)


def _returns(check: Callable[..., object], *args: Any) -> bool:
    """Whether a library's check returns. Each raises for a bad signature, and ValueErrors for bad headers."""
    try:
        check(*args)
    except Exception:  # noqa: BLE001 - whatever it raised, the signature was not shown to hold
        return False
    return True


def _time_of(header: str) -> float:
    """The time in a Stripe-Signature whose signature holds."""
    return next(float(item[2:]) for item in header.split(",") if item.startswith("t="))


def _outside(signed_at: float, allowed: float) -> Why:
    age = time.time() - signed_at
    when = f"{age:,.0f} s ago" if age >= 0 else f"{-age:,.0f} s in the future"
    return Why("clock", f"{when}, and {allowed:,.0f} s are allowed")


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"this needs the sender's library {module!r}: pip install 'oncekey[{extra}]'"
        ) from error
