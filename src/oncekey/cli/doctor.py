"""``oncekey doctor``: checks how the store is set up, and whether upkeep and workers do their work."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from oncekey.admin.doctor import examine
from oncekey.cli.options import AsJson, StoreUrl, named, print_json
from oncekey.cli.output import plain, table
from oncekey.cli.prompts import in_use
from oncekey.core.diagnosis import Diagnosis, Level, worst
from oncekey.errors import ConfigurationError

WARNED, FAILED = 1, 2

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    store: StoreUrl = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there are warnings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a store, and whether upkeep and workers do their work: one line per check, with advice.

    It only reads: few rows, and for the line `encryption` all that it can in a second.

    Exit codes: 0 nothing is broken; 1 with --strict: there are warnings; 2 something is broken.
    """
    try:
        with in_use(store) as source:
            found = examine(source)
    except ConfigurationError as error:
        if "://" not in store:
            raise typer.BadParameter(str(error)) from error  # do not print ``store``: it may be a password
        # No file, or memory://: the store does not exist, and a health check must report that as broken.
        found = [Diagnosis("store", Level.FAIL, str(error))]
    level = worst(found)
    if as_json:
        lines = [{"check": d.check, "level": d.level, "found": d.found, "advice": d.advice or None} for d in found]
        print_json({"store": named(store), "level": level, "checks": lines})
    else:
        rows: list[tuple[Text | str, str, str]] = []
        for line in found:
            rows.append((Text(line.level, _STYLES[line.level]), line.check, line.found))
            if line.advice:
                rows.append(("", "", f"-> {line.advice}"))
        print(plain(named(store)))
        table([], rows)
    if level is Level.FAIL:
        raise typer.Exit(FAILED)
    if level is Level.WARN and strict:
        raise typer.Exit(WARNED)
