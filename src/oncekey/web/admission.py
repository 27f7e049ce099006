"""What a guarded route asks of a request after its body is read and before its key is looked up.

``Policy(verify=…)``, ``Policy(key_from=…)``, ``Policy(max_age=…)``. One function for both kinds of servers; a shell
sends the answer that it returns. A request that is refused here leaves no row. A shell also calls ``Policy(bind=…)``,
which may be async.
"""

from __future__ import annotations

import logging
import time

from oncekey.core.decision import TurnedAway
from oncekey.core.guards import unusable, why_not_now
from oncekey.core.problems import Answer, Situation
from oncekey.engine.request import Request
from oncekey.errors import ConfigurationError, NotAuthenticated
from oncekey.web.exchange import Exchange

_log = logging.getLogger("oncekey")

VERIFY_RAISED = (
    "%s: its verify function raised, so the request was refused with 401. If this is a bad signature, return False "
    "instead; otherwise the function has a bug, and every request of this route is refused. This is said once per route"
)


def check(exchange: Exchange, request: Request, body: bytes) -> Answer | None:
    """Check the signature, then the time, and find the key where the policy says. None: go on.

    A request that is too old is refused by ``Engine.begin``, and only if its key is not known.
    """
    policy = exchange.policy
    if policy.verify is not None:
        refused = _verify(exchange, request, body)
        if refused is not None:
            return refused
    if policy.max_age is not None:
        detail = why_not_now(request.headers.get(policy.timestamp_header), policy, time.time())
        if detail is not None:
            exchange.too_old = TurnedAway(Situation.TIMESTAMP_REFUSED, detail)
    if policy.key_from is not None:
        return _find_key(exchange, request, body)
    return None


def _verify(exchange: Exchange, request: Request, body: bytes) -> Answer | None:
    policy = exchange.policy
    detail = None
    try:
        if policy.verify(request, body) is True:  # type: ignore[misc]
            return None
    except NotAuthenticated as error:
        detail = str(error) or None
    except Exception as error:
        exchange.once.engine.tell_once(exchange.route.operation, VERIFY_RAISED, error=error)
    return exchange.refuse(Situation.SIGNATURE_INVALID, detail)


def _find_key(exchange: Exchange, request: Request, body: bytes) -> Answer | None:
    policy, source = exchange.policy, exchange.policy.key_from
    key = source(request, body)  # type: ignore[misc]
    where = getattr(source, "where", "the request itself")
    if key is None or key == "":
        return exchange.refuse(Situation.KEY_MISSING, f"The key of this operation is in {where}, and it is missing.")
    if not isinstance(key, str):
        raise ConfigurationError(f"Policy(key_from=…): it returned {type(key).__name__}; it must return a str or None")
    if unusable(key, policy):
        limits = f"{policy.key_min_length} to {policy.key_max_length}"
        detail = f"The key of this operation is in {where}, and must have {limits} printable ASCII characters."
        return exchange.refuse(Situation.KEY_MALFORMED, detail)
    exchange.key = key
    return None
