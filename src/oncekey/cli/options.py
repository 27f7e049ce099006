"""What commands share: the option for the store, its name in messages, and JSON output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import typer

from oncekey.core.sealed import VARIABLE, shown
from oncekey.engine.parts import store_of
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store, Transactions
from oncekey.stores.registry import KNOWN

if TYPE_CHECKING:
    from oncekey.encryption import Keyring

StoreUrl = Annotated[
    str, typer.Option("--store", envvar="ONCEKEY_STORE", metavar="URL", help=f"Where keys are kept: {KNOWN}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


KeysEnv = Annotated[
    str | None,
    typer.Option(
        "--keys-env", metavar="NAME", help=f"The variable with the keyring of encrypted values (default: {VARIABLE})."
    ),
]


keys_env: ContextVar[str | None] = ContextVar("keys_env", default=None)
"""What ``--keys-env`` says. It is an option of ``oncekey`` itself, since all commands with a store need it."""


def keyring() -> Keyring | None:
    """The keyring in the variable of ``--keys-env``. None: that option is not given, and the usual one is not set."""
    name = keys_env.get()
    if name is None and not os.environ.get(VARIABLE):
        return None
    from oncekey.encryption import Keyring

    return Keyring.from_env(name or VARIABLE)


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store of this URL; it is closed at the end."""
    if not url:
        raise ConfigurationError(f"no store is given: use --store URL or ONCEKEY_STORE with one of {KNOWN}")
    store = store_of(url, keyring())
    try:
        yield store
    finally:
        store.disconnect()
        store.close()


@contextmanager
def existing(url: str) -> Iterator[Store]:
    """As ``opened``, for commands other than ``migrate``: a database file that does not exist is not created.

    An empty file would tell the operator that there are no keys, and a worker that there are no jobs.
    """
    with opened(url) as store:
        path = store.file if isinstance(store, Transactions) else None
        if path is not None and not path.exists():
            raise ConfigurationError(
                f"there is no file {path}: give the --store URL that the app uses, "
                "or create the file with `oncekey migrate`"
            )
        yield store


def named(url: str) -> str:
    """A store's URL for messages: without the password, and without the query, which may contain one. If the place
    stands in the query (``?host=…&port=…``), only the place is taken from it."""
    parts = urlsplit(url)
    said = {} if parts.netloc else dict(parse_qsl(parts.query))
    if "host" in said or "dbname" in said:
        user, host, port = said.get("user", ""), said.get("host", ""), said.get("port", "")
        place = f"{user}{'@' if user else ''}{'' if host.startswith('/') else host}{':' if port else ''}{port}"
        return f"{parts.scheme}://{place}{parts.path if parts.path != '/' else '/' + said.get('dbname', '')}"
    who, at, where = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{who.partition(':')[0]}{at}{where}{parts.path}"


def print_json(value: Any) -> None:
    print(shown(json.dumps(value, indent=2)))  # what is still encrypted is replaced by a sentence
