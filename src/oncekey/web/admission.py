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
from oncekey.telemetry import events
from oncekey.web.exchange import Exchange
from oncekey.webhooks.signatures import Check

_log = logging.getLogger("oncekey")

VERIFY_RAISED = (
    "%s: its verify function raised, so the request was refused with 401. If this is a bad signature, return False "
    "instead; otherwise the function has a bug, and every request of this route is refused. This is said once per route"
)

SIGNATURE_REFUSED = {
    "mismatch": "%s refused %s with 401, because the signature does not match the secret. If the sender did not send "
    "it, nothing is wrong. If it did, compare the secret with the one that the sender shows for this endpoint, and "
    "look for a proxy that changes the body (docs/webhooks.md). This is said at most once a minute per route",
    "clock": "%s refused %s with 401: the signature matches the secret, but was made %s. Compare the clock of this "
    "server with the right time. If it is right, the request was held up, or an attacker sent it again "
    "(docs/webhooks.md). This is said at most once a minute per route",
    "unusable": "%s refused %s with 401, because there is no usable signature: %s. If the sender did not send it, "
    "nothing is wrong. If it did, set a secret at the sender, and look for a proxy that removes headers "
    "(docs/webhooks.md). This is said at most once a minute per route",
    "own": "%s refused %s with 401, because its verify function did not return True. If the sender did not send it, "
    "nothing is wrong. If it did, compare the secrets (docs/webhooks.md). This is said at most once a minute per route",
}
"""By the reason that ``Check.why`` gives; ``own``: the app's own verify function, which gives none."""


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
            exchange.refused_if_new = exchange.refused_if_new or TurnedAway(Situation.TIMESTAMP_REFUSED, detail)
    if policy.key_from is not None:
        return _find_key(exchange, request, body)
    return None


def _verify(exchange: Exchange, request: Request, body: bytes) -> Answer | None:
    policy = exchange.policy
    detail, raised = None, False
    try:
        if policy.verify(request, body) is True:  # type: ignore[misc]
            return None
    except NotAuthenticated as error:
        detail = str(error) or None
    except Exception as error:
        raised = True
        exchange.once.engine.tell_once(exchange.route.operation, VERIFY_RAISED, error=error)
    situation = Situation.SIGNATURE_INVALID
    exchange.once.engine.emitter.emit(events.CallerRefused(exchange.route.operation, situation))
    if not raised:
        _tell_refused(exchange, request, body)
    return exchange.refuse(situation, detail)


def _tell_refused(exchange: Exchange, request: Request, body: bytes) -> None:
    """Warn about a refused signature: a wrong secret refuses every delivery, and the sender gives up after days."""
    verify, reason, values = exchange.policy.verify, "own", []
    if isinstance(verify, Check):
        why = verify.why(request, body)
        reason, values = why.reason, [why.detail] if why.detail else []
    exchange.once.engine.tell_paced(exchange.route.operation, SIGNATURE_REFUSED[reason], *values)


def _find_key(exchange: Exchange, request: Request, body: bytes) -> Answer | None:
    policy, source = exchange.policy, exchange.policy.key_from
    key = source(request, body)  # type: ignore[misc]
    where = getattr(source, "where", "the request itself")
    if key is None or key == "":
        return exchange.refuse(Situation.KEY_MISSING, f"The key of this operation is in {where}, and it is missing.")
    if not isinstance(key, str):
        raise ConfigurationError(f"Policy(key_from=…): it returned {type(key).__name__}; it must return a str or None")
    limits = f"{policy.key_min_length} to {policy.key_max_length}"
    detail = f"The key of this operation is in {where}, and must have {limits} printable ASCII characters."
    if unusable(key):
        return exchange.refuse(Situation.KEY_MALFORMED, detail)
    if not policy.key_min_length <= len(key) <= policy.key_max_length:
        exchange.refused_if_new = TurnedAway(Situation.KEY_MALFORMED, detail)
    exchange.key = key
    return None
