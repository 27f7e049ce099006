"""``oncekey keys``: shows keys, settles unknown outcomes, deletes final keys.

``cli/prompts.py`` asks the questions, ``cli/output.py`` masks keys; ``oncekey.admin.changes`` makes or refuses a
move.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from oncekey.admin import changes
from oncekey.admin.key_view import look, not_found
from oncekey.admin.masks import find_key
from oncekey.cli.cache_mark import NAME_THE_CACHE, CacheUrl, cache_json, cache_words
from oncekey.cli.descriptions import KEY_COLUMNS, key_row, print_sight, record_json, response_json, sight_json
from oncekey.cli.given import given_response, happened_verdict
from oncekey.cli.keyring import new_key
from oncekey.cli.options import AsJson, StoreUrl, named, print_json
from oncekey.cli.output import key_shown, table
from oncekey.cli.prompts import (
    SINGLE,
    AnyScope,
    Endpoint,
    Limit,
    Reveal,
    Scope,
    Who,
    Why,
    Yes,
    full_scope,
    in_use,
    seconds,
    sure,
)
from oncekey.cli.re_encrypt import EPILOG, re_encrypt
from oncekey.core.audit import Audit
from oncekey.core.by_operation import delivered_again
from oncekey.core.doubts import words_of
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Event, State
from oncekey.core.steps import STARTED, Step
from oncekey.stores.api import Store
from oncekey.stores.cache.client import Identified
from oncekey.stores.registry import cache_client

_CODES = "Exit codes: 0 done, 1 not there, refused or the store is in trouble, 2 a wrong option."
RUNS_AGAIN = frozenset({Event.REFUTE, Event.HAPPENED, Event.NOT_HAPPENED})
"""The verdicts after which a retry runs the handler."""

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The key, as the client sent it, or masked, as the log has it.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Look at keys, settle unknown outcomes, make room.", no_args_is_help=True)
    group.command("list", epilog=_CODES)(list_keys)
    group.command("show", epilog=_CODES)(show)
    group.command("resolve", epilog=_CODES)(resolve)
    group.command("forget", epilog=_CODES)(forget)
    group.command("new-key")(new_key)
    group.command("re-encrypt", epilog=EPILOG)(re_encrypt)
    app.add_typer(group, name="keys")


def list_keys(
    store: StoreUrl = "",
    state: Annotated[State | None, typer.Option(help="Only those in this state.")] = None,
    scope: Annotated[str | None, typer.Option(metavar="SCOPE", help="Only those of this scope.")] = None,
    endpoint: Endpoint = None,
    operation: Annotated[str | None, typer.Option(help="Only those of this route, such as 'POST /payments'.")] = None,
    older_than: Annotated[
        float | None, typer.Option(parser=seconds, metavar="TIME", help="Only those created so long ago: 45s, 1h, 7d.")
    ] = None,
    limit: Limit = 100,
    reveal: Reveal = False,
    as_json: AsJson = False,
) -> None:
    """List keys, in the order of scope and key.

    Keys are masked: a few letters and a hash that tells them apart. --reveal shows them.
    """
    wanted = None if scope is None else full_scope(scope, endpoint)
    with in_use(store) as source:
        found = source.listing(state, wanted, operation, older_than, limit + 1)
    records, more = found[:limit], len(found) > limit
    if as_json:
        print_json({"keys": [record_json(record, reveal) for record in records], "more": more})
        return
    if not records:
        print("no such keys")
        return
    table(KEY_COLUMNS, [key_row(record, reveal) for record in records])
    if more:
        print(f"oncekey: these are the first {limit:,}; --limit shows more", file=sys.stderr)


def show(
    key: Key,
    store: StoreUrl = "",
    scope: AnyScope = None,
    endpoint: Endpoint = None,
    reveal: Reveal = False,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a key, and what a client would get now.

    Its record, steps, jobs, and its changes by operators and the reconciler. This command only reads.
    """
    with in_use(store) as source:
        where = full_scope(SINGLE if scope is None else scope, endpoint)
        everywhere = scope is None and endpoint is None
        sight = look(source, *find_key(source, where, key, everywhere=everywhere, reveal=reveal))
    if as_json:
        print_json(sight_json(sight, reveal))
    else:
        print_sight(sight, reveal)


