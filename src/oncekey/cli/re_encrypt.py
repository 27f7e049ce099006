"""``oncekey keys re-encrypt``: writes all stored values again under the current key of the keyring, or as plain text.

``oncekey.encryption.rotation`` does it. The package that encrypts is imported only when the command runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oncekey.cli.loader import load
from oncekey.cli.options import AsJson, StoreUrl, print_json
from oncekey.cli.output import moment, table
from oncekey.cli.prompts import Who, Why, Yes, in_use, sure
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store
from oncekey.telemetry.redaction import redact

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.encryption.rotation import Fingerprints, Report

EPILOG = (
    "Exit codes: 0 nothing is left under another key (with --dry-run: and no fingerprint needs one), 1 something is or "
    "the store is in trouble, 2 a wrong option."
)
COLUMNS = ("KEY", "FOUND", "REWRITTEN", "CHANGED MEANWHILE", "NOT OPENED", "REFUSED", "FINGERPRINTS", "UNTIL")


def re_encrypt(
    context: typer.Context,
    store: StoreUrl = "",
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:ONCE", help="Where your OnceKey is, for its store and keyring."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count values by key and change nothing.")] = False,
    decrypt: Annotated[
        bool, typer.Option("--decrypt", help="Write plain text, to switch encryption off; needs a plain keyring.")
    ] = False,
    yes: Yes = False,
    who: Who = None,
    why: Why = None,
    as_json: AsJson = False,
) -> None:
    """Write all stored values again under the current key of the keyring, beside the running app.

    For a key that is replaced, and for rows from before encryption. First deploy the new key as
    the current one, to every process. End the command whenever you like, and start it again: what
    is under the current key is only read. A value whose key is not in the keyring stays as it is.
    Fingerprints stay under their key until their rows expire: the table says how many, until when.

    With a keyring that does not encrypt (plain,1:…), --decrypt writes all values as plain text.
    """
    given = getattr(context.get_parameter_source("store"), "name", "") == "COMMANDLINE"
    if app is not None and given:
        raise ConfigurationError(f"--store and --app {app}: give one of them, an OnceKey has a store of its own")
    with _target(app, store) as (target, keyring):
        from oncekey.encryption.rotation import Rotation, has_another_secret, raw_values

        if refused := _other_way(keyring, dry_run=dry_run, decrypt=decrypt):
            raise ConfigurationError(refused)
        values = raw_values(target)
        target.check()
        audit = None if dry_run else sure(_announced(keyring), yes=yes, who=who, why=why)
        rotation = Rotation(values, keyring, dry_run=dry_run, audit=audit)
        try:
            with _progress() as seen:
                report = rotation.run(seen)
            lost = keyring.ids.intersection(report.lost)
            another = {number for number in lost if has_another_secret(keyring, report, target, number)}
        except KeyboardInterrupt:
            done = rotation.report.rewritten.total()
            print(f"oncekey: ended after {done:,} rewritten values; run it again to go on", file=sys.stderr)
            raise typer.Exit(130) from None
    if as_json:
        print_json({"dry_run": dry_run, **_json(report, another)})
    else:
        _print(report, keyring, another)
    if _left(report, keyring) or (dry_run and _needed(report, keyring)):
        raise typer.Exit(1)


@contextmanager
def _target(app: str | None, store: str) -> Iterator[tuple[Store, Keyring]]:
    """The store, and the keyring of the app or of the variable."""
    if app is None:
        from oncekey.encryption import Keyring
        from oncekey.encryption.store import SealedStore

        with in_use(store) as target:
            yield target, target.keyring if isinstance(target, SealedStore) else Keyring.from_env()
        return
    once = load(app, OnceKey, "the module and name of your OnceKey, such as app.main:once")
    found: Keyring | None = once.keyring
    if found is None:
        raise ConfigurationError(f"--app {app}: this OnceKey has no keyring: give it one with encryption=")
    try:
        yield once.store, found
    finally:
        once.close()


def _other_way(keyring: Keyring, *, dry_run: bool, decrypt: bool) -> str | None:
    """Why the command must not run: plain text is written only where both the keyring and the operator say so."""
    if decrypt and keyring.encrypts:
        return (
            f"--decrypt: the keyring encrypts with key {keyring.current}, and so does the app. Give every process a "
            "keyring with plain before its keys first, plain,NUMBER:KEY (docs/encryption.md)"
        )
    if not (decrypt or dry_run or keyring.encrypts):
        return (
            "this keyring begins with plain, so it does not encrypt. To switch encryption off, add --decrypt: it "
            "writes all values as plain text. To switch it on, take plain out of the keyring of every process first"
        )
    return None


def _announced(keyring: Keyring) -> list[str]:
    others = ", ".join(map(str, sorted(keyring.ids - {keyring.current}))) or "no other key"
    if not keyring.encrypts:
        return [
            f"all stored values are written again as plain text, also those under {others}",
            "every process must have a keyring that begins with plain already: with another one it goes on encrypting",
        ]
    without = "without it, it replays answers without their bodies, or answers 503"
    return [
        f"all stored values are written again under key {keyring.current}, also those under {others} and plain ones",
        f"every process must have key {keyring.current} already: {without}",
    ]


# -- progress and summary ------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[[Report], None]]:
    """A moving bar with the numbers so far; no output if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)  # a store does not know how many rows it has

        def seen(report: Report) -> None:
            walk = f"walk {report.walks}: " if report.walks > 1 else ""
            said = f"{walk}{report.rows:,} rows read, {report.rewritten.total():,} values rewritten"
            bar.update(task, description=said)

        yield seen


