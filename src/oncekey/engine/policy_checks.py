"""Checks of a OnceKey: its arguments, and what a policy needs of it (a setting, or a store that can do it)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from oncekey.core import binding
from oncekey.core.policy import Policy
from oncekey.core.states import Effects
from oncekey.engine.request import SingleTenant
from oncekey.errors import ConfigurationError
from oncekey.limits import ELSEWHERE, Limits
from oncekey.stores.api import Tallies
from oncekey.stores.registry import KNOWN, WITH_TRANSACTIONS

if TYPE_CHECKING:
    from oncekey.engine.once import OnceKey

_log = logging.getLogger("oncekey")

MAX_SCOPE_LENGTH = 255
UNSIGNED_TIME = (
    "the time of a request is not signed (%s), so its sender chooses it: max_age keeps out requests that lay in a "
    "queue for too long, and not an attacker who sends a recorded one again. With a Policy(verify=…) that checks a "
    "signature over body and time, it does both (docs/limits.md)"
)


CANNOT_COUNT = (
    "{option} counts the keys of a tenant, and this store cannot: keep the keys in a database with SQL, or {instead}"
)


def check_options(url: Any, policy: Any, profile: Any, scope: Any, authorize: Any, on_event: Any) -> None:
    """Raise ConfigurationError for an argument of a OnceKey that cannot be one."""
    if not isinstance(url, str) and not hasattr(url, "reserve"):
        raise ConfigurationError(f"OnceKey(url): it takes the URL of a store, one of {KNOWN}, or a store")
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigurationError("OnceKey(policy=…): it takes a Policy, such as Policy(effects='repeatable')")
    if profile not in ("ietf", "stripe", "governance"):
        raise ConfigurationError(f"OnceKey(profile={profile!r}): it takes 'ietf', 'stripe' or 'governance'")
    if not (isinstance(scope, SingleTenant) or callable(scope)):
        raise ConfigurationError("OnceKey(scope=…): it takes a function of the request, or SINGLE_TENANT")
    if authorize is not None and not callable(authorize):
        raise ConfigurationError("OnceKey(authorize=…): it takes a function of the request and the operation's name")
    if on_event is not None and not callable(on_event):
        raise ConfigurationError("OnceKey(on_event=…): it takes a function of the event")


def check_values(**given: Any) -> None:
    """As ``check_options``, for options that take a plain value. A secret is not repeated in the message."""
    for name, value in given.items():
        is_one, takes = _VALUES[name]
        if not is_one(value):
            shown = "…" if "secret" in name or name == "cache" else repr(value)
            raise ConfigurationError(f"OnceKey({name}={shown}): it takes {takes}")


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


def _is_address(given: Any) -> bool:
    return isinstance(given, str) and given.startswith(("/", "https://", "http://"))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "docs_url": (
        lambda given: given is None or isinstance(given, str),
        "the address of a page, such as 'https://example.com/docs/keys'",
    ),
    "status_url": (
        lambda given: given is None or _is_address(given),
        "the address of the status resource as clients reach it, such as '/idempotency'",
    ),
    "migrate": (lambda given: isinstance(given, bool), "True or False"),
    "cache": (lambda given: given is None or isinstance(given, str), "the URL of a cache, such as 'redis://host'"),
    "cache_secret": (
        lambda given: given is None or isinstance(given, str | bytes),
        "a text or bytes, the same in all processes of the app",
    ),
    "cache_ttl": (lambda given: _is_number(given) and given > 0, "a number of seconds, more than 0"),
    "max_queued": (lambda given: type(given) is int and given > 0, "a whole number, 1 or more"),
    "grace": (lambda given: _is_number(given) and given >= 0, "a number of seconds, 0 or more"),
}
"""By option: whether a value can be one, and what to write."""


def check_tenant(tenant: object) -> None:
    """Raise ConfigurationError for what the app's scope function returned, if it cannot name a tenant. The function's
    annotations do not ensure that."""
    if isinstance(tenant, str) and 1 <= len(tenant) <= MAX_SCOPE_LENGTH and tenant.isprintable():
        return
    if isinstance(tenant, str):
        got, instead = f"a text of {len(tenant)} characters", ""
    elif tenant is None:
        got, instead = "None", ", or raise NotAuthenticated"
    else:
        got, instead = f"a value of the type {type(tenant).__name__}", ". Write str(…) around it"
    raise ConfigurationError(
        f"the scope function returned {got}: it must return 1 to {MAX_SCOPE_LENGTH} printable characters that name the "
        f"tenant{instead}"
    )


def checked_cap(given: Any) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise ConfigurationError(f"OnceKey(max_active_keys={given!r}): it takes a whole number, 1 or more")
    number: int | None = given
    return number


def checked_limits(given: Any) -> Limits:
    if given is not None and not isinstance(given, Limits):
        raise ConfigurationError(
            "OnceKey(limits=…): it takes a Limits of oncekey.limits, such as Limits(lookups='60/minute')"
        )
    return given or Limits()


def check_limits(once: OnceKey) -> None:
    """Raise ConfigurationError for limits that the store of this OnceKey cannot count."""
    if isinstance(once.store, Tallies):
        return
    if once.max_active_keys is not None:
        instead = "bound new keys with Policy(limit='100/minute') instead"
        raise ConfigurationError(CANNOT_COUNT.format(option="OnceKey(max_active_keys=…)", instead=instead))
    if once.limiter.counts_in_store:
        raise ConfigurationError(CANNOT_COUNT.format(option="Limits(storage='store')", instead=ELSEWHERE))


def check_policy(policy: Policy | None, once: OnceKey) -> None:
    """Raise ConfigurationError for a policy that needs a setting or a store which this OnceKey does not have."""
    if policy is None:
        return
    # memory:// is for tests, and may stand in for a store that shares transactions.
    shared = once.engine.transactions is not None or once.store.capabilities.embedded
    if policy.effects_kind is Effects.TRANSACTIONAL and not shared:
        raise ConfigurationError(
            "effects='transactional' stores the response in the transaction of the handler, and this store has "
            f"none to share: keep the keys in the app's own database, one of {WITH_TRANSACTIONS}, or declare "
            "effects='phased' or 'repeatable'"
        )
    # A 202 without a Location gives the client no address at which it can ask for the result.
    if policy.in_flight == "accepted" and once.status_url is None:
        raise ConfigurationError(
            "Policy(in_flight='accepted') sends clients to the status resource, and oncekey does not know where it "
            "is: mount it, as in app.mount('/idempotency', status_app(once)), and say "
            "OnceKey(status_url='/idempotency')"
        )
    if policy.rate is not None:
        once.limiter.open()
    if policy.bind is not None and not once.bind_secrets:
        raise binding.need_secret()


def warn_of_unsigned_time(policies: Mapping[str, Policy | None]) -> None:
    """Log one line for those of these routes or functions whose ``max_age`` reads a time that is not signed. Of an
    app's own ``verify`` function oncekey cannot know it."""
    found = []
    for name, policy in policies.items():
        if policy is not None and policy.max_age is not None:
            if policy.verify is None:
                found.append(f"{name}: max_age without verify")
            elif not getattr(policy.verify, "signs_time", True):
                found.append(f"{name}: max_age with a signature over the body alone")
    if found:
        _log.warning(UNSIGNED_TIME, "; ".join(found))