def resolve(
    key: Key,
    store: StoreUrl = "",
    scope: Scope = SINGLE,
    endpoint: Endpoint = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="It happened: retries get this response.")] = False,
    refute: Annotated[
        bool, typer.Option("--refute", help="It did not happen, and never will: a retry runs it.")
    ] = False,
    fail: Annotated[bool, typer.Option("--fail", help="It failed for good: retries get this response.")] = False,
    happened: Annotated[
        str | None,
        typer.Option(metavar="EFFECT", help="This effect in doubt happened: a retry goes on after it. With --result."),
    ] = None,
    not_happened: Annotated[
        str | None,
        typer.Option(metavar="EFFECT", help="This effect in doubt did not happen, and never will: a retry calls it."),
    ] = None,
    correct: Annotated[
        str | None,
        typer.Option(metavar="EFFECT", help="The result of this effect, which is done, was wrong. With --result."),
    ] = None,
    result: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="What the effect would have returned, or should have.")
    ] = None,
    provider_id: Annotated[
        str | None, typer.Option(metavar="ID", help="With --result: the provider's id, so that a webhook finds it.")
    ] = None,
    final: Annotated[
        bool,
        typer.Option("--final", help="With --confirm or --fail: also if the key has steps; later phases are skipped."),
    ] = False,
    status: Annotated[int | None, typer.Option(help="Of the response; needed with --confirm and --fail.")] = None,
    body: Annotated[
        str | None, typer.Option(metavar="TEXT|@FILE", help="Of the response: JSON, or a file's content (@- stdin).")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Of the response. Repeat it for others.")
    ] = None,
    quarantine: Annotated[
        float | None,
        typer.Option(
            parser=seconds, metavar="TIME", help="Instead of the route's quarantine, such as 0s. The audit says so."
        ),
    ] = None,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
    as_json: AsJson = False,
) -> None:
    """Settle a key whose outcome is unknown. Ask the provider first.

    With --confirm or --fail the key is final, and retries get the response that you give.
    With --happened or --not-happened one effect of a phased request is settled, and the next retry goes on.
    With --correct the next attempt gets another result of an effect that is done; the key stays unknown or half done.
    With --refute the next retry runs the operation; a request with steps goes on after the last that is done. It is
    refused until the quarantine of the route is over, which counts from the doubt, or from the end of a lease: what was
    sent may be on its way until then.
    """
    verdicts = [effect for effect in (happened, not_happened, correct) if effect is not None]
    if confirm + refute + fail + len(verdicts) != 1:
        raise typer.BadParameter(
            "say what happened, with one of --confirm, --refute, --fail, --happened, --not-happened and --correct"
        )
    response = (
        given_response("--confirm" if confirm else "--fail", status, body, header or []) if confirm or fail else None
    )
    if response is None and (status is not None or body is not None or header):
        option = "--refute" if refute else "a verdict about an effect"
        raise typer.BadParameter(f"{option} takes no response: the retry that runs it has its own")
    if fail and response is not None and response.status < 400:
        raise typer.BadParameter(f"--fail --status {response.status}: an error has a status from 400 to 599")
    if quarantine is not None and not (refute or not_happened is not None):
        raise typer.BadParameter("--quarantine goes with --refute and --not-happened: nothing else waits for it")
    if final and not (confirm or fail):
        raise typer.BadParameter("--final goes with --confirm and --fail")
    effect = verdicts[0] if verdicts else None
    verdict = happened_verdict(effect if not_happened is None else None, result, provider_id)
    event = Event.CONFIRM if confirm else Event.GIVE_UP if fail else Event.REFUTE
    if effect is not None:
        event = Event.HAPPENED if happened is not None else Event.NOT_HAPPENED
        event = event if correct is None else Event.CORRECT
    with in_use(store) as source:
        record = _movable(source, full_scope(scope, endpoint), key, event)
        if correct is not None:
            changes.done_effect(source, record, correct)
        elif effect is not None:
            changes.choose(source, record, effect)
        if response is not None and not final:
            refusal = changes.skips_phases(source, record, "--confirm" if confirm else "--fail")
            if refusal is not None:
                raise refusal
        announced = _announced(record, event, response, effect, changes.in_doubt(source, record))
        if cut := changes.cut_short(record, quarantine):
            announced.append(cut.rstrip(": "))
        audit = sure(announced, yes=yes, who=who, why=why)
        if verdict is not None and correct is not None:
            moved = changes.correct(source, record, verdict, audit)
        elif verdict is not None:
            moved = changes.happened(source, record, verdict, audit)
        elif not_happened is not None:
            moved = changes.not_happened(source, record, not_happened, audit, quarantine)
        elif response is None:
            moved = changes.refute(source, record, audit, quarantine)
        elif confirm:
            moved = changes.confirm(source, record, response, audit, final=final)
        else:
            moved = changes.give_up(source, record, response, audit, final=final)
        left = changes.in_doubt(source, moved)
    _done(record, moved.state, audit, as_json, response)
    if left and not as_json:
        print(f"it stays unknown: {words_of(left)}")
    elif event in RUNS_AGAIN and not as_json and (again := delivered_again(record.operation)):
        print(f"it runs {again}")


