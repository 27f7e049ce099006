"""Shows tables and times, and masks keys and bodies.

Clients choose keys, and errors can quote any text. So control characters are escaped before text is printed, and no
text is read as markup. If standard output is not a terminal, lines are not folded, because programs read them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oncekey.core.record import ENDPOINT_MARK
from oncekey.core.sealed import is_sealed, shown
from oncekey.telemetry.redaction import mask, redact

_WIDE = 100_000


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def table(head: Sequence[str], rows: Sequence[Sequence[str | Text]], *, indent: int = 0) -> None:
    """Print columns. On a narrow terminal cells are folded, never cut. Without ``head`` there is no header line."""
    grid = Table(box=None, pad_edge=False, show_header=bool(head), padding=(0, 2, 0, 0), header_style="bold")
    for title in head or [""] * len(rows[0]):
        grid.add_column(title, overflow="fold")
    for row in rows:
        grid.add_row(*(harmless(cell) if isinstance(cell, str) else cell for cell in row))
    out = console()
    with out.capture() as caught:
        out.print(grid)
    for line in caught.get().splitlines():
        print(f"{' ' * indent}{line}".rstrip())


def harmless(text: str) -> Text:
    """The text with control characters escaped, so that a terminal shows them and does not execute them. What is still
    encrypted in it is replaced by a sentence."""
    return Text(plain(shown(text)))


def plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def key_shown(key: str, reveal: bool) -> str:
    return key if reveal else redact(key)


HIDDEN = "shown with --reveal"


def error_shown(error: str | None, reveal: bool) -> str | None:
    """An error as it was stored: an app may have put a secret into the message of its exception."""
    return error if reveal or error is None else mask(shown(error))


def header_shown(name: str, text: str, reveal: bool) -> str | None:
    """The value of a stored header. None: it may be a secret, as the address of a new resource may be."""
    return text if reveal or name == "content-type" else None


def scope_and_endpoint(scope: str) -> tuple[str, str | None]:
    """The tenant, and for a key that is per endpoint, its operation."""
    tenant, mark, endpoint = scope.partition(ENDPOINT_MARK)
    return tenant, endpoint if mark else None


def masked(data: bytes | None, reveal: bool) -> str | None:
    """A body: its text with ``reveal``, otherwise only its size; a sentence, if it is still encrypted."""
    if data is None:
        return None
    if is_sealed(data):
        return shown(data.decode("ascii", "replace"))
    return data.decode("utf-8", "backslashreplace") if reveal else f"{len(data):,} bytes, {HIDDEN}"


def moment(seconds: float | None) -> str | None:
    """A time of the store's clock, in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