def _left(report: Report, keyring: Keyring) -> set[int]:
    """The keys of values that are left, without keys that are declared lost: no other run can do more about those."""
    return set(report.left) - keyring.lost


def _needed(report: Report, keyring: Keyring) -> set[int]:
    """The other entries that must stay in the keyring: of keys that fingerprints were made with, and of lost keys that
    something is under."""
    return (set(report.fingerprints) - {0, report.current}) | {key for key in keyring.lost if report.lost[key]}


def _print(report: Report, keyring: Keyring, another: set[int]) -> None:
    print(f"read {report.rows:,} rows with {report.found.total():,} values")
    rows = [_row(report, number) for number in _numbers(report, keyring)]
    table(COLUMNS, rows)
    if report.changed:
        print("the app changed or held some rows each time: run it again")
    if report.refused:
        print("the store refused some values, which are a little longer when they are encrypted: see its own limits")
    for number in sorted(set(report.lost) - keyring.lost):
        print(_lost(number, report, keyring, another))
    for number in sorted(keyring.lost):
        print(_declared_lost(report, number))
    for number in sorted({*keyring.ids, *report.fingerprints} - {0, report.current} - keyring.lost):
        print(_old_key(report, keyring, number))
    if not keyring.encrypts:
        print(_state_of_plain(report, keyring))
    elif plain := report.fingerprints.get(0):
        print(_plain_fingerprints(plain))


def _state_of_plain(report: Report, keyring: Keyring) -> str:
    """Whether a keyring that does not encrypt can be removed."""
    if _left(report, keyring) or _needed(report, keyring):
        return "this keyring does not encrypt (plain): new values are plain text, and its keys open the others"
    return (
        "no key is needed. This keyring does not encrypt (plain). If every process has it: to switch encryption off, "
        "remove the keyring; to switch it on, take plain out of it"
    )


def _row(report: Report, number: int) -> list[str]:
    name = "not encrypted" if number == 0 else f"{number}, current" if number == report.current else f"{number}"
    counts = (report.found, report.rewritten, report.changed, report.lost, report.refused)
    prints = report.fingerprints.get(number)
    until = "" if prints is None or not prints.until or number in (0, report.current) else moment(prints.until) or ""
    return [name, *(f"{each[number]:,}" for each in counts), f"{prints.rows if prints else 0:,}", until]


def _numbers(report: Report, keyring: Keyring) -> list[int]:
    """The keys of the table: the current one first, and last what is not encrypted."""
    found = {*keyring.ids, *report.found, *report.fingerprints}
    return sorted(found, key=lambda number: (number != report.current, number == 0, number))


