"""``oncekey client``: the key jar of a client. What is open, finishing it, and forgetting."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from oncekey.cli.client_options import (
    Account,
    HeaderLines,
    HeadersFrom,
    KeyHeader,
    KeyLifetime,
    Seconds,
    SpellingOption,
    To,
    Tries,
    given_headers,
    lifetime,
    opened_client,
)
from oncekey.cli.options import AsJson, named, print_json
from oncekey.cli.output import key_shown, moment, plain, table
from oncekey.cli.prompts import agreed
from oncekey.client.jar import KeyJar, Row
from oncekey.client.jar.jar import KNOWN
from oncekey.errors import ConfigurationError, IntentExpired

Jar = Annotated[
    str, typer.Option("--jar", envvar="ONCEKEY_JAR", metavar="URL", help=f"Where intents are kept: {KNOWN}.")
]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show keys, which are masked otherwise, and whole addresses.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The key jar of a client: what is open, and finishing it.", no_args_is_help=True)
    group.command("list")(list_intents)
    group.command("resume")(resume)
    group.command("forget")(forget)
    app.add_typer(group, name="client")


def list_intents(
    jar: Jar,
    account: Account = "",
    key_lifetime: KeyLifetime = None,
    reveal: Reveal = False,
    as_json: AsJson = False,
) -> None:
    """List the intents that have no answer yet, the oldest first.

    KEY IS KEPT UNTIL is what the server said last. "assumed": it never said, and the time comes from the key lifetime.
    """
    opened = KeyJar(jar, account=account, key_lifetime=lifetime(key_lifetime), create=False)
    try:
        rows = opened.open_intents()
    finally:
        opened.close()
    if as_json:
        print_json([_members(row, opened.kept_until(row), reveal) for row in rows])
        return
    if not rows:
        print("no open intents")
        return
    head = ("INTENT", "KEY", "REQUEST", "FIRST SENT", "KEY IS KEPT UNTIL", "NOTE")
    table(head, [
        (row.name, key_shown(row.key, reveal), f"{row.request.method} {_url(row, reveal)}",
         moment(row.first_sent_at) or "not yet", _kept_until(row, opened.kept_until(row)), row.note)
        for row in rows
    ])  # fmt: skip


def resume(
    to: To,
    jar: Jar,
    name: Annotated[str | None, typer.Argument(metavar="[INTENT]", help="Only this one.")] = None,
    header: HeaderLines = None,
    header_from: HeadersFrom = None,
    account: Account = "",
    again: Annotated[
        bool,
        typer.Option("--again", help="Also send what the server may have forgotten, and may run a second time."),
    ] = False,
    tries: Tries = 5,
    seconds: Seconds = 90.0,
    key_lifetime: KeyLifetime = None,
    key_header: KeyHeader = "Idempotency-Key",
    spelling: SpellingOption = "bare",
    as_json: AsJson = False,
) -> None:
    """Finish what was left open: send each open intent again, with its own key, and keep the answer.

    Only intents of this account for this server are sent. Credentials are not in the jar: give them with --header-from.

    Exit codes: 0 all of them have an answer, 1 some are still open.
    """
    from oncekey.client.resumption import Ended, Outcome

    headers = given_headers(header, header_from)
    outcomes: list[Outcome] = []

    def show(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if not as_json:
            status = "" if outcome.status is None else f" {outcome.status}"
            note = f": {plain(outcome.note)}" if outcome.note else ""
            print(f"{plain(outcome.name)}  {outcome.ended}{status}{note}")

    problem = ""
    with opened_client(
        *(to, jar, account, headers),
        tries=tries,
        seconds=seconds,
        key_lifetime=key_lifetime,
        key_header=key_header,
        spelling=spelling,
        create=False,
    ) as client:
        try:
            client.resume(name, again=again, on_outcome=show)
        except IntentExpired as error:
            problem = str(error)
    counts = {kind.value: sum(each.ended is kind for each in outcomes) for kind in Ended}
    if as_json:
        members = [{"intent": o.name, "ended": o.ended, "status": o.status, "note": o.note} for o in outcomes]
        print_json({"counts": counts, "intents": members})
    else:
        print(", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "no open intents")
    if problem:
        raise IntentExpired(problem)
    raise typer.Exit(0 if all(each.ended is Ended.ANSWERED for each in outcomes) else 1)


def forget(
    jar: Jar,
    name: Annotated[str | None, typer.Argument(metavar="[INTENT]", help="Its name.")] = None,
    account: Account = "",
    finished_days: Annotated[
        float | None, typer.Option("--finished", min=0, metavar="DAYS", help="All that were answered so long ago.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete an intent, or old answered ones. A request under a forgotten name gets a new key, and may run again."""
    if (name is None) == (finished_days is None):
        raise typer.BadParameter("give the name of an intent, or --finished DAYS")
    now = time.time()  # one time for the count and the deletion: what is deleted is what the operator agreed to
    opened = KeyJar(jar, account=account, create=False, clock=lambda: now)
    try:
        if name is not None:
            found = opened.read(name)
            if found is None:
                raise ConfigurationError(f"the jar has no intent '{name}' of this account")
            agreed([_forgotten(found)], yes=yes)
            opened.forget(name)
            print(f"{plain(name)} is forgotten")
        else:
            age = (finished_days or 0) * 86_400
            if count := opened.count_finished(older_than=age):
                agreed([_all_forgotten(count, finished_days or 0)], yes=yes)
            print(f"{opened.forget_finished(older_than=age)} forgotten")
    finally:
        opened.close()


def _forgotten(row: Row) -> str:
    """What it means that this intent is forgotten."""
    if row.finished_at is not None:
        state = f"was answered {row.status}"
    elif row.first_sent_at is None:
        state = "is OPEN, and was never sent"
    else:
        state = f"is OPEN: it was first sent {moment(row.first_sent_at)}, and may have happened"
    return (
        f"intent {plain(row.name)} ({row.request.method} {plain(_url(row, False))}) {state}. If it is forgotten, the "
        "next request under its name has a new key, and RUNS the operation again"
    )


def _all_forgotten(count: int, days: float) -> str:
    """What it means that old answers are forgotten."""
    intents = "intent that was" if count == 1 else "intents that were"
    return (
        f"{count:,} {intents} answered more than {days:g} days ago. If they are forgotten, the next request under one "
        "of their names has a new key, and RUNS the operation again"
    )


def _url(row: Row, reveal: bool) -> str:
    """Without --reveal it has no password and no query: APIs take tokens there."""
    return row.request.url if reveal else named(row.request.url)


def _kept_until(row: Row, end: float | None) -> str:
    if end is None:
        return ""
    assumed = ", assumed" if row.expires_at is None else ""
    return f"{moment(end)}{assumed}{', over' if end <= time.time() else ''}"


def _members(row: Row, end: float | None, reveal: bool) -> dict[str, Any]:
    return {
        "intent": row.name,
        "key": key_shown(row.key, reveal),
        "masked": not reveal,
        "method": row.request.method,
        "url": _url(row, reveal),
        "created_at": moment(row.created_at),
        "first_sent_at": moment(row.first_sent_at),
        "kept_until": moment(end),
        "kept_until_is_assumed": None if end is None else row.expires_at is None,
        "not_before": moment(row.not_before),
        "note": row.note,
    }
