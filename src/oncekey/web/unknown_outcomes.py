"""Logs, once per route, that an attempt left a key whose outcome is unknown.

The log line has what happened, the traceback, the masked key, the declaration that would have avoided it, and the
command that settles this key. The text depends on the reason: external effects, one effect of a phased route that may
not be repeated, or the handler's own word.
"""

from __future__ import annotations

import shlex

from oncekey.core.states import Effects
from oncekey.engine.engine import Engine
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.engine.operation import Operation
from oncekey.telemetry.redaction import redact

_REFUSED = "%s left a key whose outcome is unknown, %s: %s{reason}. Its retries are refused until it is settled. "
_ONCE = " (docs/endings.md). The commands take --store URL, or ONCEKEY_STORE. This is said once per route"
_WITH_RESPONSE = (
    "Find out whether it happened. If it did: `%s --confirm --status 201 --body JSON`, with the response that retries "
    "get. If it did not: `%s --refute`, after the route's quarantine. A resolver does it without you "
    "(docs/reconciliation.md). "
)

_ANYWHERE = (
    _REFUSED.format(reason=", and its effects may be anywhere (effects='external')")
    + _WITH_RESPONSE
    + "To let retries run, declare the route 'transactional', 'phased' or 'repeatable', or say that nothing happened "
    "with `raise NotExecuted` or op.not_executed()" + _ONCE
)

_BY_ITS_WORD = (
    _REFUSED.format(reason="") + _WITH_RESPONSE + "`raise OutcomeUnknown` and on_server_error='unknown' ask for this: "
    "leave them out where a retry may run" + _ONCE
)

_EFFECT = (
    _REFUSED.format(reason=" while effect '%s', which may not be repeated, had not said how it ended")
    + "Ask the provider of that effect; `oncekey keys show` has its downstream key. If it happened: `%s --happened %s "
    "--result JSON`, with what the effect returns, and the next attempt goes on after it. If it did not: `%s "
    "--not-happened %s`, after the route's quarantine. A resolver does it without you (docs/reconciliation.md). If the "
    "provider honours idempotency "
    "keys, give it op.downstream_key('%s') and declare the effect repeatable=True: then retries call it again" + _ONCE
)


def tell(engine: Engine, operation: Operation, status: int | None, error: BaseException | None) -> None:
    """Log it once per route. ``status``: of the response that is about to be sent; ``error``: what was raised."""
    key, happened, command = redact(operation.key), _happened(operation, status), resolve_command(operation)
    if operation.has_open_effect and operation.steps is not None and operation.steps.open_effects:
        effect = operation.steps.open_effects[-1]
        word = shlex.quote(effect)
        more = (effect, command, word, command, word, effect)
        engine.tell_once(operation.name, _EFFECT, key, happened, *more, error=error)
        return
    anywhere = operation.policy.effects_kind is Effects.EXTERNAL and operation.word != "outcome_unknown"
    words = _ANYWHERE if anywhere else _BY_ITS_WORD
    engine.tell_once(operation.name, words, key, happened, command, command, error=error)


def resolve_command(operation: Operation) -> str:
    """``oncekey keys resolve`` with the options that name this key; the operator adds what happened."""
    words = ["oncekey", "keys", "resolve", redact(operation.key)]
    if operation.scope != SINGLE_SCOPE:
        words += ["--scope", operation.scope]
    if operation.policy.key_per == "endpoint":
        words += ["--endpoint", operation.name]
    return shlex.join(words)


def _happened(operation: Operation, status: int | None) -> str:
    seen = operation.evidence
    if seen.raised:
        return f"its handler raised {seen.raised_name}"
    if seen.raised_name:
        return f"{seen.raised_name} was raised around its handler"
    if seen.returned is not None and seen.returned == status:
        return f"its handler answered {status}"
    if status is None:
        return "its response broke off"
    return f"{status} was answered in its handler's place"