def _lost(number: int, report: Report, keyring: Keyring, another: set[int]) -> str:
    count = report.lost[number]
    if number == 0:
        return "some values are damaged, and stay as they are"
    if number not in keyring.ids:
        return f"key {number} is not in this keyring: its values stay as they are. Add the key and run it again"
    stopped = ". Nothing else was written either" if report.wrong_current and number == report.current else ""
    if number not in another:
        found = f"key {number} does not open {_values(count)}: they were changed, or moved from another row or column"
        return found + stopped
    return (
        f"key {number} of this keyring is not the key {number} that wrote {_values(count)}: they do not open, and stay "
        f"as they are{stopped}. Look for a typing error in the key, or for a number that two keys had: put the key "
        "back that wrote them, and give another key a number of its own"
    )


def _old_key(report: Report, keyring: Keyring, number: int) -> str:
    """Whether an old key can be removed."""
    values = report.left[number]
    prints = report.fingerprints.get(number)
    if values:
        return f"key {number} is needed: {_values(values)} {'is' if values == 1 else 'are'} under it"
    if prints is None:
        advice = ". Remove it, unless it is your next one" if keyring.encrypts else ""
        return f"key {number} is not needed: nothing is under it{advice}"
    missing = "" if number in keyring.ids else ". It is not in this keyring, so their retries get 503: add it again"
    rows = f"{_rows(prints.rows)} a fingerprint that was made with it{_unsettled(prints)}{missing}"
    return f"key {number} is needed{_until(prints)}: {rows}"


def _declared_lost(report: Report, number: int) -> str:
    prints = report.fingerprints.get(number)
    if not report.lost[number] and prints is None:
        return f"key {number} is declared lost, and nothing is under it: take its entry out of the keyring"
    until, unsettled = ("", "") if prints is None else (_until(prints), _unsettled(prints))
    return (
        f"key {number} is declared lost, and its entry is needed{until}: what is under it stays as it is, and retries "
        f"of its rows are refused{unsettled}"
    )


def _until(prints: Fingerprints) -> str:
    if not prints.until:
        return ""
    over = ", which is over: the reaper deletes them" if prints.until < time.time() and not prints.unsettled else ""
    return f" {'at least ' if prints.unsettled else ''}until {moment(prints.until)}{over}"


def _unsettled(prints: Fingerprints) -> str:
    if not prints.unsettled:
        return ""
    named = ", ".join(f"{redact(row.key)} ({row.state})" for row in prints.named)
    more = ", …" if prints.unsettled > len(prints.named) else ""
    states = sorted({str(row.state) for row in prints.named})
    look = " and ".join(f"`oncekey keys list --state {state}`" for state in states)
    verb = "is" if prints.unsettled == 1 else "are"
    return f"; {prints.unsettled:,} of them {verb} not final yet: {named}{more}; see {look}"


def _plain_fingerprints(prints: Fingerprints) -> str:
    until = f" until {moment(prints.until)}" if prints.until and not prints.unsettled else ""
    return f"{_rows(prints.rows)} a fingerprint from before encryption{until}: no key is needed for it"


def _values(number: int) -> str:
    return "1 value" if number == 1 else f"{number:,} values"


def _rows(number: int) -> str:
    return "1 row has" if number == 1 else f"{number:,} rows have"


def _json(report: Report, another: set[int]) -> dict[str, Any]:
    numbers = sorted({report.current, *report.found, *report.rewritten, *report.left, *report.fingerprints})
    keys = {}
    for number in numbers:
        prints = report.fingerprints.get(number)
        keys[str(number)] = {
            "found": report.found[number],
            "rewritten": report.rewritten[number],
            "changed": report.changed[number],
            "not_opened": report.lost[number],
            "another_secret": number in another,
            "refused": report.refused[number],
            "left": report.left[number],
            "fingerprints": prints.rows if prints else 0,
            "unsettled": prints.unsettled if prints else 0,
            "until": moment(prints.until) if prints and prints.until else None,
        }
    return {"current": report.current, "walks": report.walks, "rows": report.rows, "keys": keys}
