"""Headers that a policy stores, never stores, or refuses in a fingerprint; each group with its reason."""

from __future__ import annotations

STORED_HEADERS: frozenset[str] = frozenset(
    {
        "content-type",
        "content-language",
        "content-disposition",
        "content-encoding",
        "content-location",
        "location",
        "link",
        "etag",
        "last-modified",
        "cache-control",
        "expires",
        "vary",
        "retry-after",
        "allow",
        "deprecation",
        "sunset",
    }
)
"""Headers that describe the result. An allow-list: every client with the key gets the stored headers, so headers of one
connection, one session or one moment (Set-Cookie, Authorization, Date, hop-by-hop) must not be stored."""

NEVER_STORED: frozenset[str] = frozenset(
    {
        "set-cookie",
        "set-cookie2",
        "authorization",
        "proxy-authorization",
        "authentication-info",
        "proxy-authenticate",
        "date",
        "server",
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "content-length",
        "idempotency-key",
        "idempotency-expires",
        "idempotency-replayed",
        "idempotent-replayed",
    }
)
"""Refused also if a route names them: secrets, hop-by-hop headers, and headers that every answer computes anew."""

_EVERY_TRY = "differs from one try to the next, so every retry would be refused"
_CREDENTIAL = "is a credential, which is renewed between a request and its retry: let the scope function read it"
_ON_THE_WAY = "is set on the way to this app, and a retry may take another way"
NEVER_IN_A_FINGERPRINT: dict[str, str] = {
    "idempotency-key": "is the key itself",
    "content-type": "is part of every fingerprint",
    "content-length": "says no more than the body, which is part of every fingerprint",
    **dict.fromkeys(
        [
            *("date", "traceparent", "tracestate", "baggage", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid"),
            *("sentry-trace", "x-request-id", "x-correlation-id", "request-id", "correlation-id", "x-amzn-trace-id"),
            *("x-cloud-trace-context", "cf-ray", "amz-sdk-request", "x-stainless-retry-count"),
            *("signature", "signature-input", "stripe-signature", "x-hub-signature-256", "dpop"),
        ],
        _EVERY_TRY,
    ),
    **dict.fromkeys(["authorization", "proxy-authorization", "cookie"], _CREDENTIAL),
    **dict.fromkeys(
        [
            *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "accept-encoding"),
            *("via", "forwarded", "host", "x-real-ip"),
            *("x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-forwarded-proto"),
        ],
        _ON_THE_WAY,
    ),
}
"""Headers that ``fingerprint_headers`` refuses, each with the reason."""
