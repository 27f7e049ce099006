"""``oncekey client``: the key jar of a client. What is open, finishing it, and forgetting."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from oncekey.cli.client_options import (
    Account,
    HeaderLines,
    HeadersFrom,
    Seconds,
    To,
    Tries,
    given_headers,
    opened_client,
)
from oncekey.cli.options import AsJson, print_json
from oncekey.cli.output import key_shown, moment, plain, table
from oncekey.client.jar import KeyJar, Row
from oncekey.client.jar.intent import expires_at
from oncekey.client.jar.jar import KNOWN, existing
from oncekey.errors import ConfigurationError, IntentExpired

Jar = Annotated[
    str, typer.Option("--jar", envvar="ONCEKEY_JAR", metavar="URL", help=f"Where intents are kept: {KNOWN}.")
]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show keys, which are masked otherwise.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The key jar of a client: what is open, and finishing it.", no_args_is_help=True)
    group.command("list")(list_intents)
    group.command("resume")(resume)
    group.command("forget")(forget)
    app.add_typer(group, name="client")


def list_intents(jar: Jar, account: Account = "", reveal: Reveal = False, as_json: AsJson = False) -> None:
    """List the intents that have no answer yet, the oldest first."""
    opened = KeyJar(existing(jar), account=account)
    try:
        rows = opened.open_intents()
    finally:
        opened.close()
    if as_json:
        print_json([_members(row, reveal) for row in rows])
        return
    if not rows:
        print("no open intents")
        return
    head = ("INTENT", "KEY", "REQUEST", "FIRST SENT", "KEY IS KEPT UNTIL", "NOTE")
    table(head, [
        (row.name, key_shown(row.key, reveal), f"{row.request.method} {row.request.url}",
         moment(row.first_sent_at) or "not yet", _kept_until(row), row.note)
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
    with opened_client(to, existing(jar), account, headers, tries=tries, seconds=seconds) as client:
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
) -> None:
    """Delete an intent, or old answered ones. A request under a forgotten name gets a new key, and may run again."""
    if (name is None) == (finished_days is None):
        raise typer.BadParameter("give the name of an intent, or --finished DAYS")
    opened = KeyJar(existing(jar), account=account)
    try:
        if name is not None:
            if not opened.forget(name):
                raise ConfigurationError(f"the jar has no intent '{name}' of this account")
            print(f"{plain(name)} is forgotten")
        else:
            print(f"{opened.forget_finished(older_than=(finished_days or 0) * 86_400)} forgotten")
    finally:
        opened.close()


def _kept_until(row: Row) -> str:
    end = expires_at(row)
    return "" if end is None else f"{moment(end)}{', over' if end <= time.time() else ''}"


def _members(row: Row, reveal: bool) -> dict[str, Any]:
    return {
        "intent": row.name,
        "key": key_shown(row.key, reveal),
        "masked": not reveal,
        "method": row.request.method,
        "url": row.request.url,
        "created_at": moment(row.created_at),
        "first_sent_at": moment(row.first_sent_at),
        "kept_until": moment(expires_at(row)),
        "not_before": moment(row.not_before),
        "note": row.note,
    }
