"""What the commands of the client share: where the jar is, which server, and headers that are not on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from oncekey.cli.prompts import seconds as duration
from oncekey.client.spelling import Spelling
from oncekey.errors import ConfigurationError

if TYPE_CHECKING:
    from oncekey.client import Client

To = Annotated[str, typer.Option("--to", metavar="URL", help="The API's address, such as https://api.example.com.")]
Account = Annotated[str, typer.Option(metavar="NAME", help="Whose intents: each account has credentials of its own.")]
HeaderLines = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME:VALUE", help="Sent with every request. Repeat it for others."),
]
HeadersFrom = Annotated[
    list[str] | None,
    typer.Option(
        "--header-from",
        metavar="NAME=VARIABLE",
        help="A header whose value is in an environment variable: for credentials, which others see in a command line.",
    ),
]
Tries = Annotated[int, typer.Option(min=1, help="How often one request is tried.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="How long one request is tried.")]


KeyHeader = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The header in which the server wants the key. An intent that was sent before keeps its own.",
    ),
]
SpellingOption = Annotated[
    Spelling,
    typer.Option(
        "--spelling", help="The key as it is, or in double quotes. An intent that was sent before keeps its own."
    ),
]
KeyLifetime = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="TIME",
        help="How long the server keeps a key, if it never said: 45m, 1h, 7d. Default: what the intent was sent under, "
        "or 24h.",
    ),
]


def lifetime(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def given_headers(lines: list[str] | None, variables: list[str] | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines or []:
        name, colon, text = line.partition(":")
        if not (name.strip() and colon):
            raise typer.BadParameter(f"--header {name}: it takes NAME:VALUE")
        headers[name.strip()] = text.strip()
    for line in variables or []:
        name, equals, variable = line.partition("=")
        if not (name.strip() and equals and variable.strip()):
            raise typer.BadParameter(f"--header-from {line}: it takes NAME=VARIABLE, such as Authorization=API_TOKEN")
        if variable.strip() not in os.environ:
            raise ConfigurationError(f"--header-from {line}: the environment variable {variable.strip()} is not set")
        headers[name.strip()] = os.environ[variable.strip()]
    return headers


@contextmanager
def opened_client(
    to: str,
    jar: str,
    account: str,
    headers: dict[str, str],
    *,
    tries: int,
    seconds: float,
    key_lifetime: float | None,
    key_header: str,
    spelling: Spelling,
    create: bool | None = None,
) -> Iterator[Client]:
    """``create``: as of ``KeyJar``."""
    for name in headers:
        if name.lower() in ("idempotency-key", key_header.lower()):
            raise typer.BadParameter(f"--header {name}: each request has a key of its own, which the jar keeps")
    from oncekey.client import Budget, Client, KeyJar

    opened = KeyJar(jar, account=account, key_lifetime=lifetime(key_lifetime), create=create)
    try:
        budget = Budget(tries=tries, seconds=seconds)
        with Client(to, jar=opened, headers=headers, budget=budget, header=key_header, spelling=spelling) as client:
            yield client
    finally:
        opened.close()
