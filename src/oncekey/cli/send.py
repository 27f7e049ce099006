"""``oncekey send``: the requests of a file, each once, with a progress bar; run it again to go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    opened_client,
)
from oncekey.cli.options import AsJson, print_json
from oncekey.cli.output import plain
from oncekey.client.decisions import NOT_ALLOWED
from oncekey.client.jar.jar import file_url
from oncekey.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.client.resumption import Outcome

_SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command("send")(send)


def send(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One JSON object per line.")],
    to: To,
    jar: Annotated[
        str | None, typer.Option("--jar", metavar="URL", help="Where intents are kept; by default FILE.jar beside it.")
    ] = None,
    header: HeaderLines = None,
    header_from: HeadersFrom = None,
    account: Account = "",
    bodies: Annotated[bool, typer.Option("--bodies", help="Each line is a JSON body, and is sent by POST.")] = False,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=256, help="How many requests at a time.")] = 4,
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answers here, in the order of the lines.")
    ] = None,
    tries: Tries = 5,
    seconds: Seconds = 90.0,
    key_lifetime: KeyLifetime = None,
    key_header: KeyHeader = "Idempotency-Key",
    spelling: SpellingOption = "bare",
    as_json: AsJson = False,
) -> None:
    """Send the requests of a file, each once. If it is stopped or killed, run it again: it goes on.

    A line: {"intent": "order-42", "path": "/payments", "json": {"amount": 500}}.
    It may also have "method", "headers", and "text" in place of "json".
    Without "intent" it is named by its number: lines must stay in their places between two runs, or nothing is sent.
    Nothing is sent if a line cannot be read, or if the jar cannot be written.

    Exit codes: 0 each line was answered below 400, 1 some were not, or are still open, 130 it was stopped by Ctrl-C.
    """
    from oncekey.client.bulk import REFUSED, Bulk, read_lines, write_answers

    headers = given_headers(header, header_from)
    total = sum(1 for _ in read_lines(file, to, bodies=bodies))  # a bad line is found before anything is sent
    place = jar or file_url(file.with_name(f"{file.name}.jar"))
    troubles: list[Outcome] = []
    stopped = False
    with opened_client(
        *(to, place, account, headers),
        tries=tries,
        seconds=seconds,
        key_lifetime=key_lifetime,
        key_header=key_header,
        spelling=spelling,
    ) as client:
        with _progress(total) as advance:

            def note(outcome: Outcome) -> None:
                if outcome.status is None or outcome.status >= 400:
                    troubles.append(outcome)
                advance()

            bulk = Bulk(client, at_once=at_once, on_outcome=note)
            bulk.refuse_moved(file, read_lines(file, to, bodies=bodies))
            try:
                bulk.send(read_lines(file, to, bodies=bodies))
            except KeyboardInterrupt:
                stopped = True
        if answers is not None:
            _write(answers, lambda out: write_answers(client, read_lines(file, to, bodies=bodies), out))
    counts = bulk.counts
    names = ("answered", "now", "before", "ok", "refused", "open", "unsettled", "expired", REFUSED)
    summary = {"lines": total} | {name: counts[name] for name in names} | ({"stopped": True} if stopped else {})
    if as_json:
        troubled = [{"intent": each.name, "status": each.status, "note": each.note} for each in troubles]
        print_json(summary | {"troubles": troubled})
    else:
        for each in troubles[:_SHOWN]:
            status = "" if each.status is None else f" {each.status}"
            ended = REFUSED if each.name in bulk.changed else each.ended
            print(f"{plain(each.name)}  {ended}{status}{': ' if each.note else ''}{plain(each.note)}")
        if len(troubles) > _SHOWN:
            print(f"and {len(troubles) - _SHOWN:,} more: --json lists all")
        left = [f"{counts[name]:,} {name}" for name in ("refused", "open", "unsettled", "expired", REFUSED)]
        others = ", ".join(each for each in left if not each.startswith("0 "))
        before = f" ({counts['before']:,} answered by an earlier run)" if counts["before"] else ""
        print(f"{total:,} lines: {counts['ok']:,} done{', ' if others else ''}{others}{before}")
        if stopped:
            print("stopped: run the same command again to go on with the other lines")
        elif counts["open"] or counts["unsettled"]:
            refused = any(each.ended == "open" and each.status in NOT_ALLOWED for each in troubles)
            first = "correct the credentials (--header-from); then " if refused else ""
            print(f"{first}run the same command again to go on with what is open")
        if counts["expired"]:
            print(
                "expired: the server may have forgotten their keys, so nothing was sent. Find out there whether they "
                "happened. `oncekey client resume --again` sends those that did not; `oncekey client forget` drops one"
            )
    if stopped:
        raise typer.Exit(130)
    raise typer.Exit(0 if counts["ok"] == total else 1)


def _write(path: Path, write: Callable[..., None]) -> None:
    try:
        with path.open("wb") as out:
            write(out)
    except OSError as error:
        raise ConfigurationError(f"--answers {path}: it cannot be written ({error.strerror})") from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; no output if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
