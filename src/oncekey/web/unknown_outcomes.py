"""Logs, once per route, that an attempt left a key whose outcome is unknown.

The log line has what happened, the traceback, the masked key, the declaration that would have avoided it, and the
command that settles this key. The text depends on the reason: external effects, one effect of a phased one that may
not be repeated, or the handler's own word.
"""

from __future__ import annotations

import shlex
from functools import partial

from oncekey.core.by_operation import worded
from oncekey.core.record import ENDPOINT_MARK
from oncekey.core.states import Effects
from oncekey.engine.engine import Engine
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.engine.operation import Operation
from oncekey.telemetry.redaction import redact

_REFUSED = "%s left a key whose outcome is unknown, %s: %s{reason}. Its {{again}} are refused until it is settled. "
_ONCE = " (docs/endings.md). {store}This is said once per {unit}"
_STORE = "The commands take --store URL, or ONCEKEY_STORE. "
_VERDICTS = (
    "Find out whether it happened. If it did: `%s`, with the {answer} that {again} get. If it did not: `%s`, after the "
    "quarantine of the {unit}. A resolver does it without you (docs/reconciliation.md). "
)

_ANYWHERE = (
    _REFUSED.format(reason=", and its effects may be anywhere (effects='external')")
    + _VERDICTS
    + "To let {again} run, declare the {unit} %s'phased' or 'repeatable', or say that nothing happened "
    "with `raise NotExecuted` or op.not_executed()" + _ONCE
)

_BY_ITS_WORD = (
    _REFUSED.format(reason="") + _VERDICTS + "`raise OutcomeUnknown` and on_server_error='unknown' ask for this: "
    "leave them out where it may run again" + _ONCE
)

_EFFECT = (
    _REFUSED.format(reason=" while effect '%s', which may not be repeated, had not said how it ended")
    + "Ask the provider of that effect; `{command} keys show` has its downstream key. If it happened: `%s`, with what "
    "the effect returns, and the next attempt goes on after it. If it did not: `%s`, after the quarantine of the "
    "{unit}. A resolver does it without you (docs/reconciliation.md). If the provider honours idempotency "
    "keys, give it op.downstream_key('%s') and declare the effect repeatable=True: then the next attempt calls it "
    "again" + _ONCE
)

_CANCELLED = (
    "its {work} was cancelled while it ran, as asyncio.wait_for and asyncio.timeout around the call do (put time-outs "
    "around the calls inside of it instead, and let it say what they mean)"
)
_RESPONSE = ("--confirm", "--status", "201", "--body", "JSON")
_RESULT = ("--confirm", "--status", "200", "--body", "JSON")


def tell(engine: Engine, operation: Operation, status: int | None, error: BaseException | None) -> None:
    """Log it once per route. ``status``: of the response that is about to be sent; ``error``: what was raised."""
    record = operation.record
    scope = _pasteable(engine, record.scope)
    key, happened = redact(operation.key), _happened(operation, status)
    resolve = partial(resolve_command, scope, record.key, command=engine.command)
    if operation.has_open_effect and operation.steps is not None and operation.steps.open_effects:
        effect = operation.steps.open_effects[-1]
        did = resolve("--happened", effect, "--result", "JSON")
        did_not = resolve("--not-happened", effect)
        said = key, happened, effect, did, did_not, effect
        engine.tell_once(operation.name, _with_command(engine, _EFFECT), *said, error=error)
        return
    anywhere = operation.policy.effects_kind is Effects.EXTERNAL and operation.word != "outcome_unknown"
    words = _ANYWHERE if anywhere else _BY_ITS_WORD
    did = resolve(*(_RESPONSE if operation.is_request else _RESULT))
    did_not = resolve("--refute")
    values = [key, happened, did, did_not]
    if anywhere:
        values.append("" if engine.transactions is None else "'transactional', ")
    engine.tell_once(operation.name, _with_command(engine, words), *values, error=error)


def _with_command(engine: Engine, text: str) -> str:
    """The text with the command line of this app. That of a framework knows the store."""
    return text.replace("{command}", engine.command).replace("{store}", _STORE if engine.command == "oncekey" else "")


def _pasteable(engine: Engine, scope: str) -> str:
    """The scope without an endpoint that has parameters of a path."""
    tenant, endpoint = engine.emitter.warnings.pasteable(scope)
    return tenant if endpoint is None else f"{tenant}{ENDPOINT_MARK}{endpoint}"


def resolve_command(scope: str, key: str, *verdict: str, command: str = "oncekey") -> str:
    """``oncekey keys resolve`` for this key, as an operator runs it. JSON and TEXT are the operator's to write."""
    return f"{command} {shlex.join([*_command('resolve', scope, key), *verdict, '--why', 'TEXT'])}"


def show_command(scope: str, key: str) -> str:
    """``oncekey keys show`` for this key, as an operator runs it."""
    return f"oncekey {shlex.join(_command('show', scope, key))}"


def _command(verb: str, scope: str, key: str) -> list[str]:
    words = ["keys", verb, redact(key)]
    tenant, mark, endpoint = scope.partition(ENDPOINT_MARK)
    if tenant != SINGLE_SCOPE:
        words += ["--scope", tenant]
    if mark:
        words += ["--endpoint", endpoint]
    return words


def _happened(operation: Operation, status: int | None) -> str:
    seen = operation.evidence
    if seen.raised:
        happened = f"its {{work}} raised {seen.raised_name}"
    elif seen.raised_name == "CancelledError" and not operation.is_request:
        happened = _CANCELLED
    elif seen.raised_name:
        happened = f"{seen.raised_name} was raised around its {{work}}"
    elif seen.returned is not None and seen.returned == status:
        happened = f"its {{work}} answered {status}"
    elif status is None:
        happened = "its response broke off"
    else:
        happened = f"{status} was answered in its handler's place"
    return worded(happened, operation.name)