def forget(
    key: Key,
    store: StoreUrl = "",
    scope: Scope = SINGLE,
    endpoint: Endpoint = None,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
    cache: CacheUrl = "",
    as_json: AsJson = False,
) -> None:
    """Delete a final key, so that the next request with it runs as a new one.

    For a stored answer that must not be repeated. What the operation did is not undone: a retry does it again.
    If the app has a cache, name it with --cache: otherwise it may replay the answer for up to its cache_ttl.
    """
    with in_use(store) as source:
        at = find_key(source, full_scope(scope, endpoint), key)
        if cache and source.read([at])[0] is None:  # as after a forget without --cache
            if not changes.forget_in_cache(source, *at, cache_client(cache)):
                print(f"the cache at {named(cache)} has no answer to it either", file=sys.stderr)
                raise not_found(at[1])
            _forgot_in_cache_only(*at, cache, as_json)
            return
        record = _movable(source, *at, Event.FORGET)
        audit = sure(_announced(record, Event.FORGET, None), yes=yes, who=who, why=why)
        was_cached = changes.forget_in_cache(source, *at, cache_client(cache)) if cache else None
        changes.forget(source, record, audit)
        may_have_cache = not cache and isinstance(source, Identified)
    more = None if was_cached is None else cache_json(cache, had_answer=was_cached)
    _done(record, None, audit, as_json, None, more)
    if was_cached is not None and not as_json:
        print(cache_words(cache, had_answer=was_cached))
    if may_have_cache:
        print(NAME_THE_CACHE, file=sys.stderr)


def _forgot_in_cache_only(scope: str, key: str, cache: str, as_json: bool) -> None:
    name = key_shown(key, False)
    if as_json:
        print_json({"scope": scope, "key": name, "before": None, "after": None} | cache_json(cache, had_answer=True))
    else:
        print(f"key {name}: the store has no such key; no answer to it is replayed from the cache at {named(cache)}")


# -- a change ------------------------------------------------------------------------------------------------------


def _movable(store: Store, scope: str, key: str, event: Event) -> Record:
    """The record as it is now. A move that is not possible is refused before the operator is asked."""
    record = changes.changeable(store, *find_key(store, scope, key), event)
    if event in RUNS_AGAIN and (refusal := changes.was_deferred(store, record)) is not None:
        raise refusal
    return record


def _announced(
    record: Record,
    event: Event,
    response: StoredResponse | None,
    effect: str | None = None,
    doubted: Sequence[Step] = (),
) -> list[str]:
    answer = "" if response is None else f"{response.status} with {len(response.body or b''):,} bytes"
    after = {
        Event.CONFIRM: f"completed: retries get {answer}",
        Event.GIVE_UP: f"failed: retries get {answer}",
        Event.REFUTE: f"failed_retryable: {_refuted(record, doubted)}",
        Event.HAPPENED: f"failed_retryable: effect '{effect}' is done, and the next retry goes on after it",
        Event.NOT_HAPPENED: f"failed_retryable: the next retry CALLS effect '{effect}'",
        Event.CORRECT: f"{record.state}: the next attempt gets another result of effect '{effect}'",
        Event.FORGET: "deleted: the next request with this key RUNS the operation again",
    }
    verb = "stays" if event is Event.CORRECT else f"{record.state} becomes"
    return [f"key {key_shown(record.key, False)}, {record.operation}: {verb} {after[event]}"]


def _refuted(record: Record, doubted: Sequence[Step]) -> str:
    """What the next retry does."""
    if not record.has_steps:
        return "the next retry RUNS the operation again"
    after = "" if record.recovery_point == STARTED else f" after step '{record.recovery_point}'"
    calls = "".join(f", and CALLS effect '{step.name}'" for step in doubted)
    return f"the next retry goes on{after}{calls}; effects that are done are not called again"


def _done(
    record: Record,
    after: State | None,
    audit: Audit,
    as_json: bool,
    response: StoredResponse | None,
    more: dict[str, Any] | None = None,
) -> None:
    name = key_shown(record.key, False)
    if as_json:
        members: dict[str, Any] = {"scope": record_json(record, False)["scope"], "key": name, "before": record.state}
        members |= {"after": after, "who": audit.who, "why": audit.why, "response": response_json(response, False)}
        print_json(members | (more or {}))
    else:
        print(f"key {name}: {record.state} -> {after or 'deleted'}; in the audit as {audit.who}: {audit.why}")
