"""What a route promises: one frozen value, with the reason for every default.

Owns the settings and their checks. ``judgment.py`` judges a failure; ``problems.py`` has the texts for clients.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Literal, get_args

from oncekey.core.documented import with_fields
from oncekey.core.guards import SENDER_MARK, Bind, KeySource, Verify, check_guards
from oncekey.core.personal_data import Pii
from oncekey.core.policy_headers import NEVER_IN_A_FINGERPRINT, NEVER_STORED, STORED_HEADERS
from oncekey.core.rates import Rate
from oncekey.core.recipe import DEFAULT_HEADERS, Recipe
from oncekey.core.record import DEFAULT_QUARANTINE_SECONDS
from oncekey.core.states import Effects
from oncekey.errors import ConfigurationError

EffectsName = Literal["external", "transactional", "phased", "repeatable"]
InFlight = Literal["conflict", "wait", "accepted"]
OnServerError = Literal["auto", "retry", "replay", "unknown"]
KeySyntax = Literal["any", "strict"]
KeyPer = Literal["tenant", "endpoint"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one route, or the whole app, is protected."""

    effects: EffectsName = "external"
    """Where the handler's effects live. ``external`` is the only value that is safe without knowing the handler: a
    lease that ran out leaves the key ``unknown``, never a second charge."""

    ttl: timedelta = timedelta(hours=24)
    """How long an answer is kept. 24 hours is what Stripe publishes and most clients assume; it must cover the
    longest time in which a client still retries. Under an hour warns: phones come back later than that."""

    lease: timedelta = timedelta(seconds=60)
    """How long an owner holds its key without a renewal. The process renews the lease every third of it while the
    handler lives. So the lease does not limit the handler; it limits how long a crash stays unnoticed. A process that
    is paused for longer (SIGSTOP, a VM that is moved) loses its key."""

    max_run: timedelta | None = None
    """How long a handler may run. None: without a limit, since a cut-off payment is worse than a slow one. After this
    time oncekey stops renewing the lease, and cancels the handler (ASGI, ``async def`` functions). The key is then
    treated as after a crash of the process: ``effects`` decides. A thread cannot be cancelled: a WSGI view and a plain
    function run on (docs/deploys.md)."""

    required: bool = True
    """A request without a key is refused with 400, since a retry of it would run twice. False passes such a request
    on, unprotected, for clients that do not send keys yet (docs/client.md)."""

    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    """The protected methods. RFC 9110: the other methods are idempotent already. They are not protected, unless a route
    lists them."""

    key_syntax: KeySyntax = "any"
    """``any`` takes the quoted RFC 8941 string and the bare form that Stripe made common; ``strict`` the first only."""

    key_format: Literal["uuid"] | None = None
    """None takes any opaque key: the client chooses it, and ULIDs or order numbers are good keys. ``uuid`` takes UUIDs,
    with their dashes or without; two spellings of one UUID are two keys, since keys are compared as bytes."""

    key_min_length: int = 1
    """1, since length is no proof of entropy. Raise it to keep ``1``, ``2``, ``3`` out. A known key is answered
    whatever its form."""

    key_max_length: int = 255
    """Stripe's limit, and the limit of most other APIs."""

    key_per: KeyPer = "tenant"
    """``tenant``: a key is one operation of one tenant, so the same key on another endpoint is a mismatch (Stripe).
    ``endpoint``: endpoints are independent."""

    in_flight: InFlight = "conflict"
    """``conflict`` answers a duplicate at once with 409 + Retry-After and holds nothing; ``wait`` holds the connection
    until the first is done; ``accepted`` answers 202 + Retry-After + the Location of the status resource, for clients
    that poll (docs/background.md). 409 is the default, because a client that takes every 2xx for the result would stop
    at a 202."""

    wait: timedelta = timedelta(seconds=10)
    """With ``in_flight="wait"``: how long a duplicate waits before it gets 409. Keep it below 30 s: common proxies end
    a request after that time."""

    retry_after: timedelta = timedelta(seconds=1)
    """What a 409 tells the client to wait: most handlers are done by then."""

    on_server_error: OnServerError = "auto"
    """What a 5xx or 408 of the endpoint itself means. ``auto`` follows ``effects``: with ``external`` the key becomes
    ``unknown``, since a 504 says nothing about the charge before it; otherwise it is retryable. ``retry``: nothing
    happened. ``replay``: it is stored and replayed, as Stripe v1 does. ``unknown``: the key becomes ``unknown``."""

    retryable_statuses: frozenset[int] = frozenset({425, 429})
    """Statuses by which the endpoint says that it did not process the request: the same request may run again.
    RFC 8470 (Too Early) and RFC 6585 (Too Many Requests) define these two that way. Add 503 if yours means it."""

    fingerprint_fields: tuple[str, ...] | None = None
    """The JSON members that are compared between two requests. None compares the whole body, so that no member is
    forgotten."""

    fingerprint_headers: tuple[str, ...] = DEFAULT_HEADERS
    """The headers that are compared between two requests. If-Match and If-None-Match decide what a write does: a PATCH
    with another ``If-Match`` is another request. Add ``Accept`` if the answer depends on it, or the header that names
    an account. () compares none."""

    max_request_bytes: int = 1024 * 1024
    """A larger body gets 413: a body must be in memory to be hashed, and without a hash it would not be protected."""

    max_response_bytes: int = 1024 * 1024
    """A larger response completes the key as a tombstone: a retry gets the status, and no body."""

    stored_headers: frozenset[str] = STORED_HEADERS
    """The response headers that are stored and replayed."""

    final_client_errors: bool = True
    """A 4xx is stored and replayed: the client must change the request, and a changed request needs a new key."""

    begin_timeout: timedelta = timedelta(seconds=5)
    """How long a request waits for the store before it is refused with 503. It is short, because some clients give up
    after 10 s."""

    quarantine: timedelta = timedelta(minutes=5)
    """How long after the doubt, or the end of the lease, an ``unknown`` may be refuted: what was sent may still be on
    its way. Kept in the key's row, so that upkeep and the command line know it."""

    keep_request: bool = False
    """Keep the request itself beside the key, for ``once.resume`` (docs/phases.md). Only with ``effects="phased"``. Its
    body then lies in the store as it was sent, unencrypted unless there is a keyring (docs/encryption.md), until the
    key is deleted: hence off."""

    key_from: KeySource | None = None
    """Where the key is, for a sender that has an id of its own and sends no Idempotency-Key: ``header("webhook-id")``,
    ``json_field("id")``, or a function of the request and its body that returns the key (docs/webhooks.md)."""

    verify: Verify | None = None
    """Checks the request's signature: a function of the request and its body that returns True if it holds. It runs
    before any look-up. Every other answer, and an exception, is a 401, and nothing is stored."""

    sender: str | None = None
    """Whose keys these are, if ``verify`` tells it: the name of the one sender of this route, such as ``stripe``. Then
    neither ``scope`` nor ``authorize`` is asked, since a webhook has no account of the app."""

    max_age: timedelta | None = None
    """How old a new request may be. It says when it was made, in the header ``timestamp_header``; one that is older,
    from the future or without a time is refused with 400. Known keys are answered at any age (docs/limits.md)."""

    skew: timedelta = timedelta(seconds=60)
    """With ``max_age``: how far the client's clock may be ahead. max_age and skew together may not exceed the ttl."""

    timestamp_header: str = "Idempotency-Timestamp"
    """With ``max_age``: the header with the time of the request, in RFC 3339 or in seconds since the epoch. It is not
    compared between a request and its retry."""

    limit: str | None = None
    """How many new keys a tenant may use: ``100/minute``. More get 429 + Retry-After, and nothing is written. A retry
    of a known key does not count. Routes with the same limit count together (docs/limits.md)."""

    bind: Bind | None = None
    """Whose key it is within its tenant: a function of the request, sync or async, that names the user, the client or
    the device. The key of one is a mismatch for the others, and its status a 404. Never bind to a token, which is
    renewed between a request and its retry. Needs ``OnceKey(bind_secret=…)`` (docs/limits.md)."""

    pii: Pii | None = None
    """What happens to keys that look like an e-mail address, a phone number, a card number or a token: ``warn`` says so
    in the log, ``refuse`` answers 400 to a new one and stores nothing. None does not look: a number may be an
    order's, which only the app knows (docs/limits.md)."""

    # Derived once, since the hot path wants numbers and lower-case names.
    effects_kind: Effects = field(init=False, repr=False, compare=False)
    recipe: Recipe = field(init=False, repr=False, compare=False)
    lease_seconds: float = field(init=False, repr=False, compare=False)
    retention_seconds: float = field(init=False, repr=False, compare=False)
    begin_seconds: float = field(init=False, repr=False, compare=False)
    unusual_headers: frozenset[bytes] = field(init=False, repr=False, compare=False)
    flat: bool = field(init=False, repr=False, compare=False)
    sender_scope: str = field(init=False, repr=False, compare=False)
    rate: Rate | None = field(init=False, repr=False, compare=False)
    guarded: bool = field(init=False, repr=False, compare=False)
    stored_names: dict[bytes, str] = field(init=False, repr=False, compare=False)
    quarantine_seconds: float | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        derive = object.__setattr__  # the dataclass is frozen
        self._check_types()
        derive(self, "methods", frozenset(method.upper() for method in self.methods))
        derive(self, "stored_headers", frozenset(name.lower() for name in self.stored_headers))
        derive(self, "retryable_statuses", frozenset(self.retryable_statuses))
        derive(self, "fingerprint_headers", tuple(name.lower() for name in self.fingerprint_headers))
        self._check()
        derive(self, "recipe", Recipe.of(self.fingerprint_fields, self.fingerprint_headers))
        derive(self, "unusual_headers", self.recipe.headers | {b"transfer-encoding"})
        derive(self, "stored_names", {name.encode(): name for name in self.stored_headers})
        derive(self, "sender_scope", f"{SENDER_MARK}{self.sender}")
        guards = (self.key_from, self.verify, self.max_age, self.bind)
        derive(self, "guarded", any(guard is not None for guard in guards))
        derive(self, "rate", None if self.limit is None else Rate.of(self.limit, "Policy(limit"))
        derive(self, "flat", self.takes_any_key and not self.guarded and self.limit is None and self.pii is None)
        derive(self, "effects_kind", Effects(self.effects))
        derive(self, "lease_seconds", self.lease.total_seconds())
        derive(self, "retention_seconds", self.ttl.total_seconds())
        quarantine = self.quarantine.total_seconds()
        derive(self, "quarantine_seconds", None if quarantine == DEFAULT_QUARANTINE_SECONDS else quarantine)
        # Never longer than the lease: otherwise a request could begin work after its own lease has run out.
        derive(self, "begin_seconds", min(self.begin_timeout, self.lease).total_seconds())

    @property
    def takes_any_key(self) -> bool:
        return self.key_syntax == "any" and self.key_format is None

    @property
    def ttl_is_stated(self) -> bool:
        """Whether ``ttl`` was given, also if it is the default's 24 hours. Messages are kept for longer if it was not.

        By identity, which ``dataclasses.replace`` keeps.
        """
        return self.ttl is not Policy.ttl

    def _check_types(self) -> None:
        for name in (
            "ttl",
            "lease",
            "wait",
            "retry_after",
            "begin_timeout",
            "quarantine",
            "skew",
            "max_run",
            "max_age",
        ):
            value = getattr(self, name)
            if not isinstance(value, timedelta) and not (name in ("max_run", "max_age") and value is None):
                raise ConfigurationError(f"Policy({name}=…): it takes a timedelta, such as timedelta(seconds=30)")
        for name in ("max_request_bytes", "max_response_bytes", "key_min_length", "key_max_length"):
            if type(getattr(self, name)) is not int:
                raise ConfigurationError(f"Policy({name}=…): it takes a whole number")
        if not isinstance(self.keep_request, bool):
            raise ConfigurationError("Policy(keep_request=…): it takes True or False")
        if not isinstance(self.retryable_statuses, Iterable):
            raise ConfigurationError("Policy(retryable_statuses=…): it takes a collection of statuses from 400 to 599")
        for name in ("methods", "stored_headers", "fingerprint_fields", "fingerprint_headers"):
            # A string is also a collection, of its letters: "POST" would protect P, O, S and T.
            if isinstance(getattr(self, name), str):
                raise ConfigurationError(f"Policy({name}=…): it takes a collection of names, not one string")
        if not all(type(status) is int and 400 <= status <= 599 for status in self.retryable_statuses):
            raise ConfigurationError("Policy(retryable_statuses=…): it takes a collection of statuses from 400 to 599")
        if not self.methods:
            raise ConfigurationError("Policy(methods=…): it protects nothing; exempt a route with None instead")
        if self.fingerprint_fields is not None and not self.fingerprint_fields:
            raise ConfigurationError(
                "Policy(fingerprint_fields=()): all bodies would be the same; None takes them whole"
            )

    def _check(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(f"Policy({name}={value!r}): it takes one of {', '.join(map(str, choices))}")
        for item in fields(self):
            value = getattr(self, item.name, None)
            if isinstance(value, timedelta) and value <= timedelta(0):
                raise ConfigurationError(f"Policy({item.name}={value!r}): it must be longer than zero")
            if isinstance(value, timedelta) and value > _LONGEST:
                raise ConfigurationError(f"Policy({item.name}={value!r}): it must be at most a hundred years")
        for name in ("max_request_bytes", "max_response_bytes", "key_min_length"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"Policy({name}={getattr(self, name)!r}): it must be at least 1")
        if not self.key_min_length <= self.key_max_length <= 255:
            raise ConfigurationError(
                f"Policy(key_max_length={self.key_max_length}): it must lie between key_min_length and 255"
            )
        if self.ttl <= self.lease:
            raise ConfigurationError(
                f"Policy(ttl={self.ttl}, lease={self.lease}): answers must be kept longer than a lease lasts"
            )
        if self.keep_request and self.effects != "phased":
            raise ConfigurationError(
                f"Policy(keep_request=True, effects={self.effects!r}): only a phased route can be resumed without its "
                "client, so only effects='phased' keeps the request"
            )
        if forbidden := self.stored_headers & NEVER_STORED:
            raise ConfigurationError(
                f"Policy(stored_headers=…): {', '.join(sorted(forbidden))} would go to every client that has the key"
            )
        if strange := sorted(name for name in self.stored_headers if not _HEADER_NAME(name)):
            raise ConfigurationError(f"Policy(stored_headers=…): {strange[0]!r} is not the name of a header")
        for name in self.fingerprint_headers:
            if name in NEVER_IN_A_FINGERPRINT:
                raise ConfigurationError(f"Policy(fingerprint_headers=…): {name} {NEVER_IN_A_FINGERPRINT[name]}")
            if not _HEADER_NAME(name):
                raise ConfigurationError(f"Policy(fingerprint_headers=…): {name!r} is not the name of a header")
        check_guards(self)
        if self.ttl < timedelta(hours=1):
            warnings.warn(
                f"Policy(ttl={self.ttl}): under one hour, a client that comes back later runs the operation again; "
                "24 hours is usual",
                stacklevel=4,
            )


Policy.__doc__ = with_fields(Policy)  # help(Policy) shows the reasons too

_LONGEST = timedelta(days=36_525)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+").fullmatch
_CHOICES: dict[str, tuple[object, ...]] = {
    "effects": get_args(EffectsName),
    "in_flight": get_args(InFlight),
    "on_server_error": get_args(OnServerError),
    "key_syntax": get_args(KeySyntax),
    "key_per": get_args(KeyPer),
    "key_format": (None, "uuid"),
    "pii": (None, *get_args(Pii)),
}
