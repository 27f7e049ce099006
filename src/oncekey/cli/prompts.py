"""The questions to an operator before a change: whether to do it, the operator's name, and the reason.

Questions go to standard error: standard output is for the result.
"""

from __future__ import annotations

import getpass
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from oncekey.cli.options import existing
from oncekey.core.audit import Audit
from oncekey.core.record import ENDPOINT_MARK
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.errors import ConfigurationError, OperatorError
from oncekey.stores.api import Store

Scope = Annotated[
    str, typer.Option("--scope", metavar="SCOPE", help="The tenant of the key; not needed for SINGLE_TENANT apps.")
]
AnyScope = Annotated[
    str | None,
    typer.Option(
        "--scope", metavar="SCOPE", help="The tenant of the key. Without it, a masked key is looked for in all of them."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(metavar="OPERATION", help="With key_per='endpoint': the operation, such as 'POST /payments'."),
]
Reveal = Annotated[bool, typer.Option("--reveal", help="Show keys and bodies, which are masked otherwise.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; needs --why.")]
Who = Annotated[str | None, typer.Option(metavar="NAME", help="Your name for the audit; default: your login name.")]
Why = Annotated[str | None, typer.Option(metavar="TEXT", help="The reason for the audit; asked for if not given.")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, help="How many to list.")]

SINGLE = SINGLE_SCOPE

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, None: 1}


_WRITTEN_MARK = re.compile(r"\\x1f|\\u001f")


def full_scope(scope: str, endpoint: str | None) -> str:
    """The scope of a key. Without an endpoint, ``scope`` may have it: as the app's own JSON or ``repr`` of an event
    writes it (``acme\\u001fPOST /payments``, ``acme\\x1fPOST /payments``)."""
    if endpoint is None:
        return _WRITTEN_MARK.sub(ENDPOINT_MARK, scope, count=1)
    return f"{scope}{ENDPOINT_MARK}{endpoint}"


def seconds(text: str) -> float:
    """``45s``, ``10m``, ``1h``, ``7d``, or a number of seconds; for a typer option's ``parser``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is no length of time: write 45s, 10m, 1h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


@contextmanager
def in_use(url: str) -> Iterator[Store]:
    """A store that exists, and that other processes share."""
    with existing(url) as store:
        if not store.capabilities.shared:
            raise ConfigurationError(f"{url} is inside of the app's process, so this command cannot read it")
        yield store


def sure(what: list[str], *, yes: bool, who: str | None, why: str | None) -> Audit:
    """Show what will happen, and ask. Returns the line for the audit; OperatorError if the operator does not agree."""
    if yes and not (why or "").strip():
        raise typer.BadParameter("--yes asks nothing, so give the reason with --why TEXT")
    name = (who or _login()).strip()
    if not yes:
        for line in what:
            print(line, file=sys.stderr)
    reason = _answer("Why?") if why is None else why
    if not reason.strip():
        raise typer.BadParameter("--why is empty: the audit wants a reason")
    if not yes and _answer("Do it? [y/N]").strip().lower() not in ("y", "yes"):
        raise OperatorError("nothing was changed")
    return Audit(name, reason.strip())


def agreed(what: list[str], *, yes: bool) -> None:
    """Show what will happen, and ask; for changes that no audit keeps. OperatorError if the operator does not agree."""
    if yes:
        return
    for line in what:
        print(line, file=sys.stderr)
    if _answer("Do it? [y/N]", "--yes").strip().lower() not in ("y", "yes"):
        raise OperatorError("nothing was changed")


def _answer(question: str, unasked: str = "--yes with --why TEXT") -> str:
    """Ask on standard error. typer's own prompt also writes to standard output."""
    print(question, end=" ", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        print(file=sys.stderr)
        raise OperatorError(f"nothing was changed: there was no answer; {unasked} asks nothing")
    return line


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise ConfigurationError("your login name cannot be found: give your name with --who NAME") from None
