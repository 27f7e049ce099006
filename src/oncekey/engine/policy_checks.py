"""Checks of a OnceKey: its arguments, and what a policy needs of it (a setting, or a store that can do it)."""

from __future__ import annotations

import logging
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

UNSIGNED_TIME = (
    "Policy(max_age=…) without verify: the client writes the time of its request itself, so max_age keeps out requests "
    "that lay in a queue for too long, and not an attacker. With Policy(verify=…), a function that checks a signature "
    "over body and time, it does both (docs/limits.md). This is said once"
)


CANNOT_COUNT = (
    "{option} counts the keys of a tenant, and this store cannot: keep the keys in a database with SQL, or {instead}"
)


def check_options(url: Any, policy: Any, profile: Any, scope: Any, authorize: Any, grace: float) -> None:
    """Raise ConfigurationError for an argument of a OnceKey that cannot be one."""
    if not isinstance(url, str) and not hasattr(url, "reserve"):
        raise ConfigurationError(f"OnceKey(url): it takes the URL of a store, one of {KNOWN}, or a store")
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigurationError("OnceKey(policy=…): it takes a Policy, such as Policy(effects='repeatable')")
    if profile not in ("ietf", "stripe", "governance"):
        raise ConfigurationError(f"OnceKey(profile={profile!r}): it takes ietf, stripe or governance")
    if not (isinstance(scope, SingleTenant) or callable(scope)):
        raise ConfigurationError("OnceKey(scope=…): it takes a function of the request, or SINGLE_TENANT")
    if authorize is not None and not callable(authorize):
        raise ConfigurationError("OnceKey(authorize=…): it takes a function of the request and the operation's name")
    if grace < 0:
        raise ConfigurationError(f"OnceKey(grace={grace}): it takes 0 seconds or more")


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
    if policy.max_age is not None and policy.verify is None and not once.told_unsigned_time:
        once.told_unsigned_time = True
        _log.warning(UNSIGNED_TIME)
