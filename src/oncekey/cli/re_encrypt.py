"""``oncekey keys re-encrypt``: writes all stored values again under the current key of the keyring, or as plain text.

``oncekey.encryption.rotation`` does it. The package that encrypts is imported only when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from oncekey.cli.loader import load
from oncekey.cli.options import AsJson, StoreUrl, print_json
from oncekey.cli.prompts import Who, Why, Yes, in_use, sure
from oncekey.cli.rotation_summary import left, needed, print_summary, summary_json
from oncekey.engine.once import OnceKey
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.encryption.report import Report

EPILOG = (
    "Exit codes: 0 nothing is left under another key (with --dry-run: and no fingerprint needs one), 1 something is or "
    "the store is in trouble, 2 a wrong option."
)


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
    trust_key: Annotated[
        bool,
        typer.Option("--trust-key", help="Write although stored values do not prove that the current key is right."),
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

    It reads all rows before it writes one, and stops if values under the current key do not open, or
    if no value is under it yet: the keyring may have another key of this number than the app has.

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
        rotation = Rotation(values, keyring, dry_run=dry_run, audit=audit, trust_key=trust_key)
        try:
            with _progress() as seen:
                report = rotation.run(seen)
            lost = keyring.ids.intersection(report.lost)
            another = {number for number in lost if has_another_secret(keyring, report, target, number)}
        except KeyboardInterrupt:
            done = rotation.report.rewritten.total()
            print(f"oncekey: ended after {done:,} rewritten values; run it again to go on", file=sys.stderr)
            raise typer.Exit(130) from None
    stopped = not rotation.may_write and bool(report.waiting)
    if as_json:
        print_json({"dry_run": dry_run, "stopped": stopped and not dry_run, **summary_json(report, another)})
    else:
        print_summary(report, keyring, another, stopped=stopped, dry_run=dry_run)
    if left(report, keyring) or (dry_run and needed(report, keyring)):
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
            done = f"{report.rewritten.total():,} values rewritten" if report.walks else "nothing is written yet"
            said = f"{walk}{report.read:,} rows read, {done}"
            bar.update(task, description=said)

        yield seen
