"""``oncekey dead-letters``: what an operator must look at, and can retry or discard."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from oncekey.admin import changes
from oncekey.admin.dead_letters import dead_letters
from oncekey.admin.key_view import SHOWN
from oncekey.admin.masks import find_key
from oncekey.cli import keys as key_commands
from oncekey.cli.descriptions import (
    JOB_COLUMNS,
    KEY_COLUMNS,
    change_json,
    job_json,
    job_row,
    key_row,
    print_changes,
    print_job,
    record_json,
)
from oncekey.cli.options import AsJson, StoreUrl, print_json
from oncekey.cli.output import key_shown, table
from oncekey.cli.prompts import Endpoint, Limit, Reveal, Who, Why, Yes, full_scope, in_use, sure
from oncekey.core.audit import AuditLine
from oncekey.core.record import Record
from oncekey.core.states import Event, State
from oncekey.errors import KeyNotFound, MoveRefused
from oncekey.stores.api import Outbox, Store

_CODES = "Exit codes: 0 done, 1 not there, refused or the store is in trouble, 2 a wrong option."

Letter = Annotated[str, typer.Argument(metavar="ID", help="The job's id; with --scope, a key.")]
Scope = Annotated[str | None, typer.Option("--scope", metavar="SCOPE", help="ID is a key of this scope.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What a human must look at: jobs and keys that were given up.", no_args_is_help=True)
    group.command("list", epilog=_CODES)(list_letters)
    group.command("show", epilog=_CODES)(show)
    group.command("retry", epilog=_CODES)(retry)
    group.command("discard", epilog=_CODES)(discard)
    app.add_typer(group, name="dead-letters")


def list_letters(store: StoreUrl = "", limit: Limit = 100, reveal: Reveal = False, as_json: AsJson = False) -> None:
    """List dead letters: jobs after their last attempt, and keys that upkeep leaves alone after its last try.

    Such a key is unknown, and asked about no more; or half done, and no longer resumed.

    Keys are masked: a few letters and a hash that tells them apart. --reveal shows them.
    """
    with in_use(store) as source:
        found = dead_letters(source, limit)
    if as_json:
        jobs = [job_json(job, reveal) for job in found.jobs]
        keys = [record_json(record, reveal) for record in found.keys]
        print_json({"jobs": jobs, "keys": keys, "more": found.more})
        return
    if not found.jobs and not found.keys:
        print("no dead letters")
    if found.jobs:
        table(JOB_COLUMNS, [job_row(job, reveal) for job in found.jobs])
    if found.jobs and found.keys:
        print()
    if found.keys:
        table(KEY_COLUMNS, [key_row(record, reveal) for record in found.keys])
    if found.more:
        print(f"oncekey: these are the first {limit:,} of a kind; --limit shows more", file=sys.stderr)


def show(
    letter: Letter,
    store: StoreUrl = "",
    scope: Scope = None,
    endpoint: Endpoint = None,
    reveal: Reveal = False,
    as_json: AsJson = False,
) -> None:
    """Show a job with all its attempts and its changes by operators; with --scope, a key."""
    if scope is not None:
        key_commands.show(letter, store, scope, endpoint, reveal, as_json)
        return
    with in_use(store) as source:
        job = source.job(letter) if isinstance(source, Outbox) else None
        if job is None:
            raise KeyNotFound(
                f"there is no job {letter}; see `oncekey dead-letters list`, and give --scope if it is a key"
            )
        history = _history(source, job.scope, job.key, job.id)
    if as_json:
        print_json({**job_json(job, reveal), "history": [change_json(line) for line in history]})
    else:
        print_job(job, reveal)
        print_changes(history)


def retry(
    letter: Letter,
    store: StoreUrl = "",
    scope: Scope = None,
    endpoint: Endpoint = None,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
    as_json: AsJson = False,
) -> None:
    """Retry a dead letter, or an unknown or half-done key that waits: now, and its tries start over.

    The next free worker runs a job, under the same downstream key: what an earlier try
    did outside is done again, unless the provider honours that key.
    If this job made its key unknown, the key is pending again.
    A key (--scope) is back on the reconciler's list; a half-done one is on the resumer's.
    """
    with in_use(store) as source:
        if scope is not None:
            where, key = find_key(source, full_scope(scope, endpoint), letter)
            record = changes.changeable(source, where, key, Event.POSTPONE)
            what = f"key {key_shown(record.key, False)}, {record.operation}: {_again(record)}"
            audit = sure([what], yes=yes, who=who, why=why)
            changes.ask_again(source, record, audit)
            before = "dead letter" if record.dead else "waiting"
            _done(f"key {key_shown(record.key, False)}", _list_of(record), audit.who, audit.why, as_json, before)
            return
        job = changes.dead_job(source, letter)
        what = (
            f"job {job.id}, {job.task}: it is RUN again, as attempt 1. What an earlier try did outside is done again, "
            "unless the provider honours its downstream key"
        )
        audit = sure([what], yes=yes, who=who, why=why)
        moved = changes.retry_job(source, letter, audit)
    _done(f"job {moved.id}", moved.state, audit.who, audit.why, as_json)


def discard(
    letter: Letter,
    store: StoreUrl = "",
    scope: Scope = None,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
    as_json: AsJson = False,
) -> None:
    """Discard a job: no worker runs it again.

    If the job was to settle a key, the key stays unknown: settle it with keys resolve.
    An unknown key cannot be discarded, since its operation may have happened.
    """
    if scope is not None:
        raise MoveRefused(
            "a key cannot be discarded: what it has done, or may have done, stands. Settle an unknown one with "
            "`oncekey keys resolve`; a half-done one goes on with `oncekey dead-letters retry`"
        )
    with in_use(store) as source:
        job = changes.dead_job(source, letter)
        stays = "; if its key is unknown, settle it with keys resolve" if job.settles else ""
        audit = sure([f"job {job.id}, {job.task}: no worker will run it{stays}"], yes=yes, who=who, why=why)
        moved = changes.discard_job(source, letter, audit)
    _done(f"job {moved.id}", moved.state, audit.who, audit.why, as_json)


def _again(record: Record) -> str:
    half_done = record.state is State.FAILED_RETRYABLE
    if half_done:
        return "upkeep goes on with it now, from its last step, where a function is registered (once.resume)"
    return "the reconciler asks about it now"


def _list_of(record: Record) -> str:
    return f"on the {'resumer' if record.state is State.FAILED_RETRYABLE else 'reconciler'}'s list, due now"


def _history(store: Store, scope: str, key: str, job_id: str) -> list[AuditLine]:
    return [line for line in store.audit(scope, key, SHOWN) if line.job_id == job_id]


def _done(what: str, after: str, who: str, why: str, as_json: bool, before: str = "dead letter") -> None:
    if as_json:
        was = "dead" if before == "dead letter" else before
        print_json({"letter": what, "before": was, "after": after, "who": who, "why": why})
    else:
        print(f"{what}: {before} -> {after}; in the audit as {who}: {why}")
