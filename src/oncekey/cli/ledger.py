"""``oncekey ledger compare``: compares the app's ledger with the provider's.

Owns its exit codes, which are those of ``cmp`` and ``diff``: 0 the same, 1 different, 2 cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from oncekey.cli.options import AsJson, print_json
from oncekey.errors import LedgerError
from oncekey.ledger.comparison import PROGRESS_EVERY, ROWS_IN_MEMORY, Entry, Field, Report, compare
from oncekey.ledger.files import Columns, LedgerFile

CANNOT_READ = 2

_Watch = Callable[[str, LedgerFile], Iterator[Entry]]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Compare ledgers: ours, and a provider's.", no_args_is_help=True)
    group.command("compare")(compare_files)
    app.add_typer(group, name="ledger")


def _column(name: str) -> typer.models.OptionInfo:
    help_text = f"The column or member of the {name}: NAME, or OURS=THEIRS if the files differ."
    return cast("typer.models.OptionInfo", typer.Option(f"--{name}", metavar="NAME", help=help_text))


def compare_files(
    ours: Annotated[Path, typer.Argument(metavar="OURS", help="Our ledger: .csv, .tsv, .jsonl or .ndjson.")],
    theirs: Annotated[Path, typer.Argument(metavar="THEIRS", help="The provider's, of any of these kinds.")],
    ident: Annotated[str, _column("id")] = "id",
    amount: Annotated[str, _column("amount")] = "amount",
    currency: Annotated[str, _column("currency")] = "currency",
    state: Annotated[str, _column("state")] = "state",
    decimals: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Amounts are decimal numbers with up to N places: N, or OURS=THEIRS. 0: whole minor units (cents).",
        ),
    ] = "0",
    means: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="A state of theirs, and what ours calls it. Repeat it for others."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Do not read or compare amount, currency or state. Repeat it for others."),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHARACTER", help="Between the columns of CSV files, if not a comma.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many to list of each kind; all are counted.")] = 1_000,
    rows: Annotated[int, typer.Option(min=2, help="How many rows are held in memory.")] = ROWS_IN_MEMORY,
    tmp: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For what does not fit in memory; about the files' size.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two ledgers by id: what is missing on a side, what differs, what is there twice.

    The files may be in any order and of any size.
    Amounts are whole numbers of minor units (cents), unless --decimals says otherwise.
    A line that cannot be read ends it: none is left out.

    Exit codes: 0 the same, 1 different, 2 a file cannot be read or an option is wrong.
    """
    try:
        report = _compare(
            [ours, theirs],
            {"id": ident, "amount": amount, "currency": currency, "state": state},
            decimals=_numbers(decimals),
            states=dict(_both("--means", text) for text in means or []),
            ignore=[_field(name) for name in ignore or []],
            delimiter=delimiter,
            limit=limit,
            rows=rows,
            tmp=tmp,
        )
    except LedgerError as error:
        print(f"oncekey: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_READ) from error
    if as_json:
        print_json(report.as_json())
    else:
        print(report.as_text())
    raise typer.Exit(report.exit_code)


def _compare(
    paths: list[Path],
    names: dict[str, str],
    *,
    decimals: tuple[int, int],
    states: dict[str, str],
    ignore: list[Field],
    delimiter: str | None,
    limit: int,
    rows: int,
    tmp: Path | None,
) -> Report:
    files = []
    for side, path in enumerate(paths):
        columns = {
            field: None if field in ignore else _sides(f"--{field}", text)[side] for field, text in names.items()
        }
        files.append(
            LedgerFile(
                path,
                Columns(**cast("dict[str, str]", columns)),
                decimals=decimals[side],
                states=states if side == 1 else None,
                delimiter=delimiter,
            )
        )
    with _progress(sum(file.size for file in files)) as (watch, compared):
        return compare(
            watch("reading ours", files[0]),
            watch("reading theirs", files[1]),
            ignore=ignore,
            limit=limit,
            rows_in_memory=rows,
            folder=tmp,
            on_progress=compared,
        )


# -- options -------------------------------------------------------------------------------------------------------


def _sides(option: str, text: str) -> tuple[str, str]:
    return _both(option, text) if "=" in text else (text, text)


def _both(option: str, text: str) -> tuple[str, str]:
    first, equals, second = text.partition("=")
    if not (first and equals and second):
        raise typer.BadParameter(f"{option} {text}: it takes two names with = between them")
    return first, second


def _numbers(text: str) -> tuple[int, int]:
    first, second = _sides("--decimals", text)
    if not (first.isdecimal() and second.isdecimal()):
        raise typer.BadParameter(f"--decimals {text}: it takes a number of decimal places, such as 2, or 0=2")
    return int(first), int(second)


def _field(name: str) -> Field:
    if name not in get_args(Field):
        raise typer.BadParameter(f"--ignore {name}: it takes {', '.join(get_args(Field))}")
    return cast("Field", name)


# -- progress ------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(size: int) -> Iterator[tuple[_Watch, Callable[[int], None] | None]]:
    """A progress bar on a terminal; no output if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield (lambda _, file: iter(file)), None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=max(size, 1))
        before = 0

        def watch(description: str, file: LedgerFile) -> Iterator[Entry]:
            nonlocal before
            bar.update(task, description=description)
            for number, entry in enumerate(file):
                if number % PROGRESS_EVERY == 0:
                    bar.update(task, completed=before + file.position)
                yield entry
            before += file.size
            bar.update(task, completed=before)

        yield watch, lambda ids: bar.update(task, description=f"comparing: {ids:,} ids")
